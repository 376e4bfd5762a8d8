"""`stats`: the statistics of many tensors, as a TensorTable with a column each.

One pass per tensor, tensor by tensor, in bounded memory. `tests/test_survey.py` compares with NumPy.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..errors import ValueRefusedError, quote
from ..model import ModelFile
from ..table import TensorTable
from .open import open as open_model
from .read import tensor_stats

if TYPE_CHECKING:
    from ..model import Tensor

COLUMNS = ("min", "max", "mean", "std", "nan", "inf", "zeros", "subnormals", "sparsity", "q01", "median", "q99")


def stats(
    model: ModelFile | str | os.PathLike[str], tensors: str | None = None, *, progress: bool | None = None
) -> TensorTable:
    """Statistics of the values of a model's tensors.

    Parameters
    ----------
    model
        An opened model, or a path.
    tensors
        Only the tensors whose name matches this glob.
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
        No tensor matches.
    """
    if not isinstance(model, ModelFile):
        with open_model(model) as opened:
            return stats(opened, tensors, progress=progress)
    table = TensorTable.of(model)
    table = table if tensors is None else table.filter(tensors)
    if tensors is not None and not len(table):
        raise ValueRefusedError(f"no tensor matches {quote(tensors)}")
    shown = table.nbytes > 64 << 20 if progress is None else progress
    rows = []
    from tqdm.auto import tqdm

    with tqdm(total=table.nbytes, unit="B", unit_scale=True, desc="stats", disable=not shown, leave=False) as bar:
        for name in table:
            tensor = model[name]
            rows.append(_row(tensor))
            bar.update(tensor.nbytes)
    columns: dict[str, Any] = {c: [row[i] for row in rows] for i, c in enumerate(COLUMNS)}
    return TensorTable(table.frame.assign(**columns), f"{table.title}, statistics")


def _row(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.info.encoding.kind == "complex":
        nan = float("nan")
        return (nan, nan, nan, nan, 0, 0, 0, 0, nan, nan, nan, nan)
    s = tensor_stats(tensor)
    q01, median, q99 = s.quantiles([0.01, 0.5, 0.99])
    inf = s.posinf + s.neginf
    return (s.min, s.max, s.mean, s.std, s.nan, inf, s.zeros, s.subnormals, s.sparsity, q01, median, q99)
