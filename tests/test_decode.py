"""Values of every encoding against independent decoders: bit for bit, except that any NaN equals any other.

(Which NaN comes out of an operation on two of them depends on the order of its operands in machine code, in C too.)
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import libgguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from apsi_inspect import samples
from apsi_inspect.encodings import ENCODINGS, Encoding
from apsi_inspect.encodings.run import kernel
from apsi_inspect.encodings.values import _WIDEN, aligned_empty, decode, decode_into
from apsi_inspect.errors import ValueRefusedError
from apsi_inspect.kernels.formats import value_table
from apsi_inspect.kernels.iquants import CODEBOOKS, codebook
from apsi_inspect.kernels.simd import STREAM_FROM

from . import naive, oracles

Array = np.ndarray[Any, Any]
BLOCKS = tuple(e.name for e in ENCODINGS.values() if e.is_block)
SMALL_FLOATS = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2")
HALVES = (0, 1, 0x3FF, 0x400, 0x3C00, 0x7BFF, 0x7C00, 0x7E00, 0x7C01)  # zero … subnormal … largest, infinity, NaN


def same(found: Array, expected: Array) -> None:
    """The same bits, or both NaN."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    width = np.dtype(f"u{found.dtype.itemsize}")
    differ = (found.view(width) != expected.view(width)) & ~(np.isnan(found) & np.isnan(expected))
    assert not differ.any(), f"{differ.sum()} of {differ.size} differ, the first at {np.argmax(differ)}"


def extra(name: str) -> tuple[Array, ...]:
    return (codebook(name),) if name in CODEBOOKS else ()


def chosen_blocks(e: Encoding) -> Array:
    """Random blocks, uniform ones, and random ones with every scale of `HALVES` in every half-precision field."""
    rng = np.random.default_rng(len(e.name) + e.block_bytes)
    parts = [rng.integers(0, 256, (200, e.block_bytes), np.uint8)]
    parts += [np.full((1, e.block_bytes), byte, np.uint8) for byte in (0, 0xFF, 0x80, 0x7F, 0x88)]
    fields = [offset + 2 * i for offset, size, n in e.swap if size == 2 and n <= 2 for i in range(n)]
    for offset in fields:
        for half in HALVES:
            for sign in (0, 0x8000):
                block = rng.integers(0, 256, (2, e.block_bytes), np.uint8)
                block[:, offset : offset + 2] = np.array([half | sign], "<u2").view(np.uint8)
                parts.append(block)
    if e.name == "Q8_K":
        for scale in (0.0, -0.0, 1e-45, 1e-38, 3e38, -1.5, math.inf, math.nan):
            block = rng.integers(0, 256, (2, e.block_bytes), np.uint8)
            block[:, :4] = np.array([scale], "<f4").view(np.uint8)
            parts.append(block)
    if e.name in ("MXFP4", "NVFP4"):  # every byte of a scale
        block = rng.integers(0, 256, (256, e.block_bytes), np.uint8)
        block[:, 0] = np.arange(256)
        parts.append(block)
    raw = np.concatenate(parts).reshape(-1)
    raw.flags.writeable = False
    return raw


def run(e: Encoding, raw: Array, spec: str | None = None) -> Array:
    """The values by the kernel that the driver picks, or by the one named."""
    blocks = raw.size // e.block_bytes
    out = np.empty(blocks * e.block_size, np.float32)
    module, name = (spec or "").split(":") if spec else ("", "")
    f = getattr(importlib.import_module(f"apsi_inspect.kernels.{module}"), name) if spec else kernel(str(e.decode))
    f(raw, out, 0, blocks, *extra(e.name))
    return out


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_equal_the_references(name: str) -> None:
    e = ENCODINGS[name]
    raw = chosen_blocks(e)
    found = decode(e, raw, (raw.size // e.block_bytes * e.block_size,))
    same(found, naive.decode_blocks(name, raw, e.block_bytes, *extra(name)))
    if name in oracles.IN_C:
        same(found, oracles.c_decode(name, raw, found.size))
    if name in oracles.IN_LIBGGUF:
        same(found, oracles.libgguf_decode(name, raw))
    if name in oracles.IN_GGUF:
        same(found, oracles.gguf_decode(name, raw))


def test_the_references_know_every_type_but_one() -> None:
    assert set(BLOCKS) - set(oracles.IN_C) == {"Q8_1"}
    assert len(oracles.IN_GGUF) == len(oracles.IN_C) - 3


@pytest.mark.parametrize("name", BLOCKS)
def test_plain_loops_equal_explicit_vectors(name: str) -> None:
    e = ENCODINGS[name]
    raw = chosen_blocks(e)
    same(run(e, raw), run(e, raw, e.decode))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(BLOCKS))
def test_any_bytes(data: st.DataObject, name: str) -> None:
    e = ENCODINGS[name]
    raw = np.frombuffer(data.draw(st.binary(min_size=e.block_bytes, max_size=e.block_bytes)), np.uint8)
    same(run(e, raw), naive.decode_blocks(name, raw, e.block_bytes, *extra(name)))


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q4_K", "Q6_K", "Q5_1", "TQ1_0", "MXFP4", "NVFP4", "IQ2_XXS"])
def test_large_odd_and_threaded(name: str) -> None:
    """Streaming stores, any address of the bytes and of the result, and any number of threads: the same values."""
    e = ENCODINGS[name]
    unit = chosen_blocks(e)
    raw = np.tile(unit, -(-(STREAM_FROM + 1000) // (unit.size // e.block_bytes * e.block_size)))
    n = raw.size // e.block_bytes * e.block_size
    expected = np.tile(run(e, unit), raw.size // unit.size)
    shifted = np.empty(raw.size + 1, np.uint8)
    shifted[1:] = raw
    for threads in (None, 1, 3):
        out = aligned_empty((n,))
        assert out.ctypes.data % 64 == 0
        decode_into(e, memoryview(shifted)[1:], out, threads=threads)
        same(out, expected)
    odd = np.empty(n + 1, np.float32)[1:] if aligned_empty((1,)).ctypes.data % 64 == 0 else np.empty(n, np.float32)
    decode_into(e, raw, odd)
    same(odd, expected)


# ggml's quantizers of these build tables of neighbours first, which takes seconds.
SLOW = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in oracles.IN_LIBGGUF])
def test_real_weights(name: str) -> None:
    """A trained model's weights, quantized by ggml's own C code."""
    e = ENCODINGS[name]
    tensors = load_file(samples.path("fracast.safetensors"))
    flat = np.concatenate([t.reshape(-1) for _, t in sorted(tensors.items())])
    rows = flat[: flat.size // 256 * 256].reshape(-1, 256)
    assert len(rows) > 200
    raw = libgguf.quantize_rows(np.ascontiguousarray(rows), oracles.TYPE_IDS[name])
    found = decode(e, raw.tobytes(), rows.shape)
    same(found, libgguf.dequantize_rows(raw, oracles.TYPE_IDS[name]))
    if name in oracles.IN_GGUF:
        same(found, oracles.gguf_decode(name, raw.reshape(-1)).reshape(rows.shape))
    assert np.corrcoef(found.reshape(-1), rows.reshape(-1))[0, 1] > 0.6  # of the coarsest: ternary, one bit


@pytest.mark.parametrize("name", BLOCKS)
def test_the_other_byte_order(name: str) -> None:
    """Swapping the listed fields by hand and asking for a swap gives the values back."""
    e = ENCODINGS[name]
    raw = chosen_blocks(e)
    other = raw.reshape(-1, e.block_bytes).copy()
    for offset, size, count in e.swap:
        for i in range(count):
            at = offset + size * i
            other[:, at : at + size] = other[:, at : at + size][:, ::-1]
    shape = (raw.size // e.block_bytes * e.block_size,)
    same(decode(e, other.tobytes(), shape, swap=True), decode(e, raw, shape))


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_all_codes_of_small_floats(name: str) -> None:
    """Natural values are ml_dtypes' own; float32 equals ml_dtypes' conversion and, where finite, the definition."""
    e = ENCODINGS[name]
    width = 8 * e.block_bytes // e.block_size
    codes = np.arange(1 << width, dtype=np.uint8)
    stream = sum(int(c) << (width * i) for i, c in enumerate(codes)).to_bytes(len(codes) * width // 8, "little")
    natural = decode(e, stream, codes.shape)
    table = np.empty(codes.size, np.float32)
    module, f = importlib.import_module("apsi_inspect.kernels.floats"), _WIDEN[name].partition(":")[2]
    getattr(module, f)(np.frombuffer(stream, np.uint8), table, 0, codes.size // e.block_size, value_table(e.dtype), -1)
    assert natural.dtype == getattr(ml_dtypes, e.dtype)
    assert (natural.view(np.uint8) == codes).all()
    wide = decode(e, stream, codes.shape, out=np.empty(codes.shape, np.float32))
    same(wide, codes.view(getattr(ml_dtypes, e.dtype)).astype(np.float32))
    same(wide, table)
    info = ml_dtypes.finfo(natural.dtype)
    if name != "F8_E8M0":
        bias = 1 - int(np.log2(float(info.smallest_normal)))
        finite = np.isfinite(wide)
        expected = [naive.small_float(int(c), info.nexp, info.nmant, bias) for c in codes[finite]]
        same(wide[finite], np.array(expected, np.float32))


@pytest.mark.parametrize(("name", "dtype"), [("F16", np.float16), ("BF16", ml_dtypes.bfloat16)])
def test_all_halves(name: str, dtype: Any) -> None:
    """All 65536 patterns, from an odd address, plain and vector kernel. A signalling NaN may come out quiet."""
    raw = b"x" + np.arange(65536, dtype="<u2").tobytes()
    data = memoryview(raw)[1:]
    expected = np.arange(65536, dtype=np.uint16).view(dtype).astype(np.float32)
    same(decode(ENCODINGS[name], data, (65536,), out=np.empty(65536, np.float32)), expected)
    plain = np.empty(65535, np.float32)
    getattr(importlib.import_module("apsi_inspect.kernels.floats"), f"widen_{name.lower()}")(
        np.frombuffer(data, np.uint8), plain, 1, 65535
    )
    same(plain[1:], expected[1:65535])


@pytest.mark.parametrize("name", ["F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F4", "F6_E3M2"])
def test_large_small_floats(name: str) -> None:
    """Enough for threads and streaming stores, with a tail, in both byte orders."""
    e = ENCODINGS[name]
    n = (STREAM_FROM + 4 * 37) // e.block_size * e.block_size
    raw = np.random.default_rng(1).integers(0, 256, n // e.block_size * e.block_bytes, np.uint8)
    natural = decode(e, raw, (n,))
    expected = natural.astype(np.float32)
    for threads in (1, 2, 3):
        same(decode(e, raw, (n,), out=aligned_empty((n,)), threads=threads), expected)
    if e.swap:
        other = natural.view(np.uint16).byteswap().tobytes()
        same(decode(e, other, (n,), out=aligned_empty((n,)), swap=True), expected)


@pytest.mark.parametrize("name", [e.name for e in ENCODINGS.values() if e.kind not in ("block", "scaled")])
def test_plain_values_are_views(name: str) -> None:
    e = ENCODINGS[name]
    count = 12 * e.block_size
    most = 1 if name == "BOOL" else 255
    raw = np.random.default_rng(2).integers(0, most, count // e.block_size * e.block_bytes, np.uint8, endpoint=True)
    found = decode(e, raw.tobytes(), (3, count // 3))
    dtype = np.dtype(getattr(ml_dtypes, e.dtype, e.dtype))
    assert (found.dtype, found.shape) == (dtype, (3, count // 3))
    if e.decode is None:
        assert not found.flags.writeable
        assert found.base is not None
        assert found.tobytes() == raw.tobytes()
    elif name == "C32":
        halves = raw.view(np.float16).astype(np.float32)
        assert np.array_equal(found.view(np.float32).reshape(-1), halves, equal_nan=True)
    else:
        width = 8 * e.block_bytes // e.block_size
        assert found.view(np.uint8).reshape(-1).tolist() == naive.unpack(raw.tobytes(), width, count)
    copy = np.empty_like(found)
    decode_into(e, raw, copy)
    assert copy.tobytes() == found.tobytes()
    swapped = decode(e, raw, found.shape, swap=True)
    if name == "C32":
        halves = raw.view(np.float16).byteswap().astype(np.float32)
        assert np.array_equal(swapped.view(np.float32).reshape(-1), halves, equal_nan=True)
        return
    if dtype.itemsize == 1:
        expected = found
    elif name == "BF16":
        expected = raw.view(np.uint16).byteswap()
    else:
        expected = raw.view(dtype).byteswap()
    assert swapped.tobytes() == expected.tobytes()


def test_bools_that_are_not_0_or_1() -> None:
    found = decode(ENCODINGS["BOOL"], bytes([0, 1, 2, 255]), (4,))
    assert found.dtype == np.bool_
    assert found.view(np.uint8).tolist() == [0, 1, 1, 1]


def test_empty_and_scalar() -> None:
    for e in ENCODINGS.values():
        if e.kind != "scaled":
            assert decode(e, b"", (0, e.block_size)).shape == (0, e.block_size)
    assert decode(ENCODINGS["F32"], np.float32(1.5).tobytes(), ()) == 1.5
    assert decode(ENCODINGS["F32"], np.float32(1.5).tobytes(), ()).shape == ()


@pytest.mark.parametrize(
    ("name", "nbytes", "out", "message"),
    [
        ("Q4_0", 17, np.empty(32, np.float32), "32 elements of Q4_0 take 18 bytes, got 17"),
        ("Q4_0", 18, np.empty(33, np.float32), "33 elements do not fill whole Q4_0 blocks of 32"),
        ("Q4_0", 18, np.empty(32, np.float64), "Q4_0 decodes to float32, not to float64"),
        ("F64", 8, np.empty(1, np.float32), "F64 decodes to float64, not to float32"),
        ("I32", 4, np.empty(1, np.float32), "I32 decodes to int32, not to float32"),
        ("F16", 4, np.empty(4, np.float16)[::2], "out must be a writable C-contiguous array"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, nbytes: int, out: Array, message: str) -> None:
    with pytest.raises(ValueRefusedError, match=message):
        decode_into(ENCODINGS[name], bytes(nbytes), out)


def test_a_wrong_codebook_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from gguf import quants

    grid = codebook("IQ3_S").reshape(1, 1, 512, 4).astype(np.float32)
    grid[0, 0, 7, 1] += 2
    monkeypatch.setattr(quants.IQ3_S, "grid", grid)
    codebook.cache_clear()
    with pytest.raises(ValueError, match="install another version of gguf"):
        codebook("IQ3_S")
    codebook.cache_clear()
