"""The quantized formats of .apsim: files of another implementation, an obvious twin, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from apsi_inspect.encodings import ENCODINGS
from apsi_inspect.encodings.encode_scaled import quantize_scaled
from apsi_inspect.encodings.run import kernel
from apsi_inspect.encodings.scaled import PACKING
from apsi_inspect.encodings.scaled_values import decode_scaled
from apsi_inspect.errors import ValueRefusedError

from . import naive_encode

GOLDEN = Path(__file__).parent / "data" / "golden"
FORMATS = tuple(PACKING)
LARGEST = {"int8": 127, "int4": 7, "fp8": 448, "fp8_e5m2": 57344, "fp6": 7.5, "fp6_e3m2": 28, "fp4": 6}
SMALL = {
    "fp8": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "fp6": "float6_e2m3fn", "fp6_e3m2": "float6_e3m2fn",
    "fp4": "float4_e2m1fn",
}  # fmt: skip


def read(path: Path) -> tuple[dict[str, Any], Callable[[str], bytes]]:
    """Header and a way to the bytes of a tensor, read by hand."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])

    def tensor(name: str) -> bytes:
        start, stop = header[name]["data_offsets"]
        return raw[8 + size + start : 8 + size + stop]

    return header, tensor


def twin(x: np.ndarray, fmt: str, axis: int | None, block: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Codes, one a byte in the shape of `x`, and scales: block by block."""
    codes = np.zeros(x.shape, np.uint8)
    length = 1 if axis is None else x.shape[axis]
    step = max(length, 1) if block is None else block
    count = -(-length // step)
    shape = () if axis is None else (*x.shape[:axis], count, *x.shape[axis + 1 :])
    scale = np.zeros(shape, np.float32)
    for at in np.ndindex(shape):
        if axis is None:
            index: tuple[Any, ...] = (...,)
        else:
            index = (*at[:axis], slice(at[axis] * step, (at[axis] + 1) * step), *at[axis + 1 :])
        part = x[index]
        amax = np.abs(part).max(initial=0)
        d = np.float32(amax) / np.float32(LARGEST[fmt])
        d = np.float32(2.0**-149) if amax > 0 and d == 0 else d
        scale[at] = d
        q = np.clip(part / (d if d else np.float32(1)), -LARGEST[fmt], LARGEST[fmt])
        if fmt in SMALL:
            codes[index] = q.astype(np.dtype(getattr(ml_dtypes, SMALL[fmt]))).view(np.uint8)
        else:
            codes[index] = np.rint(q).astype(np.int8).view(np.uint8) & (255 if fmt == "int8" else 15)
    return codes, scale


def packed(codes: np.ndarray, packing: str) -> bytes:
    if packing == "none":
        return codes.tobytes()
    rows = codes.reshape(-1, codes.shape[-1] if codes.ndim else 1)
    per, pack = (2, naive_encode.pack4) if packing == "nibble" else (4, naive_encode.pack6)
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % per)))
    return pack(rows).tobytes()


def test_golden_files() -> None:
    header, tensor = read(GOLDEN / "qtensors.apsim")
    entries = json.loads(header["__metadata__"]["qtensors"])
    values = np.load(GOLDEN / "qtensors.npz")
    assert {e["format"] for e in entries.values()} == set(FORMATS)
    for name, e in entries.items():
        q = quantize_scaled(values[f"{name}::source"], e["format"], e["axis"], e.get("block"))
        assert q.codes.tobytes() == tensor(name), name
        assert list(q.codes.shape) == header[name]["shape"]
        assert q.packing == e["packing"]
        if e["scale_shape"] is None:
            assert q.scale is None
            assert q.scale_shape is None
        else:
            assert q.scale is not None
            assert q.scale.tobytes() == tensor(f"{name}__qscale"), name
            assert list(q.scale.shape) == e["scale_shape"] == list(q.scale_shape or ())


def test_degenerate_golden_file() -> None:
    """Empty and 0-d tensors: shapes of codes and scales."""
    header, _ = read(GOLDEN / "degenerate.apsim")
    for name, e in json.loads(header["__metadata__"]["qtensors"]).items():
        q = quantize_scaled(np.ones(e["shape"], np.float32), e["format"], e["axis"], e.get("block"))
        assert q.scale is not None
        assert list(q.codes.shape) == header[name]["shape"], name
        assert list(q.scale.shape) == header[f"{name}__qscale"]["shape"], name


CASES = [
    ((5, 70), 1, None), ((5, 70), 1, 32), ((5, 70), -1, 3), ((70, 5), 0, None), ((70, 37), 0, 16), ((3, 4, 66), 1, 3),
    ((3, 4, 66), 0, None), ((3, 4, 66), 2, 100), ((129,), 0, 32), ((129,), None, None), ((2, 3, 35), None, None),
    ((), None, None), ((4, 64), 1, 32), ((200, 1), 1, None), ((1, 4096), 0, None),
]  # fmt: skip


@pytest.mark.parametrize("fmt", list(LARGEST))
@pytest.mark.parametrize(("shape", "axis", "block"), CASES)
def test_matches_the_twin(fmt: str, shape: tuple[int, ...], axis: int | None, block: int | None) -> None:
    r = np.random.default_rng(8)
    x = np.asarray(r.standard_t(2, shape), np.float32)
    mask = r.random(shape)
    x = np.where(mask < 0.1, np.float32(0), np.where(mask < 0.2, np.float32(-0.0), x))
    for y in (x, x * np.float32(1e-42), x * np.float32(1e36), np.rint(x * 4) / np.float32(2), x * np.float32(0)):
        codes, scale = twin(y, fmt, None if axis is None else axis % max(len(shape), 1), block)
        q = quantize_scaled(y, fmt, axis, block)
        assert q.scale is not None
        np.testing.assert_array_equal(q.scale, scale)
        assert q.codes.tobytes() == packed(codes, PACKING[fmt])


@pytest.mark.parametrize("fmt", list(LARGEST))
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    x=hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=40), elements=st.floats(
        width=32, allow_nan=False, allow_infinity=False)),
    data=st.data(),
)  # fmt: skip
def test_any_array(fmt: str, x: np.ndarray, data: st.DataObject) -> None:
    axis = data.draw(st.one_of(st.none(), st.integers(0, x.ndim - 1)))
    block = None if axis is None else data.draw(st.one_of(st.none(), st.integers(1, 40)))
    with np.errstate(all="ignore"):
        codes, scale = twin(x, fmt, axis, block)
    q = quantize_scaled(x, fmt, axis, block)
    np.testing.assert_array_equal(q.scale, scale)
    assert q.codes.tobytes() == packed(codes, PACKING[fmt])


@pytest.mark.parametrize("fmt", FORMATS)
def test_decodes_to_nearby_values(fmt: str) -> None:
    """Half a step of the code's own grid, in units of the block's scale."""
    x = np.random.default_rng(9).standard_normal((64, 96)).astype(np.float32)
    block = None if fmt == "bf16" else 32
    axis = None if fmt == "bf16" else 1
    q = quantize_scaled(x, fmt, axis, block)
    back = decode_scaled(fmt, q.codes, q.scale, x.shape, axis, block, q.packing)
    relative = {"bf16": 2.0**-8, "int8": 0, "int4": 0, "fp8": 2.0**-4, "fp8_e5m2": 2.0**-3, "fp6": 2.0**-4,
                "fp6_e3m2": 2.0**-3, "fp4": 0.25}[fmt]  # fmt: skip
    absolute = {"bf16": 0, "int8": 0.5, "int4": 0.5, "fp8": 2.0**-10, "fp8_e5m2": 2.0**-17, "fp6": 0.0625,
                "fp6_e3m2": 0.03125, "fp4": 0.25}[fmt]  # fmt: skip
    steps = np.zeros_like(x) if q.scale is None else np.repeat(q.scale, 32, axis=1) * np.float32(absolute)
    assert (np.abs(back - x) <= (np.abs(x) * relative + steps) * (1 + 1e-5)).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_threads_layouts_and_dtypes(fmt: str) -> None:
    x = np.random.default_rng(10).standard_normal((96, 130)).astype(np.float32)
    axis, block = (None, None) if fmt == "bf16" else (0, 32)
    expected = quantize_scaled(x, fmt, axis, block)
    odd = np.zeros(x.nbytes + 1, np.uint8)
    odd[1:] = np.frombuffer(x.tobytes(), np.uint8)
    for y in (np.asfortranarray(x), x.astype(">f4"), x.astype(np.float64), odd[1:].view(np.float32).reshape(x.shape)):
        q = quantize_scaled(y, fmt, axis, block, threads=3)
        assert q.codes.tobytes() == expected.codes.tobytes()
        np.testing.assert_array_equal(q.scale, expected.scale)
    if fmt != "bf16":
        one, many = (quantize_scaled(x, fmt, threads=n) for n in (1, 4))
        assert one.codes.tobytes() == many.codes.tobytes()
        assert one.scale == many.scale


_GENERIC = """
import sys
import numpy as np
from apsi_inspect.encodings.encode_scaled import quantize_scaled
from apsi_inspect.kernels._jit import cpu_has
assert not cpu_has("avx2")
x = np.load(sys.argv[1])
for fmt in sys.argv[2:]:
    for axis in (0, 1):
        print(quantize_scaled(x, fmt, axis, 32).codes.tobytes().hex())
"""


@pytest.mark.slow
def test_without_cpu_features(tmp_path: Path) -> None:
    x = np.random.default_rng(11).standard_normal((70, 75)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    env = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _GENERIC, str(tmp_path / "x.npy"), *LARGEST]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = iter(done.stdout.split())
    for fmt in LARGEST:
        for axis in (0, 1):
            assert next(lines) == packed(twin(x, fmt, axis, 32)[0], PACKING[fmt]).hex()


def test_encoders_that_are_named_exist() -> None:
    for e in ENCODINGS.values():
        assert e.encode is None or callable(kernel(e.encode)), e.name


def test_refusals() -> None:
    x = np.ones((4, 32), np.float32)
    for bad, message in (
        ({"fmt": "int3"}, "unknown format 'int3'; known: int8"),
        ({"fmt": "int8", "axis": 2}, r"no axis 2 in shape \(4, 32\)"),
        ({"fmt": "int8", "axis": 1, "block": 0}, "at least one element"),
        ({"fmt": "int8", "block": 32}, "needs an axis"),
    ):
        with pytest.raises(ValueRefusedError, match=message):
            quantize_scaled(x, **bad)
    with pytest.raises(ValueRefusedError, match="tensor 'w': its values are complex; only real numbers"):
        quantize_scaled(x.astype(np.complex64), "bf16", name="w")
    x[1, 2], x[3, 4] = np.nan, np.inf
    for fmt in LARGEST:
        with pytest.raises(ValueRefusedError, match=rf"tensor 'w': 2 of 128 values are not finite.*{fmt} cannot hold"):
            quantize_scaled(x, fmt, -1, name="w")
    q = quantize_scaled(x, "bf16")
    assert np.isnan(q.codes[1, 2])
    assert q.codes.dtype == ml_dtypes.bfloat16
