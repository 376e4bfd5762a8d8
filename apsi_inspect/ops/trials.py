"""One format tried on a piece of a tensor: quantized, read back and compared while it is in the cache.

Contract: a trial fills rows of partial results (`kernels.error`) for a piece of float32 values, a whole number of the
format's blocks (of whole rows for the formats of .apsim). The values it compares with are those that decoding a
converted file would give, bit for bit. Nothing larger than the piece is made, in buffers that each thread uses again.
`tests/test_error.py` enforces this.
"""

from __future__ import annotations

import threading
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

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

# What `kernels.error_blocks` has
FUSED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
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

    def segment(self, s: int) -> Piece:
        """The values of one segment."""
        if self.values.size <= k.SEGMENT:
            return self
        a, b = s * k.SEGMENT, (s + 1) * k.SEGMENT
        part = Piece(self.values[a:b], self.weights, self.first + a)
        if self.original is not self.values:
            part.original = self.original[a:b]
        return part


def _compare(piece: Piece, y: NDArray[Any], rows: NDArray[np.float64]) -> None:
    """`y` is read-only."""
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


class Room(NamedTuple):
    """Buffers for a number of values; what ends in `_read` is the same memory, read-only as kernels want it."""

    raw: NDArray[np.uint8]
    raw_read: NDArray[np.uint8]
    values: NDArray[np.float32]
    values_read: NDArray[np.float32]
    more: NDArray[np.float32]


class _Rooms(threading.local):
    """The views of one thread, kept: making them between two kernels costs as much as a fast kernel."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, int], Room] = {}

    def of(self, n: int, nbytes: int) -> Room:
        """Room for `n` values, and for `nbytes` of their codes (no more than 4 a value)."""
        room = self.kept.get((n, nbytes))
        if room is None:
            if len(self.kept) >= _KEPT:
                self.kept.clear()
            raw = SCRATCH.bytes("trial", 4 * n)[:nbytes]
            values, more = (SCRATCH.bytes(use, 4 * n).view(np.float32) for use in ("tried", "more"))
            room = self.kept[n, nbytes] = Room(raw, _read_only(raw), values, _read_only(values), more)
        return room


ROOMS = _Rooms()
_KEPT = 32


def _read_only(a: NDArray[Any]) -> NDArray[Any]:
    view = a.view()
    view.flags.writeable = False
    return view


def _block(encoding: Encoding) -> Trial:
    into, back, size, nbytes = encoder(encoding), decoder(encoding), encoding.block_size, encoding.block_bytes
    grid = CLIP[encoding.name]
    below, above = np.float32(grid.below), np.float32(grid.above)
    fused = None
    if in_registers(encoding):
        fused = getattr(import_module("..kernels.error_blocks", __package__), f"error_{encoding.name.lower()}")

    def tried(x: NDArray[np.float32]) -> Room:
        """The encoded blocks, and what they decode to."""
        blocks = x.size // size
        room = ROOMS.of(x.size, blocks * nbytes)
        into(x, room.raw, 0, blocks)
        back(room.raw_read, room.values, 0, blocks)
        return room

    def clipped(x: NDArray[np.float32], room: Room) -> int:
        """How many values lie beyond the grids of these blocks; the codes, and what was tried, are lost."""
        blocks = x.size // size
        for end, code in ((room.values, grid.lowest), (room.more, grid.highest)):
            for codes in grid.codes:
                k.put_codes(room.raw, nbytes, codes.start, codes.stop, code)
            back(room.raw_read, end, 0, blocks)
        return int(k.beyond(x, room.values, room.more, below, above))

    def apart(piece: Piece, rows: NDArray[np.float64], s: int) -> None:
        """One segment, step by step."""
        part, row = piece.segment(s), rows[s : s + 1]
        if _refused(part, row):
            return
        room = tried(part.values)
        _compare(part, room.values_read, row)
        row[0, k.MAX_AT] += s * k.SEGMENT if row[0, k.MAX] > 0 else 0
        row[0, k.CLIPPED] = clipped(part.values, room)

    def in_one(piece: Piece, rows: NDArray[np.float64]) -> int:
        """Whole groups in registers; gives how many segments are done, those that cannot be done so included."""
        x, done = piece.values, 0
        if fused is None or piece.weights is not None or piece.original is not x:
            return 0
        whole = x.size // k.GROUP * k.GROUP
        segments, rest = -(-whole // k.SEGMENT), x[whole:]
        while done < segments:
            begin = done * k.SEGMENT
            more = fused(x[begin:whole], rows[done:segments])
            if begin:
                at = rows[done : done + more]
                at[:, k.MAX_AT] += np.where(at[:, k.MAX] > 0, begin, 0)
            done += more
            if done < segments:
                apart(piece, rows, done)
                done += 1
            elif rest.size and whole % k.SEGMENT:
                if not np.isfinite(rest).all():
                    rows[done - 1] = 0
                    apart(piece, rows, done - 1)
                else:
                    room = tried(rest)
                    k.rest(rest, room.values_read, whole, rows[done - 1])
                    rows[done - 1, k.CLIPPED] += clipped(rest, room)
        return done

    def trial(piece: Piece, rows: NDArray[np.float64]) -> None:
        for s in range(in_one(piece, rows), len(rows)):
            apart(piece, rows, s)

    return trial


def _plain(encoding: Encoding) -> Trial:
    """A float: what does not fit becomes infinite, NaN or the greatest number, as `convert` has it."""
    name = encoding.name
    limit = np.float32(LIMITS.get(name, np.inf))
    strict, size, nbytes = not holds_nonfinite(encoding), encoding.block_size, encoding.block_bytes
    runs = None if name in _NO_GRID_END else (encoder(encoding), decoder(encoding))

    def trial(piece: Piece, rows: NDArray[np.float64]) -> None:
        x = piece.values
        if strict and _refused(piece, rows):
            return
        if runs is None:
            y: NDArray[Any] = piece.values if name == "F32" else piece.original
        elif name == "F16" and piece.original.dtype == np.float64:
            y = _read_only(encode(encoding, piece.original, threads=1).view(np.float16).astype(np.float32))
        else:
            blocks = x.size // size
            room = ROOMS.of(x.size, blocks * nbytes)
            runs[0](x, room.raw, 0, blocks)
            runs[1](room.raw_read, room.values, 0, blocks)
            y = room.values_read
        _compare(piece, y, rows)
        if limit < np.inf:
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
    back: Callable[..., Any] = kernel("scaled:decode_none") if code in _WHOLE_BYTES else decode_none
    table, code_kind = value_table(code), CODES.index(code)
    block = default_block(fmt, None)
    step = row if block is None else min(block, row)
    runs, limit = -(-row // step), np.float32(LIMITS[fmt])

    def trial(piece: Piece, rows: NDArray[np.float64]) -> None:
        if _refused(piece, rows):
            return
        x = piece.values
        lines = x.size // row
        room = ROOMS.of(x.size, x.size)
        scale = room.more[: lines * runs]
        encode_runs(x, room.raw, scale, kind, row, step, False, 0, lines)
        scales = _read_only(scale)
        matrix = scales.reshape(lines, runs)
        back(room.raw_read, room.values.reshape(lines, row), 0, lines, table, code_kind, matrix, step, 1, 1, 1)
        _compare(piece, room.values_read, rows)
        rows[0, k.CLIPPED] = k.outside_runs(x, scales, limit, row, step)

    return trial


# What the codes are read as, one a byte; the explicit vectors take those of fewer bits for packed ones
_CODES = {
    "int8": "int8",
    "int4": "int4",
    "fp8": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp6": "float6_e2m3fn",
    "fp6_e3m2": "float6_e3m2fn",
    "fp4": "float4_e2m1fn",
}
_WHOLE_BYTES = ("int8", "float8_e4m3fn", "float8_e5m2")


def _kept(piece: Piece, rows: NDArray[np.float64]) -> None:
    """No change: only the sums of the values themselves."""
    for i, line in enumerate(rows):
        x = piece.original[i * k.SEGMENT : (i + 1) * k.SEGMENT]
        k.alone(x, line)


def in_registers(encoding: Encoding) -> bool:
    """Whether a trial of many segments of float32 values is one call, which leaves the caches to the values."""
    return encoding.name in FUSED and vectors_pay()


@cache
def trial_of(encoding: Encoding, row: int, kept: bool) -> Trial:
    """What tries an encoding on pieces of a tensor whose last axis has `row` elements; `kept`: it is what is stored."""
    if kept:
        return _kept
    if encoding.kind == "scaled":
        return _scaled(encoding, row)
    return _block(encoding) if encoding.is_block else _plain(encoding)
