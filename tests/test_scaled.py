"""The quantized tensors of .apsim: files of another implementation, every code, every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from apsi_inspect.encodings.scaled_values import decode_scaled
from apsi_inspect.errors import ValueRefusedError

from . import naive

Array = np.ndarray[Any, Any]
WIDTH = {"int8": 8, "int4": 4, "fp8": 8, "fp8_e5m2": 8, "fp6": 6, "fp6_e3m2": 6, "fp4": 4}
NATURAL = {
    "int8": np.int8,
    "int4": ml_dtypes.int4,
    "fp8": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp6": ml_dtypes.float6_e2m3fn,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp4": ml_dtypes.float4_e2m1fn,
}


def golden(path: Path) -> dict[str, tuple[dict[str, Any], bytes, Array | None]]:
    """The quantized tensors of a golden file, read with nothing but json: entry, codes, scales."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])

    def tensor(name: str) -> bytes:
        a, b = header[name]["data_offsets"]
        return raw[start + a : start + b]

    found = {}
    for name, entry in json.loads(header["__metadata__"]["qtensors"]).items():
        scale = None
        if entry["scale_shape"] is not None:
            scale = np.frombuffer(tensor(name + "__qscale"), "<f4").reshape(entry["scale_shape"])
        found[name] = (entry, tensor(name), scale)
    return found


def test_files_of_another_implementation(data: Path) -> None:
    """8 formats in 5 layouts, bit for bit."""
    expected = np.load(data / "golden" / "qtensors.npz")
    tensors = golden(data / "golden" / "qtensors.apsim")
    assert len(tensors) == 40
    for name, (entry, codes, scale) in tensors.items():
        found = decode_scaled(
            entry["format"], codes, scale, entry["shape"], entry["axis"], entry.get("block"), entry["packing"]
        )
        assert found.view(np.uint32).tolist() == expected[name].view(np.uint32).tolist(), name


def test_empty_and_scalar_tensors(data: Path) -> None:
    for name, (entry, codes, scale) in golden(data / "golden" / "degenerate.apsim").items():
        found = decode_scaled(entry["format"], codes, scale, entry["shape"], entry["axis"], entry.get("block"))
        assert found.shape == tuple(entry["shape"]), name


@pytest.mark.parametrize("fmt", WIDTH)
def test_every_code(fmt: str) -> None:
    """With scale 1 the values are ml_dtypes' own; a NaN code stays NaN."""
    codes = np.arange(1 << WIDTH[fmt], dtype=np.uint8)
    stream = sum(int(c) << (WIDTH[fmt] * i) for i, c in enumerate(codes))
    raw = stream.to_bytes(len(codes) * WIDTH[fmt] // 8, "little")
    found = decode_scaled(fmt, raw, np.float32(1).reshape(()), codes.shape, None, None)
    expected = codes.view(NATURAL[fmt]).astype(np.float32)
    assert np.isnan(found).tolist() == np.isnan(expected).tolist()
    number = ~np.isnan(expected)
    assert found[number].view(np.uint32).tolist() == expected[number].view(np.uint32).tolist()
    finite = np.isfinite(expected)
    assert found[finite].tolist() == [naive.scaled_code(fmt, int(c)) for c in codes[finite]]


LAYOUTS = [
    ((5, 7), None, None),
    ((2, 75), 1, 32),
    ((2, 130), 0, None),
    ((5, 7), 1, None),
    ((5, 7), 1, 3),
    ((5, 7), 0, None),
    ((5, 7), 0, 2),
    ((3, 4, 6), 1, 3),
    ((3, 4, 5), 0, 2),
    ((3, 4, 5), 2, 2),
    ((2, 3, 4, 5), 1, 2),
    ((9,), 0, 4),
    ((9,), 0, 1),
    ((), None, None),
]


@pytest.mark.parametrize("fmt", WIDTH)
@pytest.mark.parametrize(("shape", "axis", "block"), LAYOUTS)
def test_every_layout(fmt: str, shape: tuple[int, ...], axis: int | None, block: int | None) -> None:
    rng = np.random.default_rng(5)
    n = shape[-1] if shape else 1
    row = {8: n, 4: -(-n // 2), 6: -(-n // 4) * 3}[WIDTH[fmt]]
    rows = int(np.prod(shape[:-1])) if shape else 1
    raw = rng.integers(0, 256 if WIDTH[fmt] < 8 else 0x7B, rows * row, np.uint8).tobytes()
    scale_shape: tuple[int, ...] = ()
    if axis is not None:
        scale_shape = (*shape[:axis], -(-shape[axis] // (block or shape[axis])), *shape[axis + 1 :])
    scale = rng.lognormal(0, 3, scale_shape).astype(np.float32)
    expected = naive.decode_scaled(fmt, raw, np.asarray(scale), shape, axis, block)
    for threads in (1, 2):
        found = decode_scaled(fmt, raw, np.asarray(scale), shape, axis, block, threads=threads)
        assert found.view(np.uint32).tolist() == expected.view(np.uint32).tolist()


def test_extreme_scales() -> None:
    """Subnormal, largest, zero: one product rounded once, as NumPy rounds it."""
    codes = np.arange(-128, 128, dtype=np.int8)
    for scale in (1e-45, 1e-40, 2.7e36, 3.4e38, 0.0, 2.0**-149, float("inf")):
        s = np.float32(scale).reshape(())
        with np.errstate(all="ignore"):
            expected = codes.astype(np.float32) * s
        found = decode_scaled("int8", codes.tobytes(), s, (256,), None, None)
        np.testing.assert_array_equal(found, expected)
        nan = np.isnan(expected)
        assert (np.signbit(found) == np.signbit(expected))[~nan].all()


def test_large() -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(-127, 128, (700, 2000), np.int8)
    scale = rng.random((700, 63), np.float32)
    expected = codes.astype(np.float32) * np.repeat(scale, 32, axis=1)[:, :2000]
    found = decode_scaled("int8", codes.tobytes(), scale, (700, 2000), 1, 32)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("fmt", "nbytes", "scale", "axis", "block", "packing", "message"),
    [
        ("int9", 6, (), None, None, None, "unknown format"),
        ("int8", 5, (), None, None, None, r"int8 codes of shape \(2, 3\) take 6 bytes, got 5"),
        ("int4", 3, (), None, None, None, r"int4 codes of shape \(2, 3\) take 4 bytes, got 3"),
        ("int8", 6, (2,), None, None, None, r"expected float32 scales of shape \(\)"),
        ("int8", 6, (2, 1), 1, 2, None, r"expected float32 scales of shape \(2, 2\)"),
        ("int8", 6, (2, 1), 2, None, None, "no axis 2"),
        ("int8", 6, (2, 1), 1, 0, None, "no axis 1 with blocks of 0"),
        ("int8", 6, (), None, None, "nibble", "packed as 'none', not 'nibble'"),
        ("int8", 6, None, None, None, None, "scales are missing"),
        ("bf16", 6, None, None, None, None, r"bf16 codes of shape \(2, 3\) take 12 bytes, got 6"),
    ],
)
def test_what_does_not_fit_is_refused(
    fmt: str, nbytes: int, scale: Any, axis: Any, block: Any, packing: Any, message: str
) -> None:
    scales = None if scale is None else np.ones(scale, np.float32)
    with pytest.raises(ValueRefusedError, match=message):
        decode_scaled(fmt, bytes(nbytes), scales, (2, 3), axis, block, packing)
