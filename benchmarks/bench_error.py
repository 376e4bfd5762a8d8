"""Quantization error: `quant_error` beside quantizing, dequantizing and numpy, and beside reading the memory once.

    python benchmarks/bench_error.py [--mib 64] [--rounds 7] [--formats q8_0,q4_k] [--file MODEL] [--json FILE]

GB/s of float32 values, by seconds of CPU (the machine may be busy), the best of several rounds in which the contenders
take turns; compilation is outside. "gguf-py" quantizes and dequantizes with the gguf package where it can, else with
ggml's C code (libgguf); "own decoder" has the codes given, so that it only decodes; both then let numpy compute mean
squared error, greatest error, signal to noise and cosine. `--file` measures a model in a fresh process instead: time,
and the peak memory above that of the imports.

On two busy cores of an EPYC with 1 MiB of L2: the simple blocks (q8_0 … q5_1) at 5.3 to 7.3 GB/s, which is 0.4 to 0.55
of the read and 10 to 15 times the own decoder with numpy (the goals were 0.6 and 7; the kernel alone does 0.67 for
q8_0); a file at 2.6 GB/s, with 2 MiB more than imports and kernels.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gguf
import libgguf
import numpy as np
from numba import njit

from apsi_inspect import quant_error
from apsi_inspect.encodings import ENCODINGS
from apsi_inspect.encodings.encode import encode
from apsi_inspect.encodings.run import aligned_empty
from apsi_inspect.encodings.values import decode_into
from apsi_inspect.kernels.simd import I32, M, emitter

FORMATS = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4", "q4_k", "q6_k", "f16", "f8_e4m3", "int8", "int4")
SIMPLE = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
COLUMNS, SMALL = 4096, 8  # MiB that the slow contenders get


@emitter(M, M)
def _read(x: M, acc: M) -> None:
    lines = [acc.load(I32, 8, 32 * j) for j in range(4)]
    for i in range(0, 1024, 128):
        x.prefetch(4096 + i)
        x.prefetch(4096 + i + 64)
        lines = [v ^ x.load(I32, 8, i + 32 * j) for j, v in enumerate(lines)]
    for j, v in enumerate(lines):
        acc.store(v, 32 * j)


@njit(nogil=True, error_model="numpy")
def read(x, acc):  # type: ignore[no-untyped-def]
    for i in range(0, x.size, 256):
        _read(x.ctypes.data + 4 * i, acc.ctypes.data)


def metrics(x: np.ndarray, y: np.ndarray) -> tuple[float, ...]:
    """What numpy takes, in float32 with float64 sums."""
    e = x - y
    squares, xs, ys = (np.square(v).sum(dtype=np.float64) for v in (e, x, y))
    return (
        squares / x.size,
        float(np.abs(e).max()),
        xs / squares,
        float((x * y).sum(dtype=np.float64) / (xs * ys) ** 0.5),
    )


def theirs(name: str, x: np.ndarray) -> Callable[[], Any] | None:
    if name not in gguf.GGMLQuantizationType.__members__ or name in ("F16", "BF16"):
        return None
    kind = gguf.GGMLQuantizationType[name]
    try:
        gguf.quants.quantize(x[:1], kind)
        return lambda: metrics(x, gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind))
    except NotImplementedError:
        return lambda: metrics(x, libgguf.dequantize_rows(libgguf.quantize_rows(x, int(kind)), int(kind)))


def race(contenders: dict[str, tuple[Callable[[], Any], float]], rounds: int) -> dict[str, float]:
    """GB/s of each, by CPU seconds."""
    best = dict.fromkeys(contenders, float("inf"))
    for run, _ in contenders.values():
        run()
    for _ in range(rounds):
        for name, (run, _) in contenders.items():
            start = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - start)
    return {name: gb / best[name] for name, (_, gb) in contenders.items()}


def bench(fmt: str, mib: int, rounds: int) -> dict[str, float]:
    rows = mib * 2**18 // COLUMNS
    x = aligned_empty((rows, COLUMNS))
    x[:] = np.random.default_rng(0).standard_normal((rows, COLUMNS), np.float32) * np.float32(0.02)
    flat, acc = x.reshape(-1).view(), np.zeros(32, np.uint32)
    flat.flags.writeable = False
    few = x[: max(1, SMALL * 2**18 // COLUMNS)]
    gb, small = 4e-9 * x.size, 4e-9 * few.size
    pool = ThreadPoolExecutor(1)
    contenders: dict[str, tuple[Callable[[], Any], float]] = {
        "read": (lambda: read(flat, acc), gb),
        "ours": (lambda: quant_error(x, fmt, executor=pool, progress=False), gb),
    }
    encoding = ENCODINGS.get(fmt.upper())
    if encoding is not None:
        raw, y = encode(encoding, x), np.empty_like(few)
        codes = raw[: few.size // encoding.block_size * encoding.block_bytes]

        def decoded() -> Any:
            if encoding.is_block:
                decode_into(encoding, codes, y, threads=1)
                return metrics(few, y)
            return None

        if encoding.is_block:
            contenders["encoder"] = (lambda: encode(encoding, x, out=raw, threads=1), gb)
            contenders["own decoder, numpy"] = (decoded, small)
        other = theirs(fmt.upper(), few)
        if other is not None:
            contenders["gguf-py, numpy"] = (other, small)
    return race(contenders, rounds)


_FILE = """
import sys, time, json
def peak():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmHWM")) / 1024
import numpy as np
import apsi_inspect as ai
formats = sys.argv[2].split(",")
tree = {"a": np.ones((4, 256), "f4"), "b": np.ones((4, 256), "f2")}
ai.quant_error(tree, formats, progress=False)
str(ai.quant_error(tree, formats, progress=False).frame)
base, start, used = peak(), time.perf_counter(), time.process_time()
table = ai.quant_error(sys.argv[1], formats, progress=False)
seconds = time.perf_counter() - start
numel = sum(r.numel for r in table.rows if r.good)
print(json.dumps([seconds, time.process_time() - used, peak() - base, base, numel]))
"""


def bench_file(path: str, formats: str) -> None:
    """Seconds and memory of a model, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", _FILE, path, formats], capture_output=True, text=True, check=True)
    seconds, used, more, base, numel = json.loads(done.stdout)
    print(f"{path}: {numel / 1e6:.1f} million elements x formats in {seconds:.2f} s ({used:.2f} s of CPU, ", end="")
    print(f"{4e-9 * numel / used:.2f} GB/s); peak {more:.0f} MiB above the {base:.0f} MiB of imports and kernels")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="MiB of float32 (default 64)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--file", help="a model file")
    parser.add_argument("--json", help="write the figures there")
    args = parser.parse_args()
    if args.file:
        bench_file(args.file, args.formats)
        return
    found = {}
    for fmt in args.formats.split(","):
        r = found[fmt] = bench(fmt, args.mib, args.rounds)
        ours = r["ours"]
        line = [f"{k} {v:.2f}" for k, v in r.items()]
        ratios = [f"x {k}: {ours / v:.2f}" for k, v in r.items() if k != "ours"]
        print(f"{fmt:8} GB/s: {', '.join(line)}\n         ours {'; '.join(ratios)}", flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump(found, f, indent=1)


if __name__ == "__main__":
    main()
