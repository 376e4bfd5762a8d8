"""Conversion of a float16 safetensors file to GGUF, side by side with gguf-py and with ggml's own quantizer.

    python benchmarks/bench_convert.py [--gib 2] [--rounds 3] [--only q8_0] [--folder DIR] [--big 4.5] [--json FILE]

Every contender is a fresh process that takes its turn round by round over the same file; a figure is the median. Ours
writes as it always does (temporary file, rename); durable writes are a line of their own. Compilation and imports are
outside the time. Peak memory (VmHWM) is given with that of the imports and a small conversion taken off. `--big` does
one conversion of a larger file for the memory alone. On a busy machine the seconds of CPU say more than those of the
clock: ours use all cores, gguf-py one. The goals are in `docs/performance.md`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROWS, COLUMNS = 4096, 4096  # 32 MiB a tensor in float16

_PEAK = """
import sys, time, json
def peak():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmHWM")) / 1024
src, dst, small = sys.argv[1:4]
"""
_OURS = """
import apsi_inspect as ai
{code}
def run(src, dst):
    ai.convert(src, dst, dtype="{dtype}", force=True, durable={durable}, architecture="llama")
run(small, dst)
base, start, used = peak(), time.perf_counter(), time.process_time()
run(src, dst)
print(json.dumps([time.perf_counter() - start, peak() - base, base, time.process_time() - used]))
"""
_THEIRS = """
import gguf, numpy as np
from safetensors import safe_open
{quantizer}
def run(src, dst):
    w = gguf.GGUFWriter(dst, "llama")
    with safe_open(src, "np") as f:
        for name in f.keys():
            shape = f.get_slice(name).get_shape()
            bytes_shape = gguf.quants.quant_shape_to_byte_shape(shape, kind)
            w.add_tensor_info(name, bytes_shape, np.dtype(np.uint8), int(np.prod(bytes_shape)), kind)
        w.write_header_to_file(); w.write_kv_data_to_file(); w.write_ti_data_to_file()
        for name in f.keys():
            w.write_tensor_data(quantize(f.get_tensor(name)))
    w.close()
run(small, dst)
base, start, used = peak(), time.perf_counter(), time.process_time()
run(src, dst)
print(json.dumps([time.perf_counter() - start, peak() - base, base, time.process_time() - used]))
"""
_GGUF_PY = """
kind = gguf.GGMLQuantizationType.{dtype}
def quantize(x): return gguf.quants.quantize(x.astype(np.float32), kind)
"""
_C = """
import libgguf  # two threads by itself
kind = gguf.GGMLQuantizationType.{dtype}
def quantize(x): return libgguf.quantize_rows(x.astype(np.float32), int(kind)).view(np.uint8).reshape(len(x), -1)
"""


def make(path: Path, tensors: int, seed: int) -> None:
    """A safetensors file of random float16 matrices, written piece by piece."""
    nbytes = ROWS * COLUMNS * 2
    table = {
        f"blk.{i}.w": {"dtype": "F16", "shape": [ROWS, COLUMNS], "data_offsets": [i * nbytes, (i + 1) * nbytes]}
        for i in range(tensors)
    }
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(seed)
    one = rng.standard_normal((ROWS, COLUMNS), np.float32).astype(np.float16)
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for i in range(tensors):
            f.write(np.roll(one, i).tobytes())


def child(code: str, src: Path, dst: Path, small: Path) -> list[float]:
    """Seconds, growth of peak memory above `base`, `base` (MiB), and seconds of all cores together."""
    argv = [sys.executable, "-c", _PEAK + code, str(src), str(dst), str(small)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: list[float] = json.loads(done.stdout)
    return found


def contenders() -> dict[str, str]:
    """Name -> program."""
    ours = {
        f"apsi {d}{' durable' if s else ''}": _OURS.format(code="", dtype=d, durable=s)
        for d, s in (("q8_0", False), ("q8_0", True), ("q4_k", False))
    }
    theirs = {
        "gguf-py q8_0": _THEIRS.format(quantizer=_GGUF_PY.format(dtype="Q8_0")),
        "ggml C q4_k": _THEIRS.format(quantizer=_C.format(dtype="Q4_K")),
    }
    return ours | theirs


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", metavar="WORD", help="contenders whose name holds this")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--big", type=float, default=0.0, metavar="GIB")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    per = ROWS * COLUMNS * 2 / 2**30
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        src, dst, small = (Path(folder) / n for n in ("src.safetensors", "dst.gguf", "small.safetensors"))
        make(small, 1, 0)
        make(src, max(1, round(args.gib / per)), 1)
        chosen = {name: code for name, code in contenders().items() if args.only in name}
        results: dict[str, list[list[float]]] = {name: [] for name in chosen}
        for _ in range(args.rounds):
            for name, code in chosen.items():
                results[name].append(child(code, src, dst, small))
                dst.unlink(missing_ok=True)
        figures = {n: [statistics.median(r[i] for r in rows) for i in range(4)] for n, rows in results.items()}
        if args.big:
            make(src, round(args.big / per), 2)
            figures[f"apsi q8_0, {args.big} GiB"] = child(contenders()["apsi q8_0"], src, dst, small)
    print(f"{args.gib} GiB float16 safetensors to GGUF, median of {args.rounds}")
    for name, (seconds, grew, base, cpu) in figures.items():
        print(f"  {name:<22} {seconds:7.2f} s   cpu {cpu:7.2f} s   peak memory +{grew:6.1f} MiB over {base:6.1f}")
    pairs = {
        "q8_0 against gguf-py (goal 12)": ("gguf-py q8_0", "apsi q8_0"),
        "q8_0 durable against gguf-py": ("gguf-py q8_0", "apsi q8_0 durable"),
        "q4_k against ggml C (goal 4)": ("ggml C q4_k", "apsi q4_k"),
    }
    ratios = {n: figures[a][0] / figures[b][0] for n, (a, b) in pairs.items() if a in figures and b in figures}
    for name, ratio in ratios.items():
        theirs, ours = pairs[name]
        print(f"  {name:<34} {ratio:6.1f} x   cpu {figures[theirs][3] / figures[ours][3]:6.1f} x")
    if args.json:
        args.json.write_text(json.dumps({"figures": figures, "ratios": ratios}, indent=1))


if __name__ == "__main__":
    main()
