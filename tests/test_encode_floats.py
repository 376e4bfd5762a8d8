"""Conversion of values to plain encodings: ml_dtypes, NumPy and ggml as references, all kinds of bit patterns."""

from __future__ import annotations

import libgguf
import ml_dtypes
import numpy as np
import pytest

from apsi_inspect.encodings.base import Encoding
from apsi_inspect.encodings.encode import encode, holds_nonfinite
from apsi_inspect.encodings.plain import PLAIN
from apsi_inspect.errors import ValueRefusedError
from apsi_inspect.kernels import encode_floats

from . import naive_encode

BY_NAME = {e.name: e for e in PLAIN}
OCTETS = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0")
PACKED = {"F4": naive_encode.pack4, "F6_E2M3": naive_encode.pack6, "F6_E3M2": naive_encode.pack6}
CODES = {"F4": "codes_e2m1", "F6_E2M3": "codes_e2m3", "F6_E3M2": "codes_e3m2"}


def patterns(step: int) -> np.ndarray:
    """Float32 bit patterns: strided over all of them, and both sides of every boundary of the upper 16 bits."""
    strided = np.arange(0, 2**32, step, dtype=np.uint64).astype(np.uint32)
    edges = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
    near = [edges + np.uint32(d % 2**32) for d in (0, 1, -1, 0x7FFF, 0x8000, 0x8001)]
    x = np.concatenate([strided, *near]).view(np.float32)
    return x[: x.size // 64 * 64]


def converted(name: str, x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return naive_encode.cast(BY_NAME[name].dtype)(x).reshape(-1)


@pytest.mark.parametrize("name", OCTETS)
def test_octets_match_ml_dtypes(name: str) -> None:
    x = patterns(20011)
    np.testing.assert_array_equal(encode(BY_NAME[name], x), converted(name, x))


@pytest.mark.slow
@pytest.mark.parametrize("name", OCTETS)
def test_octets_match_ml_dtypes_densely(name: str) -> None:
    x = patterns(101)
    np.testing.assert_array_equal(encode(BY_NAME[name], x), converted(name, x))


@pytest.mark.parametrize("name", list(PACKED))
def test_packed_floats_match_ml_dtypes(name: str) -> None:
    """The kernel follows ml_dtypes for NaN and infinity as well, which the driver refuses."""
    x = patterns(20011)
    x.flags.writeable = False
    expected = converted(name, x)
    codes = np.empty(x.size, np.uint8)
    getattr(encode_floats, CODES[name])(x, codes, 0, x.size)
    np.testing.assert_array_equal(codes, expected)
    finite = x[np.isfinite(x)]
    finite = finite[: finite.size // 4 * 4]
    np.testing.assert_array_equal(encode(BY_NAME[name], finite), PACKED[name](converted(name, finite)).reshape(-1))


def test_ties_of_e2m1_go_to_even() -> None:
    x = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 5.01, -0.25, -0.0, -5, 1e30], np.float32)
    raw = encode(BY_NAME["F4"], x)
    codes = np.stack([raw & 15, raw >> 4], axis=1).reshape(-1)
    assert codes.tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 8, 8, 14, 7]


@pytest.mark.parametrize(("name", "type_id", "twin"), [("F16", 1, naive_encode.f16), ("BF16", 30, naive_encode.bf16)])
def test_sixteen_bits_match_ggml(name: str, type_id: int, twin: naive_encode.Twin) -> None:
    x = patterns(20011)
    got = encode(BY_NAME[name], x)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(got, twin(x).reshape(-1))
    np.testing.assert_array_equal(got, libgguf.quantize_rows(x.reshape(-1, 64), type_id).view(np.uint8).reshape(-1))
    dtype = np.dtype(getattr(ml_dtypes, BY_NAME[name].dtype, BY_NAME[name].dtype))
    with np.errstate(all="ignore"):
        other = x.astype(dtype)
    values = got.view(dtype)
    number = ~np.isnan(x)
    assert np.isnan(values[~number].astype(np.float32)).all()
    np.testing.assert_array_equal(values[number].view(np.uint16), other[number].view(np.uint16))


@pytest.mark.parametrize("encoding", [e for e in PLAIN if e.kind == "float"], ids=lambda e: e.name)
@pytest.mark.parametrize("source", ["float64", "float32", "float16", "bfloat16", "float8_e5m2", "int16", "bool"])
def test_from_every_kind_of_value(encoding: Encoding, source: str) -> None:
    """NumPy's (ml_dtypes') own cast of the source is the reference."""
    start, target = (np.dtype(getattr(ml_dtypes, n, n)) for n in (source, encoding.dtype))
    x = (np.random.default_rng(0).standard_normal(240) * 3).astype(np.float32)
    x = np.abs(x) + np.float32(0.01) if encoding.name == "F8_E8M0" else x
    x = x.astype(start)
    expected = x.astype(target) if encoding.name != "F8_E8M0" else x.astype(np.float32).astype(target)
    octets = expected.view(np.uint8)
    if encoding.name in PACKED:
        octets = PACKED[encoding.name](octets).reshape(-1)
    assert encode(encoding, x.reshape(2, 120)).tobytes() == octets.tobytes()


def test_float64_to_float16_rounds_once() -> None:
    x = np.array([1 + 2.0**-11 + 2.0**-40])  # through float32 the tie would go to 1
    assert encode(BY_NAME["F16"], x).view(np.float16)[0] == 1 + 2.0**-10


def test_integers_are_only_stored_as_they_are() -> None:
    for name in ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64", "BOOL", "C64", "C128"):
        e = BY_NAME[name]
        x = np.arange(6).astype(e.dtype).reshape(2, 3)
        assert encode(e, x).tobytes() == x.tobytes()
        assert encode(e, x.T).tobytes() == x.T.tobytes()
        with pytest.raises(ValueRefusedError, match=f"{name} takes {e.dtype} values, got float16"):
            encode(e, np.zeros(4, np.float16))
    assert encode(BY_NAME["I32"], np.arange(3, dtype=">i4")).tobytes() == np.arange(3, dtype="<i4").tobytes()


def test_what_holds_nonfinite_values() -> None:
    special = np.array([np.inf, -np.inf, np.nan, 1], np.float32)
    for e in PLAIN:
        if e.kind != "float":
            continue
        if holds_nonfinite(e):
            assert len(encode(e, special)) == 4 * e.block_bytes
        else:
            with pytest.raises(ValueRefusedError, match=f"3 of 4 values are not finite.*{e.name}"):
                encode(e, special)
    assert {e.name for e in PLAIN if e.kind == "float" and not holds_nonfinite(e)} == set(PACKED)


def test_packed_rows_need_not_be_whole_but_the_tensor_must() -> None:
    x = np.ones((2, 3), np.float32)
    assert encode(BY_NAME["F4"], x).tobytes() == b"\x22" * 3
    with pytest.raises(ValueRefusedError, match="multiples of 4 elements, got 6"):
        encode(BY_NAME["F6_E2M3"], x)
