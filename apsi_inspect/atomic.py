"""The only way a file is written: under a temporary name beside its place, synced, then renamed over it.

Contract (`docs/apsim-format.md`, section 9): whatever happens, a reader finds the old file or the new one, whole. A
save that fails or is interrupted removes what it made; what a killed process left is removed by the next save into the
same folder (a temporary file is locked while in use). Symbolic links are followed: the target is replaced. The mode is
what `open` would give, or that of the replaced file. A mapping of the old file keeps the old bytes.
`tests/test_atomic.py` enforces this, with a child process killed at every call.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat

from .permit import check_write

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: a file that is open cannot be removed there, which serves as the lock
    fcntl = None

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType
    from typing import Any, Self

    Buffer = bytes | bytearray | memoryview | Any  # anything contiguous that os.pwritev takes

PREFIX, SUFFIX = ".apsi-", ".tmp"  # short (a name of 255 bytes has to have a temporary one) and like no model's name
_MAX_BUFFERS = 1000  # below every system's IOV_MAX
_MAX_CALL = 1 << 30
_PUSH = 1 << 24  # bytes after which the disk is told to begin


class Pending:
    """A file that is being written; it appears under its own name when its `Files` are committed."""

    def __init__(self, path: str | os.PathLike[str], durable: bool = True) -> None:
        self._push = durable and hasattr(os, "posix_fadvise")
        self._begin = self._end = 0  # a range that the disk has not been told of
        self.path = os.path.realpath(os.fsdecode(path))
        self.folder = os.path.dirname(self.path)
        old = _stat(self.path)
        if old is not None and not stat.S_ISREG(old.st_mode):
            code = errno.EISDIR if stat.S_ISDIR(old.st_mode) else errno.EINVAL
            raise OSError(code, "cannot be replaced: not a regular file", self.path)
        try:
            self.temporary, self.fd = _create(self.folder)
        except OSError as exc:  # under the name that the user knows
            raise OSError(exc.errno, exc.strerror, self.path) from None
        if old is not None and hasattr(os, "fchmod"):
            os.fchmod(self.fd, stat.S_IMODE(old.st_mode))

    def write_at(self, offset: int, buffers: Sequence[Buffer]) -> int:
        """Write contiguous byte buffers one after the other; returns where they end."""
        begin = self._begin if offset == self._end else offset
        try:
            for start in range(0, len(buffers), _MAX_BUFFERS):
                offset = self._write(offset, [memoryview(b).cast("B") for b in buffers[start : start + _MAX_BUFFERS]])
        except OSError as exc:
            raise _refused(exc, self.path) from None
        if self._push and offset - begin >= _PUSH:
            # Linux takes this advice as a request to write dirty pages out, without waiting for them, so that `sync`
            # need not wait for everything at the end; pages that are not on the disk yet stay in memory.
            os.posix_fadvise(self.fd, begin, offset - begin, os.POSIX_FADV_DONTNEED)
            begin = offset
        self._begin, self._end = begin, offset
        return offset

    def _write(self, offset: int, views: list[memoryview]) -> int:
        views = [v for v in views if v.nbytes]
        while views:
            if hasattr(os, "pwritev"):
                done = os.pwritev(self.fd, views, offset)
            else:
                os.lseek(self.fd, offset, os.SEEK_SET)
                done = os.write(self.fd, views[0][:_MAX_CALL])
            offset += done
            while views and done >= views[0].nbytes:
                done -= views.pop(0).nbytes
            if done:
                views[0] = views[0][done:]
        return offset

    def sync(self) -> None:
        """Wait until the bytes are on the disk."""
        try:
            os.fsync(self.fd)
        except OSError as exc:
            raise _refused(exc, self.path) from None

    def rename(self) -> None:
        """Give the file its name."""
        if fcntl is None:
            os.close(self.fd)
            self.fd = -1
        os.replace(self.temporary, self.path)
        self.temporary = ""

    def discard(self) -> None:
        """Close, and remove the temporary file where it still has its temporary name."""
        try:
            if self.temporary:
                os.unlink(self.temporary)
        except FileNotFoundError:
            pass  # somebody has cleaned up already
        finally:
            self.temporary = ""
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1


class Files:
    """Files that are written together; a context manager that removes whatever was not committed.

    Parameters
    ----------
    durable
        False: do not wait for the disk. A crash of the machine (not of the process) may then leave an empty file.
    """

    def __init__(self, durable: bool = True) -> None:
        self.durable = durable
        self.pending: list[Pending] = []

    def create(self, path: str | os.PathLike[str]) -> Pending:
        """Begin a file; leftovers of killed processes in its folder are removed first."""
        check_write(path)
        folder = os.path.dirname(os.path.realpath(os.fsdecode(path)))
        if folder not in [p.folder for p in self.pending]:
            remove_leftovers(folder)
        self.pending.append(Pending(path, self.durable))
        return self.pending[-1]

    def commit(self, last: Pending | None = None, remove_first: Iterable[str] = ()) -> None:
        """Sync every file, remove `remove_first`, rename the files, and rename `last` after all others."""
        if self.durable:
            for p in self.pending:
                p.sync()
        folders = {p.folder for p in self.pending}
        if remove(remove_first):
            self._sync_folders(folders)
        others = [p for p in self.pending if p is not last]
        for p in others:
            p.rename()
        self._sync_folders(folders)
        if last is not None:
            last.rename()
            self._sync_folders({last.folder})

    def _sync_folders(self, folders: Iterable[str]) -> None:
        for folder in folders if self.durable and hasattr(os, "O_DIRECTORY") else ():
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            except OSError as exc:
                if exc.errno != errno.EINVAL:  # this file system cannot sync a folder
                    raise
            finally:
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for p in self.pending:
            p.discard()


def write_bytes(path: str | os.PathLike[str], data: Buffer, durable: bool = True) -> None:
    """Replace (or make) a small file as one step."""
    with Files(durable) as files:
        files.create(path).write_at(0, [data])
        files.commit()


def remove(paths: Iterable[str]) -> int:
    """Remove files that may be there; how many were."""
    count = 0
    for path in paths:
        if os.path.lexists(path):
            check_write(path)
        try:
            os.unlink(path)
            count += 1
        except OSError as exc:
            if exc.errno not in (errno.ENOENT, errno.ENAMETOOLONG):  # a name that is too long cannot be there
                raise
    return count


def remove_leftovers(folder: str) -> None:
    """Remove temporary files that no running process holds."""
    try:
        entries = [e.path for e in os.scandir(folder or ".") if e.name.startswith(PREFIX) and e.name.endswith(SUFFIX)]
    except OSError:
        return  # the folder cannot be listed (or is missing: creating the file will say so)
    for path in entries:
        try:
            if fcntl is not None:
                fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)
                finally:
                    os.close(fd)
            else:
                os.unlink(path)
        except OSError:
            continue  # in use, or not ours to remove


def _refused(exc: OSError, path: str) -> OSError:
    """The error of a write, under the name that the file was to have; no file has been renamed by then."""
    return OSError(exc.errno, f"the disk refused to write it ({exc.strerror}); nothing was changed", path)


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _create(folder: str) -> tuple[str, int]:
    """A new locked file under a temporary name."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    for _ in range(100):
        path = os.path.join(folder, f"{PREFIX}{secrets.token_hex(8)}{SUFFIX}")
        fd = os.open(path, flags, 0o666)
        try:
            if fcntl is None or _locked(fd, path):
                return path, fd
        except BaseException:
            os.close(fd)
            os.unlink(path)
            raise
        os.close(fd)
    raise OSError(errno.EAGAIN, "could not make a temporary file", folder)


def _locked(fd: int, path: str) -> bool:
    """Lock the file; False where another save has taken it for a leftover in the moment before."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks
    here = _stat(path)
    return here is not None and here.st_ino == os.fstat(fd).st_ino
