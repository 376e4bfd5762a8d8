"""Files behind URLs as a `ByteSource`: ranges, kept in memory where they are small, in parallel where they are large.

Contract: opening costs one request for the first 512 KiB (with fsspec one more, for the size); while a header is read
forward the next requests grow, so that a header of megabytes takes three. Then ranges of at most 4 MiB are read in
blocks of 64 KiB that stay in memory, 64 MiB of them at most; larger ranges are read as they are, in parts of 8 MiB on
a few connections. Any number of threads may read; what one is fetching, others wait for. `mapped` is False: a view is
a copy in memory, so whoever wants to stay small asks for pieces. http and https need no further package; all other
addresses go through fsspec. `tests/test_remote.py` counts requests and bytes.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from .errors import ModelFileError, quote
from .permit import check_read, file_of
from .remote_url import HF_FILES, Location, hf_repository, locate, masked
from .source import FileSource, _check_range

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Any, Protocol, Self

    from .source import ByteSource

    class Ranges(Protocol):
        """What gives ranges of one file, from any thread."""

        name: str
        size: int
        head: bytes
        received: int

        @property
        def stamp(self) -> tuple[str, ...]: ...

        @property
        def requests(self) -> int: ...

        def read_into(self, offset: int, out: memoryview) -> None: ...

        def cancel(self) -> None: ...

        def close(self) -> None: ...


__all__ = ["RemoteSource", "masked", "open_source"]

BLOCK = 1 << 16
CACHE = 64 << 20
PART = 8 << 20
EXACT = 4 << 20  # longer ranges are not kept
_PARALLEL = 4
_AHEAD = 32  # blocks that follow the head while a header is read forward, then 112: 9.5 MiB in three requests
_SKIP = 16  # blocks that a reader of a header may skip and is still reading forward


def open_source(url: str, storage_options: Mapping[str, Any] | None = None, stream: bool = False) -> ByteSource:
    """What is behind a URL.

    Parameters
    ----------
    url
        ``https://``, ``http://``, ``hf://ORGANISATION/REPOSITORY[@REVISION][/FILE]``, ``file://``, or any that fsspec
        knows (``s3://``, ``gs://``, …).
    storage_options
        For http: ``headers, token, timeout, retries``; for hf: the same, the token is that of the environment variable
        ``HF_TOKEN`` by default; for others what their file system takes.
    stream
        Download the whole file to a temporary one first, which is removed when the source is closed.

    Raises
    ------
    OSError
        It is missing, not allowed or out of reach.
    ModelFileError
        The server does not give ranges, or lies.
    ValueRefusedError
        The URL or an option means nothing.
    MissingPackageError
        A package of fsspec's is needed.
    """
    path = file_of(url)
    if path is not None:
        return FileSource(path)
    from .remote_download import DownloadedSource

    made = DownloadedSource if stream else RemoteSource
    if not hf_repository(url):
        return made(url, storage_options)
    for name in HF_FILES:
        try:
            return made(f"{url.rstrip('/')}/{name}", storage_options)
        except FileNotFoundError:
            continue
    tried = " and ".join(map(quote, HF_FILES))
    raise ModelFileError(masked(url), f"has no model file of the usual name: {tried} were tried", hint="name a file")


def http_options(place: Location, url: str, options: Mapping[str, Any]) -> Any:
    """The options of an http client, with the token that the environment has for Hugging Face."""
    from .remote_http import HttpOptions

    if url.lower().startswith("hf://") and "token" not in options:
        options = {**options, "token": os.environ.get("HF_TOKEN") or None}
    return HttpOptions.of(options)


def _ranges(place: Location, url: str, options: Mapping[str, Any]) -> Ranges:
    if place.url.startswith(("http://", "https://")):
        from .remote_ranges import HttpFile

        return HttpFile(place, http_options(place, url, options))
    from .remote_fsspec import FsspecFile

    return FsspecFile(place, options)


class _Run:
    """Blocks that one request fetches; None as the result: it failed, ask again."""

    __slots__ = ("count", "data", "first")

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count
        self.data: Future[bytes | None] = Future()


class RemoteSource:
    """A file behind a URL, read by ranges.

    Parameters
    ----------
    url, storage_options
        As in `open_source`.

    Attributes
    ----------
    name
        The address for people, without secrets.
    url
        The address itself.
    size
        Bytes of the file.
    """

    mapped = False

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        place = locate(url)
        self.name, self.url, self.storage_options = place.shown, url, dict(storage_options or {})
        check_read(self.name, url)
        self._file = _ranges(place, url, self.storage_options)
        self.size = self._file.size
        self._lock = threading.Lock()
        self._runs: OrderedDict[int, _Run] = OrderedDict()
        self._blocks: dict[int, _Run] = {}
        self._whole: memoryview | None = None
        self._closed = False
        self._forward, self._ahead = 0, _AHEAD
        if self.size:
            run = self._add(0, -(-len(self._file.head) // BLOCK))
            run.data.set_result(self._file.head)
            self._forward = run.count

    @property
    def requests(self) -> int:
        """Requests made so far."""
        return self._file.requests

    @property
    def stamp(self) -> tuple[int | str, ...]:
        """What tells the file from another one at its address."""
        return self.size, *self._file.stamp

    @property
    def received(self) -> int:
        """Bytes of the file received so far."""
        return self._file.received

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Copy of a range."""
        return bytes(self.view(offset, nbytes))

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill a buffer of bytes with the range that begins at `offset`."""
        out = out.cast("B")
        if out.nbytes > EXACT and self._whole is None:
            self._usable(offset, out.nbytes)
            self._fetch(offset, out)
        else:
            out[:] = self.view(offset, out.nbytes)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A range as a read-only view of memory."""
        self._usable(offset, nbytes)
        if not nbytes:
            return memoryview(b"")
        if self._whole is not None:
            return self._whole[offset : offset + nbytes]
        if nbytes <= EXACT:
            return self._cached(offset, nbytes)
        out = memoryview(bytearray(nbytes))
        self._fetch(offset, out)
        return out.toreadonly()

    def _usable(self, offset: int, nbytes: int) -> None:
        if self._closed:
            raise ModelFileError(self.name, "is closed", hint="open it again, or read the values inside the with block")
        _check_range(self.name, self.size, offset, nbytes)

    def _fetch(self, offset: int, out: memoryview) -> None:
        """A long range, in parts on a few connections."""
        parts = range(0, len(out), PART)
        if len(parts) == 1:
            self._file.read_into(offset, out)
            return
        with ThreadPoolExecutor(min(_PARALLEL, len(parts)), "apsi-remote") as pool:
            try:
                tasks = [pool.submit(self._file.read_into, offset + a, out[a : a + PART]) for a in parts]
                for task in tasks:
                    task.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.cancel()
                raise

    def _cached(self, offset: int, nbytes: int) -> memoryview:
        first, last = offset // BLOCK, (offset + nbytes - 1) // BLOCK
        while True:
            with self._lock:
                mine = self._missing(first, last)
                runs = list(dict.fromkeys(self._blocks[i] for i in range(first, last + 1)))
                for run in runs:
                    self._runs.move_to_end(run.first)
            self._fill(mine)
            found = [(run, run.data.result()) for run in runs]
            if all(data is not None for _, data in found):
                break
        self._shrink()
        if len(found) == 1 and found[0][1] is not None:
            start = offset - found[0][0].first * BLOCK
            return memoryview(found[0][1])[start : start + nbytes]
        pieces = []
        for run, data in found:
            start = offset - run.first * BLOCK
            pieces.append((data or b"")[max(start, 0) : start + nbytes])
        return memoryview(b"".join(pieces))

    def _missing(self, first: int, last: int) -> list[_Run]:
        """Runs for the blocks that nobody has fetched or is fetching; with the lock held."""
        made: list[_Run] = []
        total, i = -(-self.size // BLOCK), first
        while i <= last:
            if i in self._blocks:
                i += 1
                continue
            end = last + 1
            forward = self._ahead and self._forward <= i <= self._forward + _SKIP
            if forward:
                end = max(end, i + self._ahead)
                self._ahead = min(self._ahead * 7 // 2, PART // BLOCK)
            stop = next((j for j in range(i, min(end, total)) if j in self._blocks), min(end, total))
            if forward:
                self._forward = stop
            made.append(self._add(i, stop - i))
            i = stop
        return made

    def _add(self, first: int, count: int) -> _Run:
        run = self._runs[first] = _Run(first, count)
        self._blocks.update(dict.fromkeys(range(first, first + count), run))
        return run

    def _remove(self, run: _Run) -> None:
        if self._runs.pop(run.first, None) is run:
            for i in range(run.first, run.first + run.count):
                self._blocks.pop(i, None)

    def _fill(self, mine: list[_Run]) -> None:
        """Fetch runs; whatever happens, nobody is left waiting for one."""
        try:
            for run in mine:
                begin = run.first * BLOCK
                buffer = bytearray(min(run.count * BLOCK, self.size - begin))
                self._file.read_into(begin, memoryview(buffer))
                run.data.set_result(bytes(buffer))
        finally:
            for run in mine:
                if not run.data.done():
                    with self._lock:
                        self._remove(run)
                    run.data.set_result(None)

    def _shrink(self) -> None:
        """Forget what was not used for longest."""
        with self._lock:
            while sum(run.count for run in self._runs.values()) * BLOCK > CACHE:
                oldest = next((run for run in self._runs.values() if run.data.done()), None)
                if oldest is None:
                    return
                self._remove(oldest)

    def settle(self) -> None:
        """The header has been read: from now on, fetch what is asked for and nothing ahead of it."""
        self._ahead = 0

    def hold(self) -> None:
        """Bring the whole file into memory: every range is then a view of the same bytes."""
        if self._whole is None and self.size:
            self._whole = self.view(0, self.size)
            with self._lock:
                self._runs.clear()
                self._blocks.clear()

    def beside(self, name: str) -> RemoteSource:
        """The file of that name in the same folder."""
        place = Location(self.url, self.name).beside(name)
        return RemoteSource(place.url, self.storage_options)

    def cancel(self) -> None:
        """End what other threads are reading at the moment (after Ctrl-C)."""
        self._file.cancel()

    def close(self) -> None:
        """Close connections and forget what was read; views that are in use stay valid."""
        self._closed, self._whole = True, None
        self._file.close()
        with self._lock:
            self._runs.clear()
            self._blocks.clear()

    def __repr__(self) -> str:
        return f"<RemoteSource {quote(self.name, 200)}: {self.size} bytes>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
