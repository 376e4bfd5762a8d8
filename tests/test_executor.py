"""Verbs with `executor=` against the same verbs without: equal to the bit, for every kind of file and encoding."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import save_file

import apsi_inspect as ai
from apsi_inspect.errors import ModelFileError, ValueRefusedError
from apsi_inspect.kernels.stats import SEGMENT
from apsi_inspect.ops import stats_tasks
from apsi_inspect.ops.open import open_source
from apsi_inspect.ops.tasks import spec_of
from apsi_inspect.reports import Report
from apsi_inspect.source import BytesSource

from . import test_tasks
from .servers import File, Server


@pytest.fixture(scope="module")
def processes() -> Iterator[Executor]:
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        yield pool


def same(a: pd.DataFrame, b: pd.DataFrame) -> None:
    """Equal to the bit, dtypes included."""
    pd.testing.assert_frame_equal(a, b, check_exact=True)
    for column in a:
        x, y = a[column].to_numpy(), b[column].to_numpy()
        assert [repr(v) for v in x] == [repr(v) for v in y], column


def large(folder: Path, seed: int = 0) -> Path:
    """Tensors of many segments, odd values among them, of several dtypes."""
    rng = np.random.default_rng(seed)
    n = 5 * SEGMENT + 777
    x = rng.standard_normal(n).astype(np.float32)
    x[[0, 5, SEGMENT, n - 1]] = [np.nan, np.inf, -np.inf, 0]
    arrays = {
        "f32": x, "bf16": x.astype(ml_dtypes.bfloat16), "f16": x.astype(np.float16), "f64": x.astype(np.float64) * 1e-3,
        "i64": rng.integers(-(2**62), 2**62, n), "u8": rng.integers(0, 255, n).astype(np.uint8),
        "rows": rng.standard_normal((1000, 1000)).astype(np.float32), "small": x[:10], "empty": x[:0],
        "c64": x[:100].astype(np.complex64), "nothing": np.full(300_000, np.nan, np.float32),
    }  # fmt: skip
    save_file(arrays, folder / "large.safetensors")
    return folder / "large.safetensors"


class TestStats:
    @pytest.mark.filterwarnings("ignore:torch.quantize")
    @pytest.mark.parametrize("kind", test_tasks.KINDS)
    def test_every_kind(self, kind: str, tmp_path: Path, processes: Executor) -> None:
        path = test_tasks.KINDS[kind](tmp_path)
        same(ai.stats(path, executor=processes).frame, ai.stats(path).frame)

    @pytest.mark.parametrize("segments", [1, 2, 3, 32])
    def test_large_tensors_in_parts(
        self, segments: int, tmp_path: Path, processes: Executor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stats_tasks, "RUN", segments * SEGMENT)
        path = large(tmp_path)
        same(ai.stats(path, executor=processes).frame, ai.stats(path).frame)

    @pytest.mark.parametrize("target", ["q4_k", "q8_0", "iq4_nl", "int4", "int8", "fp6"])
    def test_blocks_in_parts(
        self, target: str, tmp_path: Path, processes: Executor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stats_tasks, "RUN", SEGMENT)
        x = np.random.default_rng(1).standard_normal((1000, 1280)).astype(np.float32)
        save_file({"x": x}, tmp_path / "x.safetensors")
        ending = "gguf" if target[0] in "qi" and target[:3] != "int" else "apsim"
        path = tmp_path / f"m.{ending}"
        ai.convert(tmp_path / "x.safetensors", path, dtype=target)
        same(ai.stats(path, executor=processes).frame, ai.stats(path).frame)

    def test_threads(self, tmp_path: Path) -> None:
        path = large(tmp_path)
        with ThreadPoolExecutor(2) as pool:
            same(ai.stats(path, executor=pool).frame, ai.stats(path).frame)

    def test_some_tensors(self, tmp_path: Path, processes: Executor) -> None:
        path = large(tmp_path)
        same(ai.stats(path, "f*", executor=processes).frame, ai.stats(path, "f*").frame)

    def test_a_file_that_changed(self, tmp_path: Path, processes: Executor) -> None:
        with ai.open(large(tmp_path)) as model:
            np.asarray(model["f32"])  # it is mapped here
            large(tmp_path, seed=1)
            with pytest.raises(ModelFileError, match="has changed"):
                ai.stats(model, executor=processes)

    def test_memory_is_refused(self, tmp_path: Path, processes: Executor) -> None:
        model = open_source(BytesSource(large(tmp_path).read_bytes()))
        with pytest.raises(ValueRefusedError, match="in memory"):
            ai.stats(model, executor=processes)

    def test_progress_is_all_of_it(self, tmp_path: Path, processes: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stats_tasks, "RUN", SEGMENT)
        seen: list[Any] = []
        with ai.open(large(tmp_path)) as model:
            tensors = [t for t in model.values() if t.name != "c64"]
            list(stats_tasks.tensor_stats_of(tensors, processes, seen.append))
            assert sum(seen) == sum(t.nbytes for t in tensors)
            assert len(seen) > 30


KEY = b"0123456789abcdef"
ROWS = 3 << 20  # a tensor of 12 MiB: two chunks


def checkpoint(folder: Path, shard: str | None = None, tensors: int = 6) -> Path:
    """A signed .apsim of some chunks."""
    rng = np.random.default_rng(2)
    tree = {f"t{i}": rng.integers(0, 2**32, ROWS, dtype=np.uint32) for i in range(tensors)}
    ai.save_model(folder / "m.apsim", tree, sign=KEY, shard=shard, durable=False)
    return folder / ("m.apsim" if shard is None else "m.apsim.index.json")


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1]))


def unlink_second(folder: Path) -> None:
    sorted(folder.glob("m-*.apsim"))[1].unlink()


def swap_two(folder: Path) -> None:
    a, b, *_ = sorted(folder.glob("m-*.apsim"))
    x, y = a.read_bytes(), b.read_bytes()
    a.write_bytes(y)
    b.write_bytes(x)


def cut_last(folder: Path) -> None:
    last = sorted(folder.glob("m-*.apsim"))[-1]
    last.write_bytes(last.read_bytes()[:-5])


DAMAGE: dict[str, Any] = {
    "none": lambda folder: None,
    "a byte": lambda folder: flip(sorted(folder.glob("m*.apsim"))[0], 9_000_000),
    "bytes of two": lambda folder: [flip(p, p.stat().st_size - 1) for p in sorted(folder.glob("m*.apsim"))[:2]],
    "missing": unlink_second, "mixed": swap_two, "cut": cut_last,
}  # fmt: skip


def alike(a: Report, b: Report) -> None:
    """The same report, to the word."""
    assert a.to_dict() == b.to_dict()
    assert (a.parts, a.damage, a.findings) == (b.parts, b.damage, b.findings)


class TestVerify:
    @pytest.mark.parametrize("full", [False, True])
    @pytest.mark.parametrize("key", [None, KEY, b"another key, not it"])
    @pytest.mark.parametrize("damage", ["none", "a byte", "bytes of two"])
    def test_a_file(self, damage: str, key: bytes | None, full: bool, tmp_path: Path, processes: Executor) -> None:
        path = checkpoint(tmp_path, tensors=2)
        DAMAGE[damage](tmp_path)
        there = ai.verify(path, key, full, executor=processes)
        alike(there, ai.verify(path, key, full))
        assert there.status == (
            "damaged" if damage != "none" else "intact" if key is None else "authentic" if key == KEY else "other-key"
        )

    @pytest.mark.parametrize("full", [False, True])
    @pytest.mark.parametrize("damage", DAMAGE)
    def test_shards(self, damage: str, full: bool, tmp_path: Path, processes: Executor) -> None:
        path = checkpoint(tmp_path, "13MB", 4)
        assert len(list(tmp_path.glob("m-*.apsim"))) == 4
        DAMAGE[damage](tmp_path)
        there = ai.verify(path, KEY, full, executor=processes)
        alike(there, ai.verify(path, KEY, full))
        assert there.ok == (damage == "none")

    def test_small_and_without_chunks(self, tmp_path: Path, data: Path, processes: Executor) -> None:
        ai.save_model(tmp_path / "s.apsim", {"a": np.arange(5)}, sign=KEY)
        for path in (tmp_path / "s.apsim", data / "golden/base_profile.apsim", test_tasks.safetensors(tmp_path)):
            for full in (False, True):
                alike(ai.verify(path, KEY, full, executor=processes), ai.verify(path, KEY, full))

    def test_an_opened_model(self, tmp_path: Path, processes: Executor) -> None:
        for shard, folder in (("13MB", tmp_path / "a"), (None, tmp_path / "b")):
            folder.mkdir()
            with ai.open(checkpoint(folder, shard, 3)) as model:
                alike(model.verify(KEY, executor=processes), model.verify(KEY))

    @pytest.mark.parametrize("full", [False, True])
    def test_progress(self, full: bool, tmp_path: Path, processes: Executor) -> None:
        path = checkpoint(tmp_path, tensors=4)
        seen: list[tuple[int, int]] = []
        ai.verify(path, None, full, executor=processes, progress=lambda done, total: seen.append((done, total)))
        assert [t for _, t in seen] == [seen[-1][0]] * len(seen)
        assert [d for d, _ in seen] == sorted(d for d, _ in seen)
        assert len(seen) > 1


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def both(src: Path, folder: Path, name: str, processes: Executor, **how: Any) -> dict[str, bytes]:
    """Convert with and without an executor; files and reports are the same."""
    found = {}
    for kind, executor in (("here", None), ("there", processes)):
        (folder / kind).mkdir()
        report = ai.convert(src, folder / kind / name, executor=executor, durable=False, **how).to_dict()
        found[kind] = (files(folder / kind), {k: v for k, v in report.items() if k not in ("target", "files")})
    assert found["there"] == found["here"]
    return found["there"][0]


class TestConvert:
    @pytest.mark.filterwarnings("ignore:torch.quantize")
    @pytest.mark.parametrize("kind", [k for k in test_tasks.KINDS if k != "sharded"])
    def test_every_kind(self, kind: str, tmp_path: Path, processes: Executor) -> None:
        src = test_tasks.KINDS[kind](tmp_path)
        both(src, tmp_path, "m.apsim", processes, dtype="int8")

    @pytest.mark.parametrize("target", ["f16", "bf16", "q8_0", "q4_k", "q6_k", "iq4_nl", "f32"])
    def test_to_gguf(self, target: str, tmp_path: Path, processes: Executor) -> None:
        x = np.random.default_rng(3).standard_normal((3000, 1024)).astype(ml_dtypes.bfloat16)
        save_file({"a.weight": x, "b.weight": x[:7].astype(np.float32), "c": np.arange(5)}, tmp_path / "x.safetensors")
        both(tmp_path / "x.safetensors", tmp_path, "m.gguf", processes, dtype=target)

    @pytest.mark.parametrize("how", [{}, {"shard": "1MB"}, {"sign": KEY}, {"shard": "1MB", "sign": KEY}])
    @pytest.mark.parametrize("target", ["int8", "int4", "fp8", "bf16", None])
    def test_to_apsim(self, target: str | None, how: dict[str, Any], tmp_path: Path, processes: Executor) -> None:
        x = np.random.default_rng(3).standard_normal((3000, 1024)).astype(np.float32)
        save_file({"a": x, "b": x[:999], "row": x.reshape(-1)[: 1 << 21]}, tmp_path / "x.safetensors")
        written = both(tmp_path / "x.safetensors", tmp_path, "m.apsim", processes, dtype=target, **how)
        assert (len(written) > 1) == ("shard" in how)
        assert ai.verify(tmp_path / "there" / sorted(written)[-1], KEY if "sign" in how else None).ok

    def test_sharded_both_ways(self, tmp_path: Path, processes: Executor) -> None:
        src = test_tasks.sharded(tmp_path)
        both(src, tmp_path, "m.gguf", processes, dtype="q8_0", shard="100kB")

    def test_a_signed_source_is_verified(self, tmp_path: Path, processes: Executor) -> None:
        path = checkpoint(tmp_path, tensors=1)
        both(path, tmp_path, "m.safetensors", processes, source_key=KEY)

    def test_what_became_infinite_is_counted(self, tmp_path: Path, processes: Executor) -> None:
        x = np.full((2000, 2048), 1e6, np.float32)
        save_file({"a": x, "b": x[:3]}, tmp_path / "x.safetensors")
        report = ai.convert(tmp_path / "x.safetensors", tmp_path / "y.safetensors", "f16", executor=processes)
        assert [f.message for f in report.findings] == [
            f"tensor '{n}': {k} values are too large for F16 and became infinite"
            for n, k in (("a", x.size), ("b", 6144))
        ]

    @pytest.mark.parametrize("ending", ["gguf", "apsim"])
    def test_refused_values_leave_nothing(self, ending: str, tmp_path: Path, processes: Executor) -> None:
        x = np.zeros((4000, 1024), np.float32)
        x[-1, -1] = np.nan
        dtype = "q8_0" if ending == "gguf" else "int8"
        save_file({"w.weight": x}, tmp_path / "x.safetensors")
        for executor in (None, processes):
            with pytest.raises(ValueRefusedError, match=r"w\.weight") as caught:
                ai.convert(tmp_path / "x.safetensors", tmp_path / f"y.{ending}", dtype, executor=executor)
            assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"], caught.value

    @pytest.mark.parametrize("ending", ["gguf", "apsim", "safetensors"])
    def test_ctrl_c_leaves_nothing(self, ending: str, tmp_path: Path, processes: Executor) -> None:
        x = np.ones((6000, 1024), np.float32)
        save_file({"w.weight": x}, tmp_path / "x.safetensors")

        def interrupt(done: int, total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            ai.convert(
                tmp_path / "x.safetensors", tmp_path / f"y.{ending}", "bf16", executor=processes, progress=interrupt
            )
        assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def apsi(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "apsi_inspect", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def alive(group: int) -> bool:
    """Whether a process of a group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


class TestCommand:
    def test_the_same_output(self, tmp_path: Path) -> None:
        path = checkpoint(tmp_path, tensors=1)
        for words in (["verify", path], ["stats", path], ["quantize-error", path], ["compare", path, path]):
            here = apsi("model", *words, "--json")
            there = apsi("model", *words, "--json", "--workers", 2)
            assert (there.stdout, there.stderr, there.returncode) == (here.stdout, "", here.returncode)

    def test_convert(self, tmp_path: Path) -> None:
        src = test_tasks.gguf(tmp_path)
        for name, more in (("a", []), ("b", ["--workers", 2])):
            done = apsi("model", "convert", src, tmp_path / f"{name}.apsim", "--dtype", "int8", *more)
            assert (done.returncode, done.stderr) == (0, "")
        assert (tmp_path / "a.apsim").read_bytes() == (tmp_path / "b.apsim").read_bytes()

    def test_ctrl_c_ends_the_processes(self, tmp_path: Path) -> None:
        save_file({"w": np.ones((16_384, 2048), np.float32)}, tmp_path / "x.safetensors")
        command = ["model", "convert", "x.safetensors", "y.gguf", "--dtype", "q4_k", "--workers", "2"]
        child = subprocess.Popen(
            [sys.executable, "-m", "apsi_inspect", *command], cwd=tmp_path, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        while len(list(tmp_path.iterdir())) == 1:
            assert child.poll() is None
            time.sleep(0.01)
        os.killpg(child.pid, signal.SIGINT)
        out, err = child.communicate(timeout=100)
        assert (child.returncode, out, err) == (130, "", "apsi: interrupted\n")
        assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]
        until = time.monotonic() + 30
        while alive(child.pid):
            assert time.monotonic() < until, "processes are left"
            time.sleep(0.05)

    @pytest.mark.parametrize("more", [["--workers", 0], ["--workers", -1], ["--workers", 2, "--scheduler", "x"]])
    def test_usage(self, more: list[Any], tmp_path: Path) -> None:
        src = test_tasks.gguf(tmp_path)
        for verb in (["verify", src], ["stats", src], ["convert", src, tmp_path / "x.apsim"]):
            done = apsi("model", *verb, *more)
            assert (done.returncode, done.stdout) == (2, ""), verb
            assert "--workers" in done.stderr


class TestRemote:
    """Workers read what is behind a URL by themselves."""

    def test_every_verb(self, tmp_path: Path, processes: Executor) -> None:
        index = checkpoint(tmp_path, "13MB", 3)
        with Server({f"/{p.name}": p.read_bytes() for p in tmp_path.iterdir()}) as server:
            url = f"{server.url}/{index.name}"
            there, here = ai.verify(url, KEY, executor=processes), ai.verify(index, KEY)
            assert {**there.to_dict(), "file": ""} == {**here.to_dict(), "file": ""}
            with ai.open(url) as model:
                frame = ai.stats(model, executor=processes).frame
            same(frame, ai.stats(index).frame)
            ai.convert(url, tmp_path / "a.gguf", architecture="x", executor=processes)
            ai.convert(index, tmp_path / "b.gguf", architecture="x")
            assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()

    def test_options_go_along_and_secrets_do_not_show(self, tmp_path: Path, processes: Executor) -> None:
        path = large(tmp_path)
        with Server({"/large.safetensors": path.read_bytes()}, "needs_token", authorization="Bearer sesame") as server:
            url = f"{server.url}/large.safetensors"
            with ai.open(url, storage_options={"token": "sesame"}) as model:
                spec = spec_of(model["f32"])
                assert "sesame" not in f"{spec} {spec.source!r}"
                same(ai.stats(model, executor=processes).frame, ai.stats(path).frame)

    def test_a_file_that_changed(self, tmp_path: Path, processes: Executor) -> None:
        path = large(tmp_path)
        with Server({"/m.safetensors": path.read_bytes()}) as server:
            url = f"{server.url}/m.safetensors?secret=1"
            with ai.open(url) as model:
                server.files["/m.safetensors"] = File(path.read_bytes() + b"x")
                with pytest.raises(ModelFileError, match="has changed") as caught:
                    ai.stats(model, executor=processes)
            assert "secret" not in str(caught.value)


def test_the_working_folder_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = test_tasks.gguf(tmp_path)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with ai.open(os.path.basename(path)) as model:
        here = ai.stats(model)
        monkeypatch.chdir(tmp_path / "other")
        with ThreadPoolExecutor(1) as executor:
            assert ai.stats(model, executor=executor).frame.equals(here.frame)
