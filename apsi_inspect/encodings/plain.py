"""The plain dtypes: one element (or the fewest that fill whole bytes) a block.

Names are those of safetensors 0.8 (`docs/formats.md`, 1.2); C32, C128 and the integers of 2 and 4 bits, which PyTorch
and ONNX add, are named after the same pattern.
"""

from __future__ import annotations

from .base import Encoding


def _word(name: str, nbytes: int, dtype: str, kind: str, decode: str | None = None) -> Encoding:
    swap = ((0, nbytes, 1),) if nbytes > 1 and kind != "complex" else ((0, nbytes // 2, 2),) if nbytes > 1 else ()
    return Encoding(name, 1, nbytes, dtype, kind, decode, None, swap)


PLAIN: tuple[Encoding, ...] = (
    _word("BOOL", 1, "bool", "bool"),
    # Sub-byte types: element 0 in the low bits, little-endian bit stream; values come one a byte, as in ml_dtypes.
    Encoding("F4", 2, 1, "float4_e2m1fn", "float", "floats:unpack_nibbles"),
    Encoding("F6_E2M3", 4, 3, "float6_e2m3fn", "float", "floats:unpack_bits6"),
    Encoding("F6_E3M2", 4, 3, "float6_e3m2fn", "float", "floats:unpack_bits6"),
    Encoding("I4", 2, 1, "int4", "int", "floats:unpack_nibbles"),
    Encoding("U4", 2, 1, "uint4", "uint", "floats:unpack_nibbles"),
    Encoding("I2", 4, 1, "int2", "int", "floats:unpack_crumbs"),
    Encoding("U2", 4, 1, "uint2", "uint", "floats:unpack_crumbs"),
    _word("U8", 1, "uint8", "uint"),
    _word("I8", 1, "int8", "int"),
    _word("F8_E5M2", 1, "float8_e5m2", "float"),
    _word("F8_E4M3", 1, "float8_e4m3fn", "float"),
    _word("F8_E8M0", 1, "float8_e8m0fnu", "float"),
    _word("F8_E4M3FNUZ", 1, "float8_e4m3fnuz", "float"),
    _word("F8_E5M2FNUZ", 1, "float8_e5m2fnuz", "float"),
    _word("I16", 2, "int16", "int"),
    _word("U16", 2, "uint16", "uint"),
    _word("F16", 2, "float16", "float"),
    _word("BF16", 2, "bfloat16", "float"),
    _word("I32", 4, "int32", "int"),
    _word("U32", 4, "uint32", "uint"),
    _word("F32", 4, "float32", "float"),
    # Two halves; values come as complex64, as NumPy has nothing smaller.
    Encoding("C32", 1, 4, "complex64", "complex", "floats:widen_c32", None, ((0, 2, 2),)),
    _word("C64", 8, "complex64", "complex"),
    _word("F64", 8, "float64", "float"),
    _word("I64", 8, "int64", "int"),
    _word("U64", 8, "uint64", "uint"),
    _word("C128", 16, "complex128", "complex"),
)
