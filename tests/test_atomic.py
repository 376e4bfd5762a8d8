"""Writing a file: old or new, never half; nothing is left over. The crash tests kill a child at every system call."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apsi_inspect as ai
from apsi_inspect import atomic
from apsi_inspect.errors import ApsiError

CALLS = ("pwritev", "fsync", "replace", "unlink", "open", "fchmod", "close")
OLD = {"a": np.zeros(300, np.uint8), "b": np.ones(300, np.uint8), "c": np.full(300, 2, np.uint8)}
NEW = {"a": np.full(300, 7, np.uint8), "b": np.full(300, 8, np.uint8), "c": np.full(300, 9, np.uint8), "d": np.uint8(4)}


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def killed_at(n: int, action: Callable[[], Any]) -> bool:
    """Run `action` in a child that is killed before its n-th system call of `CALLS`; True where it was."""
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        return os.WIFSIGNALED(status)
    count = 0
    try:
        for name in CALLS:
            real = getattr(os, name)

            def counted(*args: Any, _real: Any = real, **kwargs: Any) -> Any:
                nonlocal count
                if count == n:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1
                return _real(*args, **kwargs)

            setattr(os, name, counted)
        action()
        os._exit(0)
    finally:  # the child must never return into pytest
        os._exit(3)


def equal(loaded: Any, tree: dict[str, Any]) -> bool:
    return list(loaded) == list(tree) and all(np.array_equal(loaded[k], tree[k]) for k in tree)


@pytest.mark.filterwarnings("ignore:.*beside the index")
@pytest.mark.parametrize("before", [None, 400])
@pytest.mark.parametrize("after", [None, 400, 700])
def test_killed_at_every_call(before: int | None, after: int | None, tmp_path: Path) -> None:
    n = 0
    while True:
        folder = tmp_path / str(n)
        folder.mkdir()
        path = folder / "m.apsim"
        ai.save_model(path, OLD, shard=before)
        whole = names(folder)
        was_killed = killed_at(n, lambda path=path: ai.save_model(path, NEW, shard=after))  # type: ignore[misc]
        for file in [path, folder / "m.apsim.index.json"]:
            if not file.exists():
                continue
            loaded = ai.load_model(file)
            assert equal(loaded, OLD) or equal(loaded, NEW), n
            assert was_killed or equal(loaded, NEW)
        if (folder / "m.apsim").exists() is False and before is None and after is None:
            pytest.fail("the single file is gone")
        for name in set(names(folder)) - set(whole):
            assert name.startswith(".apsi-") or name.endswith((".apsim", ".apsim.index.json"))
        ai.save_model(path, NEW, shard=after)
        assert not [p for p in names(folder) if p.startswith(".")], n
        assert equal(ai.load_model(path), NEW)
        if not was_killed:
            break
        n += 1
    assert n > 5


def test_no_mix_of_shards_loads(tmp_path: Path) -> None:
    """Between removing the index and writing the new one there are shards of both, and nothing that opens them."""
    path = tmp_path / "m.apsim"
    ai.save_model(path, OLD, shard=400)
    seen = []
    real = os.replace

    def watch(a: str, b: str) -> None:
        real(a, b)
        index = tmp_path / "m.apsim.index.json"
        seen.append(index.exists())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", watch)
        ai.save_model(path, NEW, shard=400)
    assert seen == [False] * (len(seen) - 1) + [True]
    assert len(seen) > 2


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int, BaseException], None]:
    """``failing(name, n, exception)``: the n-th call of an os function raises."""

    def fail(name: str, n: int, exception: BaseException) -> None:
        real, left = getattr(os, name), [n]

        def counted(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                raise exception
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, counted)

    return fail


@pytest.mark.parametrize("name", ["pwritev", "fsync", "replace"])
@pytest.mark.parametrize("exception", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("shard", [None, 400])
def test_failure_leaves_the_old_one(
    name: str, exception: BaseException, shard: int | None, tmp_path: Path, failing: Any
) -> None:
    path = tmp_path / "m.apsim"
    ai.save_model(path, OLD, shard=shard)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    failing(name, 0, exception)
    with pytest.raises(type(exception)) as caught:
        ai.save_model(path, NEW, shard=shard)
    if isinstance(exception, OSError) and name != "replace":
        assert "m" in str(caught.value.filename)  # type: ignore[attr-defined]
    if name == "replace" and shard:
        before.pop("m.apsim.index.json")  # between the two there is no index
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


REFUSAL = "the disk refused to write it ({}); nothing was changed"
_LIMITED = """
import resource, signal, sys, numpy as np, apsi_inspect as ai
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
shard = int(sys.argv[2]) or None
try:
    ai.save_model(sys.argv[1], {"v": np.zeros(60_000), "w": np.zeros(70_000), "x": np.zeros(1 << 20)}, shard=shard)
except OSError as exc:
    print(exc.errno, exc.strerror, exc.filename, sep="\\n")
"""


@pytest.mark.parametrize("before", [None, 400])
@pytest.mark.parametrize("shard", [None, 600_000])
def test_file_size_limit(before: int | None, shard: int | None, tmp_path: Path) -> None:
    """A disk that is full, as a limit on file size: a clear error, the old checkpoint, nothing left over.

    Of the shards, the first two fit; the limit meets the third.
    """
    path = tmp_path / "m.apsim"
    saved = ai.save_model(path, OLD, shard=before)
    old = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    argv = [sys.executable, "-c", _LIMITED, str(path), str(shard or 0)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    refused = path if shard is None else tmp_path / "m-00003-of-00003.apsim"
    said = [str(errno.EFBIG), REFUSAL.format(os.strerror(errno.EFBIG)), str(refused)]
    assert done.stdout.splitlines() == said
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == old
    assert equal(ai.load_model(saved), OLD)


class TestMode:
    def test_umask(self, tmp_path: Path) -> None:
        for mask in (0o022, 0o077, 0o002):
            old = os.umask(mask)
            try:
                ai.save_model(tmp_path / f"m{mask}", {})
            finally:
                os.umask(old)
            assert stat.S_IMODE((tmp_path / f"m{mask}").stat().st_mode) == 0o666 & ~mask

    @pytest.mark.parametrize("mode", [0o640, 0o600, 0o444, 0o755])
    def test_of_the_replaced_file(self, mode: int, tmp_path: Path) -> None:
        path = tmp_path / "m"
        ai.save_safetensors(path, {"a": np.zeros(1)})
        path.chmod(mode)
        ai.save_safetensors(path, {"a": np.ones(1)})
        assert stat.S_IMODE(path.stat().st_mode) == mode


class TestPlaces:
    def test_missing_folder(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="missing/dir"):
            ai.save_model(tmp_path / "missing" / "dir" / "m.apsim", {})

    def test_no_temporary_file_can_be_made(self, tmp_path: Path, failing: Any) -> None:
        failing("open", 0, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), ".apsi-0.tmp"))
        with pytest.raises(OSError, match="No space left") as caught:
            ai.save_model(tmp_path / "m.apsim", {})
        assert caught.value.filename == str(tmp_path / "m.apsim")
        assert names(tmp_path) == []

    def test_folder_in_the_way(self, tmp_path: Path) -> None:
        (tmp_path / "m").mkdir()
        with pytest.raises(IsADirectoryError):
            ai.save_model(tmp_path / "m", {})
        assert names(tmp_path) == ["m"]

    def test_dangling_link(self, tmp_path: Path) -> None:
        (tmp_path / "m").symlink_to("/nowhere/x")
        with pytest.raises(FileNotFoundError):
            ai.save_model(tmp_path / "m", {})

    def test_device(self) -> None:
        with pytest.raises(OSError, match="regular"):
            ai.save_model("/dev/null", {})

    @pytest.mark.parametrize("name", ["a b", "#%", "é🙂", "-x", "m" * 249 + ".apsim", "a\nb", "%s{}"])
    def test_odd_names(self, name: str, tmp_path: Path) -> None:
        path = tmp_path / name
        ai.save_model(path, OLD, sign="s")
        assert ai.verify(path, "s").status == "authentic"
        assert names(tmp_path) == [name]

    def test_relative(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        ai.save_model("m.apsim", OLD, shard=400)
        assert equal(ai.load_model("m.apsim"), OLD)
        ai.save_model("m.apsim", NEW)
        assert names(tmp_path) == ["m.apsim"]

    def test_temporary_folder_does_not_matter(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TMPDIR", "/dev/shm")
        ai.save_model(tmp_path / "m", OLD)
        assert equal(ai.load_model(tmp_path / "m"), OLD)


class TestInPlace:
    """Saving over the file that the arrays are mapped from."""

    def test_single(self, tmp_path: Path) -> None:
        path = tmp_path / "m.apsim"
        ai.save_model(path, OLD)
        first = ai.load_model(path)
        ai.save_model(path, {**first, "b": first.b + 1}, {"more": 1})
        assert equal(first, OLD)
        second = ai.load_model(path)
        assert second.b[0] == 2
        assert np.array_equal(second.a, OLD["a"])

    def test_shards(self, tmp_path: Path) -> None:
        path = tmp_path / "m.apsim"
        ai.save_model(path, OLD, shard=400)
        first = ai.load_model(path)
        ai.save_model(path, first, shard=700)
        assert equal(first, OLD)
        assert equal(ai.load_model(path), OLD)

    def test_opened_model(self, tmp_path: Path) -> None:
        path = tmp_path / "m.safetensors"
        ai.save_safetensors(path, OLD, {"k": "v"})
        with ai.open(path) as m:
            ai.save_model(path, ai.quantize_model(m, "int8", min_ndim=9))
            assert np.array_equal(np.asarray(m["c"]), OLD["c"])
        assert ai.open(path).format == "apsim"


def test_leftovers_in_use_stay(tmp_path: Path) -> None:
    (tmp_path / ".apsi-0123456789abcdef.tmp").write_bytes(b"of a process that was killed")
    with atomic.Files() as files:
        mine = files.create(tmp_path / "x")
        assert names(tmp_path) == [os.path.basename(mine.temporary)]
        ai.save_model(tmp_path / "m", OLD)  # another save into the same folder
        assert os.path.exists(mine.temporary)
        mine.write_at(0, [b"hello"])
        files.commit()
    assert (tmp_path / "x").read_bytes() == b"hello"
    assert names(tmp_path) == ["m", "x"]


def test_links_named_like_leftovers_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"p")
    (tmp_path / ".apsi-x.tmp").symlink_to("precious")
    ai.save_model(tmp_path / "m", OLD)
    assert (tmp_path / "precious").read_bytes() == b"p"


def test_many_at_once(tmp_path: Path) -> None:
    """Threads that save the same checkpoint: one of them wins, whole."""
    trees = [{"a": np.full(1000, i, np.uint8), "b": np.full(1000, i, np.uint8)} for i in range(8)]
    errors: list[BaseException] = []

    def work(tree: Any) -> None:
        try:
            for _ in range(5):
                ai.save_model(tmp_path / "m.apsim", tree)
        except ApsiError as exc:
            errors.append(exc)

    threads = [threading.Thread(target=work, args=(t,)) for t in trees]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    loaded = ai.load_model(tmp_path / "m.apsim")
    assert loaded.a[0] == loaded.b[0]
    assert names(tmp_path) == ["m.apsim"]


def test_partial_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev

    def short(fd: int, views: list[memoryview], offset: int) -> int:
        return real(fd, [views[0][:7]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    ai.save_model(tmp_path / "m", OLD)
    assert ai.verify(tmp_path / "m").status == "intact"


def test_write_bytes(tmp_path: Path) -> None:
    atomic.write_bytes(tmp_path / "x", b"one")
    atomic.write_bytes(tmp_path / "x", b"two")
    assert (tmp_path / "x").read_bytes() == b"two"
    assert names(tmp_path) == ["x"]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice about files")
def test_the_disk_begins_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A durable save has the disk begin with each 16 MiB that are written; without durability nothing asks it to."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, length, advice: told.append((offset, offset + length)))
    tree = {str(i): np.full(9_000_000, i, np.uint8) for i in range(5)}
    ai.save_model(tmp_path / "m", tree, durable=False)
    assert told == []
    ai.save_model(tmp_path / "m", tree)
    assert [b - a >> 24 for a, b in told] == [1, 1]
    assert told[0][1] == told[1][0]
    assert (tmp_path / "m").stat().st_size - told[-1][1] < 2 << 24
    assert equal(ai.load_model(tmp_path / "m"), tree)


def test_without_durability_nothing_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise AssertionError

    monkeypatch.setattr(os, "fsync", refuse)
    ai.save_model(tmp_path / "m", OLD, durable=False)
    with pytest.raises(AssertionError):
        ai.save_model(tmp_path / "m", OLD)
    assert equal(ai.load_model(tmp_path / "m"), OLD)
