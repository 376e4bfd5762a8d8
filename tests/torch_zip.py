"""PyTorch archives put together byte by byte, the way the format's description says: nothing of the package is used."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

EMPTY_HOOKS = b"ccollections\nOrderedDict\n)R"


class Entry(NamedTuple):
    """A member; `central` and `local` override what the two headers say."""

    name: str
    data: bytes
    method: int = 0
    flags: int = 0
    crc: int | None = None
    size: int | None = None
    local_name: str | None = None
    at: int | None = None  # where the directory says that it begins


def archive(entries: Sequence[Entry], comment: bytes = b"", zip64: bool = False) -> bytes:
    """A ZIP archive."""
    body, directory = b"", b""
    for e in entries:
        packed = e.data
        if e.method == 8:
            z = zlib.compressobj(9, zlib.DEFLATED, -15)
            packed = z.compress(e.data) + z.flush()
        crc = zlib.crc32(e.data) if e.crc is None else e.crc
        size = len(e.data) if e.size is None else e.size
        name, local = e.name.encode(), (e.local_name or e.name).encode()
        extra = b"FB" + struct.pack("<H", 5) + b"ZZZZZ"
        header = struct.pack("<HHHHHIIIHH", 0, e.flags, e.method, 0, 0, 0, 0, 0, len(local), len(extra))
        begin = len(body) if e.at is None else e.at
        body += b"PK\x03\x04" + header + local + extra + packed
        sizes = (0xFFFFFFFF, 0xFFFFFFFF) if zip64 else (len(packed), size)
        more = struct.pack("<HHQQQ", 1, 24, size, len(packed), begin) if zip64 else b""
        offset = 0xFFFFFFFF if zip64 else begin
        directory += b"PK\x01\x02" + struct.pack("<HHHHHHIII", 0, 0, e.flags, e.method, 0, 0, crc, *sizes)
        directory += struct.pack("<HHHHHII", len(name), len(more), 0, 0, 0, 0, offset) + name + more
    begin, n = len(body), len(entries)
    tail = b""
    if zip64:
        tail += b"PK\x06\x06" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, n, n, len(directory), begin)
        tail += b"PK\x06\x07" + struct.pack("<IQI", 0, begin + len(directory), 1)
        n, length, begin = 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF
    else:
        length = len(directory)
    tail += b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, n, n, length, begin, len(comment)) + comment
    return body + directory + tail


def text(value: str) -> bytes:
    """A text in a pickle."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def integer(value: int) -> bytes:
    """An integer in a pickle."""
    raw = value.to_bytes(17, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def numbers(values: Sequence[int]) -> bytes:
    """A tuple of integers."""
    return b"(" + b"".join(map(integer, values)) + b"t"


def storage(key: str, numel: int, kind: str = "FloatStorage", module: str = "torch") -> bytes:
    """A persistent id."""
    head = b"(" + text("storage") + f"c{module}\n{kind}\n".encode()
    return head + text(key) + text("cpu") + integer(numel) + b"tQ"


def tensor(key: str, numel: int, shape: Sequence[int], stride: Sequence[int], start: int = 0) -> bytes:
    """A call of `_rebuild_tensor_v2` over float32."""
    args = storage(key, numel) + integer(start) + numbers(shape) + numbers(stride) + b"\x89" + EMPTY_HOOKS
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + args + b"tR"


def state_dict(**values: bytes) -> bytes:
    """A pickle of a dict whose values are given as opcodes."""
    return b"\x80\x02}(" + b"".join(text(k) + v for k, v in values.items()) + b"u."


def file(pickle: bytes, storages: dict[str, bytes] | None = None, root: str = "m", **kwargs: object) -> bytes:
    """A torch.save archive."""
    method = int(str(kwargs.pop("method", 0)))
    entries = [Entry(f"{root}/data.pkl", pickle), Entry(f"{root}/byteorder", b"little")]
    entries += [Entry(f"{root}/data/{k}", v, method) for k, v in (storages or {}).items()]
    entries.append(Entry(f"{root}/version", b"3\n"))
    return archive(entries, zip64=bool(kwargs.get("zip64")))
