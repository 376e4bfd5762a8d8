"""Verbs on a dask cluster of two processes: equal to the bit, also where a worker is killed in the middle."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apsi_inspect as ai
from apsi_inspect.errors import ApsiError, ModelFileError
from apsi_inspect.ops import stats_tasks, verify_tasks
from apsi_inspect.ops.tasks import run_tasks

from . import test_tasks
from .test_executor import DAMAGE, KEY, SEGMENT, alike, both, checkpoint, large, same

distributed = pytest.importorskip("distributed", reason="dask.distributed is not installed (extra: distributed)")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs="CRITICAL"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def executor(client: Any) -> Executor:
    client.wait_for_workers(2, timeout=240)
    return client.get_executor(pure=False)  # type: ignore[no-any-return]


def slow_square(i: int) -> tuple[int, int]:
    time.sleep(0.05)
    return i * i, os.getpid()


def sleep_and_leave(path: str, i: int) -> int:
    time.sleep(1)
    Path(path, str(i)).touch()
    return i


def refuse(i: int) -> int:
    raise ModelFileError("m.gguf", f"task {i}", "here", "a hint")


def pids(client: Any) -> list[int]:
    return list(client.run(os.getpid).values())


class TestTasks:
    def test_order_on_two_workers(self, executor: Executor) -> None:
        found = list(run_tasks(slow_square, ((i,) for i in range(20)), executor, window=6))
        assert [x for x, _ in found] == [i * i for i in range(20)]
        assert len({pid for _, pid in found}) == 2

    def test_a_killed_worker_is_replaced(self, client: Any, executor: Executor) -> None:
        results = run_tasks(slow_square, ((i,) for i in range(60)), executor)
        first = [next(results)[0] for _ in range(4)]
        os.kill(pids(client)[0], signal.SIGKILL)
        assert first + [x for x, _ in results] == [i * i for i in range(60)]

    def test_an_error_comes_through_whole(self, executor: Executor) -> None:
        with pytest.raises(ModelFileError) as caught:
            list(run_tasks(refuse, [(1,)], executor))
        assert str(caught.value) == "m.gguf: here: task 1 (a hint)"

    def test_what_has_not_begun_is_cancelled(self, client: Any, executor: Executor, tmp_path: Path) -> None:
        client.run(slow_square, 1)  # both have imported what they need
        results = run_tasks(sleep_and_leave, ((str(tmp_path), i) for i in range(40)), executor)
        assert next(results) == 0
        results.close()  # type: ignore[attr-defined]
        time.sleep(5)
        count = len(list(tmp_path.iterdir()))
        time.sleep(2)
        assert len(list(tmp_path.iterdir())) == count < 35


class TestEqual:
    @pytest.mark.filterwarnings("ignore:torch.quantize")
    @pytest.mark.parametrize("kind", test_tasks.KINDS)
    def test_stats(self, kind: str, tmp_path: Path, executor: Executor) -> None:
        path = test_tasks.KINDS[kind](tmp_path)
        same(ai.stats(path, executor=executor).frame, ai.stats(path).frame)

    def test_stats_of_large_tensors(self, tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stats_tasks, "RUN", SEGMENT)
        path = large(tmp_path)
        same(ai.stats(path, executor=executor).frame, ai.stats(path).frame)

    @pytest.mark.parametrize("damage", DAMAGE)
    def test_verify(self, damage: str, tmp_path: Path, executor: Executor) -> None:
        path = checkpoint(tmp_path, "13MB", 4)
        DAMAGE[damage](tmp_path)
        for full in (False, True):
            alike(ai.verify(path, KEY, full, executor=executor), ai.verify(path, KEY, full))

    @pytest.mark.parametrize(("name", "dtype"), [("m.gguf", "q4_k"), ("m.apsim", "int4"), ("m.safetensors", "bf16")])
    @pytest.mark.parametrize("shard", [None, "1MB"])
    def test_convert(self, name: str, dtype: str, shard: str | None, tmp_path: Path, executor: Executor) -> None:
        x = np.random.default_rng(0).standard_normal((4000, 1024)).astype(np.float32)
        ai.save_safetensors(tmp_path / "x.safetensors", {f"t{i}": x[i * 500 :] for i in range(8)})
        both(tmp_path / "x.safetensors", tmp_path, name, executor, dtype=dtype, shard=shard)

    def test_quant_error(self, tmp_path: Path, executor: Executor) -> None:
        path = ai.samples.path("fracast.safetensors")
        formats = ["q8_0", "q4_k", "int8", "f16"]
        same(ai.quant_error(path, formats, executor=executor).frame, ai.quant_error(path, formats).frame)

    def test_compare(self, tmp_path: Path, executor: Executor) -> None:
        path = ai.samples.path("fracast.safetensors")
        ai.convert(path, tmp_path / "m.apsim", "int8")
        there = ai.compare(path, tmp_path / "m.apsim", executor=executor)
        assert there.to_dict() == ai.compare(path, tmp_path / "m.apsim").to_dict()


class TestKilled:
    """A worker that is killed in the middle of a verb changes nothing of its result."""

    @staticmethod
    def killer(client: Any, at: int) -> Any:
        """A progress function that kills a worker at its `at`-th call."""
        calls: list[Any] = []

        def step(*progress: int) -> None:
            calls.append(progress)
            if len(calls) == at:
                os.kill(pids(client)[0], signal.SIGKILL)

        step.calls = calls  # type: ignore[attr-defined]
        return step

    def test_verify(self, tmp_path: Path, client: Any, executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(verify_tasks, "GROUP", 1)
        path = checkpoint(tmp_path, "13MB", 8)
        step = self.killer(client, 3)
        alike(ai.verify(path, KEY, executor=executor, progress=step), ai.verify(path, KEY))
        assert len(step.calls) > 5

    def test_stats(self, tmp_path: Path, client: Any, executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stats_tasks, "RUN", SEGMENT)
        path = large(tmp_path)
        expected = ai.stats(path)
        with ai.open(path) as model:
            tensors = [t for t in model.values() if t.name != "c64"]
            step = self.killer(client, 3)
            found = list(stats_tasks.tensor_stats_of(tensors, executor, step))
        frame = expected.frame.set_index("name")[["min", "max", "mean", "std"]].astype(float)
        for tensor, s in zip(tensors, found, strict=True):
            row = [float(x) for x in (s.min, s.max, s.mean, s.std)]
            assert repr(row) == repr(frame.loc[tensor.name].tolist())

    def test_convert(self, tmp_path: Path, client: Any, executor: Executor) -> None:
        x = np.random.default_rng(0).standard_normal((8000, 1024)).astype(np.float32)
        ai.save_safetensors(tmp_path / "x.safetensors", {f"t{i}": x for i in range(4)})
        expected = tmp_path / "expected.gguf"
        ai.convert(tmp_path / "x.safetensors", expected, "q4_k", durable=False)
        found = tmp_path / "found.gguf"
        step = self.killer(client, 2)
        ai.convert(tmp_path / "x.safetensors", found, "q4_k", executor=executor, progress=step, durable=False)
        assert found.read_bytes() == expected.read_bytes()


def test_ctrl_c_leaves_nothing_and_the_cluster_goes_on(tmp_path: Path, executor: Executor) -> None:
    ai.save_safetensors(tmp_path / "x.safetensors", {"w": np.ones((9000, 1024), np.float32)})

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ai.convert(tmp_path / "x.safetensors", tmp_path / "y.gguf", "q4_k", executor=executor, progress=interrupt)
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]
    assert list(run_tasks(abs, [(-1,), (-2,)], executor)) == [1, 2]


def dies(i: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return i


def test_a_task_that_always_kills_its_worker_is_given_up(executor: Executor) -> None:
    with pytest.raises((ApsiError, distributed.scheduler.KilledWorker)):
        list(run_tasks(dies, [(0,)], executor))


def test_the_command_on_a_cluster(client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from apsi_inspect.cli import main

    src, address = test_tasks.gguf(tmp_path), client.scheduler.address
    for verb in (["verify", src], ["stats", src], ["stats", src, "--json"]):
        words = ["model", *map(str, verb)]
        assert main(words) == 0
        alone = capsys.readouterr().out
        assert main([*words, "--scheduler", address]) == 0
        assert capsys.readouterr().out == alone
    for name, more in (("a.apsim", []), ("b.apsim", ["--scheduler", address])):
        assert main(["model", "convert", str(src), str(tmp_path / name), *more]) == 0
    assert (tmp_path / "a.apsim").read_bytes() == (tmp_path / "b.apsim").read_bytes()


def test_an_address_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from apsi_inspect.cli import main

    assert main(["model", "verify", str(test_tasks.gguf(tmp_path)), "--scheduler", "nonsense"]) == 2
    assert "tcp://HOST:8786 was expected" in capsys.readouterr().err
