"""Opening side by side with `json`, `safetensors`, gguf-py and ggml's C loader; whole processes; the table of tensors.

    python benchmarks/bench_open.py [VOCABULARY.gguf …] [--rounds 5] [--quick] [--cpu] [--json FILE]

Files of 300, 10 000 and 100 000 tensors are generated. Real vocabulary files are given by name: those whose names hold
``llama-bpe`` and ``gemma-4`` count for goal 5. Contenders take turns round by round; a figure is the median after one
warm-up round, and what takes over two seconds is measured once. Plain parsers are timed before Numba is imported, scans
after.
The goals are ratios on one machine in one run, those of `docs/performance.md`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import libggml
import pandas as pd
from safetensors import safe_open
from safetensors.numpy import load_file

import apsi_inspect as ai
from apsi_inspect.listing import rows as listing_rows

Contender = Callable[[], object]
SIZES = (300, 10_000, 100_000)
SLOW = 2.0  # seconds


# --- the contenders' common ground


def cpu_seconds() -> float:
    """CPU time of this process and of those it has waited for."""
    import resource

    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


clock: Callable[[], float] = time.perf_counter


def race(rounds: int, contenders: dict[str, Contender]) -> dict[str, float]:
    """Seconds of each, a median; one that takes longer than `SLOW` runs once."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, run in contenders.items():
            if times[name] and times[name][0] > SLOW:
                continue
            start = clock()
            run()
            times[name].append(clock() - start)
            if turn == 1 and times[name][0] <= SLOW:
                del times[name][0]  # the warm-up
    return {name: statistics.median(t) for name, t in times.items()}


class Report:
    """Prints figures and ratios, and keeps them."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def times(self, title: str, times: dict[str, float]) -> None:
        print(f"{title:<34}" + "  ".join(f"{name} {1e3 * t:.2f} ms" for name, t in times.items()))
        self.rows.append({"title": title, "ms": {name: round(1e3 * t, 3) for name, t in times.items()}})

    def goal(self, number: str, what: str, ratio: float, goal: float) -> None:
        met = "met" if ratio <= goal else "MISSED"
        print(f"    goal {number:<3} {what:<58} {ratio:8.4f}  (at most {goal:.4g})  {met}")
        self.rows.append({"goal": number, "what": what, "ratio": ratio, "limit": goal, "met": ratio <= goal})


# --- files


KINDS = (("F32", 4), ("BF16", 2), ("F16", 2))


def write_safetensors(path: Path, n: int, numel: int = 8, kinds: tuple[tuple[str, int], ...] = KINDS) -> Path:
    """`n` small tensors under names as transformers gives them; the data is a hole."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for i in range(n):
        dtype, nbytes = kinds[i % len(kinds)]
        shape = [numel // 2, 2] if i % 9 else [numel]
        end = position + numel * nbytes
        name = f"model.layers.{i // 9}.self_attn.part{i % 9}.q_proj.weight"
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + position)
    return path


def write_gguf(path: Path, n: int) -> Path:
    """`n` small tensors under names as llama.cpp gives them; the data is a hole."""

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text)) + text.encode()

    head = [
        b"GGUF",
        struct.pack("<IQQ", 3, n, 1),
        string("general.architecture"),
        struct.pack("<I", 8),
        string("llama"),
    ]
    position = 0
    for i in range(n):
        kind, nbytes = ((0, 256), (8, 68))[i % 2]
        head += [string(f"blk.{i // 9}.attn_part{i % 9}.weight"), struct.pack("<IQQIQ", 2, 32, 2, kind, position)]
        position += nbytes + -nbytes % 32
    blob = b"".join(head)
    with path.open("wb") as f:
        f.write(blob + bytes(-len(blob) % 32))
        f.truncate(f.tell() + position)
    return path


# --- contenders


def ours(path: Path) -> Contender:
    def run() -> None:
        ai.open(path).close()

    return run


def json_rows(path: Path, rows: bool) -> Contender:
    """What reading a safetensors header by hand comes to, unchecked."""

    def run() -> object:
        with path.open("rb") as f:
            table = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        if not rows:
            return table
        table.pop("__metadata__", None)
        return [(name, t["dtype"], t["shape"], t["data_offsets"]) for name, t in table.items()]

    return run


def json_only(path: Path) -> Contender:
    with path.open("rb") as f:
        text = f.read(int.from_bytes(f.read(8), "little"))
    return lambda: json.loads(text)


def safe_open_slices(path: Path) -> Contender:
    def run() -> object:
        with safe_open(path, "np") as f:
            parts = [f.get_slice(name) for name in f.keys()]  # noqa: SIM118
            return [(p.get_dtype(), p.get_shape()) for p in parts]

    return run


def ggml_c(path: Path) -> Contender:
    lib = ctypes.CDLL(str(Path(libggml.__file__).parent / "lib64" / "libggml-base.so"))

    class Params(ctypes.Structure):
        _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))

    lib.gguf_init_from_file.restype = ctypes.c_void_p
    lib.gguf_init_from_file.argtypes = [ctypes.c_char_p, Params]
    lib.gguf_free.argtypes = [ctypes.c_void_p]

    def run() -> None:
        found = lib.gguf_init_from_file(os.fsencode(path), Params(True, None))
        if not found:
            raise RuntimeError(f"ggml does not open {path}")
        lib.gguf_free(found)

    return run


def process(*command: str | Path) -> Contender:
    """A whole process, with its byte code cached as it is after an installation."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = str(Path(tempfile.gettempdir()) / "apsi-bench-pycache")

    def run() -> None:
        subprocess.run([str(c) for c in command], check=True, stdout=subprocess.DEVNULL, env=env)

    return run


def apsi_info(path: Path) -> Contender:
    """The command as it is installed, short of the launcher script (which may stand elsewhere)."""
    code = "import sys; from apsi_inspect.cli import main; sys.exit(main())"
    return process(sys.executable, "-c", code, "model", "info", path)


# --- the goals


def plain(report: Report, rounds: int, st: dict[int, Path], gg: dict[int, Path], vocabularies: list[Path]) -> None:
    """Goals 1, 2 and 3 of the plain parsers, in a process without Numba."""
    assert "numba" not in sys.modules
    took: dict[tuple[str, int], float] = {}
    for n, path in st.items():
        times = race(
            rounds, {"ours": ours(path), "json rows": json_rows(path, True), "safe_open": safe_open_slices(path)}
        )
        report.times(f"safetensors {n}, plain", times)
        took["safetensors", n] = times["ours"]
        if n >= 10_000:
            report.goal("1", f"plain parser / (json.loads + rows), {n}", times["ours"] / times["json rows"], 1.2)
    for n, path in gg.items():
        times = race(rounds, {"ours": ours(path), "GGUFReader": lambda path=path: gguf.GGUFReader(path)})
        report.times(f"GGUF {n}, plain", times)
        took["GGUF", n] = times["ours"]
        if n >= 10_000:
            report.goal("2", f"plain parser / GGUFReader, {n}", times["ours"] / times["GGUFReader"], 1 / 30)
    for kind in ("safetensors", "GGUF"):
        if (kind, SIZES[2]) in took:
            report.goal("3", f"plain {kind}: 100 000 / 10 000 tensors", took[kind, SIZES[2]] / took[kind, SIZES[1]], 15)
    for path in vocabularies:
        times = race(
            rounds, {"ours": ours(path), "C": ggml_c(path), "GGUFReader": lambda path=path: gguf.GGUFReader(path)}
        )
        report.times(path.name + ", plain", times)
        report.goal("2", "plain parser / GGUFReader", times["ours"] / times["GGUFReader"], 1 / 100)


def warm(report: Report, rounds: int, st: dict[int, Path], gg: dict[int, Path], vocabularies: list[Path]) -> None:
    """Goals 1, 2, 3 of the scans."""
    import numba  # noqa: F401

    took: dict[tuple[str, int], float] = {}
    for n, path in st.items():
        contenders = {"ours": ours(path), "json.loads": json_only(path), "safe_open": safe_open_slices(path)}
        times = race(rounds, {**contenders, "ours + frame": lambda path=path: ai.open(path).table.frame})
        report.times(f"safetensors {n}, scan", times)
        took["safetensors", n] = times["ours"]
        if n >= 10_000:
            report.goal("1", f"scan / json.loads, {n}", times["ours"] / times["json.loads"], 0.5)
        if n == SIZES[2]:
            report.goal("1", "scan + DataFrame / safe_open", times["ours + frame"] / times["safe_open"], 0.3)
    for n, path in gg.items():
        times = race(rounds, {"ours": ours(path), "GGUFReader": lambda path=path: gguf.GGUFReader(path)})
        report.times(f"GGUF {n}, scan", times)
        took["GGUF", n] = times["ours"]
        if n >= 10_000:
            report.goal("2", f"scan / GGUFReader, {n}", times["ours"] / times["GGUFReader"], 1 / 100)
    for kind in ("safetensors", "GGUF"):
        if (kind, SIZES[2]) in took:
            report.goal("3", f"scan {kind}: 100 000 / 10 000 tensors", took[kind, SIZES[2]] / took[kind, SIZES[1]], 15)
    for path in vocabularies:
        times = race(
            rounds, {"ours": ours(path), "C": ggml_c(path), "GGUFReader": lambda path=path: gguf.GGUFReader(path)}
        )
        report.times(path.name + ", scan", times)
        report.goal("2", "scan / GGUFReader", times["ours"] / times["GGUFReader"], 1 / 500)
        report.goal("2", "scan / ggml C", times["ours"] / times["C"], 0.2)


def processes(report: Report, rounds: int, st: Path, gg: Path, vocabularies: list[Path]) -> None:
    """Goals 4 and 5: the header command, whole."""
    nothing = process(sys.executable, "-c", "pass")
    times = race(2 * rounds, {"python -c pass": nothing, "safetensors": apsi_info(st), "GGUF": apsi_info(gg)})
    report.times("apsi model info, 300 tensors", times)
    for kind in ("safetensors", "GGUF"):
        report.goal("4", f"apsi model info / python -c pass, {kind}", times[kind] / times["python -c pass"], 5)
    dump = Path(sys.executable).with_name("gguf-dump")
    for path in vocabularies:
        for word, factor in (("llama-bpe", 80), ("gemma-4", 150)):
            if word in path.name:
                times = race(rounds, {"ours": apsi_info(path), "gguf-dump": process(dump, path)})
                report.times(f"{path.name}, whole process", times)
                report.goal("5", "apsi model info / gguf-dump", times["ours"] / times["gguf-dump"], 1 / factor)


def arrays(report: Report, rounds: int, folder: Path) -> None:
    """Goal 17: all tensors as arrays."""
    for n, numel, limit in ((64, 1 << 22, 1 / 100), (10_000, 25_000, 1 / 5)):
        path = write_safetensors(folder / f"arrays-{n}.safetensors", n, numel, KINDS[:1])

        def views(path: Path = path) -> object:
            with ai.open(path) as m:
                return [t.numpy() for t in m.values()]

        times = race(rounds, {"ours": views, "load_file": lambda path=path: load_file(path)})
        report.times(f"{n} tensors as arrays, {path.stat().st_size >> 20} MiB", times)
        report.goal("17", f"ours / load_file, {n} tensors", times["ours"] / times["load_file"], limit)
        path.unlink()


def table(report: Report, rounds: int, path: Path) -> None:
    """Goal 20: the frame of an opened model beside a DataFrame of the same rows as tuples; one level of the tree."""
    from apsi_inspect.table import TensorTable

    model = ai.open(path)
    names = list(TensorTable.of(model).frame.columns)
    tuples = list(TensorTable.of(model).frame.astype(object).itertuples(index=False, name=None))
    paths = [r.name for r in listing_rows(model, sort="file")]

    def nested() -> object:
        root: dict[str, Any] = {}
        for name in paths:
            *inner, last = name.split(".")
            node = root
            for part in inner:
                node = node.setdefault(part, {})
            node[last] = None
        return root

    times = race(
        2 * rounds,
        {
            "frame": lambda: TensorTable.of(model).frame,
            "DataFrame(list of tuples)": lambda: pd.DataFrame(tuples, columns=names),
            "nested dict": nested,
        },
    )
    report.times(f"table of {len(model)} tensors", times)
    report.goal("20", "frame / DataFrame(list of tuples)", times["frame"] / times["DataFrame(list of tuples)"], 0.25)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("vocabularies", nargs="*", type=Path, metavar="VOCABULARY.gguf")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="without 100 000 tensors")
    parser.add_argument("--only", nargs="*", choices=["plain", "processes", "warm", "arrays", "table"])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--cpu", action="store_true", help="CPU time instead of wall time (for a busy machine)")
    args = parser.parse_args()
    if args.cpu:
        global clock
        clock = cpu_seconds
    report, parts = Report(), args.only or ["plain", "processes", "arrays", "table", "warm"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = SIZES[:2] if args.quick else SIZES
        st = {n: write_safetensors(folder / f"{n}.safetensors", n) for n in sizes}
        gg = {n: write_gguf(folder / f"{n}.gguf", n) for n in sizes}
        if "plain" in parts:
            plain(report, args.rounds, st, gg, args.vocabularies)
        if "processes" in parts:
            processes(report, args.rounds, st[300], gg[300], args.vocabularies)
        if "arrays" in parts:
            arrays(report, args.rounds, folder)
        if "table" in parts:
            table(report, args.rounds, st[sizes[-1]])
        if "warm" in parts:
            warm(report, args.rounds, st, gg, args.vocabularies)
            table(report, args.rounds, st[sizes[-1]])
    if args.json:
        args.json.write_text(json.dumps(report.rows, indent=1))


if __name__ == "__main__":
    main()
