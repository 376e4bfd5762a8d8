"""Ranges of one file through fsspec: S3, Google Cloud Storage, Azure, SFTP, memory, and whatever else it knows.

Contract: a package that is missing is named; errors of the libraries underneath become OSError, without the address's
secrets; size and stamp are asked for again at most every ten seconds of reading, and a file that has changed is an
error. fsspec and its file systems are imported on use. `tests/test_remote_fsspec.py` enforces this with an S3 server.
"""

from __future__ import annotations

import errno
import random
import re
import sys
import threading
import time

from .errors import MissingPackageError, ModelFileError, ValueRefusedError, quote, visible

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from .remote_url import Location

HEAD = 1 << 19
RETRIES, PAUSE, LONGEST_PAUSE = 2, 0.25, 8.0  # the file systems try again by themselves, too
_AGE = 10.0  # seconds for which size and stamp are believed
_PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs",
    "adl": "adlfs", "sftp": "paramiko", "ssh": "paramiko", "smb": "smbprotocol", "oci": "ocifs", "hdfs": "pyarrow",
}  # fmt: skip
_EXTRA = ("s3fs", "aiohttp", "fsspec")  # what the extra "remote" brings
_STAMPS = ("ETag", "etag", "LastModified", "last_modified", "mtime", "created", "VersionId")
# Errors of libraries that are no OSError; looked up only where the library is loaded.
_FOREIGN = (
    ("aiohttp", "ClientError"),
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("gcsfs.retry", "HttpError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("azure.core.exceptions", "AzureError"),
    ("paramiko.ssh_exception", "SSHException"),
)
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


def _errors() -> tuple[type[BaseException], ...]:
    found = [getattr(sys.modules[module], name) for module, name in _FOREIGN if module in sys.modules]
    return (OSError, *found)


class FsspecFile:
    """A file of a file system that fsspec knows.

    Attributes
    ----------
    size
        Its bytes.
    head
        The first ones, at most `HEAD`.
    stamp
        What tells that it has changed.
    """

    def __init__(self, place: Location, options: Mapping[str, Any]) -> None:
        self.name = place.shown
        self._fs, self._path = _file_system(place, options)
        self._turn, self.requests, self.received = 0, 0, 0
        self._lock = threading.Lock()
        info = self._info()
        self.size, self.stamp, self._asked = int(info["size"]), _stamp(info), time.monotonic()
        buffer = bytearray(min(self.size, HEAD))
        self.read_into(0, memoryview(buffer))
        self.head = bytes(buffer)

    def _info(self) -> Mapping[str, Any]:
        self._fs.invalidate_cache()
        info: Mapping[str, Any] = self._tried(lambda: self._fs.info(self._path))
        if info.get("type") == "directory":
            hint = "name a file in it, such as model.safetensors or its index"
            raise ModelFileError(self.name, "is a folder, a model file was expected", hint=hint)
        if info.get("size") is None:
            raise ModelFileError(self.name, "its size is not known", hint="open(url, stream=True) downloads it")
        return info

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill a buffer with the range that begins at `offset`."""
        if not len(out):
            return
        self._unchanged()
        data = self._tried(lambda: self._fs.cat_file(self._path, start=offset, end=offset + len(out)))
        if len(data) != len(out):
            raise ModelFileError(self.name, f"asked for {len(out)} bytes at {offset}, {len(data)} came")
        out[:] = data
        self.received += len(data)

    def _unchanged(self) -> None:
        with self._lock:
            if time.monotonic() - self._asked < _AGE:
                return
            self._asked = time.monotonic()
        info = self._info()
        if (int(info["size"]), _stamp(info)) != (self.size, self.stamp):
            raise ModelFileError(self.name, "has changed since it was opened", hint="open it again")

    def _tried(self, ask: Any) -> Any:
        """What `ask` gives; again after a pause where it fails with something that may pass."""
        turn, failed = self._turn, 0
        while True:
            self.requests += 1
            try:
                return ask()
            except _errors() as exc:
                failed += 1
                if isinstance(exc, _FINAL) or not _may_pass(exc) or failed > RETRIES or turn != self._turn:
                    raise self._said(exc) from None
            time.sleep(min(PAUSE * 2 ** (failed - 1), LONGEST_PAUSE) * random.uniform(0.5, 1.5))

    def _said(self, exc: BaseException) -> OSError:
        code = getattr(exc, "errno", None)
        for kind, number in ((FileNotFoundError, errno.ENOENT), (PermissionError, errno.EACCES)):
            code = number if isinstance(exc, kind) else code
        return OSError(code or errno.EIO, _masked(exc), self.name)

    def cancel(self) -> None:
        """Try nothing again that is under way."""
        self._turn += 1

    def close(self) -> None:
        """The file system is fsspec's to keep."""


def _may_pass(exc: BaseException) -> bool:
    return type(exc).__name__ not in ("NoCredentialsError", "ParamValidationError", "DefaultCredentialsError")


def _stamp(info: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(info[k]) for k in _STAMPS if info.get(k) is not None)


def _file_system(place: Location, options: Mapping[str, Any]) -> tuple[Any, str]:
    protocol = place.url.partition("://")[0].rpartition("::")[2].lower()
    what = f"opening {protocol}://"
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise MissingPackageError("fsspec", what, "remote") from None
    try:
        fs, path = url_to_fs(place.url, **options)
    except ImportError as exc:
        package = _PACKAGES.get(protocol) or exc.name or protocol
        raise MissingPackageError(package, what, "remote" if package in _EXTRA else None) from None
    except ValueError as exc:  # fsspec's word for a protocol that it does not know
        raise ValueRefusedError(f"{quote(place.shown, 200)}: {_masked(exc)}") from None
    except _errors() as exc:  # some connect at once
        raise OSError(getattr(exc, "errno", None) or errno.EIO, _masked(exc), place.shown) from None
    return fs, path


def _masked(exc: BaseException) -> str:
    """What a library says, without the query of an address in it."""
    return visible(f"{type(exc).__name__}: " + re.sub(r"\?[^\s'\"]*", "?…", str(exc)), 200)
