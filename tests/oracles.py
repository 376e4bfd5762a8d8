"""ggml's own decoders: the C library of the `libggml-python` package, `libgguf`, and the `gguf` package."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import libggml
import libgguf
import numpy as np

Array = np.ndarray[Any, Any]
TYPE_IDS = {t.name: int(t) for t in gguf.GGMLQuantizationType} | {"Q1_0": 41, "Q2_0": 42}


@cache
def _ggml() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(libggml.__file__).parent / "lib64" / "libggml-base.so"))


def c_function(name: str) -> Any:
    """`dequantize_row_<name>(blocks, values, count)`; K-quants have a capital K there."""
    lower = name.lower()
    lower = lower[:-1] + "K" if lower.startswith("q") and lower.endswith("_k") else lower
    f = getattr(_ggml(), "dequantize_row_" + lower)
    f.argtypes, f.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    return f


def c_decode(name: str, raw: Array, count: int) -> Array:
    """ggml's C code, in this process."""
    data, out = np.ascontiguousarray(raw), np.empty(count, np.float32)
    c_function(name)(data.ctypes.data, out.ctypes.data, count)
    return out


def gguf_decode(name: str, raw: Array) -> Array:
    """The `gguf` package."""
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw.reshape(1, -1), gguf.GGMLQuantizationType[name]).reshape(-1)


def libgguf_decode(name: str, raw: Array) -> Array:
    """`libgguf`'s C code."""
    return libgguf.dequantize_rows(raw.reshape(1, -1), TYPE_IDS[name]).reshape(-1)


# Which library knows which type (docs/formats.md, 2.12); Q8_1 has no decoder in any of them.
IN_C = tuple(n for n in TYPE_IDS if n.startswith(("Q", "IQ", "TQ", "MXFP4", "NVFP4")) and n != "Q8_1")
IN_GGUF = tuple(n for n in IN_C if n not in ("Q1_0", "Q2_0", "Q8_K"))
IN_LIBGGUF = tuple(n for n in IN_C if n not in ("Q2_0", "Q8_K"))
