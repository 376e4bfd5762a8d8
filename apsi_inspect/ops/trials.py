"""One format tried on a piece of a tensor: quantized, read back and compared while it is in the cache.

Contract: a trial fills rows of partial results (`kernels.error`) for a piece of float32 values, a whole number of the
format's blocks (of whole rows for the formats of .apsim). The values it compares with are those that decoding a
converted file would give, bit for bit. Nothing larger than the piece is made, in buffers that each thread uses again.
`tests/test_error.py` enforces this.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from ..encodings.encode import encode, holds_nonfinite
from ..encodings.round_trip import CLIP, LIMITS, decoder, encoder
from ..encodings.run import kernel
from ..kernels import error as k
from ..kernels._jit import vectors_pay
from .inputs import SCRATCH
from .recode import _block as default_block

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ..encodings import Encoding

    Trial = Callable[["Piece", NDArray[np.float64]], None]

FUSED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")  # what `kernels.error_blocks` has
_NO_GRID_END = ("F32", "F64")


class Piece:
    """Consecutive values of a tensor, flat.

    Attributes
    ----------
    values
        float32, read-only, aligned.
    original
        The same where float32 holds them, else float64.
    weights
        The weights of the columns, or None.
    first
        Where among the columns the piece begins.
    """

    __slots__ = ("_bad", "first", "original", "values", "weights")

    def __init__(self, values: NDArray[Any], weights: NDArray[np.float32] | None = None, first: int = 0) -> None:
        self._bad: int | None = None
        self.weights, self.first = weights, first
        if values.dtype == np.float32:
            self.values = values.view()
            self.original: NDArray[Any] = self.values
        else:
            with np.errstate(over="ignore"):
                self.values = values.astype(np.float32)
            self.original = values.astype(np.float64, copy=False)
            self.original.flags.writeable = False
        self.values.flags.writeable = False

    @property
    def bad(self) -> int:
        """How many values are not finite as float32; counted when first asked for."""
        if self._bad is None:
            count: Callable[..., Any] = kernel("encode_floats:count_nonfinite")
            self._bad = int(count(self.values, 0, self.values.size))
        return self._bad


def _compare(piece: Piece, approximation: NDArray[np.float32], rows: NDArray[np.float64]) -> None:
    y = approximation.view()
    y.flags.writeable = False
    x = piece.original
    (k.pair_sums if x.dtype == np.float32 else k.wide_sums)(x, y, rows)
    if piece.weights is not None:
        for i, row in enumerate(rows):
            a, b = i * k.SEGMENT, (i + 1) * k.SEGMENT
            k.weigh(x[a:b], y[a:b], piece.weights, piece.first + a, row)


def _refused(piece: Piece, rows: NDArray[np.float64]) -> bool:
    """Whether the piece has values that no block can hold; they are counted."""
    rows[0, k.NONFINITE] = piece.bad
    return bool(piece.bad)


def _given(use: str, nbytes: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """A buffer to write, and the same to read."""
    buffer = SCRATCH.bytes(use, nbytes)
    view = buffer.view()
    view.flags.writeable = False
    return buffer, view


def _block(encoding: Encoding) -> Trial:
    into, back, size, nbytes = encoder(encoding), decoder(encoding), encoding.block_size, encoding.block_bytes
    grid = CLIP[encoding.name]
    fused = None
    if encoding.name in FUSED and vectors_pay():
        fused = getattr(import_module("..kernels.error_blocks", __package__), f"error_{encoding.name.lower()}")

    def tried(x: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """The encoded blocks, and what they decode to."""
        blocks = x.size // size
        raw, given = _given("trial", blocks * nbytes)
        into(x, raw, 0, blocks)
        y, decoded = (b.view(np.float32) for b in _given("tried", 4 * x.size))
        back(given, y, 0, blocks)
        return raw, decoded

    def clipped(x: NDArray[np.float32], raw: NDArray[np.uint8]) -> int:
        """How many values lie beyond the grids of these blocks; the codes are lost."""
        blocks, ends = x.size // size, []
        given = raw.view()
        given.flags.writeable = False
        for use, code in (("low", grid.lowest), ("high", grid.highest)):
            for codes in grid.codes:
                raw.reshape(blocks, nbytes)[:, codes] = code
            end = SCRATCH.bytes(use, 4 * x.size).view(np.float32)
            back(given, end, 0, blocks)
            ends.append(end)
        return int(k.beyond(x, *ends, np.float32(grid.below), np.float32(grid.above)))

    def in_one(piece: Piece, rows: NDArray[np.float64]) -> bool:
        """Whole groups in registers, the rest apart; False if that cannot be done."""
        x = piece.values
        whole = x.size // k.GROUP * k.GROUP
        segments = -(-whole // k.SEGMENT)
        if fused is None or not whole or piece.weights is not None or piece.original is not x:
            return False
        rest = x[whole:]
        if fused(x[:whole], rows[:segments]) != segments or (rest.size and not np.isfinite(rest).all()):
            rows[:] = 0
            return False
        if rest.size:
            raw, y = tried(rest)
            k.rest(rest, y, whole, rows[-1])
            rows[-1, k.CLIPPED] += clipped(rest, raw)
        return True

    def trial(piece: Piece, rows: NDArray[np.float64]) -> None:
        if in_one(piece, rows) or _refused(piece, rows):
            return
        raw, y = tried(piece.values)
        _compare(piece, y, rows)
        rows[0, k.CLIPPED] = clipped(piece.values, raw)

    return trial


def _plain(encoding: Encoding) -> Trial:
    """A float: what does not fit becomes infinite, NaN or the greatest number, as `convert` has it."""
    name = encoding.name
    limit = np.float32(LIMITS.get(name, np.inf))
    strict, size, nbytes = not holds_nonfinite(encoding), encoding.block_size, encoding.block_bytes

    def trial(piece: Piece, rows: NDArray[np.float64]) -> None:
        x = piece.values
        if strict and _refused(piece, rows):
            return
        if name in _NO_GRID_END:
            y = piece.values if name == "F32" else piece.original
        elif name == "F16" and piece.original.dtype == np.float64:
            y = encode(encoding, piece.original, threads=1).view(np.float16).astype(np.float32)
        else:
            blocks = x.size // size
            raw, given = _given("trial", blocks * nbytes)
            encoder(encoding)(x, raw, 0, blocks)
            y = SCRATCH.bytes("tried", 4 * x.size).view(np.float32)
            decoder(encoding)(given, y, 0, blocks)
        _compare(piece, y, rows)
        if np.isfinite(limit):
            rows[0, k.CLIPPED] = k.outside(x, -limit, limit)

    return trial


def _scaled(encoding: Encoding, row: int) -> Trial:
    """Codes with scales along rows of the last axis."""
    from ..kernels.codes import KINDS as CODES
    from ..kernels.encode_scaled import KINDS, encode_runs
    from ..kernels.formats import value_table
    from ..kernels.scaled import decode_none

    fmt = encoding.name
    kind = [name for name, _ in KINDS].index(fmt)
    code = _CODES[fmt]
    table, code_kind = value_table(code), CODES.index(code)
    block = default_block(fmt, None)
    step = row if block is None else min(block, row)
    runs, limit = -(-row // step), np.float32(LIMITS[fmt])

    def trial(piece: Piece, rows: NDArray[np.float64]) -> None:
        if _refused(piece, rows):
            return
        x = piece.values
        lines = x.size // row
        codes, given = _given("trial", x.size)
        scale, scales = (b.view(np.float32) for b in _given("trial scales", 4 * lines * runs))
        encode_runs(x, codes, scale, kind, row, step, False, 0, lines)
        y = SCRATCH.bytes("tried", 4 * x.size).view(np.float32)
        matrix = scales.reshape(lines, runs)
        decode_none(given, y.reshape(lines, row), 0, lines, table, code_kind, matrix, step, 1, 1, 1)
        _compare(piece, y, rows)
        rows[0, k.CLIPPED] = k.outside_runs(x, scales, limit, row, step)

    return trial


_CODES = {
    "int8": "int8",
    "int4": "int4",
    "fp8": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp6": "float6_e2m3fn",
    "fp6_e3m2": "float6_e3m2fn",
    "fp4": "float4_e2m1fn",
}


def _kept(piece: Piece, rows: NDArray[np.float64]) -> None:
    """No change: only the sums of the values themselves."""
    for i, line in enumerate(rows):
        x = piece.original[i * k.SEGMENT : (i + 1) * k.SEGMENT]
        k.alone(x, line)


@cache
def trial_of(encoding: Encoding, row: int, kept: bool) -> Trial:
    """What tries an encoding on pieces of a tensor whose last axis has `row` elements; `kept`: it is what is stored."""
    if kept:
        return _kept
    if encoding.kind == "scaled":
        return _scaled(encoding, row)
    return _block(encoding) if encoding.is_block else _plain(encoding)
