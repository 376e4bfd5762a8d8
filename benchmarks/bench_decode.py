"""Decoding and statistics side by side with gguf-py, libgguf, ggml's C code, ml_dtypes, numpy and torch.

    python benchmarks/bench_decode.py [--mib 64] [--rounds 7] [--busy] [--only Q8_0 F16 stats …] [--json FILE]

GB/s of the float32 side. Contenders take turns round by round; a figure is the median after one warm-up. Ours and C
write into a buffer that is already touched (`out=`); gguf-py, libgguf, ml_dtypes and torch allocate their result.
libgguf uses two threads by itself; ours is given with one thread and with the default. The goals are ratios on one
machine in one run: those of `docs/performance.md`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from apsi_inspect.encodings import ENCODINGS, Encoding
from apsi_inspect.encodings.values import aligned_empty, decode_into, decode_scaled
from apsi_inspect.kernels import stats as stats_kernels
from apsi_inspect.kernels._jit import kernel
from apsi_inspect.kernels.simd import I64, M, W, emitter
from apsi_inspect.ops.stats import compute_stats

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests import oracles

Array = np.ndarray[Any, Any]
Contender = Callable[[], object]
CLOCK: Callable[[], float] = time.perf_counter
SUMMARY: Callable[[list[float]], float] = statistics.median
SMALL = 8  # MiB for the contenders that would take seconds


@emitter(M, ret=I64)
def read_256(p: M) -> W:
    """Read 256 bytes and ask for the line 4 KiB on."""
    total = p.load(I64, 8)
    for i in range(4):
        p.prefetch(4096 + 64 * i)
        if i:
            total = total ^ p.load(I64, 8, 64 * i)
    return total.reduce("xor")


@kernel
def read(x):
    found = np.uint64(0)
    for i in range(0, x.size * 4, 256):
        found ^= read_256(x.ctypes.data + i)
    return found


def race(contenders: dict[str, tuple[Contender, float]], rounds: int) -> dict[str, float]:
    """GB/s of each (callable, GB of float32), by turns."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, (f, _) in contenders.items():
            start = CLOCK()
            f()
            if turn:
                times[name].append(CLOCK() - start)
    return {name: size / SUMMARY(times[name]) for name, (_, size) in contenders.items()}


def blocks_of(e: Encoding, count: int) -> Array:
    """Random codes under ordinary scales (no NaN, no subnormals: those are slow for everybody)."""
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (count, e.block_bytes), np.uint8)
    scale = np.array([0.011], "<f2").view(np.uint8)
    for offset, size, n in e.swap:
        if size == 2 and n <= 2 and e.name != "Q8_K":
            for i in range(n):
                raw[:, offset + 2 * i : offset + 2 * i + 2] = scale
    if e.name == "Q8_K":
        raw[:, :4] = np.array([0.011], "<f4").view(np.uint8)
    if e.name == "IQ1_M":
        half = int(scale.view("<u2")[0])
        for k in range(4):
            raw[:, 49 + 2 * k] = (raw[:, 49 + 2 * k] & 15) | (half >> (4 * k) & 15) << 4
    if e.name == "MXFP4":
        raw[:, 0] = 121
    if e.name == "NVFP4":
        raw[:, :4] = 0x30
    flat = raw.reshape(-1)
    flat.flags.writeable = False
    return flat


def bench_blocks(e: Encoding, mib: int, rounds: int) -> dict[str, float]:
    n = mib * 2**18 // e.block_size * e.block_size
    few = SMALL * 2**18 // e.block_size * e.block_size
    raw, out, source = blocks_of(e, n // e.block_size), aligned_empty((n,)), aligned_empty((n,))
    out[:], source[:] = 0, 1
    part, gb, small = raw[: few // e.block_size * e.block_bytes], 4e-9 * n, 4e-9 * few
    contenders: dict[str, tuple[Contender, float]] = {
        "memcpy": (lambda: np.copyto(out, source), gb),
        "ours 1t": (lambda: decode_into(e, raw, out, threads=1), gb),
        "ours": (lambda: decode_into(e, raw, out), gb),
    }
    if e.name in oracles.IN_C:
        f = oracles.c_function(e.name)
        contenders["C 1t"] = (lambda: f(raw.ctypes.data, out.ctypes.data, n), gb)
    if e.name in oracles.IN_LIBGGUF:
        contenders["libgguf 2t"] = (lambda: oracles.libgguf_decode(e.name, raw), gb)
    if e.name in oracles.IN_GGUF:
        contenders["gguf-py"] = (lambda: oracles.gguf_decode(e.name, part), small)
    return race(contenders, rounds)


def bench_float(e: Encoding, mib: int, rounds: int) -> dict[str, float]:
    n, few = mib * 2**18, SMALL * 2**18
    raw = np.random.default_rng(0).integers(0, 256, n // e.block_size * e.block_bytes, np.uint8)
    if e.name in ("F16", "BF16"):
        raw.view(np.uint16)[:] = np.random.default_rng(0).standard_normal(n, np.float32).astype(e.dtype).view(np.uint16)
    raw.flags.writeable = False
    out, source = aligned_empty((n,)), aligned_empty((n,))
    out[:], source[:] = 0, 1
    dtype = np.dtype(getattr(ml_dtypes, e.dtype, e.dtype))
    codes = (raw if e.block_size == 1 else np.random.default_rng(0).integers(0, 16, few, np.uint8)).view(dtype)
    contenders: dict[str, tuple[Contender, float]] = {
        "memcpy": (lambda: np.copyto(out, source), 4e-9 * n),
        "ours 1t": (lambda: decode_into(e, raw, out, threads=1), 4e-9 * n),
        "ours": (lambda: decode_into(e, raw, out), 4e-9 * n),
        "ml_dtypes/numpy": (lambda: codes[:few].astype(np.float32), 4e-9 * few),
    }
    torch = _torch()
    if torch is not None and hasattr(torch, e.dtype) and e.block_size == 1:
        kind = getattr(torch, e.dtype)
        t = torch.from_numpy(raw.copy()).view(kind)
        contenders["torch 1t"] = (lambda: t.to(torch.float32), 4e-9 * n)
    return race(contenders, rounds)


def bench_scaled(fmt: str, mib: int, rounds: int) -> dict[str, float]:
    n, rows, block = 4096, mib * 2**18 // 4096, 32
    width = {"int8": 8, "int4": 4, "fp8": 8, "fp8_e5m2": 8, "fp6": 6, "fp6_e3m2": 6, "fp4": 4}[fmt]
    rng = np.random.default_rng(0)
    codes, scale = rng.integers(0, 120, rows * n * width // 8, np.uint8), rng.random((rows, n // block), np.float32)
    out, gb = aligned_empty((rows, n)), 4e-9 * rows * n
    out[:] = 0
    contenders: dict[str, tuple[Contender, float]] = {
        "ours 1t": (lambda: decode_scaled(fmt, codes, scale, (rows, n), 1, block, out=out, threads=1), gb),
        "ours": (lambda: decode_scaled(fmt, codes, scale, (rows, n), 1, block, out=out), gb),
    }
    if width == 8:
        kind = {"int8": np.int8, "fp8": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}[fmt]
        natural, small = codes.view(kind).reshape(rows, n // block, block)[:128], 4e-9 * min(rows, 128) * n
        contenders["ml_dtypes/numpy"] = (lambda: natural.astype(np.float32) * scale[:128, :, None], small)
    return race(contenders, rounds)


def bench_stats(mib: int, rounds: int) -> dict[str, float]:
    n, few = mib * 2**18, SMALL * 2**18
    x = aligned_empty((n,))
    x[:] = np.random.default_rng(0).standard_normal(n, np.float32)
    part, x_given = x[:few], x.view()
    x_given.flags.writeable = False
    segments = -(-n // stats_kernels.SEGMENT)

    def moments() -> None:
        rows = np.zeros((segments, stats_kernels.COLUMNS))
        stats_kernels.stats_f32(x_given, 0, segments, rows, np.zeros(0, np.uint32))

    def numpy_way() -> None:
        finite = np.isfinite(part)
        y = part[finite].astype(np.float64)
        _ = y.min(), y.max(), y.mean(), y.std(), (y == 0).sum(), np.isnan(part).sum()
        _ = np.isposinf(part).sum(), np.isneginf(part).sum(), np.histogram(y, 256)

    contenders: dict[str, tuple[Contender, float]] = {
        "prefetched read": (lambda: read(x_given), 4e-9 * n),
        "no histogram 1t": (moments, 4e-9 * n),
        "ours 1t": (lambda: compute_stats(x, threads=1), 4e-9 * n),
        "ours": (lambda: compute_stats(x), 4e-9 * n),
        "numpy": (numpy_way, 4e-9 * few),
    }
    torch = _torch()
    if torch is not None:
        t = torch.from_numpy(part)
        contenders["torch 1t"] = (
            lambda: (torch.aminmax(t), torch.var_mean(t), torch.histc(t, 256), torch.isfinite(t).sum(), (t == 0).sum()),
            4e-9 * few,
        )
    return race(contenders, rounds)


def _torch() -> Any:
    """torch on one thread, or None."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    torch.set_num_threads(1)
    return torch


_COLD = """
import time, numba, numpy as np
a = time.perf_counter()
from apsi_inspect.kernels.{module} import {first} as f, {later} as g
raw = np.zeros({nbytes}, np.uint8); raw.flags.writeable = False
f(raw, np.empty(256, np.float32), 0, 1)
b = time.perf_counter()
g(raw, np.empty(256, np.float32), 0, 1)
print(b - a, time.perf_counter() - b)
"""


def bench_cold(rounds: int) -> dict[str, float]:
    """Seconds from `import numba` done to the first kernel's result, and for a later one; cold and cached."""
    code = _COLD.format(module="kquants_simd", first="decode_q4_k", later="decode_q6_k", nbytes=256)
    found: dict[str, list[float]] = {"first cold": [], "first cached": [], "later cached": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            env = {**os.environ, "NUMBA_CACHE_DIR": cache}
            for kind in ("cold", "cached"):
                done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
                first, later = map(float, done.stdout.split())
                found[f"first {kind}"].append(first)
            found["later cached"].append(later)
    return {k: SUMMARY(v) for k, v in found.items()}


def goals(name: str, r: dict[str, float]) -> list[tuple[str, float, float]]:
    """(what, ratio, goal) of one row."""
    ours, found = r.get("ours 1t", 0.0), []
    if "C 1t" in r:
        found.append(("C", ours / r["C 1t"], {"Q8_0": 2.0, "Q6_K": 4.0}.get(name, 1.0)))
    if "gguf-py" in r:
        found.append(("gguf-py", ours / r["gguf-py"], 5.0))
    if name in ("Q8_0", "Q6_K", "F16"):
        found.append(("memcpy", ours / r["memcpy"], 1.4))
    if name.startswith(("F8", "F4")):
        found.append(("ml_dtypes", ours / r["ml_dtypes/numpy"], 15.0))
    if "torch 1t" in r:
        found.append(("torch", ours / r["torch 1t"], 10.0 if name == "stats" else 2.0))
    if name == "stats":
        found.append(("read, no histogram", r["no histogram 1t"] / r["prefetched read"], 0.65))
        found.append(("read, histogram", ours / r["prefetched read"], 0.25))
        found.append(("numpy", ours / r["numpy"], 20.0))
        found.append(("2 threads", r["ours"] / ours, 1.6))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="MiB of float32 (default 64)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", help="names of encodings, .apsim formats, 'stats' or 'cold'")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument(
        "--busy", action="store_true", help="the machine is busy: CPU time of one thread, best round (2 threads: void)"
    )
    args = parser.parse_args()
    if args.busy:
        global CLOCK, SUMMARY
        CLOCK, SUMMARY = time.thread_time, min
    tasks: dict[str, Callable[[], dict[str, float]]] = {}
    for e in ENCODINGS.values():
        if e.is_block:
            tasks[e.name] = lambda e=e: bench_blocks(e, args.mib, args.rounds)
        elif e.kind == "float" and e.name not in ("F32", "F64"):
            tasks[e.name] = lambda e=e: bench_float(e, args.mib, args.rounds)
        elif e.kind == "scaled" and e.name != "bf16":
            tasks[e.name] = lambda e=e: bench_scaled(e.name, args.mib, args.rounds)
    tasks |= {"stats": lambda: bench_stats(args.mib, args.rounds), "cold": lambda: bench_cold(args.rounds)}
    results: dict[str, Any] = {}
    for name in args.only or tasks:
        r = tasks[name]()
        judged = goals(name, r)
        results[name] = {"figures": r, "goals": judged}
        figures = "  ".join(f"{k} {v:.3g}" for k, v in r.items())
        verdict = "  ".join(f"{what} x{x:.2f} (goal {g:g}{'' if x >= g else ' MISSED'})" for what, x, g in judged)
        print(f"{name:12} {figures}   | {verdict}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
