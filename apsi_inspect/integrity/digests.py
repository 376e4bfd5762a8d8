"""SHA-256 digests of an .apsim file: table and data in one stream, chunks, the metadata (`docs/apsim-format.md`, 6).

Contract: `jcs` is RFC 8785, byte for byte as the `rfc8785` package. `Hashing` takes blocks in order and hashes them on
two threads (the stream, the chunks) while the caller writes them; it holds at most `DEPTH` blocks.
`tests/test_integrity.py` compares with hashlib over whole files.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future, ThreadPoolExecutor
    from types import TracebackType
    from typing import Any, Self

CHUNK = 8_388_608
DEPTH = 4  # blocks in flight: what is copied for writing stays below 40 MiB
MAX_INT = (1 << 53) - 1
MAX_DEPTH = 256
NOT_COVERED = ("meta_sha256", "signature")


class Digests(NamedTuple):
    """Digests of a file's table and data; `chunks` and `root` are None where the data fits one chunk."""

    sha256: str
    chunks: list[bytes] | None
    root: str | None


def jcs(value: Any) -> bytes:
    """RFC 8785 canonical JSON.

    Objects whose numbers are all integers of at most 2^53-1 (every table is one) take a fast way to the same bytes.
    """
    ordered = _ordered(value)
    if ordered is not None:
        return json.dumps(ordered, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    import rfc8785

    return rfc8785.dumps(value)


def _ordered(value: Any, depth: int = 0) -> Any:
    """A copy with the keys of every object in canonical order; None where a value needs the slow way."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if type(value) is dict:
        keys = list(value)
        # UTF-16 order differs from code point order only above U+FFFF.
        keys.sort(key=None if all(map(str.isascii, keys)) else lambda k: k.encode("utf-16-be", "surrogatepass"))
        out = {}
        for key in keys:
            child = value[key]
            if type(child) is not str and not _small(child):
                child = _ordered(child, depth + 1)
                if child is None:
                    return None
            out[key] = child
        return out
    if type(value) is list:
        items = [v if type(v) is str or _small(v) else _ordered(v, depth + 1) for v in value]
        return None if None in items else items
    return value if type(value) is str or _small(value) else None


def _small(value: Any) -> bool:
    return type(value) is int and -MAX_INT <= value <= MAX_INT


def meta_sha256(metadata: dict[str, str]) -> str:
    """Digest of ``__metadata__`` without what cannot cover itself."""
    return hashlib.sha256(jcs({k: v for k, v in metadata.items() if k not in NOT_COVERED})).hexdigest()


def root_of(table: bytes, chunks: Sequence[bytes]) -> str:
    """Digest that binds the chunks to the table."""
    return hashlib.sha256(table + b"".join(chunks)).hexdigest()


def chunks_text(chunks: Sequence[bytes], root: str) -> str:
    """The ``chunks`` field as the file has it."""
    fields = {"size": CHUNK, "sha256": [c.hex() for c in chunks], "root": root}
    return json.dumps(fields, separators=(",", ":"))


class Hashing:
    """Digests of a data section of `size` bytes that comes in blocks of `CHUNK` bytes; a context manager."""

    def __init__(self, table: bytes, size: int) -> None:
        self.table, self.size = table, size
        self._stream = hashlib.sha256(table)
        self._chunks: list[bytes] | None = [] if size > CHUNK else None
        self._pools: list[ThreadPoolExecutor] = []
        self._flight: deque[tuple[Future[None], Future[bytes]]] = deque()
        if self._chunks is not None:
            from concurrent.futures import ThreadPoolExecutor

            self._pools = [ThreadPoolExecutor(1, "apsi-hash"), ThreadPoolExecutor(1, "apsi-hash")]

    def feed(self, block: Sequence[Any]) -> None:
        """Take the next block; returns before it is hashed, so that it can be written meanwhile."""
        if self._chunks is None:
            self._update(block)
            return
        stream, chunks = self._pools
        self._flight.append((stream.submit(self._update, block), chunks.submit(_sha256, block)))
        while len(self._flight) >= DEPTH:
            self._collect()

    def _update(self, block: Sequence[Any]) -> None:
        for part in block:
            self._stream.update(part)

    def _collect(self) -> None:
        stream, chunk = self._flight.popleft()
        stream.result()
        assert self._chunks is not None
        self._chunks.append(chunk.result())

    def finish(self) -> Digests:
        """Wait for the threads."""
        while self._flight:
            self._collect()
        root = None if self._chunks is None else root_of(self.table, self._chunks)
        return Digests(self._stream.hexdigest(), self._chunks, root)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in self._pools:
            pool.shutdown(wait=True, cancel_futures=True)


def _sha256(block: Sequence[Any]) -> bytes:
    digest = hashlib.sha256()
    for part in block:
        digest.update(part)
    return digest.digest()
