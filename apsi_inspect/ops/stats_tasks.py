"""`stats` in tasks: runs of whole segments of tensors, several small tensors to a task.

Contract: the result is that of `ops.stats`, bit for bit. A worker reads the bytes of its runs and nothing else, and
gives back a row for every segment and the filled bins of a histogram. `tests/test_distributed.py` enforces this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import TYPE_CHECKING

from ..kernels.stats import SEGMENT
from .read import dtype_of, stream
from .stats import stats_of
from .stats_parts import Partial, Sums, partial
from .tasks import TensorSpec, run_tasks, spec_of, tensor_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from ..model import Tensor
    from .stats import TensorStats

    Run = tuple[TensorSpec, int, int]  # elements [first, last)

RUN = 32 * SEGMENT  # elements of a task: 16 MiB of bfloat16
_MOST = 64  # tensors in a task


def stats_of_runs(runs: list[Run]) -> list[Partial]:
    """In a worker: statistics of each run."""
    out = []
    for spec, first, last in runs:
        tensor = tensor_of(spec)
        out.append(partial(stream(tensor, widen=True, first=first, last=last), dtype_of(tensor), threads=1))
    return out


def runs_of(tensor: Tensor) -> list[tuple[int, int]]:
    """The element ranges that can be read by themselves, in order; at least one."""
    q, n = tensor.qparams, tensor.numel
    whole = n <= RUN or (q is not None and (q.axis == 0 or prod(tensor.shape[1:]) > RUN))
    return [(0, n)] if whole else [(a, min(a + RUN, n)) for a in range(0, n, RUN)]


def grouped(tensors: Iterable[Tensor]) -> Iterator[list[Run]]:
    """The runs of all tensors, in order, in groups of about `RUN` elements."""
    group: list[Run] = []
    held = 0
    for tensor in tensors:
        spec = spec_of(tensor)
        for first, last in runs_of(tensor):
            if group and (held + last - first > RUN or len(group) >= _MOST):
                yield group
                group, held = [], 0
            group.append((spec, first, last))
            held += last - first
    if group:
        yield group


def tensor_stats_of(tensors: list[Tensor], executor: Executor, done: Callable[[int], object]) -> Iterator[TensorStats]:
    """Statistics of each tensor, in order; `done` is called with the bytes of every run that is through."""
    partials = (p for group in run_tasks(stats_of_runs, ((g,) for g in grouped(tensors)), executor) for p in group)
    for tensor in tensors:
        sums = Sums()
        for first, last in runs_of(tensor):
            sums.add_partial(next(partials))
            done(tensor.nbytes * last // max(tensor.numel, 1) - tensor.nbytes * first // max(tensor.numel, 1))
        yield stats_of(sums)
