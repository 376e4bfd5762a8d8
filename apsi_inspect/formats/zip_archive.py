"""The members of a ZIP archive, checked before any of them is believed.

Contract: `read_members` takes only the central directory and each member's local header. Every member lies inside the
file, before the directory, overlaps no other, is stored or deflated, and has the same name in both places; anything
else is a ModelFileError. Sizes come from the directory (torch leaves them out of the local header).
`tests/test_zip.py` enforces this.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ..errors import ModelFileError, TruncatedFileError, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..source import ByteSource

MAX_DIRECTORY = 128 << 20
_RATIO = 1032  # deflate cannot shrink more than this
_STEP = 1 << 16  # packed bytes that are unpacked at once
STORED, DEFLATED = 0, 8


class Member(NamedTuple):
    """One member: where its bytes are, and how many when they are unpacked."""

    name: str
    offset: int
    packed: int
    size: int
    method: int
    crc: int


def read_members(source: ByteSource) -> dict[str, Member]:
    """All members by name, in the order of the directory.

    Raises
    ------
    ModelFileError
        The archive breaks one of the rules above.
    """
    begin, length, count = _find_directory(source)
    if length > MAX_DIRECTORY:
        raise ModelFileError(source.name, f"its ZIP directory has {length} bytes, at most {MAX_DIRECTORY} are read")
    directory = source.read_at(begin, length)
    members: dict[str, Member] = {}
    spans = []
    at = 0
    for _ in range(count):
        member, header, at = _entry(source, directory, at)
        if member.name in members:
            raise ModelFileError(source.name, f"ZIP member {quote(member.name)} stands twice")
        member = _locate(source, member, header, begin)
        members[member.name] = member
        spans.append((header, member.offset + member.packed, member.name))
    if at != length:
        raise ModelFileError(source.name, f"its ZIP directory says {count} members, but does not end after them")
    _check_overlaps(source, spans)
    return members


def _find_directory(source: ByteSource) -> tuple[int, int, int]:
    """Begin, length and number of entries of the central directory."""
    tail_at = max(0, source.size - 65_557)
    tail = source.read_at(tail_at, source.size - tail_at)
    at = tail.rfind(b"PK\x05\x06")
    while at >= 0 and (len(tail) - at < 22 or at + 22 + int.from_bytes(tail[at + 20 : at + 22], "little") != len(tail)):
        at = tail.rfind(b"PK\x05\x06", 0, at)
    if at < 0:
        raise TruncatedFileError(
            source.name, "is a ZIP archive without its directory at the end", hint="the download was cut; get it again"
        )
    disk, start_disk, here, count, length, begin, _ = struct.unpack("<HHHHIIH", tail[at + 4 : at + 22])
    end = tail_at + at
    if count == 0xFFFF or length == 0xFFFFFFFF or begin == 0xFFFFFFFF or _has_locator(tail, at):
        begin, length, count, end = _zip64(source, tail, at)
    elif disk or start_disk or here != count:
        raise ModelFileError(source.name, "is one volume of a ZIP archive in several")
    if begin + length != end:
        raise ModelFileError(source.name, "its ZIP directory is not where the end of the archive says")
    return begin, length, count


def _has_locator(tail: bytes, at: int) -> bool:
    return at >= 20 and tail[at - 20 : at - 16] == b"PK\x06\x07"


def _zip64(source: ByteSource, tail: bytes, at: int) -> tuple[int, int, int, int]:
    if not _has_locator(tail, at):
        raise ModelFileError(source.name, "is a ZIP64 archive without its locator")
    _, where, _ = struct.unpack("<IQI", tail[at - 16 : at])
    record = source.read_at(where, 56)
    if record[:4] != b"PK\x06\x06":
        raise ModelFileError(source.name, "is a ZIP64 archive without its end record")
    _, count, length, begin = struct.unpack("<QQQQ", record[24:56])
    return begin, length, count, where


def _entry(source: ByteSource, directory: bytes, at: int) -> tuple[Member, int, int]:
    """A directory entry: the member without its place, where its local header is, where the next entry begins."""
    if directory[at : at + 4] != b"PK\x01\x02" or at + 46 > len(directory):
        raise ModelFileError(source.name, f"its ZIP directory is damaged at byte {at}")
    flags, method = struct.unpack_from("<HH", directory, at + 8)
    crc, packed, size, n_name, n_extra, n_comment = struct.unpack_from("<IIIHHH", directory, at + 16)
    header = int.from_bytes(directory[at + 42 : at + 46], "little")
    end = at + 46 + n_name + n_extra + n_comment
    if end > len(directory):
        raise ModelFileError(source.name, f"its ZIP directory is damaged at byte {at}")
    try:
        name = directory[at + 46 : at + 46 + n_name].decode("utf-8")
    except UnicodeDecodeError:
        raise ModelFileError(source.name, "a ZIP member has a name that is not UTF-8") from None
    extra = directory[at + 46 + n_name : at + 46 + n_name + n_extra]
    size, packed, header = _zip64_sizes(extra, size, packed, header)
    if flags & 0x2041:
        raise ModelFileError(source.name, f"ZIP member {quote(name)} is encrypted")
    if method not in (STORED, DEFLATED):
        raise ModelFileError(source.name, f"ZIP member {quote(name)} has method {method}; stored and deflated are read")
    if method == STORED and packed != size:
        raise ModelFileError(source.name, f"ZIP member {quote(name)} is stored, but has two sizes: {packed} and {size}")
    if size > _RATIO * packed + 1024:
        raise ModelFileError(source.name, f"ZIP member {quote(name)}: {packed} bytes cannot unpack to a size of {size}")
    return Member(name, 0, packed, size, method, crc), header, end


def _zip64_sizes(extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int]:
    """Sizes beyond 32 bits, which stand in an extra field, only those that do not fit."""
    values = [size, packed, header]
    at = 0
    while at + 4 <= len(extra):
        kind, n = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            words = extra[at + 4 : at + 4 + n]
            for i, value in enumerate(values):
                if value == 0xFFFFFFFF and len(words) >= 8:
                    values[i], words = int.from_bytes(words[:8], "little"), words[8:]
            break
        at += 4 + n
    return values[0], values[1], values[2]


def _locate(source: ByteSource, member: Member, header: int, directory: int) -> Member:
    """The member with the place of its bytes, from its local header."""
    if header + 30 > directory:
        raise ModelFileError(source.name, f"ZIP member {quote(member.name)} begins beyond the archive's data")
    local = source.read_at(header, min(30 + 256, directory - header))
    n_name, n_extra = struct.unpack_from("<HH", local, 26)
    if len(local) < 30 + n_name:
        local = source.read_at(header, min(30 + n_name, directory - header))
    if local[:4] != b"PK\x03\x04":
        raise ModelFileError(source.name, f"ZIP member {quote(member.name)} has no local header")
    if local[30 : 30 + n_name] != member.name.encode("utf-8"):
        other = quote(local[30 : 30 + n_name].decode("utf-8", "replace"))
        raise ModelFileError(
            source.name, f"ZIP member {quote(member.name)} has the name {other} in its local header (name mismatch)"
        )
    if int.from_bytes(local[8:10], "little") != member.method:
        raise ModelFileError(source.name, f"ZIP member {quote(member.name)} has two methods in its two headers")
    offset = header + 30 + n_name + n_extra
    if offset + member.packed > directory:
        raise ModelFileError(source.name, f"ZIP member {quote(member.name)} reaches beyond the archive's data")
    return member._replace(offset=offset)


def _check_overlaps(source: ByteSource, spans: list[tuple[int, int, str]]) -> None:
    spans.sort()
    end, before = 0, ""
    for start, stop, name in spans:
        if start < end:
            raise ModelFileError(source.name, f"ZIP members {quote(before)} and {quote(name)} overlap")
        end, before = stop, name


def read_small(source: ByteSource, member: Member, limit: int) -> bytes:
    """A whole member, unpacked; refuses one of more than `limit` bytes.

    Raises
    ------
    ModelFileError
        It is larger, or its deflated bytes are damaged.
    """
    if member.size > limit:
        raise ModelFileError(
            source.name, f"ZIP member {quote(member.name)} has a size of {member.size} bytes, at most {limit} are read"
        )
    raw = source.read_at(member.offset, member.packed)
    if member.method == STORED:
        return raw
    return bytes(inflate(raw, member.size, source.name, member.name))


def inflate(raw: bytes | memoryview, size: int, file: str, name: str) -> memoryview:
    """Unpack deflated bytes that must give exactly `size` bytes, into one buffer; never more are made."""
    import zlib

    z = zlib.decompressobj(-15)
    out = bytearray(size)
    filled = at = 0
    tail = b""
    try:
        while not z.eof and filled <= size:
            if not tail:
                tail, at = bytes(raw[at : at + _STEP]), at + _STEP
            part = z.decompress(tail, 16 * _STEP)
            if not part and not tail:  # truncated
                break
            tail = z.unconsumed_tail
            out[filled : filled + len(part)] = part[: size - filled]
            filled += len(part)
    except zlib.error as exc:
        raise ModelFileError(file, f"ZIP member {quote(name)} is damaged: {exc}") from None
    if filled != size or not z.eof:
        raise ModelFileError(file, f"ZIP member {quote(name)} does not unpack to its size of {size} bytes (mismatch)")
    return memoryview(out).toreadonly()
