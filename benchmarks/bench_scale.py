"""Verbs over executors: `python benchmarks/bench_scale.py scaling FOLDER` and `… shards FOLDER`; prints JSON.

`scaling`: verify, stats and convert of a checkpoint of 0.25 GB in 2 shards; here on one thread, and over executors of 1
and 2 processes (`ProcessPoolExecutor`, and a dask cluster), in turns; the best of six rounds each, with the files in
the page cache. `shards`: 1 000 sparse shards, once of 4 GB each (a checkpoint of 2e12 bfloat16 parameters: opened,
planned and cut into tasks, which are counted), once of 16 MiB each with digests (verified and measured to the end).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import apsi_inspect as ai
from apsi_inspect.integrity import digests
from apsi_inspect.ops.convert import prepared
from apsi_inspect.ops.stats_tasks import RUN, grouped
from apsi_inspect.ops.verify_tasks import GROUP

SHARDS = 1000
PER_SHARD = 90
BIG = 4_000_000_000 // PER_SHARD // 2 // 4096 * 4096  # elements of a tensor: 90 of them are a shard of about 4 GB


@contextmanager
def processes(n: int) -> Iterator[Executor]:
    with ProcessPoolExecutor(n, get_context("spawn")) as pool:
        yield pool


@contextmanager
def dask(n: int) -> Iterator[Executor]:
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=n, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(n)
        yield client.get_executor(pure=False)


def best(runs: dict[str, Callable[[], Any]], rounds: int = 6) -> dict[str, float]:
    """Seconds of the fastest round of each, after one that warms up; they take turns, so all meet the same load."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: round(min(t[1:]), 3) for name, t in times.items()}


def checkpoint(folder: Path) -> tuple[Path, Path]:
    """0.25 GB of bfloat16 in 2 shards, as .apsim and as safetensors."""
    rng = np.random.default_rng(0)
    block = rng.standard_normal((4096, 1024)).astype(np.float32)
    tree = {f"layer.{i}.weight": np.roll(block, i, 0).astype(ml_dtypes.bfloat16) for i in range(30)}
    ai.save_model(folder / "m.apsim", tree, shard="130MB", durable=False)
    ai.save_safetensors(folder / "m.safetensors", tree)
    return folder / "m.apsim.index.json", folder / "m.safetensors"


def scaling(folder: Path) -> dict[str, Any]:
    apsim, plain = checkpoint(folder)
    out = folder / "out.gguf"
    verbs: dict[str, Callable[..., Any]] = {
        "verify": lambda **how: ai.verify(apsim, **how),
        "stats": lambda **how: ai.stats(plain, progress=False, **{k: v for k, v in how.items() if k != "threads"}),
        "convert to Q8_0": lambda **how: ai.convert(plain, out, "q8_0", force=True, durable=False, **how),
        "convert to Q4_K": lambda **how: ai.convert(plain, out, "q4_k", force=True, durable=False, **how),
    }
    found: dict[str, Any] = {"load before": os.getloadavg()[0], "bytes": plain.stat().st_size}
    with processes(1) as p1, processes(2) as p2, dask(1) as d1, dask(2) as d2:
        executors = {"1 process": p1, "2 processes": p2, "1 dask worker": d1, "2 dask workers": d2}
        for name, verb in verbs.items():
            runs = {"here, 1 thread" if name != "stats" else "here": lambda verb=verb: verb(threads=1)}
            runs |= {kind: lambda verb=verb, e=e: verb(executor=e) for kind, e in executors.items()}
            found[name] = best(runs)
            print(name, found[name], os.getloadavg(), file=sys.stderr, flush=True)
    found["load after"] = os.getloadavg()[0]
    return found


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000


def timed(run: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """The result, and seconds: of the clock, and of this process's CPU."""
    start, used = time.perf_counter(), time.process_time()
    result = run()
    return result, {"wall": round(time.perf_counter() - start, 2), "cpu": round(time.process_time() - used, 2)}


def sparse(path: Path, header: bytes, size: int) -> None:
    with path.open("wb") as f:
        f.write(header)
        f.truncate(len(header) + size)


def entry(dtype: str, shape: list[int], begin: int, nbytes: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + nbytes]}


def head(entries: dict[str, Any]) -> bytes:
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def two_trillion(folder: Path) -> dict[str, Any]:
    """2e12 parameters, planned but not read."""
    weight_map = {}
    for i in range(SHARDS):
        file = f"model-{i + 1:05d}-of-{SHARDS:05d}.safetensors"
        names = [f"model.layers.{i}.experts.{j}.weight" for j in range(PER_SHARD)]
        shape, nbytes = [BIG // 4096, 4096], 2 * BIG
        table = {n: entry("BF16", shape, j * nbytes, nbytes) for j, n in enumerate(names)}
        sparse(folder / file, head(table), PER_SHARD * nbytes)
        weight_map |= dict.fromkeys(names, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": SHARDS * PER_SHARD * 2 * BIG}, "weight_map": weight_map}))
    before = descriptors()
    model, opened = timed(lambda: ai.open(index))
    found: dict[str, Any] = {
        "parameters": int(model.table.frame["numel"].sum()), "bytes": model.file_size, "tensors": len(model),
        "open, s": opened, "descriptors held": descriptors() - before, "peak after open, MB": peak_mb(),
    }  # fmt: skip
    tasks, found["cut stats into tasks, s"] = timed(lambda: sum(1 for _ in grouped(model.values())))
    found["stats tasks"] = tasks

    def plan() -> Any:
        with prepared(model, folder / "out.gguf", "q4_k", shard="4GB") as conversion:
            return conversion.report

    report, found["plan conversion to Q4_K, s"] = timed(plan)
    found |= {"planned bytes": report.size_after, "planned files": len(report.files), "peak, MB": peak_mb()}
    found["verify tasks, were it .apsim"] = SHARDS * -(-(PER_SHARD * 2 * BIG) // (GROUP * digests.CHUNK))
    found["elements of a stats task"] = RUN
    return found


def digested(folder: Path) -> Path:
    """1 000 sparse .apsim shards of 16 MiB whose chunk digests hold."""
    zeros = hashlib.sha256(bytes(digests.CHUNK)).digest()
    paths, rows = [], []
    weight_map = {}
    whole = hashlib.sha256(bytes(2 * digests.CHUNK)).hexdigest()  # of the stream: compared with the index, not read
    for i in range(1, SHARDS + 1):
        name, file = f"t{i}", f"m-{i:05d}-of-{SHARDS:05d}.apsim"
        table = {name: entry("BF16", [2048, 4096], 0, 2 * digests.CHUNK)}
        chunks = [zeros, zeros]
        meta = {
            "format": "apsi-model", "version": "1", "apsi": "bench", "shard": f"{i}/{SHARDS}", "sha256": whole,
            "chunks": digests.chunks_text(chunks, digests.root_of(digests.jcs(table), chunks)),
        }  # fmt: skip
        meta["meta_sha256"] = digests.meta_sha256(meta)
        sparse(folder / file, head({"__metadata__": meta, **table}), 2 * digests.CHUNK)
        weight_map[name] = file
        paths.append(file)
        rows.append({"file": file, "sha256": whole, "meta_sha256": meta["meta_sha256"]})
    return write_index(folder, rows, weight_map)


def write_index(folder: Path, rows: list[dict[str, str]], weight_map: dict[str, str]) -> Path:
    from apsi_inspect.formats.apsim_write import index_sha256

    metadata: dict[str, Any] = {
        "format": "apsi-model", "version": "1", "apsi": "bench", "shards": rows,
        "total_size": SHARDS * 2 * digests.CHUNK,
    }  # fmt: skip
    metadata["index_sha256"] = index_sha256(metadata)
    path = folder / "m.apsim.index.json"
    path.write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    return path


def run_digested(folder: Path) -> dict[str, Any]:
    index = digested(folder)
    found: dict[str, Any] = {"load before": os.getloadavg()[0]}
    most = [0]

    def watch(done: int, total: int) -> None:
        most[0] = max(most[0], descriptors())

    before = descriptors()
    report, found["verify here, s"] = timed(lambda: ai.verify(index, progress=watch))
    assert report.ok, report
    print(found, file=sys.stderr, flush=True)
    found |= {"descriptors here": most[0] - before, "peak here, MB": peak_mb()}
    for kind, make in (("processes", processes), ("dask", dask)):
        most[0] = 0
        with make(2) as executor:
            before = descriptors()
            there, used = timed(lambda e=executor: ai.verify(index, executor=e, progress=watch))
            assert there.to_dict() == report.to_dict()
            found[f"verify, 2 {kind}, s"], found[f"descriptors, 2 {kind}"] = used, most[0] - before
            print(found, file=sys.stderr, flush=True)
    found["peak of the caller, MB"] = peak_mb()
    found["peak of a worker, MB"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1000
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["scaling", "shards"])
    parser.add_argument("folder", type=Path, help="an empty folder with room for 5 GB; it is emptied afterwards")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    try:
        if args.what == "scaling":
            print(json.dumps(scaling(args.folder), indent=1))
            return
        for run in (two_trillion, run_digested):
            (args.folder / run.__name__).mkdir()
            print(json.dumps({run.__name__: run(args.folder / run.__name__)}, indent=1), flush=True)
    finally:
        shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
