"""`stats`: the statistics of many tensors, as a TensorTable with a column each.

One pass per tensor, tensor by tensor, in bounded memory; with an executor, in tasks (`ops.stats_tasks`).
`tests/test_survey.py` compares with NumPy.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..errors import ValueRefusedError, quote
from ..model import ModelFile
from ..table import TensorTable
from .open import open as open_model
from .read import tensor_stats
from .stats_tasks import tensor_stats_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Executor

    from ..model import Tensor
    from .stats import TensorStats

COLUMNS = ("min", "max", "mean", "std", "nan", "inf", "zeros", "subnormals", "sparsity", "q01", "median", "q99")


def stats(
    model: ModelFile | str | os.PathLike[str],
    tensors: str | None = None,
    *,
    executor: Executor | None = None,
    progress: bool | None = None,
) -> TensorTable:
    """Statistics of the values of a model's tensors.

    Parameters
    ----------
    model
        An opened model, or a path.
    tensors
        Only the tensors whose name matches this glob.
    executor
        Spread the work over its workers (`docs/scale.md`): a `ProcessPoolExecutor`, ``Client(…).get_executor()`` of a
        dask cluster, … None: here. The result is the same, bit for bit.
    progress
        True, False, or None: show a bar where more than 64 MiB are read.

    Returns
    -------
    TensorTable
        The table of the model with the columns ``min, max, mean, std, nan, inf, zeros, subnormals, sparsity, q01,
        median, q99``; NaN for complex tensors and where there is no finite value. Quantiles are within 1/128 of
        themselves.

    Raises
    ------
    ValueRefusedError
        No tensor matches; or, with an executor, the model is in memory.
    """
    if not isinstance(model, ModelFile):
        with open_model(model) as opened:
            return stats(opened, tensors, executor=executor, progress=progress)
    table = TensorTable.of(model)
    table = table if tensors is None else table.filter(tensors)
    if tensors is not None and not len(table):
        raise ValueRefusedError(f"no tensor matches {quote(tensors)}")
    shown = table.nbytes > 64 << 20 if progress is None else progress
    chosen = [model[name] for name in table]
    from tqdm.auto import tqdm

    with tqdm(total=table.nbytes, unit="B", unit_scale=True, desc="stats", disable=not shown, leave=False) as bar:
        rows = [_row(s) for s in _all_stats(chosen, executor, bar.update)]
    columns: dict[str, Any] = {c: [row[i] for row in rows] for i, c in enumerate(COLUMNS)}
    return TensorTable(table.frame.assign(**columns), f"{table.title}, statistics")


def _all_stats(
    tensors: list[Tensor], executor: Executor | None, done: Callable[[int], object]
) -> Iterator[TensorStats | None]:
    """Statistics of each tensor; None for a complex one."""
    complexes = [t.info.encoding.kind == "complex" for t in tensors]
    rest = [t for t, is_complex in zip(tensors, complexes, strict=True) if not is_complex]
    found = _here(rest, done) if executor is None else tensor_stats_of(rest, executor, done)
    for tensor, is_complex in zip(tensors, complexes, strict=True):
        if is_complex:
            done(tensor.nbytes)
        yield None if is_complex else next(found)


def _here(tensors: list[Tensor], done: Callable[[int], object]) -> Iterator[TensorStats]:
    for tensor in tensors:
        yield tensor_stats(tensor)
        tensor.kept_stats = None  # a histogram each is too much to keep
        done(tensor.nbytes)


def _row(s: TensorStats | None) -> tuple[Any, ...]:
    if s is None:
        nan = float("nan")
        return (nan, nan, nan, nan, 0, 0, 0, 0, nan, nan, nan, nan)
    q01, median, q99 = s.quantiles([0.01, 0.5, 0.99])
    inf = s.posinf + s.neginf
    return (s.min, s.max, s.mean, s.std, s.nan, inf, s.zeros, s.subnormals, s.sparsity, q01, median, q99)
