"""Pieces of tensors, and what is done with each: read, tried in every format, reduced to rows of sums.

Contract: `pieces` cuts a tensor the same way whatever the number of threads or processes; `measure` gives the rows of
one piece, and `measure_spec` the same in another process. `tests/test_error.py` enforces this.
"""

from __future__ import annotations

import os
from math import lcm, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..encodings.run import MAX_THREADS
from ..kernels.error import COLUMNS, GROUP, MAX_AT, SEGMENT
from .inputs import SCRATCH, ArrayInput, FileInput, ScaledInput, input_of
from .tasks import tensor_of
from .trials import Piece, in_registers, trial_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ..encodings import Encoding
    from .inputs import Input
    from .tasks import TensorSpec

_READ = 4  # steps that are read at a time where nothing else fills the caches
_PART = 1 << 23  # elements that one task measures
_SHARE = 2  # tasks for each thread, at least, of a tensor that is large
_UNIT = 1 << 14  # elements: of longer rows, a sample takes parts
_BLOCKS = 256  # a whole number of blocks of every type


class Job(NamedTuple):
    """What is to be tried on a tensor.

    Attributes
    ----------
    trials
        Encodings, and whether each leaves the values as they are.
    weights
        Of the columns, or of the columns of each matrix.
    sample
        About how many elements; None: all.
    """

    trials: tuple[tuple[Encoding, bool], ...]
    weights: NDArray[np.float32] | None
    sample: int | None


class Part(NamedTuple):
    """A piece of a tensor.

    Attributes
    ----------
    spans
        Element ranges: one, which is cut into steps, or the sampled ones.
    step
        Elements that are tried at a time.
    """

    spans: tuple[tuple[int, int], ...]
    step: int
    sampled: bool = False


def pieces(source: Input, job: Job) -> list[Part]:
    """The pieces of a tensor, in order."""
    numel = prod(source.shape)
    if not numel or not job.trials:
        return []
    row = source.shape[-1] if source.shape else 1
    plain = isinstance(source, (ArrayInput, FileInput))
    rows = not plain or any(e.kind == "scaled" for e, _ in job.trials)
    packed = [e.block_size for e, _ in job.trials if not e.is_block and e.kind != "scaled"]
    own = [] if isinstance(source, ScaledInput) else [source.encoding.block_size]
    all_of_it = job.sample is None or job.sample >= numel
    by_row = rows or (not all_of_it and row <= SEGMENT)
    unit = lcm(*packed, *own, row if by_row else _BLOCKS)
    whole = lcm(unit, GROUP)  # a step of whole groups has no rest, which would be done apart
    step = SEGMENT // whole * whole or max(SEGMENT // unit, 1) * unit
    cuts = source.cuts(row if isinstance(source, ScaledInput) else step)
    if job.sample is None or all_of_it:
        return [Part((cut,), step) for cut in (_joined(cuts) if plain else cuts)]
    if isinstance(source, ScaledInput) and source._across:  # its scales serve whole boxes
        return [Part((cut,), step) for cut in _spread(cuts, max(1, len(cuts) * job.sample // numel))]
    unit = unit if rows or unit <= _UNIT else lcm(_BLOCKS, *packed, *own)
    spans = [(a, min(a + unit, numel)) for a in range(0, numel, unit)] if numel // unit < 1 << 20 else None
    chosen = _spread(spans or range(0, numel, unit), max(1, job.sample // unit))
    ranges = [s if isinstance(s, tuple) else (s, min(s + unit, numel)) for s in chosen]
    many = max(step // unit, 1)
    return [Part(tuple(ranges[i : i + many]), step, True) for i in range(0, len(ranges), many)]


def _joined(cuts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours together, as long as there is enough to share out."""
    length, numel = cuts[0][1], cuts[-1][1]
    threads = max(2, min(os.cpu_count() or 1, MAX_THREADS))
    many = max(min(_PART, numel // (_SHARE * threads)) // length, 1)
    return [(cuts[i][0], cuts[min(i + many, len(cuts)) - 1][1]) for i in range(0, len(cuts), many)]


def _spread(items: Any, count: int) -> list[Any]:
    """`count` of the items, evenly spaced."""
    n = len(items)
    return list(items) if count >= n else [items[i * n // count] for i in range(count)]


def measure(source: Input, job: Job, part: Part) -> NDArray[np.float64]:
    """Rows of partial results: an array (formats, segments, columns of `kernels.error`)."""
    row = source.shape[-1] if source.shape else 1
    trials = [trial_of(encoding, row, kept) for encoding, kept in job.trials]
    out, begins = [], []
    for values, first in _values(source, part, job):
        piece = Piece(values, *_weights(source.shape, job.weights, part, first, values.size))
        segments = -(-values.size // SEGMENT)
        rows = np.zeros((len(trials), segments, COLUMNS))
        for trial, lines in zip(trials, rows, strict=True):
            trial(piece, lines)
        out.append(rows)
        begins += [first] * segments
    rows = np.concatenate(out, axis=1)
    rows[:, :, MAX_AT] = _places(part, begins, rows[:, :, MAX_AT])
    return rows


def measure_spec(spec: TensorSpec, job: Job, part: Part) -> NDArray[np.float64]:
    """The same for a tensor of a file, in any process."""
    return measure(input_of(tensor_of(spec)), job, part)


def _values(source: Input, part: Part, job: Job) -> Iterator[tuple[NDArray[Any], int]]:
    """What is tried at a time, and the index of its first element; of a sample all of it at once."""
    if part.sampled:
        yield _gathered(source, part), part.spans[0][0]
        return
    ((a, b),) = part.spans
    read, step = _lengths(source, part, job)
    for i in range(a, b, read):
        values = _read(source, i, min(b, i + read))
        for j in range(0, values.size, step):
            yield values[j : j + step], i + j


def _lengths(source: Input, part: Part, job: Job) -> tuple[int, int]:
    """Elements that are read at a time, and those that are tried at a time.

    What the bits depend on is the step of the part; trials in registers take any number of whole segments.
    """
    ((a, b),) = part.spans
    if isinstance(source, ScaledInput):
        return b - a, part.step
    memory = isinstance(source, ArrayInput) and source.encoding.name == "F32"
    at_once = job.weights is None and all(in_registers(e) and not kept for e, kept in job.trials)
    if part.step != SEGMENT or not at_once:
        return (b - a if memory else part.step), part.step
    length = b - a if memory else _READ * part.step
    return length, length


def _read(source: Input, a: int, b: int) -> NDArray[Any]:
    if isinstance(source, FileInput) and source.direct == "F32":
        return source.stored(a, b).view(np.float32)
    return source.read(a, b)


def _gathered(source: Input, part: Part) -> NDArray[Any]:
    n, done = sum(b - a for a, b in part.spans), 0
    out: NDArray[Any] | None = None
    for a, b in part.spans:
        values = _read(source, a, b)
        if out is None:
            out = SCRATCH.bytes("sample", n * values.itemsize).view(values.dtype)
        out[done : done + b - a] = values
        done += b - a
    assert out is not None
    return out


def _places(part: Part, begins: list[int], at: NDArray[np.float64]) -> NDArray[np.float64]:
    """Indices in what was tried at a time as indices in the tensor; of each segment it is given where that began."""
    if not part.sampled:
        return at + np.array(begins, np.float64)
    length = part.spans[0][1] - part.spans[0][0]
    which = at.astype(np.int64) // length
    starts = np.array([a for a, _ in part.spans])
    return starts[which] + at % length


def _weights(
    shape: tuple[int, ...], weights: NDArray[np.float32] | None, part: Part, first: int, count: int
) -> tuple[NDArray[np.float32] | None, int]:
    """Weights that repeat over a piece, and where it begins among them."""
    if weights is None:
        return None, 0
    row = shape[-1] if shape else 1
    if weights.size == row and not part.sampled:
        return weights, first % row
    places = (
        np.concatenate([np.arange(a, b) for a, b in part.spans]) if part.sampled else np.arange(first, first + count)
    )
    matrix = prod(shape[-2:])
    chosen = weights[places % row if weights.size == row else places // matrix * row + places % row]
    chosen.flags.writeable = False
    return chosen, 0
