"""Simple blocks quantized and compared in registers: neither codes nor values are written anywhere.

Contract: `error_x(x, rows)` does for whole groups of `GROUP` values what encoding, decoding, `error.pair_sums` and
counting the clipped values do one after the other, bit for bit, and gives how many segments it did: it stops at the
first that `pair_sums` would do one by one, or that has a value that is not finite. `rows` are float64 zeros on entry,
one for each segment. Needs what `_jit.vectors_pay` asks for. `tests/test_error.py` compares.

Eight blocks are a group. What the vectors of `encode_eights_simd` leave to its one-block emitters is encoded by those,
and read back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ._jit import kernel
from .blocks_simd import decode_q4_0, decode_q4_1, decode_q5_0, decode_q5_1, decode_q8_0, q4_0, q4_1, q5_0, q5_1, q8_0
from .encode_eights_simd import (
    INF,
    ahead,
    away,
    encode_q4_0,
    encode_q4_1,
    encode_q5_0,
    encode_q5_1,
    encode_q8_0,
    good,
    least,
    most,
    over_eight,
)
from .encode_floats import count_nonfinite
from .error import CLIPPED, GROUP, LANES, SEGMENT, Sums, clear, finish, quarters, worst_of
from .simd import I32, I64, F, M, Put, W, emitter

F32 = np.float32
NOT = np.uint32(0xFFFFFFFF)  # the mask of a group that must be encoded block by block
SIZE = 32
BLOCKS = GROUP // SIZE
# What a group needs, in vectors of eight floats: reciprocals of the scales, scales and minima as halves have them,
# lower and upper limits of the grids, minima
INVERSE, SCALE, OFFSET, LOW, HIGH, MINIMUM, ROOM = (4 * BLOCKS * i for i in range(7))


class Kind:
    """A block format: codes from `bottom` to `top`; `affine`: codes from 0 on, with a minimum."""

    def __init__(self, body: Callable[[M, Put], None], nbytes: int, bottom: int, top: int, affine: bool) -> None:
        self.body, self.nbytes, self.bottom, self.top, self.affine = body, nbytes, bottom, top, affine

    def limits(self, d: W, m: W | None) -> tuple[W, W]:
        """Half a step beyond either end of the grid."""
        a, z = d * (self.bottom - 0.5), d * (self.top + 0.5)
        if m is not None:
            a, z = a + m, z + m
        return a.lt(z).sel(a, z), a.lt(z).sel(z, a)

    def found(self, src: M) -> tuple[W, W | None, W, W, W]:
        """Of eight blocks: scales, minima, the least and the greatest values, and 1 where vectors can do them."""
        if self.bottom == -self.top:
            top = over_eight(src, lambda v: v.abs().bits(I32), lambda a, b: a.call("umax", b)).bits(F)
            d = top / float(self.top)
            return d, None, top.like(0.0) - top, top, good((d.like(1.0) / d).lt(INF))
        high, low = over_eight(src, lambda v: v, most), over_eight(src, lambda v: v, least)
        if self.affine:
            d = (high - low) / float(self.top)
            return d, low, low, high, good((d.like(1.0) / d).lt(INF), d.lt(INF), low.eq(0.0) ^ 1)
        minus = low.like(0.0) - low
        d = high.gt(minus).sel(high, low) / float(self.bottom)
        return d, None, low, high, good((d.like(1.0) / d).abs().lt(INF), high.eq(minus) ^ 1)

    def value(self, v: W, inverse: W, minimum: W, scale: W, offset: W) -> W:
        """What eight values become."""
        if self.affine:
            q = ((v - minimum) * inverse + 0.5).fptosi(I32).smin(self.top)
            return q.sitofp(F) * scale + offset
        if self.bottom == -self.top:
            return away(v * inverse).sitofp(F) * scale
        q = (v * inverse + (0.5 - self.bottom)).fptosi(I32).smin(self.top - self.bottom)
        return (q + self.bottom).sitofp(F) * scale


def prepared(kind: Kind) -> Any:
    """Emitter (values, room): what a group needs.

    Gives a mask of the blocks in which a value may lie beyond the grid; or -1 if the group must be encoded block by
    block.
    """

    @emitter(M, M, ret=I32)
    def prepare(src: M, room: M) -> W:
        ahead(src, 2 * GROUP)
        d, m, bottom, top, fine = kind.found(src)
        scale = d.float_to_half().half_to_float()
        offset = None if m is None else m.float_to_half().half_to_float()
        low, high = kind.limits(scale, offset)
        for at, w in (
            (INVERSE, d.like(1.0) / d),
            (SCALE, scale),
            (OFFSET, offset),
            (MINIMUM, m),
            (LOW, low),
            (HIGH, high),
        ):
            if w is not None:
                room.store(w, at)
        beyond = (bottom.lt(low) | top.gt(high)).mask_bits().zext(I32)
        return fine.eq(0).sel(fine.like(-1), beyond)

    return prepare


def scored(kind: Kind) -> Any:
    """Emitter (values, room, scratch of the sums): folds `GROUP` values, gives the greatest squared error."""

    @emitter(M, M, M, M, ret=F)
    def score(x: M, room: M, lanes: M, counts: M) -> W:
        sums = Sums(x.load(F))
        for k in range(BLOCKS):
            x.prefetch(4096 + 512 + 64 * k)
            own = [room.load(F, off=at + 4 * k).splat(LANES) for at in (INVERSE, MINIMUM, SCALE, OFFSET)]
            vs = (x.load(F, LANES, 4 * (SIZE * k + i)) for i in range(0, SIZE, LANES))
            sums.add((v, kind.value(v, *own)) for v in vs)
        return sums.store(lanes, counts)

    return score


@emitter(M, M, ret=I32)
def clipped(x: M, limits: M) -> W:
    """How many of 32 values lie beyond the limits."""
    low, high = limits.load(F, off=LOW).splat(LANES), limits.load(F, off=HIGH).splat(LANES)
    n = low.bits(I32).like(0)
    for v in quarters(x.load(F, SIZE)):
        n = n - (v.lt(low) | v.gt(high)).sext(I32)
    return n.reduce("add")


@kernel
def count_clipped(x, room, mask):
    """Of a group, where the mask has a block's bit."""
    n = 0
    for k in range(BLOCKS):
        if mask >> k & 1:
            n += clipped(x + 4 * SIZE * k, room + 4 * k)
    return n


def read_back(kind: Kind) -> Any:
    """Emitter (values, eight encoded blocks, room, scratch of the sums): the same from the codes, and the limits."""

    @emitter(M, M, M, M, M, ret=F)
    def score(x: M, raw: M, room: M, lanes: M, counts: M) -> W:
        first = x.load(F)
        sums = Sums(first)
        for k in range(BLOCKS):
            block, v = raw.plus(first.w(I64(kind.nbytes * k))), x.load(F, SIZE, 4 * SIZE * k)
            kind.body(block, lambda y, off=0, v=v: sums.add(zip(quarters(v), quarters(y), strict=True)))
            low, high = kind.limits(block.half(), block.half(2) if kind.affine else None)
            room.store(low, LOW + 4 * k)
            room.store(high, HIGH + 4 * k)
        return sums.store(lanes, counts)

    return score


Q8_0, Q4_0, Q5_0 = Kind(q8_0, 34, -127, 127, False), Kind(q4_0, 18, -8, 7, False), Kind(q5_0, 22, -16, 15, False)
Q4_1, Q5_1 = Kind(q4_1, 20, 0, 15, True), Kind(q5_1, 24, 0, 31, True)
prepare_q8_0, score_q8_0, back_q8_0 = prepared(Q8_0), scored(Q8_0), read_back(Q8_0)
prepare_q4_0, score_q4_0, back_q4_0 = prepared(Q4_0), scored(Q4_0), read_back(Q4_0)
prepare_q4_1, score_q4_1, back_q4_1 = prepared(Q4_1), scored(Q4_1), read_back(Q4_1)
prepare_q5_0, score_q5_0, back_q5_0 = prepared(Q5_0), scored(Q5_0), read_back(Q5_0)
prepare_q5_1, score_q5_1, back_q5_1 = prepared(Q5_1), scored(Q5_1), read_back(Q5_1)


# The loops differ in five names. Numba's cache wants a function of its own for each, in a file.
@kernel
def error_q8_0(x, rows):
    raw, y, room = np.empty(34 * BLOCKS, np.uint8), np.empty(GROUP, np.float32), np.empty(ROOM, np.uint8)
    lanes, counts = np.empty(3 * LANES, np.float64), np.empty(LANES, np.int32)
    r, own, sums, found = raw.ctypes.data, room.ctypes.data, lanes.ctypes.data, counts.ctypes.data
    for s in range(rows.shape[0]):
        part = x[s * SEGMENT : min(x.size, (s + 1) * SEGMENT)]
        clear(lanes, counts)
        best, where, beyond = F32(-1.0), 0, 0
        for i in range(0, part.size, GROUP):
            src = part.ctypes.data + 4 * i
            mask = prepare_q8_0(src, own)
            if mask != NOT:
                top = score_q8_0(src, own, sums, found)
            elif count_nonfinite(part, i, i + GROUP):
                return s
            else:
                encode_q8_0(part[i : i + GROUP], raw, 0, BLOCKS)
                top = back_q8_0(src, r, own, sums, found)
            if mask:
                beyond += count_clipped(src, own, mask)
            if top > best:
                best, where = top, i
        if not finish(lanes, counts, part.size, False, rows[s]):
            return s
        rows[s, CLIPPED] = beyond
        encode_q8_0(part[where : where + GROUP], raw, 0, BLOCKS)
        decode_q8_0(raw, y, 0, BLOCKS)
        worst_of(part[where : where + GROUP], y, s * SEGMENT + where, rows[s])
    return rows.shape[0]


@kernel
def error_q4_0(x, rows):
    raw, y, room = np.empty(18 * BLOCKS, np.uint8), np.empty(GROUP, np.float32), np.empty(ROOM, np.uint8)
    lanes, counts = np.empty(3 * LANES, np.float64), np.empty(LANES, np.int32)
    r, own, sums, found = raw.ctypes.data, room.ctypes.data, lanes.ctypes.data, counts.ctypes.data
    for s in range(rows.shape[0]):
        part = x[s * SEGMENT : min(x.size, (s + 1) * SEGMENT)]
        clear(lanes, counts)
        best, where, beyond = F32(-1.0), 0, 0
        for i in range(0, part.size, GROUP):
            src = part.ctypes.data + 4 * i
            mask = prepare_q4_0(src, own)
            if mask != NOT:
                top = score_q4_0(src, own, sums, found)
            elif count_nonfinite(part, i, i + GROUP):
                return s
            else:
                encode_q4_0(part[i : i + GROUP], raw, 0, BLOCKS)
                top = back_q4_0(src, r, own, sums, found)
            if mask:
                beyond += count_clipped(src, own, mask)
            if top > best:
                best, where = top, i
        if not finish(lanes, counts, part.size, False, rows[s]):
            return s
        rows[s, CLIPPED] = beyond
        encode_q4_0(part[where : where + GROUP], raw, 0, BLOCKS)
        decode_q4_0(raw, y, 0, BLOCKS)
        worst_of(part[where : where + GROUP], y, s * SEGMENT + where, rows[s])
    return rows.shape[0]


@kernel
def error_q4_1(x, rows):
    raw, y, room = np.empty(20 * BLOCKS, np.uint8), np.empty(GROUP, np.float32), np.empty(ROOM, np.uint8)
    lanes, counts = np.empty(3 * LANES, np.float64), np.empty(LANES, np.int32)
    r, own, sums, found = raw.ctypes.data, room.ctypes.data, lanes.ctypes.data, counts.ctypes.data
    for s in range(rows.shape[0]):
        part = x[s * SEGMENT : min(x.size, (s + 1) * SEGMENT)]
        clear(lanes, counts)
        best, where, beyond = F32(-1.0), 0, 0
        for i in range(0, part.size, GROUP):
            src = part.ctypes.data + 4 * i
            mask = prepare_q4_1(src, own)
            if mask != NOT:
                top = score_q4_1(src, own, sums, found)
            elif count_nonfinite(part, i, i + GROUP):
                return s
            else:
                encode_q4_1(part[i : i + GROUP], raw, 0, BLOCKS)
                top = back_q4_1(src, r, own, sums, found)
            if mask:
                beyond += count_clipped(src, own, mask)
            if top > best:
                best, where = top, i
        if not finish(lanes, counts, part.size, False, rows[s]):
            return s
        rows[s, CLIPPED] = beyond
        encode_q4_1(part[where : where + GROUP], raw, 0, BLOCKS)
        decode_q4_1(raw, y, 0, BLOCKS)
        worst_of(part[where : where + GROUP], y, s * SEGMENT + where, rows[s])
    return rows.shape[0]


@kernel
def error_q5_0(x, rows):
    raw, y, room = np.empty(22 * BLOCKS, np.uint8), np.empty(GROUP, np.float32), np.empty(ROOM, np.uint8)
    lanes, counts = np.empty(3 * LANES, np.float64), np.empty(LANES, np.int32)
    r, own, sums, found = raw.ctypes.data, room.ctypes.data, lanes.ctypes.data, counts.ctypes.data
    for s in range(rows.shape[0]):
        part = x[s * SEGMENT : min(x.size, (s + 1) * SEGMENT)]
        clear(lanes, counts)
        best, where, beyond = F32(-1.0), 0, 0
        for i in range(0, part.size, GROUP):
            src = part.ctypes.data + 4 * i
            mask = prepare_q5_0(src, own)
            if mask != NOT:
                top = score_q5_0(src, own, sums, found)
            elif count_nonfinite(part, i, i + GROUP):
                return s
            else:
                encode_q5_0(part[i : i + GROUP], raw, 0, BLOCKS)
                top = back_q5_0(src, r, own, sums, found)
            if mask:
                beyond += count_clipped(src, own, mask)
            if top > best:
                best, where = top, i
        if not finish(lanes, counts, part.size, False, rows[s]):
            return s
        rows[s, CLIPPED] = beyond
        encode_q5_0(part[where : where + GROUP], raw, 0, BLOCKS)
        decode_q5_0(raw, y, 0, BLOCKS)
        worst_of(part[where : where + GROUP], y, s * SEGMENT + where, rows[s])
    return rows.shape[0]


@kernel
def error_q5_1(x, rows):
    raw, y, room = np.empty(24 * BLOCKS, np.uint8), np.empty(GROUP, np.float32), np.empty(ROOM, np.uint8)
    lanes, counts = np.empty(3 * LANES, np.float64), np.empty(LANES, np.int32)
    r, own, sums, found = raw.ctypes.data, room.ctypes.data, lanes.ctypes.data, counts.ctypes.data
    for s in range(rows.shape[0]):
        part = x[s * SEGMENT : min(x.size, (s + 1) * SEGMENT)]
        clear(lanes, counts)
        best, where, beyond = F32(-1.0), 0, 0
        for i in range(0, part.size, GROUP):
            src = part.ctypes.data + 4 * i
            mask = prepare_q5_1(src, own)
            if mask != NOT:
                top = score_q5_1(src, own, sums, found)
            elif count_nonfinite(part, i, i + GROUP):
                return s
            else:
                encode_q5_1(part[i : i + GROUP], raw, 0, BLOCKS)
                top = back_q5_1(src, r, own, sums, found)
            if mask:
                beyond += count_clipped(src, own, mask)
            if top > best:
                best, where = top, i
        if not finish(lanes, counts, part.size, False, rows[s]):
            return s
        rows[s, CLIPPED] = beyond
        encode_q5_1(part[where : where + GROUP], raw, 0, BLOCKS)
        decode_q5_1(raw, y, 0, BLOCKS)
        worst_of(part[where : where + GROUP], y, s * SEGMENT + where, rows[s])
    return rows.shape[0]
