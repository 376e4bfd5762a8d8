"""ZIP archives: what is read, and every trick that must be refused."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from apsi_inspect.errors import ModelFileError
from apsi_inspect.formats.zip_archive import read_members, read_small
from apsi_inspect.source import BytesSource

from .torch_zip import Entry, archive


def members(data: bytes) -> dict[str, bytes]:
    source = BytesSource(data, "m.pt")
    return {name: read_small(source, m, 1 << 20) for name, m in read_members(source).items()}


@pytest.mark.parametrize("zip64", [False, True])
@pytest.mark.parametrize("method", [0, 8])
def test_members(method: int, zip64: bool) -> None:
    found = members(archive([Entry("a/x", b"12345" * 99, method), Entry("a/ü", b"")], zip64=zip64))
    assert found == {"a/x": b"12345" * 99, "a/ü": b""}


def test_as_zipfile_writes_them() -> None:
    """Data descriptors, comments, folders, and what `zipfile` calls ZIP64."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        z.comment = b"PK\x05\x06 in the comment"
        z.mkdir("folder")
        z.writestr("stored", b"abc")
        z.writestr("deflated", b"abc" * 1000, zipfile.ZIP_DEFLATED)
        with z.open("large", "w", force_zip64=True) as f:
            f.write(b"x" * 100)
    found = members(out.getvalue())
    assert found == {"folder/": b"", "stored": b"abc", "deflated": b"abc" * 1000, "large": b"x" * 100}


GOOD = [Entry("m/a", b"1" * 64), Entry("m/b", b"2" * 64)]
BAD = {
    "overlap": (archive([GOOD[0], GOOD[1]._replace(at=0, name="m/a2", local_name="m/b")]), "name"),
    "overlapping data": (archive([Entry("m/a", b"1" * 64), Entry("m/a", b"")._replace(at=0)]), "twice"),
    "duplicate": (archive([GOOD[0], GOOD[0]]), "stands twice"),
    "two names": (archive([GOOD[0]._replace(local_name="m/c")]), "name mismatch"),
    "encrypted": (archive([GOOD[0]._replace(flags=1)]), "encrypted"),
    "method 12": (archive([GOOD[0]._replace(method=12)]), "method 12"),
    "stored with two sizes": (archive([GOOD[0]._replace(size=65)]), "two sizes"),
    "impossible ratio": (archive([Entry("m/a", b"1" * 64, 8, size=1 << 30)]), "cannot unpack"),
    "beyond the end": (archive([GOOD[0]._replace(at=10_000)]), "beyond"),
    "no directory": (archive(GOOD)[:-30], "directory"),
    "prefix": (b"PK\x03\x04" + archive(GOOD), "directory"),
    "empty": (b"PK\x03\x04", "directory"),
}


@pytest.mark.parametrize("what", BAD)
def test_refused(what: str) -> None:
    data, word = BAD[what]
    with pytest.raises(ModelFileError, match=word):
        read_members(BytesSource(data, "m.pt"))


def test_overlapping_members_of_one_entry() -> None:
    """The quoted-overlap bomb: the second member's header stands inside the first one's data."""
    inner = archive([Entry("m/b", b"2" * 64)])
    begin = 30 + len("m/a") + 9
    data = archive([Entry("m/a", inner), Entry("m/b", b"2" * 64, at=begin)])
    with pytest.raises(ModelFileError, match="overlap"):
        read_members(BytesSource(data, "m.pt"))


@pytest.mark.parametrize("size", [10, 99, 101, 5000])
def test_a_wrong_size_is_noticed_and_never_exceeded(size: int) -> None:
    source = BytesSource(archive([Entry("m/a", b"1" * 100, 8, size=size)]), "m.pt")
    (member,) = read_members(source).values()
    with pytest.raises(ModelFileError, match="does not unpack to its size"):
        read_small(source, member, 1 << 20)


def test_a_limit_holds() -> None:
    source = BytesSource(archive([Entry("m/a", b"1" * 100, 8)]), "m.pt")
    (member,) = read_members(source).values()
    with pytest.raises(ModelFileError, match="at most 99"):
        read_small(source, member, 99)


def test_cut_everywhere() -> None:
    whole = archive(GOOD)
    for n in range(len(whole)):
        with pytest.raises(ModelFileError):
            read_members(BytesSource(whole[:n], "m.pt"))


def test_a_byte_changed_anywhere_never_crashes(tmp_path: Path) -> None:
    whole = bytearray(archive(GOOD, zip64=True))
    for i in range(len(whole)):
        for bit in (0x01, 0x80, 0xFF):
            changed = bytes([*whole[:i], whole[i] ^ bit, *whole[i + 1 :]])
            try:
                members(changed)
            except ModelFileError:
                continue
