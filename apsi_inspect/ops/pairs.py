"""Two tensors, measured: are they equal, how far apart are they, and does rounding explain it.

Contract: `measure` is a pure, picklable task; memory is bounded by a few pieces of `PIECE` elements (only where both
tensors are .apsim ones with scales along other axes, or one of permuted rows, one of them is decoded as a whole). Both
are decoded in logical space, in the GGUF's order of rows. Integers are compared as integers, complex values as pairs.
`tests/test_compare.py` compares with NumPy in float64, `tests/test_pairs.py` what counts as equal.
"""

from __future__ import annotations

import threading
from math import lcm, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .error_sums import ErrorSums, pair_sums
from .inputs import SCRATCH, ArrayInput, FileInput, Input, ScaledInput, even_cuts, fill, input_of
from .roundings import coarser, explained, is_lossy, kind_of, rounding_of
from .tasks import TensorSpec, tensor_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..model import Tensor
    from .hf_layouts import Layout
    from .roundings import Rounding

_BYTES = 1 << 20  # that are read at a time
PIECE = 1 << 18  # elements: on any machine the same, so that sums have the same bits


class _Kept(threading.local):
    """The buffers that one thread reads into: a set for each side and one for rounding, so that none is copied."""

    def __init__(self) -> None:
        self.sets: tuple[dict[str, NDArray[np.uint8]], ...] = ({}, {}, {})

    def use(self, which: int) -> None:
        """What is read from now on leaves the other sets alone."""
        SCRATCH.buffers = self.sets[which]


_KEPT = _Kept()


class Measured(NamedTuple):
    """What is known of a pair.

    Attributes
    ----------
    same_bytes
        The stored bytes are the same, in the same encoding (then no value was decoded).
    sums
        Of the error of b.
    differ
        Elements that are not equal; two NaN are equal.
    signs
        Zeros that differ in their sign, and are equal.
    at
        The values of a and b where they are furthest apart.
    rounded
        ``"a"`` or ``"b"``: its values are exactly the rounding of the other's; "" otherwise.
    own
        Error of our own rounding of the finer one to the coarser one's encoding, where that was tried.
    explained
        The error is no greater than rounding makes it (`roundings.explained`).
    layout
        What was done to the Hugging Face form for the values to fit; None: nothing.
    """

    same_bytes: bool
    sums: ErrorSums
    differ: int = 0
    signs: int = 0
    at: tuple[float, float] = (0.0, 0.0)
    rounded: str = ""
    own: ErrorSums | None = None
    explained: bool = False
    layout: Layout | None = None

    @property
    def good(self) -> bool:
        """Equal, or explained by rounding."""
        return not self.differ or bool(self.rounded) or self.explained


class Moved:
    """The Hugging Face form of a tensor as a converter moves it into a GGUF; read a whole number of heads at a time."""

    def __init__(self, source: Input, layout: Layout) -> None:
        self.name, self.encoding, self.shape = source.name, source.encoding, source.shape
        self._source, self._layout = source, layout
        rows = self.shape[0] if self.shape else 1
        self._row = prod(self.shape[1:])
        self.unit = rows // layout.heads * self._row if layout.heads else 1

    def cuts(self, block: int) -> list[tuple[int, int]]:
        """See `Input`."""
        return even_cuts(prod(self.shape), lcm(self.unit, block), PIECE)

    def read(self, a: int, b: int) -> NDArray[Any]:
        """See `Input`."""
        values = self._source.read(a, b)
        if not self._layout.heads:
            shifted: NDArray[Any] = values + values.dtype.type(self._layout.shift)
            return shifted
        heads = (b - a) // self.unit
        return values.reshape(heads, 2, -1, self._row).swapaxes(1, 2).reshape(-1)

    def raw(self, a: int, b: int) -> Any:
        """See `Input`; of moved values there are no stored bytes."""
        raise NotImplementedError


def fits(layout: Layout | None, shape: tuple[int, ...]) -> bool:
    """Whether rows can be permuted so."""
    return layout is None or not layout.heads or bool(shape and shape[0] and shape[0] % (2 * layout.heads) == 0)


def measure(a: TensorSpec | Tensor, b: TensorSpec | Tensor, layout: Layout | None = None) -> Measured:
    """Measure two tensors of as many elements.

    Parameters
    ----------
    layout
        What a converter is expected to have done; the values as they stand are tried too where that does not explain
        them, and what has the smaller error is taken.
    """
    x, y = (tensor_of(t) if isinstance(t, TensorSpec) else t for t in (a, b))
    if layout is None and _same_bytes(x, y):
        return Measured(True, ErrorSums(n=x.numel))
    found = [_measure(x, y, layout if fits(layout, x.shape) else None)]
    if layout is not None and not found[0].good:
        found.append(_measure(x, y, None))
    return min(found, key=lambda m: (not m.good, m.sums.nonfinite, m.sums.squares))


def _same_bytes(x: Tensor, y: Tensor) -> bool:
    """Compare stored bytes up to the first that differ."""
    if x.info.encoding != y.info.encoding or x.byte_order != y.byte_order or x.affine or y.affine:
        return False
    if x.qparams is not None or y.qparams is not None:
        return False  # codes say nothing without their scales
    if x.nbytes != y.nbytes:
        return False
    u, v = bytearray(min(x.nbytes, _BYTES)), bytearray(min(x.nbytes, _BYTES))
    for i in range(0, x.nbytes, _BYTES):
        n = min(_BYTES, x.nbytes - i)
        fill(x.source, x.offset + i, np.frombuffer(u, np.uint8, n))
        fill(y.source, y.offset + i, np.frombuffer(v, np.uint8, n))
        if u != v:  # beyond n there is what was equal in the piece before
            return False
    return True


def _measure(x: Tensor, y: Tensor, layout: Layout | None) -> Measured:
    sides: list[Input] = [input_of(x), input_of(y)]
    tries = _roundings(x, y, sides)
    if layout is not None:
        at = "ab".index(layout.side)
        inner = sides[at]
        whole = isinstance(inner, ScaledInput) and bool(layout.heads)
        sides[at] = Moved(ArrayInput(inner.name, np.asarray((x, y)[at])) if whole else inner, layout)
        tries = {side: r for side, r in tries.items() if side != layout.side}
    cuts = _cuts(sides, (x, y))
    total, differ, signs, at_most = ErrorSums(), 0, 0, (0.0, 0.0)
    own: dict[str, ErrorSums | None] = dict.fromkeys(tries, ErrorSums())
    exact = dict.fromkeys(tries, True)
    for a, b in cuts:
        u, v = (_values(side, i, a, b) for i, side in enumerate(sides))
        unequal, sign = _unequal(u, v)
        differ, signs = differ + unequal, signs + sign
        fu, fv = _floats(u), _floats(v)
        sums = pair_sums(fu, fv, a)
        if sums.max_abs > total.max_abs:
            i = sums.max_at - a
            at_most = float(fu[i]), float(fv[i])
        total += sums
        _KEPT.use(2)
        for side, rounding in tries.items():
            exact[side] &= _step(rounding, (fu, fv), side, own, a, b, sums)
    best = next((side for side in "ba" if exact.get(side)), "")
    sides_tried = dict.fromkeys((*filter(None, [coarser(x, y)]), *tries))
    fine = [side for side in sides_tried if _explained(total, own.get(side), (x, y), side)]
    shown = next(iter([*fine, *tries]), "")
    return Measured(
        False, total, differ, signs, at_most, best if differ else "", own.get(shown), bool(fine), layout
    )  # fmt: skip


def _roundings(x: Tensor, y: Tensor, sides: list[Input]) -> dict[str, Rounding]:
    """The tensors that may be a rounding of the other: the coarser one, and b in any case."""
    side = coarser(x, y)
    out = {}
    for s in dict.fromkeys((side, "b")) if side else ():
        i = "ab".index(s)
        rounding = rounding_of((x, y)[i], sides[i])
        if rounding is not None:
            out[s] = rounding
    return out


def _step(
    rounding: Rounding,
    values: tuple[NDArray[Any], NDArray[Any]],
    side: str,
    own: dict[str, ErrorSums | None],
    a: int,
    b: int,
    sums: ErrorSums,
) -> bool:
    """Round one piece, and add its error to `own`; True where that is exactly what the other side has."""
    sofar = own[side]
    if sofar is None:
        return False
    finer = values[1] if side == "a" else values[0]
    made = rounding(finer, a, b)
    if made is None:
        own[side] = None
        return False
    own[side] = sofar + (sums if made.exact or made.values is None else pair_sums(finer, made.values, a))
    return made.exact


def _explained(total: ErrorSums, own: ErrorSums | None, tensors: tuple[Tensor, Tensor], side: str) -> bool:
    tensor = tensors["ab".index(side)]
    lossy = all(map(is_lossy, tensors))
    return explained(total, own, kind_of(tensor), tensor.encoding, lossy)


def _cuts(sides: list[Input], tensors: tuple[Tensor, Tensor]) -> list[tuple[int, int]]:
    """Ranges that both sides can be read in; where none but the whole will do, one of them is decoded first."""
    sizes = [t.info.encoding.block_size for t in tensors]
    scaled = [i for i, s in enumerate(sides) if isinstance(s, ScaledInput)]
    moved = [i for i, s in enumerate(sides) if isinstance(s, Moved)]
    if len(scaled) == 2 or (scaled and moved):
        i = scaled[-1]
        sides[i] = ArrayInput(sides[i].name, np.asarray(tensors[i]))
        scaled, sizes[i] = [j for j in scaled if j != i], 1
    if scaled:
        return sides[scaled[0]].cuts(lcm(*sizes))
    if moved:
        return sides[moved[0]].cuts(lcm(*sizes))
    return even_cuts(tensors[0].numel, lcm(*sizes), PIECE)


def _values(side: Input, which: int, a: int, b: int) -> NDArray[Any]:
    """What a side has, until it is read again; float32 as it was read, not moved once more."""
    _KEPT.use(which)
    if isinstance(side, FileInput) and side.direct == "F32":
        return side.stored(a, b).view(np.float32)
    return _numbers(side.read(a, b))


def _numbers(values: NDArray[Any]) -> NDArray[Any]:
    """Complex values as pairs of floats; the rest as it is."""
    if values.dtype.kind == "c":
        return values.view(np.float32 if values.dtype == np.complex64 else np.float64)
    return values


def _floats(values: NDArray[Any]) -> NDArray[Any]:
    if values.dtype in (np.float32, np.float64):
        return values
    return values.astype(np.float64 if values.dtype.kind in "iub" and values.dtype.itemsize > 2 else np.float32)


def _unequal(u: NDArray[Any], v: NDArray[Any]) -> tuple[int, int]:
    """How many elements differ, and how many zeros differ in their sign only."""
    if u.dtype == v.dtype and u.dtype in (np.float32, np.float64):
        from ..kernels.pairs import unequal

        u, v = _given(u), _given(v)
        bits = np.uint32 if u.dtype == np.float32 else np.uint64
        differ, signs = unequal(u, v, u.view(bits), v.view(bits))
        return int(differ), int(signs)
    if u.dtype == v.dtype and np.array_equal(u.view(np.uint8), v.view(np.uint8)):
        return 0, 0
    same = u == v
    if u.dtype.kind != "f" or v.dtype.kind != "f":
        return int(same.size - np.count_nonzero(same)), 0
    both_nan = np.isnan(u) & np.isnan(v)
    signs = same & (u == 0) & (np.signbit(u) != np.signbit(v))
    return int(same.size - np.count_nonzero(same | both_nan)), int(np.count_nonzero(signs))


def _given(values: NDArray[Any]) -> NDArray[Any]:
    """Read-only, aligned and in order, as kernels are compiled for."""
    view = np.require(values, requirements=["C", "A"]).view()
    view.flags.writeable = False
    return view
