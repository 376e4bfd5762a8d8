"""Encoding side by side with ggml's C code, libgguf, gguf-py, ml_dtypes, numpy and torch.

    python benchmarks/bench_encode.py [--mib 256] [--rounds 7] [--only Q8_0 F16 int8 …] [--best] [--json FILE]

GB/s of the float32 side. Contenders take turns round by round; a figure is the median after one warm-up. Ours (the
product call, its check for non-finite values included) and C write into a buffer that is already touched (`out=`);
gguf-py, libgguf, ml_dtypes and torch allocate their result. C on two threads is `ggml_quantize_chunk` on two halves;
libgguf uses two threads by itself. K-quants run on 4 MiB, IQ4 on 1 MiB (compute bound: size does not matter), gguf-py,
ml_dtypes and numpy on 8 MiB, in their favour. The goals are ratios on one machine in one run: 7, 8, 9, 10, 13 and 16
of `docs/performance.md`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from apsi_inspect.encodings.encode import can_encode, encode
from apsi_inspect.encodings.encode_scaled import quantize_scaled
from apsi_inspect.encodings.ggml import GGML
from apsi_inspect.encodings.plain import PLAIN

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests import ggml_oracle

Array = np.ndarray[Any, Any]
Contender = Callable[[], object]
FLOATS = ("F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "F4", "F6_E2M3", "F6_E3M2")
SCALED = ("int8", "int4", "fp8", "fp6", "fp4")
SMALL = 8  # MiB for the contenders that would take seconds
IN_GGUF = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "TQ1_0", "TQ2_0", "MXFP4")
BY_NAME = {e.name: e for e in (*GGML, *PLAIN)}
# name: ratios that a run is held against, as (contender, peer, at least)
GOALS: dict[str, list[tuple[str, str, float]]] = {
    "Q8_0": [("ours 1t", "C 1t", 8), ("ours 2t", "C 2t", 8), ("ours 1t", "memcpy", 0.8), ("ours 2t", "ours 1t", 1.6)],
    "Q4_0": [("ours 1t", "C 1t", 4), ("ours 2t", "C 2t", 4), ("ours 1t", "memcpy", 0.8), ("ours 2t", "ours 1t", 1.6)],
    **{n: [("ours 1t", "C 1t", 3)] for n in ("Q4_1", "Q5_0", "Q5_1", "TQ1_0", "TQ2_0", "MXFP4")},
    **{n: [("ours 1t", "C 1t", 6), ("ours 2t", "C 2t", 6), ("ours 2t", "ours 1t", 1.6)] for n in ("Q4_K", "Q5_K")},
    **{n: [("ours 1t", "C 1t", 3), ("ours 2t", "C 2t", 3)] for n in ("Q2_K", "Q3_K", "Q6_K")},
    **{n: [("ours 1t", "C 1t", 1)] for n in ("NVFP4", "Q1_0", "Q2_0", "IQ4_NL", "IQ4_XS")},
    "F16": [("ours 1t", "memcpy", 0.75), ("ours 1t", "torch 1t", 2), ("ours 2t", "torch 2t", 2)],
    "BF16": [("ours 1t", "memcpy", 0.75), ("ours 1t", "torch 1t", 2), ("ours 2t", "torch 2t", 2)],
    "F8_E4M3": [
        ("ours 1t", "memcpy", 0.75), ("ours 1t", "numpy/ml_dtypes", 15), ("ours 1t", "torch 1t", 2),
        ("ours 2t", "torch 2t", 2),
    ],
    "F8_E5M2": [("ours 1t", "numpy/ml_dtypes", 15), ("ours 1t", "torch 1t", 2), ("ours 2t", "torch 2t", 2)],
    "F4": [("ours 1t", "memcpy", 0.75), ("ours 1t", "numpy/ml_dtypes", 15)],
}  # fmt: skip


AVERAGE: Callable[[list[float]], float] = statistics.median


def race(contenders: dict[str, tuple[Contender, float]], rounds: int) -> dict[str, float]:
    """GB/s of each (callable, GB of float32), by turns."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, (f, _) in contenders.items():
            start = time.perf_counter()
            f()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: size / AVERAGE(times[name]) for name, (_, size) in contenders.items()}


def weights(mib: int) -> Array:
    return np.random.default_rng(0).standard_normal((mib * 64, 4096), np.float32) * np.float32(0.02)


def on_two_threads(f: Callable[[int, int], object], rows: int) -> Contender:
    pool = ThreadPoolExecutor(2)

    def run() -> None:
        for done in [pool.submit(f, 0, rows // 2), pool.submit(f, rows // 2, rows)]:
            done.result()

    return run


def bench_blocks(name: str, mib: int, rounds: int) -> dict[str, float]:
    e = BY_NAME[name]
    x = weights({"IQ4_NL": 1, "IQ4_XS": 1}.get(name, 4 if name.endswith("_K") else mib))
    gb, copy = x.nbytes / 1e9, np.zeros_like(x)
    out = np.zeros(x.size // e.block_size * e.block_bytes, np.uint8)
    per_row = x.shape[1] // e.block_size * e.block_bytes
    lib, kind = ggml_oracle.library(), ggml_oracle.TYPE_IDS[name]

    def in_c(a: int, b: int) -> None:
        lib.ggml_quantize_chunk(kind, x[a:].ctypes.data, out[a * per_row :].ctypes.data, 0, b - a, x.shape[1], None)

    contenders: dict[str, tuple[Contender, float]] = {
        "memcpy": (lambda: np.copyto(copy, x), gb),
        "ours 1t": (lambda: encode(e, x, out=out, threads=1), gb),
        "ours 2t": (lambda: encode(e, x, out=out, threads=2), gb),
        "C 1t": (lambda: in_c(0, len(x)), gb),
        "C 2t": (on_two_threads(in_c, len(x)), gb),
    }
    if name != "Q2_0":
        contenders["libgguf 2t"] = (lambda: ggml_oracle.libgguf.quantize_rows(x, kind), gb)
    if name in IN_GGUF:
        part = x[: SMALL * 64]
        contenders["gguf-py"] = (
            lambda: gguf.quants.quantize(part, gguf.GGMLQuantizationType[name]),
            part.nbytes / 1e9,
        )
    return race(contenders, rounds)


def bench_floats(name: str, mib: int, rounds: int) -> dict[str, float]:
    e, x = BY_NAME[name], np.abs(weights(mib)) + np.float32(1e-4)
    gb, copy, part = x.nbytes / 1e9, np.zeros_like(x), x[: SMALL * 64]
    out = np.zeros(x.size // e.block_size * e.block_bytes, np.uint8)
    dtype = np.dtype(getattr(ml_dtypes, e.dtype, e.dtype))
    contenders: dict[str, tuple[Contender, float]] = {
        "memcpy": (lambda: np.copyto(copy, x), gb),
        "ours 1t": (lambda: encode(e, x, out=out, threads=1), gb),
        "ours 2t": (lambda: encode(e, x, out=out, threads=2), gb),
        "numpy/ml_dtypes": (lambda: part.astype(dtype), part.nbytes / 1e9),
    }
    torch = _torch()
    if torch is not None and hasattr(torch, e.dtype) and e.block_size == 1:
        t, kind = torch.from_numpy(x), getattr(torch, e.dtype)

        def cast(threads: int) -> object:
            torch.set_num_threads(threads)
            return t.to(kind)

        contenders["torch 1t"] = (lambda: cast(1), gb)
        contenders["torch 2t"] = (lambda: cast(2), gb)
    return race(contenders, rounds)


def bench_scaled(name: str, mib: int, rounds: int) -> dict[str, float]:
    x = weights(mib)
    gb, part = x.nbytes / 1e9, x[: SMALL * 64]
    block = 32 if name in ("int4", "fp6", "fp4") else None

    def by_numpy() -> Array:
        scale = np.abs(part).max(axis=1, keepdims=True) / np.float32(127)
        return np.rint(part / scale).astype(np.int8)

    contenders: dict[str, tuple[Contender, float]] = {
        "ours 1t": (lambda: quantize_scaled(x, name, 1, block, threads=1), gb),
        "ours 2t": (lambda: quantize_scaled(x, name, 1, block, threads=2), gb),
    }
    if name == "int8":
        contenders["numpy/ml_dtypes"] = (by_numpy, part.nbytes / 1e9)
    return race(contenders, rounds)


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch


def judge(name: str, found: dict[str, float]) -> list[str]:
    """The goals that this run meets or misses."""
    lines = []
    for mine, peer, least in GOALS.get(name, []):
        if mine in found and peer in found:
            ratio = found[mine] / found[peer]
            lines.append(f"{mine} / {peer} {ratio:.2f} (goal {least:g}){'' if ratio >= least else ' MISSED'}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--best", action="store_true", help="the best round instead of the median: a busy machine")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.best:
        global AVERAGE
        AVERAGE = min
    blocks = [e.name for e in GGML if can_encode(e)]
    benches = dict.fromkeys(blocks, bench_blocks) | dict.fromkeys(FLOATS, bench_floats)
    benches |= dict.fromkeys(SCALED, bench_scaled)
    results = {}
    for name, bench in benches.items():
        if args.only and name not in args.only:
            continue
        found = results[name] = bench(name, args.mib, args.rounds)
        print(f"{name:12}", "  ".join(f"{k} {v:.3g}" for k, v in found.items()), flush=True)
        for line in judge(name, found):
            print(" " * 14 + line, flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
