"""Checking the digests of one .apsim file: what its header claims, whether its bytes agree (`docs/apsim-format.md`, 6).

Contract: bytes are hashed over the same open file (and map) that serves the values afterwards, chunks on several
threads, in bounded memory. `Lazy` checks a chunk when a range that touches it is first asked for.
`tests/test_integrity.py` flips every byte of small files, and bytes on chunk borders of large ones.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import NamedTuple

from ..errors import ModelFileError, VerificationError, quote
from ..formats import safetensors
from ..formats.base import is_mapped
from .digests import CHUNK, jcs, meta_sha256, root_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from ..source import ByteSource

    Progress = Callable[[int], None]

MAX_THREADS = 8
_STEP = 1 << 20
_FETCH = 8 << 20  # of a file that is not mapped


class Claims(NamedTuple):
    """What the header of an .apsim file says of its bytes.

    Attributes
    ----------
    meta
        ``__metadata__`` as it stands.
    table
        Canonical JSON of the tensor table.
    spans
        (name, begin, end) of every tensor, relative to the data.
    start, size
        Where the data section begins, and its bytes.
    chunks, root
        None where the file has no chunks.
    """

    meta: dict[str, str]
    table: bytes
    spans: list[tuple[str, int, int]]
    start: int
    size: int
    chunks: list[str] | None
    root: str | None

    @property
    def signature(self) -> dict[str, Any] | None:
        """The signature's fields."""
        return json.loads(self.meta["signature"]) if "signature" in self.meta else None

    @property
    def signed(self) -> tuple[str, str]:
        """The digests that a signature covers."""
        return self.meta["sha256"], self.meta.get("meta_sha256", "")


def read_claims(source: ByteSource) -> Claims:
    """The claims of a file whose header the format's reader has accepted."""
    text = safetensors.read_text(source)
    entries = json.loads(text)
    meta = entries.pop("__metadata__")
    try:
        table = jcs(entries)
    except (ValueError, RecursionError) as exc:  # integers beyond 2^53-1, or nested too deeply, in unknown fields
        raise ModelFileError(source.name, f"the tensor table has no canonical form: {exc}") from None
    spans = sorted(((n, *e["data_offsets"]) for n, e in entries.items()), key=lambda s: (s[1], s[2], s[0]))
    chunks = json.loads(meta["chunks"]) if "chunks" in meta else {"sha256": None, "root": None}
    start = 8 + len(text)
    return Claims(meta, table, spans, start, source.size - start, chunks["sha256"], chunks["root"])


def metadata_holds(claims: Claims) -> bool | None:
    """Whether `meta_sha256` fits; None where the file has none (base profile)."""
    return None if "meta_sha256" not in claims.meta else meta_sha256(claims.meta) == claims.meta["meta_sha256"]


def table_holds(claims: Claims) -> bool | None:
    """Whether `root` fits table and chunk digests; None where there are no chunks."""
    if claims.chunks is None:
        return None
    return root_of(claims.table, [bytes.fromhex(c) for c in claims.chunks]) == claims.root


def stream_holds(source: ByteSource, claims: Claims, progress: Progress | None = None) -> bool:
    """Whether `sha256` fits table and data, in one stream."""
    return stream_digest(source, claims.table, claims.start, claims.size, progress) == claims.meta["sha256"]


def stream_digest(source: ByteSource, table: bytes, start: int, size: int, progress: Progress | None = None) -> str:
    """SHA-256 of table and data in one stream, in hex."""
    digest = hashlib.sha256(table)
    most = _STEP if is_mapped(source) else _FETCH
    for begin in range(0, size, most):
        nbytes = min(most, size - begin)
        digest.update(source.view(start + begin, nbytes))
        _done(source, start + begin, nbytes, progress)
    return digest.hexdigest()


def chunk_holds(source: ByteSource, claims: Claims, number: int, progress: Progress | None = None) -> bool:
    """Whether one chunk has its digest."""
    assert claims.chunks is not None
    return chunk_digest(source, claims.start, claims.size, number, progress) == claims.chunks[number]


def chunk_digest(source: ByteSource, start: int, size: int, number: int, progress: Progress | None = None) -> str:
    """SHA-256 of a chunk of a data section, in hex."""
    begin = number * CHUNK
    nbytes = min(CHUNK, size - begin)
    digest = hashlib.sha256(source.view(start + begin, nbytes)).hexdigest()
    _done(source, start + begin, nbytes, progress)
    return digest


def _done(source: ByteSource, offset: int, nbytes: int, progress: Progress | None) -> None:
    forget = getattr(source, "forget", None)  # a map of a whole model would count as this process's memory
    if forget is not None:
        forget(offset, nbytes)
    if progress is not None:
        progress(nbytes)


def bad_chunks(
    source: ByteSource, claims: Claims, threads: int | None = None, progress: Progress | None = None
) -> list[int]:
    """The chunks that do not have their digest, checked on several threads."""
    assert claims.chunks is not None
    from concurrent.futures import ThreadPoolExecutor

    count, usual = len(claims.chunks), (os.cpu_count() or 1) if is_mapped(source) else MAX_THREADS
    source.view(claims.start, 1)  # the map is made once, before there are threads
    with ThreadPoolExecutor(min(threads or usual, MAX_THREADS, count), "apsi-verify") as pool:
        try:
            tasks = [pool.submit(chunk_holds, source, claims, i, progress) for i in range(count)]
            return [i for i, task in enumerate(tasks) if not task.result()]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            stop = getattr(source, "cancel", None)  # Ctrl-C does not wait for a slow server
            if stop is not None:
                stop()
            raise


class Damage(NamedTuple):
    """Bytes of a file that are not what their digest says.

    Attributes
    ----------
    file
        The file.
    begin, end
        Absolute byte range.
    tensors
        Names of the tensors that touch it.
    """

    file: str
    begin: int
    end: int
    tensors: tuple[str, ...]


def damage_of(source: ByteSource, claims: Claims, chunks: Sequence[int]) -> list[Damage]:
    """Byte ranges of damaged chunks, neighbours joined, with the tensors they touch."""
    ranges: list[list[int]] = []
    for i in chunks:
        begin, end = i * CHUNK, min((i + 1) * CHUNK, claims.size)
        if ranges and ranges[-1][1] == begin:
            ranges[-1][1] = end
        else:
            ranges.append([begin, end])
    start = claims.start
    return [Damage(source.name, start + a, start + b, touched(claims, a, b)) for a, b in ranges]


def touched(claims: Claims, begin: int, end: int) -> tuple[str, ...]:
    """Names of the tensors with bytes in a range of the data."""
    return tuple(name for name, a, b in claims.spans if a < end and b > begin)


def name_some(names: Sequence[str]) -> str:
    """A few names for a message."""
    shown = ", ".join(quote(n) for n in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class Lazy:
    """The chunks of a mapped file, each checked once, when a range that touches it is asked for.

    It keeps the map, not the file: what is checked is what is served, whatever happens to the name.
    """

    def __init__(self, source: ByteSource, claims: Claims) -> None:
        self.name, self.size = source.name, source.size
        self._whole, self._claims = source.view(0, source.size), claims
        self._good: set[int] = set()

    def check(self, offset: int, nbytes: int) -> None:
        """Check the chunks of a range of the file.

        Raises
        ------
        VerificationError
            One of them is damaged.
        """
        first = (offset - self._claims.start) // CHUNK
        for i in range(first, -(-(offset + nbytes - self._claims.start) // CHUNK)):
            if i in self._good:
                continue
            if not chunk_holds(self, self._claims, i):
                (damage,) = damage_of(self, self._claims, [i])
                raise VerificationError(
                    self.name,
                    f"bytes {damage.begin} to {damage.end} are damaged (chunk {i}): {name_some(damage.tensors)}",
                    hint="copy or download the file again",
                )
            self._good.add(i)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Read-only view of a range, unchecked."""
        return self._whole[offset : offset + nbytes]

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Copy of a range, unchecked."""
        return bytes(self.view(offset, nbytes))

    def close(self) -> None:
        """Nothing to release: the map goes with the last view."""
