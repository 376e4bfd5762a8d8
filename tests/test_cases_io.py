"""The files-and-folders family of the bank of cases (`io-`): each is carried out as its steps say, under its id."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apsi_inspect as ai
from apsi_inspect.errors import ModelFileError

from .case_steps import CASES, Scripts, entry
from .test_atomic import killed_at
from .test_cases import check_tensors, missing

steps = Scripts("io-")
RIGHT = np.array(ai.load_safetensors(CASES / "io" / "model.safetensors").w)


@pytest.mark.parametrize("case", steps.cases.values(), ids=lambda c: c["id"])
def test_case(case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    start = time.process_time()
    steps.scripts[case["id"]](case, tmp_path)
    assert time.process_time() - start < case["limits"]["max_seconds"]


def values(path: Path) -> np.ndarray[Any, Any]:
    """Tensor w of a file, copied."""
    with ai.open(path) as model:
        return np.array(model["w"])


def apsi(*args: object) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "apsi_inspect", *map(str, args)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)


@steps("io-in-place")
def in_place(case: dict[str, Any], folder: Path) -> None:
    """Saved over the file that is open: both are right, the old object by its own map."""
    path = entry(case, folder)
    with ai.open(path) as model:
        ai.save_safetensors(path, model, {**model.metadata, "note": "x"})
        assert np.array_equal(np.asarray(model["w"]), RIGHT)
        with ai.open(path) as again:
            check_tensors(again, case["expect"])
            assert again.metadata["note"] == "x"
    with ai.open(path) as model:
        ai.convert(path, path, force=True)
        assert np.array_equal(np.asarray(model["w"]), RIGHT)
    assert np.array_equal(values(path), RIGHT)
    assert os.listdir(folder) == [path.name]


@steps("io-in-place-quantize")
def in_place_quantize(case: dict[str, Any], folder: Path) -> None:
    path = entry(case, folder)
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        ai.convert(path, path, "bf16")
    assert path.read_bytes() == before
    with ai.open(path) as model:
        ai.save_model(path, ai.quantize_model(model, "int8", min_ndim=1))
        assert np.array_equal(np.asarray(model["w"]), RIGHT)
    with ai.open(path) as model:
        assert model.verify().status == "intact"
        error = np.abs(np.asarray(model["w"]) - RIGHT).max()
    assert 0 < error <= np.abs(RIGHT).max() / 127 * 0.501
    assert os.listdir(folder) == [path.name]


@steps("io-no-clobber")
def no_clobber(case: dict[str, Any], folder: Path) -> None:
    """Refused without --force; with it, replaced."""
    path, other = entry(case, folder), folder / "notes.safetensors"
    other.write_text("my notes")
    with pytest.raises(FileExistsError, match=r"notes\.safetensors"):
        ai.convert(path, other)
    done = apsi("model", "convert", path, other)
    assert done.returncode == 3
    assert "notes.safetensors" in done.stderr
    assert "--force" in done.stderr
    assert other.read_text() == "my notes"
    assert apsi("model", "convert", path, other, "--force").returncode == 0
    assert np.array_equal(values(other), RIGHT)


@steps("io-keep-mode")
def keep_mode(case: dict[str, Any], folder: Path) -> None:
    path, out = entry(case, folder), folder / "out.safetensors"
    out.write_text("x")
    out.chmod(0o640)
    ai.convert(path, out, force=True)
    assert f"{stat.S_IMODE(out.stat().st_mode):04o}" in case["expect"]["modes"]


@steps("io-out-dangling")
def out_dangling(case: dict[str, Any], folder: Path) -> None:
    """An error that names the place that is not there; the link stays."""
    path, out = entry(case, folder), folder / "out.safetensors"
    out.symlink_to("/nowhere/x")
    for force in (False, True):
        with pytest.raises(OSError, match=r"/nowhere|out\.safetensors"):
            ai.convert(path, out, force=force)
    assert os.readlink(out) == "/nowhere/x"
    assert sorted(os.listdir(folder)) == ["model.safetensors", "out.safetensors"]


@steps("io-no-dir")
def no_dir(case: dict[str, Any], folder: Path) -> None:
    path = entry(case, folder)
    with pytest.raises(FileNotFoundError) as caught:
        ai.convert(path, folder / "missing" / "dir" / "out.safetensors")
    assert not missing(str(caught.value), case["expect"]["error_mentions"])
    done = apsi("model", "convert", path, folder / "missing" / "dir" / "out.safetensors")
    assert done.returncode == 3
    assert not missing(done.stderr, case["expect"]["error_mentions"])
    assert os.listdir(folder) == [path.name]


@steps("io-kill")
def kill(case: dict[str, Any], folder: Path) -> None:
    """Killed before every system call of the write: the old file, or the new one after its rename."""
    path = entry(case, folder)
    n = 0
    while True:
        place = folder / str(n)
        place.mkdir()
        out = place / "out.safetensors"
        ai.save_safetensors(out, {"w": np.zeros(3)})
        old = out.read_bytes()
        was_killed = killed_at(n, lambda out=out: ai.convert(path, out, "f16", force=True, threads=1))  # type: ignore[misc]
        assert out.read_bytes() == old or np.array_equal(values(out), RIGHT.astype("f2"))
        left = [p.name for p in place.iterdir() if p != out]
        assert not [name for name in left if Path(name).suffix in (".safetensors", ".gguf", ".apsim", ".json")]
        with ai.open(place) as found:  # what a folder holds is its model, not what was left over
            assert found.path == str(out)
        if not was_killed:
            break
        n += 1
    assert n > 3


@steps("io-cross-device")
def cross_device(case: dict[str, Any], folder: Path) -> None:
    path = entry(case, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", "/dev/shm")
        for ending in ("safetensors", "apsim", "gguf"):
            ai.convert(path, folder / f"out.{ending}")
            with ai.open(folder / f"out.{ending}") as model:
                assert np.array_equal(np.asarray(model["w"]), RIGHT)
    with ai.open(folder / "out.safetensors") as model:
        check_tensors(model, case["expect"])


@steps("io-shrink-mapped")
def shrink_mapped(case: dict[str, Any], folder: Path) -> None:
    """Cut after it was opened, before and after the map was made: an exception, and the process goes on."""
    code = """
import sys, numpy as np, apsi_inspect as ai
model = ai.open(sys.argv[1])
if sys.argv[2] == "mapped":
    model["w"].raw()
open(sys.argv[1], "r+b").truncate(100)
try:
    print(np.asarray(model["w"]).sum())
except ai.ModelFileError as exc:
    print("refused:", exc)
print("alive")
"""
    for when in ("opened", "mapped"):
        path = entry(case, folder)
        argv = [sys.executable, "-c", code, str(path), when]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("refused:")
        assert "shrunk" in done.stdout or "has changed" in done.stdout
        assert done.stdout.endswith("alive\n")


@steps("io-handles")
def handles(case: dict[str, Any], folder: Path) -> None:
    path = entry(case, folder)

    def held() -> tuple[int, int]:
        with open("/proc/self/maps") as f:
            return len(os.listdir("/proc/self/fd")), sum(str(folder) in line for line in f)

    def once(i: int) -> None:
        if i % 2:
            with ai.open(path) as model:
                copy = np.array(model["w"])
        else:
            model = ai.open(path)
            copy = np.array(model["w"])
            model.close()
            del model
        assert copy[-1] == RIGHT[-1]

    once(0)
    before = held()
    for i in range(2000):
        once(i)
    assert held() == before
    assert before[1] == case["expect"]["leaks"] == 0
    path.rename(folder / "x")
    (folder / "x").unlink()


@steps("io-writable-view")
def writable_view(case: dict[str, Any], folder: Path) -> None:
    path = entry(case, folder)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with ai.open(path) as model:
        a = np.asarray(model["w"])
        with pytest.raises(ValueError, match="read-only"):
            a[0] = 99
        assert np.array_equal(np.asarray(model["w"]), RIGHT)
        mine = np.array(model["w"])
        mine[0] = 99
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    assert np.array_equal(ai.load_safetensors(path).w, RIGHT)


@steps("io-dev-zero")
def dev_zero(case: dict[str, Any], folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    (folder / "empty").mkdir()
    held = socket.socket(socket.AF_UNIX)
    held.bind("socket")
    try:
        for name in ("/dev/zero", folder / "fifo", folder / "empty", folder / "socket"):
            done = apsi("model", "info", name)
            assert done.returncode == 3
            assert "Traceback" not in done.stderr
            if Path(name).name == "socket":  # the system refuses to open one
                with pytest.raises((ModelFileError, OSError), match=r"socket|No such device"):
                    ai.open(name)
                continue
            with pytest.raises(ModelFileError) as caught:
                ai.open(name)
            assert not missing(str(caught.value), case["expect"]["error_mentions"])
    finally:
        held.close()


@steps("io-odd-paths")
def odd_paths(case: dict[str, Any], folder: Path) -> None:
    for name in case["expect"]["names"]:
        path = folder / name
        path.write_bytes((CASES / case["entry"]).read_bytes())
        with ai.open(path) as model:
            check_tensors(model, case["expect"])
        done = apsi("model", "info", "--", name)
        assert done.returncode == 0, done.stderr
        signed = path.with_suffix(".apsim")
        assert ai.convert(path, signed, sign="s").files == [str(signed)]
        assert ai.verify(signed, "s").status == "authentic"
        assert apsi("model", "verify", "--key", "s", "--", signed.name).returncode == 0
        ai.convert(signed, path, force=True)
        with ai.open(path) as model:
            check_tensors(model, case["expect"])
        assert sorted(os.listdir(folder)) == sorted([name, signed.name])
        path.unlink()
        signed.unlink()


@steps("io-export-names")
def export_names(case: dict[str, Any], folder: Path) -> None:
    """A file per tensor is not offered; names are never paths: shards hold all of them, nothing is outside."""
    assert not {"export", "extract"} & set(apsi("model", "--help").stdout.split())
    inside = folder / "a" / "b"
    inside.mkdir(parents=True)
    path = entry(case, inside)
    with ai.open(path) as model:
        names = list(model)
        assert len(names) == case["expect"]["n_files"]
        report = ai.convert(path, inside / "out.apsim", shard=4)
        assert len(report.files) == 5  # four shards and the index
        with ai.open(inside / "out.apsim.index.json") as again:
            assert set(again) == set(names)
            assert all(bytes(again[n].raw()) == bytes(model[n].raw()) for n in names)
        said = apsi("model", "info", path)
        assert said.returncode == 0, said.stderr
    assert sorted(os.listdir(folder)) == ["a"]
    assert sorted(os.listdir(folder / "a")) == ["b"]
    assert not os.path.exists("/tmp/apsi_evil")


@steps("io-shard-kill")
def shard_kill(case: dict[str, Any], folder: Path) -> None:
    """Killed before every system call of a sharded write over an older set: old, new, or no index."""
    old = {"v": np.zeros(100), "w": RIGHT + 1}
    n = 0
    while True:
        place = folder / str(n)
        place.mkdir()
        out = place / "out.apsim"
        index = Path(ai.save_model(out, old, shard=2000))
        was_killed = killed_at(n, lambda out=out: ai.save_model(out, {"v": np.ones(100), "w": RIGHT}, shard=2000))  # type: ignore[misc]
        if index.exists():
            loaded = ai.load_model(index)
            assert (loaded.v[0], loaded.w[0] - RIGHT[0]) in ((0, 1), (1, 0)), n
        else:
            with pytest.raises((ModelFileError, OSError)):
                ai.load_model(out)
        if not was_killed:
            break
        n += 1
    assert n > 5


@steps("io-lock-doc")
def concurrent_readers(case: dict[str, Any], folder: Path) -> None:
    path = entry(case, folder)
    model = ai.open(path)
    errors: list[int] = []

    def work() -> None:
        for _ in range(200):
            if not np.array_equal(np.asarray(model["w"]), RIGHT):
                errors.append(1)

    def child() -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            work()
            os._exit(len(errors))
        finally:
            os._exit(99)

    children = [child() for _ in range(4)]
    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    check_tensors(model, case["expect"])
    model.close()


def test_every_case_is_scripted() -> None:
    assert steps.scripts.keys() == steps.cases.keys()
    assert len(steps.cases) == 16
