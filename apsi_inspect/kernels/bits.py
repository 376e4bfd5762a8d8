"""Scalar bit helpers for kernels: float <-> bits, half <-> float on any CPU, C's rounding, little-endian loads.

Halves travel as uint16 (Numba has no float16 on the CPU). Bytes are put together by hand where arrays may sit at odd
addresses. Mind Numba's rule that uint32 + uint32 is uint64: cast back after each step that must wrap around.
`tests/test_kernels.py` runs all of it against NumPy, with and without hardware support.
"""

from __future__ import annotations

from .simd import I16, I32, I64, D, F, M, W, emitter

__all__ = [
    "bits",
    "bits64",
    "float_at",
    "float_to_half",
    "half_at",
    "half_to_float",
    "put_float",
    "put_half",
    "put_u32",
    "roundf",
    "u16_at",
    "u32_at",
    "unbits",
    "unbits64",
]


@emitter(F, ret=I32)
def bits(x: W) -> W:
    """The bits of a float32 as uint32."""
    return x.bits(I32)


@emitter(I32, ret=F)
def unbits(u: W) -> W:
    """The float32 that has these bits."""
    return u.bits(F)


@emitter(D, ret=I64)
def bits64(x: W) -> W:
    """The bits of a float64 as uint64."""
    return x.bits(I64)


@emitter(I64, ret=D)
def unbits64(u: W) -> W:
    """The float64 that has these bits."""
    return u.bits(D)


@emitter(I16, ret=F)
def half_to_float(h: W) -> W:
    """uint16 holding a half -> float32, exact."""
    return h.half_to_float()


@emitter(F, ret=I16)
def float_to_half(x: W) -> W:
    """float32 -> uint16 holding a half, ties to even, overflow to infinity."""
    return x.float_to_half()


@emitter(F, ret=F)
def roundf(x: W) -> W:
    """Nearest integer, ties away from zero; `np.round` and `np.rint` take ties to even."""
    return x.round()


# Little-endian fields at a byte address (`array.ctypes.data + offset`), at any alignment.
@emitter(M, ret=I16)
def u16_at(p: M) -> W:
    return p.load(I16)


@emitter(M, ret=I32)
def u32_at(p: M) -> W:
    return p.load(I32)


@emitter(M, ret=F)
def half_at(p: M) -> W:
    """The half at an address, as a float32."""
    return p.half()


@emitter(M, ret=F)
def float_at(p: M) -> W:
    return p.load(F)


@emitter(M, F)
def put_half(p: M, x: W) -> None:
    """Store a float32 as a half."""
    p.store(x.float_to_half())


@emitter(M, F)
def put_float(p: M, x: W) -> None:
    p.store(x)


@emitter(M, I32)
def put_u32(p: M, u: W) -> None:
    p.store(u)
