"""Bytes of files: bounds, views that outlive their source, closing, changes on disk, what is no regular file."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from apsi_inspect.errors import ModelFileError, TruncatedFileError
from apsi_inspect.source import BytesSource, FileSource

CONTENT = bytes(range(256)) * 40


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "file"
    found.write_bytes(CONTENT)
    return found


SOURCES: dict[str, Callable[[Path], BytesSource | FileSource]] = {
    "file": FileSource,
    "file, not kept open": lambda p: FileSource(p, keep_open=False),
    "file, not mapped": lambda p: FileSource(p, mmap=False),
    "file, neither": lambda p: FileSource(p, keep_open=False, mmap=False),
    "bytes": lambda p: BytesSource(p.read_bytes(), str(p)),
    "bytearray": lambda p: BytesSource(bytearray(p.read_bytes()), str(p)),
    "memoryview of words": lambda p: BytesSource(memoryview(p.read_bytes()).cast("I"), str(p)),
}
every = pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)


@every
def test_ranges(path: Path, make: Callable[[Path], BytesSource | FileSource]) -> None:
    source = make(path)
    assert (source.name, source.size) == (str(path), len(CONTENT))
    for a, n in ((0, 0), (0, 1), (5, 300), (len(CONTENT) - 1, 1), (len(CONTENT), 0), (0, len(CONTENT))):
        assert source.read_at(a, n) == CONTENT[a : a + n]
        view = source.view(a, n)
        assert view == CONTENT[a : a + n]
        assert view.readonly
        assert view.format == "B"


@every
@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, len(CONTENT) + 1), (len(CONTENT), 1), (-1, 1), (0, -1), (5, -5), (2**63, 1), (1, 2**64)],
)
def test_bounds(path: Path, make: Callable[[Path], BytesSource | FileSource], offset: int, nbytes: int) -> None:
    source = make(path)
    for ask in (source.read_at, source.view):
        with pytest.raises(TruncatedFileError) as info:
            ask(offset, nbytes)
        assert str(path) in str(info.value)


@every
def test_a_view_outlives_the_source(path: Path, make: Callable[[Path], BytesSource | FileSource]) -> None:
    source = make(path)
    view = source.view(3, 9000)
    source.close()
    source.close()
    del source
    gc.collect()
    path.unlink()
    assert view == CONTENT[3:9003]


def test_closed_is_said(path: Path) -> None:
    for source in (FileSource(path), FileSource(path, keep_open=False)):
        with source:
            source.read_at(0, 1)
        for ask in (source.read_at, source.view):
            with pytest.raises(ModelFileError, match="is closed"):
                ask(0, 1)


def test_no_descriptor_leaks(path: Path) -> None:
    before = descriptors()
    for keep in (True, False):
        source = FileSource(path, keep_open=keep)
        assert descriptors() == before + keep
        view = source.view(0, 10)
        source.close()
        del view, source
        assert descriptors() == before
    for bad in (path.parent, Path("/dev/null")):
        with pytest.raises(ModelFileError):
            FileSource(bad)
    assert descriptors() == before


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    source = FileSource(tmp_path / "empty")
    assert (source.size, source.read_at(0, 0), bytes(source.view(0, 0))) == (0, b"", b"")


@pytest.mark.parametrize("kind", ["directory", "pipe", "device", "socket"])
def test_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    import socket

    path = tmp_path / kind
    server = socket.socket(socket.AF_UNIX)
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        server.bind(str(path))
    else:
        path = Path("/dev/zero")
    outcome: list[BaseException] = []

    def attempt() -> None:
        try:
            FileSource(path)
        except (ModelFileError, OSError) as exc:
            outcome.append(exc)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(2)
    server.close()
    assert not thread.is_alive()
    assert isinstance(outcome[0], OSError if kind == "socket" else ModelFileError)


def test_missing_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FileSource(tmp_path / "none")


def test_a_file_that_shrank(path: Path) -> None:
    source = FileSource(path)
    os.truncate(path, 100)
    with pytest.raises(TruncatedFileError, match="ends at byte 100"):
        source.read_at(50, 100)
    with pytest.raises(TruncatedFileError, match="shrunk"):
        source.view(0, 10)


def test_a_file_that_was_replaced(path: Path) -> None:
    kept, reopened = FileSource(path), FileSource(path, keep_open=False)
    other = path.with_name("other")
    other.write_bytes(b"x" * len(CONTENT))
    os.replace(other, path)
    assert kept.read_at(0, 5) == CONTENT[:5]
    assert bytes(kept.view(0, 5)) == CONTENT[:5]
    with pytest.raises(ModelFileError, match="changed on disk"):
        reopened.read_at(0, 5)


def test_without_descriptors_a_view_is_a_copy(path: Path, measured: Callable[..., tuple[str, float]]) -> None:
    code = """
from apsi_inspect.source import FileSource
sources = [FileSource(sys.argv[1], keep_open=False) for _ in range(200)]
views = [s.view(7, 3) for s in sources]
print({bytes(v) for v in views})
"""
    printed, _ = measured(code, path, limit_files=50)
    assert printed == str({CONTENT[7:10]})


def test_paths_of_every_kind(tmp_path: Path) -> None:
    for name in ("with space", "quo'te", 'dou"ble', "größe", "層", "-dash", "a\nb"):
        path = tmp_path / name
        path.write_bytes(b"x")
        for form in (path, str(path), os.fsencode(path)):
            assert FileSource(form).read_at(0, 1) == b"x"  # type: ignore[arg-type]
    (tmp_path / "link").symlink_to(tmp_path / "with space")
    assert FileSource(tmp_path / "link").size == 1
    raw = os.fsencode(tmp_path) + b"/\xff\xfe"
    with open(raw, "wb") as f:
        f.write(b"y")
    assert FileSource(raw).read_at(0, 1) == b"y"  # type: ignore[arg-type]


def test_a_source_that_is_dropped_releases_its_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(b"12345678")
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        assert bytes(FileSource(path).view(2, 3)) == b"345"
    with pytest.raises(FileNotFoundError):
        FileSource(tmp_path / "missing")
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_is_opened_anew_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_bytes(b"abcdef")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with FileSource("f", keep_open=False) as source:
        monkeypatch.chdir(tmp_path / "other")
        assert (source.name, source.read_at(1, 2), bytes(source.view(3, 3))) == ("f", b"bc", b"def")
