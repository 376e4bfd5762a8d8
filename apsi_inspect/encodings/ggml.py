"""The block formats of ggml (`docs/formats.md`, 2.8 and 2.9): sizes, and the fields a big-endian file swaps."""

from __future__ import annotations

from .base import Encoding

# name, elements and bytes of a block, family (module of the kernels), multi-byte fields (offset, item size, count)
_TABLE = (
    ("Q4_0", 32, 18, "blocks", ((0, 2, 1),)),
    ("Q4_1", 32, 20, "blocks", ((0, 2, 2),)),
    ("Q5_0", 32, 22, "blocks", ((0, 2, 1),)),
    ("Q5_1", 32, 24, "blocks", ((0, 2, 2),)),
    ("Q8_0", 32, 34, "blocks", ((0, 2, 1),)),
    ("Q8_1", 32, 36, "blocks", ((0, 2, 2),)),
    ("Q2_K", 256, 84, "kquants", ((80, 2, 2),)),
    ("Q3_K", 256, 110, "kquants", ((108, 2, 1),)),
    ("Q4_K", 256, 144, "kquants", ((0, 2, 2),)),
    ("Q5_K", 256, 176, "kquants", ((0, 2, 2),)),
    ("Q6_K", 256, 210, "kquants", ((208, 2, 1),)),
    ("Q8_K", 256, 292, "kquants", ((0, 4, 1), (260, 2, 16))),
    ("IQ2_XXS", 256, 66, "iquants", ((0, 2, 1), (2, 4, 16))),
    ("IQ2_XS", 256, 74, "iquants", ((0, 2, 33),)),
    ("IQ3_XXS", 256, 98, "iquants", ((0, 2, 1), (66, 4, 8))),
    ("IQ1_S", 256, 50, "iquants", ((0, 2, 1), (34, 2, 8))),
    ("IQ4_NL", 32, 18, "blocks", ((0, 2, 1),)),
    ("IQ3_S", 256, 110, "iquants", ((0, 2, 1),)),
    ("IQ2_S", 256, 82, "iquants", ((0, 2, 1),)),
    ("IQ4_XS", 256, 136, "iquants", ((0, 2, 2),)),
    ("IQ1_M", 256, 56, "iquants", ((48, 2, 4),)),
    ("TQ1_0", 256, 54, "blocks", ((52, 2, 1),)),
    ("TQ2_0", 256, 66, "blocks", ((64, 2, 1),)),
    ("MXFP4", 32, 17, "blocks", ()),
    ("NVFP4", 64, 36, "blocks", ()),
    ("Q1_0", 128, 18, "blocks", ((0, 2, 1),)),
    ("Q2_0", 64, 18, "blocks", ((0, 2, 1),)),
)
_ENCODERS = {
    **dict.fromkeys(
        ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "Q1_0", "Q2_0"),
        "encode_blocks",
    ),
    **dict.fromkeys(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"), "encode_kquants"),
}

GGML: tuple[Encoding, ...] = tuple(
    Encoding(
        name,
        size,
        nbytes,
        "float32",
        "block",
        f"{family}:decode_{name.lower()}",
        f"{_ENCODERS[name]}:encode_{name.lower()}" if name in _ENCODERS else None,
        swap,
    )
    for name, size, nbytes, family, swap in _TABLE
)
