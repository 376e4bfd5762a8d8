"""The encoders of ggml's block formats: byte-identical with ggml, plain loops and vectors alike, through the driver.

References: libgguf and libggml (C, no importance matrix), gguf where it encodes, the twins in `naive_encode`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file

from apsi_inspect import samples
from apsi_inspect.encodings.encode import can_encode, check_finite, encode
from apsi_inspect.encodings.ggml import GGML
from apsi_inspect.errors import ApsiError, ValueRefusedError
from apsi_inspect.kernels._jit import vectors_pay

from . import naive_encode
from .ggml_oracle import ROW, families, quantize_chunk, quantize_libgguf, reference

NAMES = tuple(naive_encode.GGML)
BY_NAME = {e.name: e for e in GGML}
FAMILIES = tuple(families(1))
ALIKE_IN_GGUF = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "TQ1_0", "TQ2_0", "MXFP4")
VARIANTS = ("", "_simd") if vectors_pay() else ("",)


def kernel_of(name: str, variant: str) -> Callable[..., None]:
    spec = BY_NAME[name].encode
    assert spec is not None
    module, function = spec.split(":")
    plain: Callable[..., None] = getattr(import_module(f"apsi_inspect.kernels.{module}"), function)
    return getattr(import_module(f"apsi_inspect.kernels.{module}{variant}"), function, plain)


def run(name: str, variant: str, x: np.ndarray) -> np.ndarray:
    """A kernel over all blocks of `x`; (blocks, block_bytes). It must not write outside its range."""
    size, nbytes, _ = naive_encode.GGML[name]
    flat = np.ascontiguousarray(x, np.float32).reshape(-1)
    flat.flags.writeable = False
    blocks = flat.size // size
    raw = np.full((blocks + 2) * nbytes, 0x5A, np.uint8)
    kernel_of(name, variant)(flat, raw[nbytes:-nbytes], 0, blocks)
    assert (raw[:nbytes] == 0x5A).all()
    assert (raw[-nbytes:] == 0x5A).all()
    return raw[nbytes:-nbytes].reshape(blocks, nbytes)


def same(a: np.ndarray, b: np.ndarray, x: np.ndarray) -> None:
    """Equal bytes; shows the first block that differs."""
    bad = np.flatnonzero((a != b).any(axis=1))
    if bad.size:
        block = x.reshape(len(a), -1)[bad[0]]
        first = f"block {bad[0]}:\n{block}\n{a[bad[0]]}\n{b[bad[0]]}"
        raise AssertionError(f"{bad.size} of {len(a)} blocks differ; {first}")


@pytest.mark.parametrize("name", NAMES)
def test_twins_and_kernels_match_ggml(name: str) -> None:
    for family, x in families(24, seed=1).items():
        expected = reference(name, x)
        twin = naive_encode.encode(name, x).reshape(expected.shape)
        for label, got in (("twin", twin), *((v or "plain", run(name, v, x)) for v in VARIANTS)):
            try:
                same(got, expected, x)
            except AssertionError as e:
                raise AssertionError(f"{name}, {family}, {label}: {e}") from None


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [2, 3])
def test_kernels_match_ggml_on_many_blocks(name: str, seed: int) -> None:
    for x in families(1024, seed).values():
        for variant in VARIANTS:
            same(run(name, variant, x), reference(name, x), x)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "Q2_0"])
def test_the_two_references_agree(name: str) -> None:
    x = families(16, seed=4)
    for v in x.values():
        same(quantize_libgguf(name, v), quantize_chunk(name, v), v)


@pytest.mark.parametrize("name", ALIKE_IN_GGUF)
def test_matches_gguf_py(name: str) -> None:
    """gguf-py does not copy the scale -0.0 of zero blocks in Q4_0 and Q5_0, nor C's casts where 1/d overflows."""
    differs = {"zero", "minus zero", "mixed zeros", "one hot", "sparse", "zero sub-blocks", "subnormal", "bit patterns"}
    differs |= {"just below powers of two", "scales apart", "huge", "smallest normal", "zeros and positive"}
    for family, x in families(16, seed=5).items():
        if family not in differs:
            with np.errstate(all="ignore"):
                expected = gguf.quants.quantize(x, gguf.GGMLQuantizationType[name])
            got = encode(BY_NAME[name], x)
            same(got.reshape(-1, naive_encode.GGML[name][1]), expected.reshape(-1, naive_encode.GGML[name][1]), x)


def test_zero_blocks_follow_c() -> None:
    """The bytes that the description of the formats gives for blocks of zeros."""
    zero = np.zeros((1, ROW), np.float32)
    expect = {
        "Q4_0": "0080" + "88" * 16,
        "Q5_0": "0080" + "ff" * 4 + "00" * 16,
        "Q8_0": "00" * 34,
        "Q4_1": "00" * 20,
        "IQ4_NL": "0000" + "88" * 16,
        "IQ4_XS": "0080" + "aaaa" + "00" * 4 + "88" * 128,
        "TQ1_0": "80" * 48 + "7f" * 4 + "0000",
        "TQ2_0": "55" * 64 + "0000",
        "Q1_0": "0000" + "ff" * 16,
        "Q2_0": "0000" + "55" * 16,
        **{name: "00" * naive_encode.GGML[name][1] for name in ("Q2_K", "Q4_K", "Q5_K", "Q6_K")},
    }
    for name, text in expect.items():
        first = encode(BY_NAME[name], zero)[: naive_encode.GGML[name][1]]
        assert first.tobytes().hex() == text, name


def test_nvfp4_scale_ceiling_and_mxfp4_wrap() -> None:
    """ggml stores every NVFP4 scale from 248 up as 448, and lets the exponent of a tiny MXFP4 block wrap around."""
    x = np.zeros((1, 64), np.float32)
    x[0, 0], x[0, 16], x[0, 32], x[0, 48] = 6 * 247, 6 * 248, 6 * 256, 6 * 200
    assert encode(BY_NAME["NVFP4"], x)[:4].tolist() == [0x77, 0x7E, 0x7E, 0x75]
    tiny = np.full((1, 32), 2.0**-126, np.float32)
    assert encode(BY_NAME["MXFP4"], tiny)[0] == 255


def test_mxfp4_exponent_is_c_log2f() -> None:
    """The last 128 floats below and the first above every power of two."""
    powers = np.exp2(np.arange(-149, 128)).astype(np.float32).view(np.int32)
    near = (powers[:, None] + np.arange(-128, 2)).astype(np.int32)
    values = near[(near > 0) & (near < 0x7F800000)].view(np.float32)
    x = np.zeros((-(-values.size // 8) * 8, 32), np.float32)
    x[: values.size, 0] = values
    for variant in VARIANTS:
        same(run("MXFP4", variant, x), reference("MXFP4", x), x)


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(x=hnp.arrays(np.float32, (2, ROW), elements=FLOATS, fill=st.one_of(st.just(np.float32(0)), FLOATS)))
def test_any_finite_block(name: str, x: np.ndarray) -> None:
    expected = reference(name, x)
    for variant in VARIANTS:
        same(run(name, variant, x), expected, x)


def real_weights() -> dict[str, np.ndarray]:
    return load_file(samples.path("fracast.safetensors"))


@pytest.mark.parametrize("name", NAMES)
def test_real_weights(name: str) -> None:
    tensors = [v.astype(np.float32).reshape(-1) for v in real_weights().values() if v.dtype.kind == "f"]
    x = np.concatenate(tensors)
    x = x[: min(x.size, 1 << 18) // ROW * ROW].reshape(-1, ROW)
    assert x.size >= ROW
    for variant in VARIANTS:
        same(run(name, variant, x), reference(name, x), x)


@pytest.mark.parametrize("name", NAMES)
def test_ranges_threads_layouts_and_alignment(name: str) -> None:
    """Any block range, number of threads, input layout or alignment gives the same bytes."""
    encoding, size = BY_NAME[name], naive_encode.GGML[name][0]
    x = families(37, seed=6)["weights"]
    expected = reference(name, x).reshape(-1)
    blocks = x.size // size
    raw = np.zeros(expected.size, np.uint8)
    flat = x.reshape(-1).view()
    flat.flags.writeable = False
    for variant in VARIANTS:
        for a, b in ((0, 0), (0, 1), (1, 4), (4, 4), (4, 23), (23, blocks)):
            kernel_of(name, variant)(flat, raw, a, b)
        assert raw.tobytes() == expected.tobytes()
    for threads in (1, 2, 5):
        assert encode(encoding, x, threads=threads).tobytes() == expected.tobytes()
    odd = np.zeros(x.nbytes + 1, np.uint8)
    odd[1:] = np.frombuffer(x.tobytes(), np.uint8)
    unaligned = odd[1:].view(np.float32).reshape(x.shape)
    assert not unaligned.flags.aligned
    strided = np.repeat(x, 2, axis=1)[:, ::2]
    for y in (unaligned, strided, np.asfortranarray(x), x.astype(">f4"), x.astype(np.float64)):
        assert encode(encoding, y).tobytes() == expected.tobytes()
    out = np.zeros(expected.size + 1, np.uint8)[1:]
    assert encode(encoding, x, out=out) is out
    assert out.tobytes() == expected.tobytes()


def test_every_encoder_in_the_registry_is_covered() -> None:
    assert {e.name for e in GGML if can_encode(e)} == set(NAMES)
    for e in GGML:
        if can_encode(e):
            assert naive_encode.GGML[e.name][:2] == (e.block_size, e.block_bytes)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_is_refused(name: str, bad: float) -> None:
    x = np.ones((40, 4096), np.float32)
    x[0, 3] = x[39, 4095] = bad
    for y in (x, x.astype(np.float64), x.T.copy().T):
        with pytest.raises(ValueRefusedError, match=rf"tensor 'blk\.0\.w': 2 of 163840 values.*{name}"):
            encode(BY_NAME[name], y, name="blk.0.w", threads=2)


def test_check_finite() -> None:
    check_finite(np.zeros((3, 3)), "w")
    check_finite(np.zeros((0, 3)), "w")
    with pytest.raises(ApsiError, match=r"tensor 'w': 1 of 9 values is not finite"):
        check_finite(np.diag([1.0, np.nan, 2.0]), "w")
    with pytest.raises(ValueError, match=r"2 of 3 values"):
        check_finite(np.array([1e39, -1e300, 1e38]))  # beyond float32
    with pytest.raises(ValueRefusedError, match=r"'a\\nb'"):
        check_finite(np.array([np.inf]), "a\nb")


def test_misfits_are_refused() -> None:
    q4_k, q4_0 = BY_NAME["Q4_K"], BY_NAME["Q4_0"]
    with pytest.raises(ValueRefusedError, match=r"blocks of 256.*\(4, 128\) has 128"):
        encode(q4_k, np.zeros((4, 128), np.float32))
    with pytest.raises(ValueRefusedError, match="IQ2_XXS cannot be encoded"):
        encode(BY_NAME["IQ2_XXS"], np.zeros((1, 256), np.float32))
    with pytest.raises(ValueRefusedError, match="18 bytes"):
        encode(q4_0, np.zeros(32, np.float32), out=np.zeros(17, np.uint8))
    with pytest.raises(ValueRefusedError, match="writable"):
        encode(q4_0, np.zeros(32, np.float32), out=np.frombuffer(bytes(18), np.uint8))
    for wrong in (np.zeros(32, np.complex64), np.full(32, "1"), np.zeros(32, "V4")):
        with pytest.raises(ValueRefusedError, match="real numbers"):
            encode(q4_0, wrong)
    assert encode(q4_0, np.zeros((0, 32), np.float32)).size == 0
    assert encode(q4_0, np.zeros((3, 0), np.float32)).size == 0


_WITHOUT_FEATURES = """
import sys
import numpy as np
from apsi_inspect.encodings.encode import encode
from apsi_inspect.encodings.ggml import GGML
from apsi_inspect.encodings.plain import PLAIN
from apsi_inspect.kernels._jit import cpu_has, vectors_pay
assert not vectors_pay() and not cpu_has("f16c")
x = np.load(sys.argv[1])
print(*(encode(e, x).tobytes().hex() for e in (*GGML, *PLAIN) if e.name in sys.argv[2:]), sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("names", [NAMES[:9], NAMES[9:], ("F16", "BF16", "F8_E4M3", "F8_E5M2", "F4", "F6_E2M3")])
def test_without_cpu_features(names: tuple[str, ...], tmp_path: Path) -> None:
    """The plain loops on a CPU without F16C and AVX2: the same bytes."""
    from apsi_inspect.encodings.plain import PLAIN

    x = np.concatenate([families(2, seed=7)[k] for k in ("weights", "heavy tails", "sparse", "subnormal", "large")])
    np.save(tmp_path / "x.npy", x)
    env = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_FEATURES, str(tmp_path / "x.npy"), *names],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    listed = [e for e in (*GGML, *PLAIN) if e.name in names]
    for e, line in zip(listed, done.stdout.split(), strict=True):
        expected = reference(e.name, x) if e.is_block else encode(e, x)
        assert line == expected.tobytes().hex(), e.name
