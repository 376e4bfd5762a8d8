"""Where bytes come from: `read_at` copies a range, `view` maps it; the only bounds check, in Python ints.

A source is opened once and keeps the file it opened: a file that is replaced on disk afterwards does not mix with it.
Headers are read with `read_at` (a shrinking file is an error there, never a bus error); values are viewed through one
read-only map, made at the first `view`. A view holds its map, so it stays valid after `close`.
Shards of a large checkpoint are opened with ``keep_open=False``: the file is opened anew for each use (the map stays)
and must still be the same one. `tests/test_source.py` enforces this.
"""

from __future__ import annotations

import os
import stat
import sys

from .errors import ModelFileError, TruncatedFileError
from .permit import check_read

TYPE_CHECKING = False
if TYPE_CHECKING:
    import mmap as mmap_module
    from types import TracebackType
    from typing import Protocol, Self

    class ByteSource(Protocol):
        """What a format reader needs of a file."""

        name: str
        size: int

        def read_at(self, offset: int, nbytes: int) -> bytes: ...

        def view(self, offset: int, nbytes: int) -> memoryview: ...

        def close(self) -> None: ...


def _check_range(name: str, size: int, offset: int, nbytes: int) -> None:
    if offset < 0 or nbytes < 0 or offset + nbytes > size:
        raise TruncatedFileError(
            name,
            f"bytes {offset} to {offset + nbytes} are needed, but the file has {size} bytes",
            hint="the file is truncated or its header is wrong",
        )


class BytesSource:
    """Bytes in memory, under a name for messages."""

    def __init__(self, data: bytes | bytearray | memoryview, name: str = "<bytes>") -> None:
        self.name = name
        self._data = memoryview(data).toreadonly().cast("B")
        self.size = len(self._data)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Copy of a range."""
        return bytes(self.view(offset, nbytes))

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Read-only view of a range."""
        _check_range(self.name, self.size, offset, nbytes)
        return self._data[offset : offset + nbytes]

    def close(self) -> None:
        """Nothing to release."""


class FileSource:
    """A regular file on disk.

    Parameters
    ----------
    path
        The file; symbolic links are followed.
    keep_open
        False: do not hold a file descriptor between reads (for checkpoints of many shards).
    mmap
        False: `view` reads a copy instead of mapping (for file systems on which a map is unsafe).

    Raises
    ------
    OSError
        The file is missing or unreadable; PermissionError where `permissions` do not allow to read it.
    ModelFileError
        It is a directory, a pipe or a device.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep_open: bool = True, mmap: bool = True) -> None:
        self.name = os.fsdecode(path)
        # where to open it anew, when the working folder may be another one; `..` after a link is the system's to follow
        self.place = self.name if os.path.isabs(self.name) else os.path.join(os.getcwd(), self.name)
        self._fd = -1
        self._map: mmap_module.mmap | None = None
        self._use_map = mmap
        self._closed = False
        self._stamp: tuple[int, int, int, int] | None = None
        self._allowed()
        fd = self._open()
        if keep_open:
            self._fd = fd
        else:
            os.close(fd)

    def _allowed(self) -> None:
        check_read(self.name, local=True)

    def _open(self) -> int:
        if self._closed:
            raise ModelFileError(self.name, "is closed", hint="open it again, or read the values inside the with block")
        # O_NONBLOCK: opening a pipe must not wait for a writer; it changes nothing for a regular file.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
        fd = os.open(self.name if self._stamp is None else self.place, flags)
        try:
            st = os.fstat(fd)
            if not stat.S_ISREG(st.st_mode):
                kind = "a directory" if stat.S_ISDIR(st.st_mode) else "not a regular file"
                raise ModelFileError(self.name, f"is {kind}, a model file was expected")
            stamp = (st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns)
            if self._stamp is not None and stamp != self._stamp:
                raise ModelFileError(self.name, "has changed on disk since it was opened", hint="open it again")
        except BaseException:
            os.close(fd)
            raise
        self._stamp, self.size = stamp, st.st_size
        return fd

    @property
    def stamp(self) -> tuple[int, ...]:
        """Size and time of change of the file that was opened: the same on every machine that shares the disk."""
        assert self._stamp is not None
        return self._stamp[2:]

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Copy of a range, all of it or TruncatedFileError."""
        _check_range(self.name, self.size, offset, nbytes)
        fd = self._fd if self._fd >= 0 else self._open()
        try:
            parts = []
            while nbytes:
                part = os.pread(fd, min(nbytes, 1 << 30), offset)
                if not part:
                    raise TruncatedFileError(self.name, f"ends at byte {offset}, although it had {self.size} bytes")
                parts.append(part)
                offset, nbytes = offset + len(part), nbytes - len(part)
        finally:
            if fd != self._fd:
                os.close(fd)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill a buffer of bytes with the range that begins at `offset`, or TruncatedFileError."""
        _check_range(self.name, self.size, offset, out.nbytes)
        if not hasattr(os, "preadv"):
            out[:] = self.read_at(offset, out.nbytes)
            return
        fd = self._fd if self._fd >= 0 else self._open()
        try:
            done = 0
            while done < out.nbytes:
                n = os.preadv(fd, [out[done : done + (1 << 30)]], offset + done)
                if not n:
                    at = offset + done
                    raise TruncatedFileError(self.name, f"ends at byte {at}, although it had {self.size} bytes")
                done += n
        finally:
            if fd != self._fd:
                os.close(fd)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Read-only view of a range; it keeps the map alive by itself."""
        _check_range(self.name, self.size, offset, nbytes)
        if not nbytes:
            return memoryview(b"")
        if not self._use_map:
            return memoryview(self.read_at(offset, nbytes))
        if self._map is None:
            try:
                self._map = self._make_map()
            except OSError:  # out of descriptors (a map takes one before Python 3.13), or a file system without maps
                return memoryview(self.read_at(offset, nbytes))
        else:
            self._still_whole(self._map)
        return memoryview(self._map)[offset : offset + nbytes]

    def _still_whole(self, held: mmap_module.mmap) -> None:
        """Refuse to view a map whose file has shrunk: touching what is gone would end the process."""
        try:
            size = held.size()
        except (OSError, ValueError):  # the map holds no descriptor to ask (Python 3.13, shards)
            return
        if size < self.size:
            raise TruncatedFileError(self.name, f"has shrunk below the {self.size} bytes it had when it was opened")

    def forget(self, offset: int, nbytes: int) -> None:
        """The mapped pages of a range are not needed for now: they stay cached, but not as this process's memory."""
        if self._map is not None and nbytes and hasattr(self._map, "madvise"):
            import mmap

            begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, begin, offset + nbytes - begin)

    def _make_map(self) -> mmap_module.mmap:
        import mmap

        fd = self._fd if self._fd >= 0 else self._open()
        try:
            if os.fstat(fd).st_size < self.size:
                raise TruncatedFileError(self.name, f"has shrunk below the {self.size} bytes it had when it was opened")
            if sys.version_info >= (3, 13):  # hold no descriptor: a checkpoint can have hundreds of shards
                return mmap.mmap(fd, self.size, access=mmap.ACCESS_READ, trackfd=self._fd >= 0)
            return mmap.mmap(fd, self.size, access=mmap.ACCESS_READ)
        finally:
            if fd != self._fd:
                os.close(fd)

    def close(self) -> None:
        """Release the descriptor and the map; views that are still in use keep the map."""
        self._closed = True
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        held, self._map = self._map, None
        if held is not None:
            try:
                held.close()
            except BufferError:  # a view is in use: the map goes when the last view does
                return

    def __del__(self) -> None:
        # A model that was dropped without `close`; `_fd` is missing where the file could not be opened.
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
