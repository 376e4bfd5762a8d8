"""ggml's own quantizers (libgguf, and the C library of libggml-python), and the inputs they are compared on."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import libggml
import libgguf
import numpy as np

from .naive_encode import GGML

TYPE_IDS = {
    "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14,
    "IQ4_NL": 20, "IQ4_XS": 23, "TQ1_0": 34, "TQ2_0": 35, "MXFP4": 39, "NVFP4": 40, "Q1_0": 41, "Q2_0": 42,
}  # fmt: skip
ROW = 256


@cache
def library() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(Path(next(iter(libggml.__path__))) / "lib64" / "libggml-base.so"))
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    lib.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
    ]  # fmt: skip
    return lib


def quantize_chunk(name: str, x: np.ndarray) -> np.ndarray:
    """`ggml_quantize_chunk` of libggml-python without an importance matrix; (blocks, block_bytes)."""
    size, nbytes, _ = GGML[name]
    x = np.ascontiguousarray(x, np.float32).reshape(-1, ROW)
    out = np.empty((x.size // size, nbytes), np.uint8)
    done = library().ggml_quantize_chunk(TYPE_IDS[name], x.ctypes.data, out.ctypes.data, 0, len(x), ROW, None)
    assert done == out.nbytes
    return out


def quantize_libgguf(name: str, x: np.ndarray) -> np.ndarray:
    """The same of libgguf, which does not know Q2_0; (blocks, block_bytes)."""
    x = np.ascontiguousarray(x, np.float32).reshape(-1, ROW)
    return libgguf.quantize_rows(x, TYPE_IDS[name]).view(np.uint8).reshape(-1, GGML[name][1])


def reference(name: str, x: np.ndarray) -> np.ndarray:
    return quantize_chunk(name, x) if name == "Q2_0" else quantize_libgguf(name, x)


def families(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs of shape (rows, 256): what weights look like, and what breaks quantizers."""
    r = np.random.default_rng(seed)
    shape, f = (rows, ROW), np.float32
    g = r.standard_normal(shape).astype(f)
    one_hot = np.zeros(shape, f)
    one_hot[np.arange(rows), r.integers(0, ROW, rows)] = r.standard_normal(rows)
    patterns = r.integers(0, 2**32, shape, dtype=np.uint32).view(f).copy()
    patterns[~np.isfinite(patterns)] = 1
    power = np.exp2(r.integers(-140, 128, (rows, 1))).astype(f)
    halves = (r.integers(-16, 17, shape) / 2).astype(f)
    return {
        "gaussian": g,
        "weights": g * f(0.02),
        "cubed": g**3,
        "heavy tails": r.standard_t(1.5, shape).astype(f),
        "integers": r.integers(-8, 9, shape).astype(f),
        "ternary": r.integers(-1, 2, shape).astype(f),
        "ties": halves,
        "constant": np.repeat(r.standard_normal((rows, 1)).astype(f), ROW, axis=1),
        "zero": np.zeros(shape, f),
        "minus zero": -np.zeros(shape, f),
        "mixed zeros": np.where(r.random(shape) < 0.5, f(0), f(-0.0)),
        "zeros and positive": np.where(r.random(shape) < 0.5, f(-0.0), np.where(r.random(shape) < 0.5, f(0), abs(g))),
        "one hot": one_hot,
        "sparse": np.where(r.random(shape) < 0.9, f(0), g),
        "zero sub-blocks": g * np.repeat(r.integers(0, 2, (rows, 16)), 16, axis=1).astype(f),
        "positive": abs(g),
        "negative": -abs(g),
        "around the zero threshold": g * f(1e-15),
        "tiny": g * f(1e-30),
        "smallest normal": g * f(1e-37),
        "subnormal": g * f(1e-39),
        "large": g * f(1e6),
        "very large": g * f(1e20),
        "huge": np.clip(g.astype(np.float64) * 1e38, -3.4e38, 3.4e38).astype(f),
        "bit patterns": patterns,
        "just below powers of two": np.nextafter(power, f(0)) * np.ones(shape, f),
        "scales apart": (g * np.exp2(r.uniform(-40, 40, (rows, 8)).repeat(32, axis=1))).astype(f),
    }
