"""What the plots draw, worked out in one or two passes over a tensor and in bounded memory.

Contract: counts are exact (`np.histogram` of all values gives the same), values and approximations are those that
`convert` would write, fallbacks included. No matplotlib here. `tests/test_plots.py` compares with NumPy over the whole
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import inf, isfinite, nan, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..encodings import ENCODINGS
from ..encodings.encode import encode
from ..encodings.run import numpy_dtype
from ..encodings.values import decode_into
from ..errors import ValueRefusedError, quote
from ..model import Tensor
from ..ops.error_sums import ErrorSums, pair_sums
from ..ops.hardware_weights import encoding_of
from ..ops.inputs import ArrayInput, FileInput, Input, ScaledInput, input_of
from ..ops.quantize import quantize
from ..ops.recode import ScaledMaker
from ..ops.targets import choose
from ..qtensor import QTensor
from .plots_codes import LAYOUTS, code_range, codes_of, levels, scales_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Pieces = Callable[[], Iterable[NDArray[Any]]]

MAX_GRID = 300  # levels of a grid that can be told apart in a plot


class Histogram(NamedTuple):
    """Counts of finite values in equal bins, and their moments."""

    counts: NDArray[np.int64]
    edges: NDArray[np.float64]
    n: int
    low: float
    high: float
    mean: float
    std: float
    nonfinite: int


class Rounded(NamedTuple):
    """A tensor and its approximation: the encoding it really gets, why it is not the one asked for, and the pairs."""

    encoding: str
    reason: str
    pairs: Callable[[], Iterator[tuple[NDArray[Any], NDArray[Any]]]]


def source_of(x: Any) -> Input:
    """Values in bounded pieces from a tensor of a file, a QTensor or an array.

    Raises
    ------
    ValueRefusedError
        It is none of these, or holds complex numbers.
    """
    if isinstance(x, QTensor):
        x = x.tensor()
    source: Input
    if isinstance(x, Tensor):
        source = input_of(x)
    elif isinstance(x, np.ndarray):
        source = ArrayInput("array", x)
    else:
        raise ValueRefusedError(f"a {type(x).__name__} is no tensor; give one like model['name'], or an array")
    if source.encoding.kind == "complex":
        raise ValueRefusedError(f"tensor {quote(source.name)}: complex values are not drawn")
    return source


def values_of(source: Input) -> Iterator[NDArray[Any]]:
    """The values in pieces, each valid until the next."""
    return (source.read(a, b) for a, b in source.cuts(1))


def histogram(
    pieces: Pieces,
    bins: int,
    again: Pieces | None = None,
    *,
    symmetric: bool = False,
    at_least: tuple[float, float] = (inf, -inf),
) -> Histogram:
    """An exact histogram in two passes.

    Parameters
    ----------
    pieces, again
        Give the values anew each time; `again` for the second pass, where the first one also does something else.
    symmetric
        Edges from -m to m, where m is the greatest magnitude; else from the least value to the greatest.
    at_least
        A range that the edges take in as well.
    """
    n, nonfinite, low, high, total, squares, pivot = 0, 0, inf, -inf, 0.0, 0.0, 0.0
    for piece in pieces():
        good = _finite(piece)
        nonfinite += piece.size - good.size
        if not good.size:
            continue
        pivot = pivot if n else float(good[0])
        n, low, high = n + good.size, min(low, float(good.min())), max(high, float(good.max()))
        away = good - pivot
        total, squares = total + float(away.sum()), squares + float(np.dot(away, away))
    if not n:
        return Histogram(np.zeros(bins, np.int64), np.linspace(-0.5, 0.5, bins + 1), 0, nan, nan, nan, nan, nonfinite)
    mean = total / n
    std = sqrt(max(squares / n - mean * mean, 0.0))
    largest = max(-low, high)
    a, b = (-largest, largest) if symmetric else (min(low, at_least[0]), max(high, at_least[1]))
    edges = np.linspace(a, b, bins + 1) if a < b else np.linspace(a - 0.5, a + 0.5, bins + 1)
    return Histogram(counted(again or pieces, edges), edges, n, low, high, mean + pivot, std, nonfinite)


def extremes(pieces: Iterable[NDArray[Any]]) -> tuple[float, float]:
    """The least and the greatest finite value; infinity and its negative where there is none."""
    low, high = inf, -inf
    for piece in pieces:
        good = _finite(piece)
        if good.size:
            low, high = min(low, float(good.min())), max(high, float(good.max()))
    return low, high


def counted(pieces: Pieces, edges: NDArray[np.float64]) -> NDArray[np.int64]:
    """How many values are between each pair of edges."""
    counts = np.zeros(len(edges) - 1, np.int64)
    for piece in pieces():
        counts += np.histogram(_finite(piece), edges)[0]
    return counts


def _finite(piece: NDArray[Any]) -> NDArray[np.float64]:
    wide = piece.astype(np.float64)
    good = np.isfinite(wide)
    return wide if good.all() else wide[good]


def rounded(source: Input, word: str) -> Rounded:
    """The approximation that `convert` would make of a tensor.

    Raises
    ------
    ValueRefusedError
        No such format, or the tensor holds integers.
    """
    container, asked = encoding_of(word)
    if source.encoding.kind in ("int", "uint", "bool") and not isinstance(source, ScaledInput):
        raise ValueRefusedError(f"tensor {quote(source.name)}: {source.encoding.name} values are kept as they are")
    choice = choose(source.name, source.encoding, source.shape, container, asked)
    target = choice.encoding
    if choice.action == "kept":
        return Rounded(target.name, choice.reason, lambda: ((x, x) for x in values_of(source)))
    if target.kind == "scaled" and target.name != "bf16":
        return Rounded(target.name, choice.reason, lambda: _scaled(source, target.name))
    if target.name == "bf16":
        target = ENCODINGS["BF16"]

    def pairs() -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        for a, b in source.cuts(target.block_size):
            x = source.read(a, b)
            raw = encode(target, x, threads=1, name=source.name)
            y = np.empty(b - a, np.float64 if target.name == "F64" else np.float32)
            decode_into(target, raw, y, threads=1)
            yield x, y

    return Rounded(choice.encoding.name, choice.reason, pairs)


def _scaled(source: Input, fmt: str) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """An .apsim format, in the pieces and blocks that `convert` takes."""
    made = ScaledMaker(source, fmt, None)
    for a, b in made.cuts():
        x = source.read(a, b)
        box = x.reshape(-1, made.row) if (b - a) % made.row == 0 else x
        q = quantize(box, fmt, -1, made.block)
        yield x, np.asarray(q).reshape(-1)


def errors(made: Rounded, bins: int) -> tuple[Histogram, ErrorSums]:
    """Histogram of approximation minus value, and the measures of the error."""
    sums = ErrorSums()

    def first() -> Iterator[NDArray[np.float64]]:
        nonlocal sums
        for x, y in made.pairs():
            sums += pair_sums(x.reshape(-1), y.reshape(-1))
            yield _difference(x, y)

    found = histogram(first, bins, lambda: (_difference(x, y) for x, y in made.pairs()), symmetric=True)
    return found, sums


def _difference(x: NDArray[Any], y: NDArray[Any]) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):  # of two infinities
        difference: NDArray[np.float64] = y.astype(np.float64) - x.astype(np.float64)
    return difference


def grid(source: Input, encoding: str) -> tuple[NDArray[np.float64], str]:
    """The values that a typical block can hold (of those of the first piece, the one of median magnitude), and where.

    Empty where a plot cannot tell them apart or the format has no grid of its own.
    """
    target, none = ENCODINGS[encoding], np.zeros(0)
    if target.kind == "float":
        if target.bpw > 8:
            return none, ""
        every = np.arange(int(2**target.bpw), dtype=np.uint8).view(numpy_dtype(target.dtype)).astype(np.float64)
        return np.unique(every[np.isfinite(every)]), "grid"
    cuts = source.cuts(target.block_size) if source.encoding.kind != "scaled" else source.cuts(1)
    if not cuts:
        return none, ""
    x = source.read(*cuts[0]).astype(np.float32)
    if target.kind == "scaled" and target.name != "bf16":
        made = ScaledMaker(source, target.name, None)
        return _grid_scaled(x, target.name, made.step)
    if target.name not in LAYOUTS or x.size < target.block_size:
        return none, ""
    blocks = x[: x.size // target.block_size * target.block_size].reshape(-1, target.block_size)
    i = _median(blocks)
    if target == source.encoding:
        nbytes = target.block_bytes
        raw = np.frombuffer(source.raw(*cuts[0]), np.uint8)[i * nbytes : (i + 1) * nbytes]
    else:
        raw = encode(target, np.ascontiguousarray(blocks[i]), threads=1)
    found = levels(target, raw)
    return (found, f"grid of a typical block (number {i})") if found.size <= MAX_GRID else (none, "")


def _grid_scaled(x: NDArray[np.float32], fmt: str, step: int) -> tuple[NDArray[np.float64], str]:
    blocks = x[: x.size // step * step].reshape(-1, step) if x.size >= step > 0 else x.reshape(1, -1)
    i = _median(blocks)
    q = quantize(np.ascontiguousarray(blocks[i]), fmt, None)
    if q.scale is None:
        return np.zeros(0), ""
    codes = _codes_scaled(fmt)
    return codes * float(np.asarray(q.scale).reshape(-1)[0]), f"grid of a typical block (number {i})"


def _codes_scaled(fmt: str) -> NDArray[np.float64]:
    if fmt.startswith("int"):
        top = 2 ** (int(fmt[3:]) - 1) - 1
        return np.arange(-top, top + 1, dtype=np.float64)
    kinds = {
        "fp8": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "fp6": "float6_e2m3fn", "fp6_e3m2": "float6_e3m2fn",
        "fp4": "float4_e2m1fn",
    }  # fmt: skip
    count = {"fp8": 256, "fp6": 64, "fp4": 16}[fmt.partition("_")[0]]
    every = np.arange(count, dtype=np.uint8).view(numpy_dtype(kinds[fmt])).astype(np.float64)
    return np.unique(every[np.isfinite(every)])


def _median(blocks: NDArray[Any]) -> int:
    """The block of median magnitude."""
    peaks = np.abs(np.nan_to_num(blocks)).max(axis=1)
    return int(np.argsort(peaks, kind="stable")[len(peaks) // 2])


def scale_pieces(x: Any) -> Iterator[NDArray[np.float64]]:
    """The scales of a quantized tensor, in pieces.

    Raises
    ------
    ValueRefusedError
        It has none.
    """
    source = source_of(x)
    tensor = x.tensor() if isinstance(x, QTensor) else x
    if isinstance(source, ScaledInput):
        q = source.qparams
        if q.scale_shape is None:
            raise ValueRefusedError(f"tensor {quote(source.name)}: {source.encoding.name} has no scales")
        for at in range(0, q.scale_nbytes, 1 << 20):
            raw = source.tensor.source.read_at(q.scale_offset + at, min(1 << 20, q.scale_nbytes - at))
            yield np.frombuffer(raw, "<f4").astype(np.float64)
    elif isinstance(tensor, Tensor) and tensor.affine is not None:
        yield np.asarray(tensor.affine.scale, np.float64).reshape(-1)
    elif isinstance(source, FileInput) and source.encoding.is_block:
        for a, b in source.cuts(1):
            yield scales_of(source.encoding, source.raw(a, b))
    else:
        raise ValueRefusedError(f"tensor {quote(source.name)}: {source.encoding.name} has no scales; quantize it first")


def code_counts(x: Any) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """How often each code of a quantized tensor occurs: the codes in ascending order of value, and their counts.

    Raises
    ------
    ValueRefusedError
        The tensor has no codes, or they are entries of a codebook.
    """
    source = source_of(x)
    if isinstance(source, ScaledInput) and source.encoding.name != "bf16":
        every = _codes_scaled(source.encoding.name)
        found: dict[float, int] = {}
        for values in _plain_codes(source):
            kinds, counts = np.unique(values, return_counts=True)
            for k, n in zip(kinds.tolist(), counts.tolist(), strict=True):
                found[k + 0.0] = found.get(k + 0.0, 0) + n
        every = np.union1d(every, np.asarray([k for k in found if isfinite(k)]))
        return every, np.asarray([found.get(float(k), 0) for k in every], np.int64)
    if not (isinstance(source, FileInput) and source.encoding.is_block):
        raise ValueRefusedError(f"tensor {quote(source.name)}: {source.encoding.name} has no codes; quantize it first")
    if source.encoding.name not in LAYOUTS:
        codes_of(source.encoding, b"")
    low, high = code_range(source.encoding)
    total = np.zeros(high - low + 1, np.int64)
    for a, b in source.cuts(1):
        total += np.bincount(codes_of(source.encoding, source.raw(a, b)) - low, minlength=len(total))
    return np.arange(low, high + 1, dtype=np.float64), total


def _plain_codes(source: ScaledInput) -> Iterator[NDArray[np.float64]]:
    """Codes of an .apsim tensor as numbers: what it would hold with all scales 1."""
    from ..encodings.scaled_values import decode_scaled

    for a, b in source.cuts(1):
        box, _, _, _ = source.box(a, b)
        ones = np.ones((), np.float32)
        codes = np.frombuffer(source.raw(a, b), np.uint8)
        values = decode_scaled(source.encoding.name, codes, ones, box, None, None, source.qparams.packing, threads=1)
        yield values.reshape(-1).astype(np.float64)
