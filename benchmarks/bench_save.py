"""Saving, loading and verifying side by side with safetensors, hashlib and plain writes.

    python benchmarks/bench_save.py [--mib 1024] [--rounds 5] [--folder DIR] [--json FILE]

64 tensors of equal size, and 10 000 small ones of 1 GB together. Contenders take turns round by round; a figure is the
median after one warm-up, a ratio is taken between medians of one run. Reads are warm (page cache). A goal is met where
the ratio is on the right side; the goals are those of `docs/performance.md`.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

import apsi_inspect as ai

Contender = Callable[[], object]


def race(contenders: dict[str, Contender], rounds: int, before: Contender = gc.collect) -> dict[str, float]:
    """Median seconds of each, by turns."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, f in contenders.items():
            before()
            start = time.perf_counter()
            kept = f()
            took = time.perf_counter() - start
            del kept
            if turn:
                times[name].append(took)
    return {name: statistics.median(t) for name, t in times.items()}


def settle() -> None:
    """Let the disk finish what earlier contenders left."""
    gc.collect()
    os.sync()


def hash_map(path: Path) -> str:
    """One SHA-256 over the map, on one thread."""
    with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as m:
        return hashlib.sha256(m).hexdigest()


def plain_write(path: Path, arrays: dict[str, Any], durable: bool) -> None:
    """What any writer has to do: the bytes under another name, fsync, rename."""
    other = path.with_suffix(".other")
    with open(other, "wb", buffering=0) as f:
        for a in arrays.values():
            f.write(memoryview(a).cast("B"))
        if durable:
            os.fsync(f.fileno())
    os.replace(other, path)


def hash_arrays(arrays: dict[str, Any]) -> str:
    """One pass of SHA-256 over the arrays."""
    digest = hashlib.sha256()
    for a in arrays.values():
        digest.update(memoryview(a).cast("B"))
    return digest.hexdigest()


class Results:
    """Figures and ratios, printed as they come."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def times(self, title: str, seconds: dict[str, float], nbytes: int) -> None:
        print(f"\n{title}")
        for name, t in seconds.items():
            print(f"  {name:<44} {t * 1e3:10.2f} ms  {nbytes / t / 1e9:7.2f} GB/s")
            self.rows.append({"title": title, "name": name, "seconds": t, "bytes": nbytes})

    def goal(self, text: str, ratio: float, limit: float, at_least: bool) -> None:
        good = ratio >= limit if at_least else ratio <= limit
        bound = "≥" if at_least else "≤"
        print(f"  {'✓' if good else '✗'} {text}: {ratio:.4g} ({bound} {limit:.4g})")
        self.rows.append({"goal": text, "ratio": ratio, "limit": limit, "at_least": at_least, "met": good})


def saving(folder: Path, arrays: dict[str, Any], rounds: int, out: Results) -> None:
    """Saving: plain safetensors, durable, and with all digests."""
    size = sum(a.nbytes for a in arrays.values())
    path = folder / "save.safetensors"
    apsim = folder / "save.apsim"
    t = race(
        {
            "safetensors save_file": lambda: safetensors.numpy.save_file(arrays, path),
            "ours, safetensors, no fsync": lambda: ai.save_safetensors(path, arrays, durable=False),
            "plain write, no fsync": lambda: plain_write(path, arrays, False),
        },
        rounds,
        settle,
    )
    out.times("save without fsync", t, size)
    out.goal("speed vs save_file", t["safetensors save_file"] / t["ours, safetensors, no fsync"], 0.9, True)
    t = race(
        {
            "plain write, fsync, rename": lambda: plain_write(path, arrays, True),
            "ours, safetensors, durable": lambda: ai.save_safetensors(path, arrays),
            "one hash pass (in memory)": lambda: hash_arrays(arrays),
            "ours, .apsim with all digests, durable": lambda: ai.save_model(apsim, arrays),
            "ours, .apsim, signed, durable": lambda: ai.save_model(apsim, arrays, sign=b"0123456789abcdef"),
        },
        rounds,
        settle,
    )
    out.times("durable save", t, size)
    out.goal(
        "speed vs write + fsync + rename", t["plain write, fsync, rename"] / t["ours, safetensors, durable"], 0.9, True
    )
    slowest = max(t["one hash pass (in memory)"], t["plain write, fsync, rename"])
    digests = t["ours, .apsim with all digests, durable"] / slowest
    out.goal("time with all digests vs max(one hash pass, durable write)", digests, 1.4, False)
    t = race(
        {
            "one hash pass (in memory)": lambda: hash_arrays(arrays),
            "plain write, no fsync": lambda: plain_write(path, arrays, False),
            "ours, .apsim with all digests, no fsync": lambda: ai.save_model(apsim, arrays, durable=False),
        },
        rounds,
        settle,
    )
    out.times("save with digests, without fsync", t, size)
    slowest = max(t["one hash pass (in memory)"], t["plain write, no fsync"])
    digests = t["ours, .apsim with all digests, no fsync"] / slowest
    out.goal("time with all digests vs max(one hash pass, write)", digests, 1.4, False)


def verifying(path: Path, rounds: int, out: Results) -> None:
    """Verifying by chunks and in one stream."""
    t = race(
        {
            "hashlib over a map, one thread": lambda: hash_map(path),
            "verify, one thread": lambda: ai.verify(path, threads=1),
            "verify, two threads": lambda: ai.verify(path, threads=2),
            "verify, full": lambda: ai.verify(path, full=True),
        },
        rounds,
    )
    out.times("verify", t, path.stat().st_size)
    base = t["hashlib over a map, one thread"]
    out.goal("one thread vs hashlib over a map", base / t["verify, one thread"], 0.95, True)
    out.goal("two threads vs hashlib over a map", base / t["verify, two threads"], 1.8, True)
    out.goal("two threads vs one", t["verify, one thread"] / t["verify, two threads"], 1.6, True)


def loading(folder: Path, name: str, arrays: dict[str, Any], limit: float, rounds: int, out: Results) -> None:
    """Opening as arrays, without verification."""
    apsim, plain = folder / f"{name}.apsim", folder / f"{name}.safetensors"
    ai.save_model(apsim, arrays, durable=False)
    ai.save_safetensors(plain, arrays, durable=False)
    t = race(
        {
            "safetensors load_file": lambda: safetensors.numpy.load_file(plain),
            "load_model(verify=False)": lambda: ai.load_model(apsim, verify=False),
            "load_model(verify='lazy')": lambda: ai.load_model(apsim, verify="lazy"),
            "load_safetensors": lambda: ai.load_safetensors(plain),
        },
        rounds,
    )
    out.times(f"load {name}", t, sum(a.nbytes for a in arrays.values()))
    out.goal(
        "load_model(verify=False) vs load_file",
        t["load_model(verify=False)"] / t["safetensors load_file"],
        limit,
        False,
    )
    out.goal("load_safetensors vs load_file", t["load_safetensors"] / t["safetensors load_file"], limit, False)


def main() -> None:
    """Run all races."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", type=int, default=10_000, help="number of small tensors")
    parser.add_argument("--folder", help="where to write; by default a temporary folder")
    parser.add_argument("--only", nargs="*", choices=["save", "verify", "load"], default=["save", "verify", "load"])
    parser.add_argument("--json")
    args = parser.parse_args()
    out = Results()
    rng = np.random.default_rng(0)
    each = args.mib * (1 << 20) // 64 // 4
    big = {f"layers.{i}.w": rng.integers(0, 1 << 32, each, np.uint32).view(np.float32) for i in range(64)}
    versions = f"numpy {np.__version__}, safetensors {safetensors.__version__}, Python {sys.version.split()[0]}"
    print(f"{os.cpu_count()} CPUs, {versions}")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        if "save" in args.only:
            saving(folder, big, args.rounds, out)
        if "verify" in args.only:
            ai.save_model(folder / "v.apsim", big)
            verifying(folder / "v.apsim", args.rounds, out)
        if "load" in args.only:
            loading(folder, "64 large tensors", big, 1 / 100, args.rounds, out)
            count = args.mib * (1 << 20) // args.small // 4
            small = {f"blk.{i // 10}.t{i % 10}.w": big["layers.0.w"][:count].copy() for i in range(args.small)}
            loading(folder, f"{args.small} small tensors", small, 1 / 5, args.rounds, out)
    if args.json:
        Path(args.json).write_text(json.dumps(out.rows, indent=1))


if __name__ == "__main__":
    main()
