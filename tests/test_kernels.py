"""The decorator and its cache, the vector and bit helpers, and a CPU that can do nothing."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import njit
from numba.core.caching import FunctionCache

from apsi_inspect.encodings import ENCODINGS
from apsi_inspect.encodings.values import decode
from apsi_inspect.kernels import _jit, bits, blocks_simd, simd
from apsi_inspect.kernels._jit import KernelCache, cpu_has, kernel
from apsi_inspect.kernels.simd import I8, I16, I32, F, M, W, emitter
from apsi_inspect.ops.stats import compute_stats

Array = np.ndarray[Any, Any]


def patterns() -> Array:
    """float32 of every kind: random bits, and those near the range of halves with few mantissa bits (ties)."""
    rng = np.random.default_rng(0)
    u = rng.integers(0, 2**32, 300_000, np.uint32)
    u[:200_000] = (u[:200_000] & 0x807FFFFF) | (rng.integers(95, 145, 200_000, np.uint32) << 23)
    u[:100_000:2] &= 0xFFFFF000
    return u.view(np.float32)


@pytest.mark.parametrize("hardware", [False, _jit.half_in_hardware()])
def test_halves_with_and_without_hardware(hardware: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 65536 halves and many floats against NumPy; NaN to NaN."""
    monkeypatch.setattr(simd, "half_in_hardware", lambda: hardware)

    @emitter(I16, ret=F)
    def widen(h: W) -> W:
        return h.half_to_float()

    @emitter(F, ret=I16)
    def narrow(x: W) -> W:
        return x.float_to_half()

    @njit
    def each(halves, floats, x, out):
        for i in range(halves.size):
            floats[i] = widen(halves[i])
        for i in range(x.size):
            out[i] = narrow(x[i])

    halves, x = np.arange(65536, dtype=np.uint16), patterns()
    floats, out = np.empty(65536, np.float32), np.empty(x.size, np.uint16)
    each(halves, floats, x, out)
    expected = halves.view(np.float16).astype(np.float32)
    nan = np.isnan(expected)
    assert (floats.view(np.uint32) == expected.view(np.uint32))[~nan].all()
    assert np.isnan(floats[nan]).all()
    with np.errstate(all="ignore"):
        expected16 = x.astype(np.float16).view(np.uint16)
    nan = np.isnan(x)
    assert (out == expected16)[~nan].all()
    assert np.isnan(out[nan].view(np.float16)).all()


def test_scalar_bit_helpers() -> None:
    @njit
    def each(x, u, back, rounded):
        for i in range(x.size):
            u[i] = bits.bits(x[i])
            back[i] = bits.unbits(u[i])
            rounded[i] = bits.roundf(x[i])

    x = np.array([0.5, -0.5, 0.49999997, 1.5, 2.5, -2.5, -0.0, 2.0**70, np.inf, 8388607.5], np.float32)
    u, back, rounded = np.empty(x.size, np.uint32), np.empty_like(x), np.empty_like(x)
    each(x, u, back, rounded)
    assert (u == x.view(np.uint32)).all()
    assert (back.view(np.uint32) == u).all()
    assert rounded.tolist() == [1, -1, 0, 2, 3, -3, 0, 2.0**70, np.inf, 8388608]
    assert np.signbit(rounded[6])


def test_fields_at_any_address() -> None:
    @njit
    def read(raw, out):
        p = raw.ctypes.data + 1
        out[0], out[1], out[2], out[3] = bits.u16_at(p), bits.u32_at(p), bits.half_at(p), bits.float_at(p)
        bits.put_half(p + 4, np.float32(1.5))
        bits.put_float(p + 6, np.float32(-2.25))
        bits.put_u32(p + 10, np.uint32(0xDEADBEEF))

    raw, out = np.zeros(16, np.uint8), np.empty(4)
    raw[1:5] = np.frombuffer(np.float32(3.14).tobytes(), np.uint8)
    field = raw[1:5].tobytes()
    read(raw, out)
    half = np.frombuffer(field[:2], np.float16)[0]
    integers = [int.from_bytes(field[:2], "little"), int.from_bytes(field, "little")]
    assert out.tolist() == [*integers, half, np.float32(3.14)]
    assert raw[5:7].tobytes() == np.float16(1.5).tobytes()
    assert raw[7:11].tobytes() == np.float32(-2.25).tobytes()
    assert raw[11:15].tobytes() == (0xDEADBEEF).to_bytes(4, "little")


def signed(f: Any, a: Array, b: Array) -> Array:
    return f(a.view(np.int32), b.view(np.int32)).view(np.uint32)


# Name, what the emitter does with two vectors of eight int32, and the same in NumPy (on uint32)
INTEGER = {
    "add": (lambda a, b: a + b, lambda a, b: a + b),
    "sub": (lambda a, b: a - b, lambda a, b: a - b),
    "mul": (lambda a, b: a * b, lambda a, b: a * b),
    "and": (lambda a, b: a & b, lambda a, b: a & b),
    "or": (lambda a, b: a | b, lambda a, b: a | b),
    "xor": (lambda a, b: a ^ b, lambda a, b: a ^ b),
    "shl": (lambda a, b: a << (b & 31), lambda a, b: a << (b & 31)),
    "lshr": (lambda a, b: a >> (b & 31), lambda a, b: a >> (b & 31)),
    "sar": (lambda a, b: a.sar(b & 31), lambda a, b: signed(np.right_shift, a, b & 31)),
    "lt": (lambda a, b: a.lt(b).sel(a, b), np.minimum),
    "gt": (lambda a, b: a.gt(b).sel(a, b), np.maximum),
    "slt": (lambda a, b: a.slt(b).sel(a, b), lambda a, b: signed(np.minimum, a, b)),
    "eq": (lambda a, b: a.eq(b).zext(I32), lambda a, b: (a == b).astype(np.uint32)),
    "min": (lambda a, b: a.min_(b), np.minimum),
    "smin": (lambda a, b: a.smin(b), lambda a, b: signed(np.minimum, a, b)),
    "smax": (lambda a, b: a.smax(b), lambda a, b: signed(np.maximum, a, b)),
    "bytes": (lambda a, b: a.trunc(I8).sext(I32) + b.trunc(I8).zext(I32), lambda a, b: (
        a.astype(np.int8).astype(np.int32).view(np.uint32) + (b & 255))),
    "lanes": (lambda a, b: a.pick([0, 2, 4, 6]).cat(b.pick([1, 3, 5, 7])), lambda a, b: np.r_[a[::2], b[1::2]]),
    "reduce": (lambda a, b: a.reduce("add").splat(8) + b.lane(3).splat(8), lambda a, b: np.full(
        8, (int(a.sum()) + int(b[3])) % 2**32, np.uint32)),
    "mask": (lambda a, b: a.lt(b).mask_bits().zext(I32).splat(8), lambda a, b: np.full(
        8, sum(1 << i for i in range(8) if a[i] < b[i]), np.uint32)),
    "popcount": (lambda a, b: a.ctpop() + b.cttz(), lambda a, b: np.array(
        [bin(x).count("1") + ((int(y) & -int(y)).bit_length() - 1 if y else 32) for x, y in zip(a, b, strict=True)],
        np.uint32)),
}  # fmt: skip
_COUNT = np.arange(8, dtype=np.float32)
FLOAT = {
    "add": (lambda a, b: a + b, lambda a, b: a + b),
    "sub": (lambda a, b: a - b, lambda a, b: a - b),
    "mul": (lambda a, b: a * b, lambda a, b: a * b),
    "div": (lambda a, b: a / b, lambda a, b: a / b),
    "abs": (lambda a, b: a.abs(), lambda a, b: np.abs(a)),
    "rint": (lambda a, b: a.rint() + b.rint(), lambda a, b: np.rint(a) + np.rint(b)),
    "lt": (lambda a, b: a.lt(b).sel(a, b), lambda a, b: np.where(a < b, a, b)),
    "no contraction": (lambda a, b: a * b + a, lambda a, b: a * b + a),
    "to int": (lambda a, b: (a + b).fptosi(I32).sitofp(F), lambda a, b: np.trunc(a + b)),
    "constants": (lambda a, b: a * 0.1 + a.vector(range(8)), lambda a, b: a * np.float32(0.1) + _COUNT),
}


def _emitted(elem: Any, operation: Any) -> Any:
    @emitter(M, M, M)
    def put(a: M, b: M, out: M) -> None:
        out.store(operation(a.load(elem, 8), b.load(elem, 8)))

    @njit
    def each(a, b, out):
        for i in range(0, a.size, 8):
            put(a.ctypes.data + 4 * i, b.ctypes.data + 4 * i, out.ctypes.data + 4 * i)

    return each


@pytest.mark.parametrize("name", INTEGER)
def test_integer_vectors(name: str) -> None:
    rng = np.random.default_rng(1)
    a, b = rng.integers(0, 2**32, (2, 80), np.uint32)
    b[::5] = a[::5]
    b[1::7] = 0
    out = np.empty_like(a)
    _emitted(I32, INTEGER[name][0])(a, b, out)
    expected = [INTEGER[name][1](x, y) for x, y in zip(a.reshape(-1, 8), b.reshape(-1, 8), strict=True)]
    assert out.tolist() == np.concatenate(expected).tolist()


@pytest.mark.parametrize("name", FLOAT)
def test_float_vectors(name: str) -> None:
    """NumPy multiplies and adds apart, so equal bits also mean that nothing was contracted."""
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal((2, 80)) * 1000).astype(np.float32)
    out = np.empty_like(a)
    _emitted(F, FLOAT[name][0])(a, b, out)
    expected = [FLOAT[name][1](x, y) for x, y in zip(a.reshape(-1, 8), b.reshape(-1, 8), strict=True)]
    assert out.view(np.uint32).tolist() == np.concatenate(expected).view(np.uint32).tolist()


def test_kernels_are_strict_and_free_of_the_gil() -> None:
    @kernel
    def divide(a, b):
        return a / b

    assert divide(1.0, 0.0) == np.inf  # NumPy's rules, no exception
    assert divide.targetoptions["nogil"]
    assert not divide.targetoptions["fastmath"]
    assert not divide.targetoptions["boundscheck"]


def _double(x):
    return x + x


def test_nowhere_to_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only install: kernels compile, once a process."""

    def refuse(self: Any, fn: Any) -> None:
        raise RuntimeError("cannot cache function '_double': no locator available for file")

    monkeypatch.setattr(FunctionCache, "__init__", refuse)
    assert kernel(_double)(4) == 8
    monkeypatch.setattr(FunctionCache, "__init__", lambda self, fn: (_ for _ in ()).throw(RuntimeError("other")))
    with pytest.raises(RuntimeError, match="other"):
        kernel(_double)


def test_a_full_disk_costs_time_not_the_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(self: Any, sig: Any, data: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FunctionCache, "load_overload", lambda self, sig, context: None)
    monkeypatch.setattr(FunctionCache, "save_overload", full)
    with pytest.warns(RuntimeWarning, match="could not be cached"):
        assert kernel(_double)(3.5) == 7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(FunctionCache, "save_overload", lambda self, sig, data: None)
        assert kernel(_double)(3.5) == 7


def test_the_cache_follows_what_a_kernel_borrows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba looks only at a kernel's own file: the digest of all files it takes code from is part of the key."""
    assert _jit.borrowed("blocks_simd") == {"blocks_simd", "_jit", "simd"}
    assert _jit.borrowed("iquants") == {"iquants", "_jit", "simd", "bits", "blocks"}
    here = Path(_jit.__file__).parent
    digest = hashlib.sha256(b"".join((here / f"{name}.py").read_bytes() for name in ("_jit", "blocks_simd", "simd")))
    cache = blocks_simd.decode_q8_0._cache
    assert isinstance(cache, KernelCache)
    key = cache._index_key((), _jit.cpu_target.target_context.codegen())
    assert key[-1] == digest.hexdigest()
    monkeypatch.setattr(_jit, "sources_digest", lambda module: "another")
    assert cache._index_key((), _jit.cpu_target.target_context.codegen()) != key


def test_features() -> None:
    assert cpu_has()
    assert not cpu_has("no-such-feature")


# What a fresh process computes: a digest of the values of some encodings, NaN made all the same.
_DIGESTS = """
import hashlib, json, sys
import numpy as np
from tests.test_kernels import digests
print(json.dumps(digests(sys.argv[1].split(","))))
"""
FEW = ("Q4_0", "Q6_K", "IQ2_XXS", "MXFP4", "F16", "F8_E5M2")


def digests(names: list[str]) -> dict[str, str]:
    """SHA-256 of the values of random blocks, and of statistics."""
    found = {}
    for name in names:
        e = ENCODINGS[name]
        raw = np.random.default_rng(4).integers(0, 256, 600 * e.block_bytes, np.uint8)
        values = decode(e, raw, (600 * e.block_size,), out=np.empty(600 * e.block_size, np.float32))
        values[np.isnan(values)] = np.nan
        found[name] = hashlib.sha256(values.tobytes()).hexdigest()
    x = np.random.default_rng(4).standard_normal(300_000).astype(np.float32)
    s = compute_stats(x)
    found["stats"] = repr((s, s.quantiles([0.1, 0.5])))
    found["hardware"] = str(_jit.half_in_hardware())
    return found


def _elsewhere(names: tuple[str, ...], cache: Path, **environment: str) -> dict[str, str]:
    env = {**os.environ, "NUMBA_CACHE_DIR": str(cache), **environment}
    done = subprocess.run(
        [sys.executable, "-c", _DIGESTS, ",".join(names)],
        capture_output=True, text=True, timeout=600, check=False, env=env, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout))


def test_a_cpu_without_features(tmp_path: Path) -> None:
    """No F16C, no AVX: no crash (LLVM's `half` would call what is not there), the same bits."""
    found = _elsewhere(FEW, tmp_path, NUMBA_CPU_NAME="generic")
    assert found.pop("hardware") == "False"
    here = digests(list(FEW))
    here.pop("hardware")
    assert found == here


@pytest.mark.slow
@pytest.mark.parametrize("environment", [
    {"NUMBA_CPU_NAME": "generic"},
    {"NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": ""},
    {"NUMBA_CPU_NAME": "haswell"},
])  # fmt: skip
def test_every_encoding_on_other_cpus(tmp_path: Path, environment: dict[str, str]) -> None:
    names = tuple(e.name for e in ENCODINGS.values() if e.is_block or e.name in ("F16", "BF16", *_SMALL))
    found, here = _elsewhere(names, tmp_path, **environment), digests(list(names))
    found.pop("hardware")
    here.pop("hardware")
    assert found == here


_SMALL = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2")


@pytest.mark.slow
def test_warm_leaves_nothing_to_compile(tmp_path: Path) -> None:
    """After `warm`, decoding, encoding and statistics load what they need from the cache."""
    code = """
import numpy as np
from numba.core import event
import apsi_inspect.kernels.warm as w
from apsi_inspect.encodings import ENCODINGS
from apsi_inspect.encodings.encode import can_encode, encode
from apsi_inspect.encodings.values import decode
from apsi_inspect.ops.stats import compute_stats
seen = []
assert w.warm(lambda done, total, name: seen.append((done, total))) == seen[-1][0] == seen[-1][1] > 60
with event.install_recorder("numba:compile") as recorder:
    for e in ENCODINGS.values():
        if e.is_block or e.name in ("F16", "BF16", "F8_E4M3", "F8_E5M2", "F4", "F6_E2M3"):
            out = np.empty(4 * e.block_size, np.float32)
            raw = bytes(range(1, 5)) * e.block_bytes
            decode(e, raw, out.shape, out=out)
            if can_encode(e):
                encode(e, np.linspace(-1, 1, 4 * e.block_size, dtype=np.float32))
    compute_stats(np.ones(1000, np.float32))
print(len(recorder.buffer))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=False,
        cwd=Path(__file__).parents[1], env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "0"


def test_the_first_compile_says_so_once(tmp_path: Path) -> None:
    """On a terminal, with an empty cache; in a pipe, or when asked to be quiet, nothing is printed."""
    import pty

    code = (
        "import numpy as np; from apsi_inspect.kernels.blocks import decode_q8_0\n"
        "decode_q8_0(np.zeros(34, np.uint8), np.zeros(32, np.float32), 0, 1)"
    )

    def stderr(terminal: bool, **env: str) -> str:
        reader, writer = pty.openpty() if terminal else os.pipe()
        cache = {"NUMBA_CACHE_DIR": str(tmp_path / f"{terminal}{len(env)}")}
        subprocess.run([sys.executable, "-c", code], check=True, stderr=writer, env={**os.environ, **cache, **env})
        os.close(writer)
        try:
            return os.read(reader, 10_000).decode()
        except OSError:  # the end of a terminal
            return ""
        finally:
            os.close(reader)

    assert stderr(True, APSI_QUIET="").strip() == (
        "apsi_inspect: compiling for this CPU, once; `apsi warm` compiles everything ahead"
    )
    assert stderr(True, APSI_QUIET="1", EXTRA="1") == ""
    assert stderr(False, APSI_QUIET="") == ""
