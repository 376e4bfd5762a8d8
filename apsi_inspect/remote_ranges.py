"""Ranges of one file on an http server, continued where a connection breaks; or all of it, to a file.

Contract: the first request says size and stamp (ETag, Last-Modified); every later answer must have the same, and every
answer must be exactly of the range that was asked: else the file has changed, or the server lies, and it is an error. A
server that ignores `Range` is refused before its body is read, unless the body is no larger than the head we asked for.
Lost connections, 429 and 5xx are tried again with growing pauses. `tests/test_remote.py` enforces this.
"""

from __future__ import annotations

import errno
import random
import re
import time
from http.client import HTTPException, HTTPResponse

from .errors import ModelFileError, UnsupportedFileError, quote
from .remote_http import Again, Client, HttpOptions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO, NoReturn

    from .remote_url import Location

HEAD = 1 << 19  # bytes of the first request
PAUSE, LONGEST_PAUSE = 0.25, 8.0  # seconds before the second try, and at most
_STEP = 1 << 18  # bytes taken at a time; so many in a row, and a server that drops connections is not given up
_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")
_IDENTITY = {"Accept-Encoding": "identity", "User-Agent": "apsi-inspect", "Accept": "*/*"}


class HttpFile:
    """A file on a server that gives ranges.

    Attributes
    ----------
    size
        Its bytes.
    head
        The first ones, at most `HEAD`.
    stamp
        ETag and Last-Modified.
    """

    def __init__(self, place: Location, options: HttpOptions) -> None:
        self.name, self._options = place.shown, options
        self._client = Client(place, options)
        self._turn = 0
        self.size = -1
        self.stamp: tuple[str, str] = "", ""
        self.received = 0
        buffer = bytearray(HEAD)
        try:
            self.read_into(0, memoryview(buffer))
        except BaseException:
            self._client.close()
            raise
        self.head = bytes(buffer[: min(self.size, HEAD)])

    @property
    def requests(self) -> int:
        """Requests made so far."""
        return self._client.requests

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill a buffer with the range that begins at `offset`, in as many requests as it takes."""
        turn, done, failed = self._turn, 0, 0
        while done < (len(out) if self.size < 0 else min(len(out), self.size - offset)):
            try:
                got = self._some(offset + done, out[done:])
                done += got
                if not got:
                    break  # an empty file
            except Again as exc:
                done += exc.got
                failed = self._failed(exc, failed, turn, f"at byte {offset + done}")

    def _failed(self, exc: Again, failed: int, turn: int, where: str) -> int:
        """Count a failure and wait, or give up."""
        if turn != self._turn:
            raise OSError(errno.ECANCELED, "reading was interrupted", self.name) from None
        if exc.stale:
            return failed
        failed = 1 if exc.got >= _STEP else failed + 1
        if failed > self._options.retries:
            code = errno.ETIMEDOUT if "in time" in str(exc) else errno.ECONNABORTED
            raise OSError(code, f"{exc}, {where} (tried {failed} times)", self.name) from None
        pause = min(PAUSE * 2 ** (failed - 1), LONGEST_PAUSE) * random.uniform(0.5, 1.5)
        end = time.monotonic() + max(pause, exc.wait or 0.0)
        while turn == self._turn and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))
        return failed

    def _some(self, offset: int, out: memoryview) -> int:
        """One request; the bytes that it gave."""
        headers = {**_IDENTITY, "Range": f"bytes={offset}-{offset + len(out) - 1}"}
        if self.stamp[0].startswith('"'):
            headers["If-Range"] = self.stamp[0]
        link, response = self._client.get(headers, (200, 206, 416))
        try:
            count = self._checked(response, offset, len(out))
            try:
                self._receive(response, out[:count])
            except Again as exc:
                if response.status == 200:  # cannot be continued
                    self.size, exc.got = -1, 0
                raise
            return count
        finally:
            self._client.release(link, response)

    def _receive(self, response: HTTPResponse, out: memoryview) -> None:
        got = 0
        try:
            while got < len(out):
                n = response.readinto(out[got : got + _STEP])
                if not n:
                    raise Again("the server closed the connection", got=got)
                got += n
        except TimeoutError:
            raise Again("the server does not answer in time", got=got) from None
        except (OSError, HTTPException, ValueError) as exc:
            raise Again(f"the connection was lost ({type(exc).__name__})", got=got) from None
        finally:
            self.received += got
        if response.length == 0:  # at its end, so that the connection can be kept
            response.read()

    def _checked(self, response: HTTPResponse, offset: int, wanted: int) -> int:
        """The bytes that this answer will give; the headers must fit what was asked and what we know."""
        encoding = response.getheader("Content-Encoding") or "identity"
        if response.status == 206 and encoding == "identity":
            found = _RANGE.fullmatch((response.getheader("Content-Range") or "").strip())
            if found is None:
                said = quote(str(response.getheader("Content-Range")))
                raise ModelFileError(self.name, f"the server answers with a range {said}, which says no bytes and size")
            first, last, size = map(int, found.groups())
            length = response.getheader("Content-Length")
            sound = first == offset <= last < min(offset + wanted, size)
            if not sound or length not in (None, str(last + 1 - first)):
                asked = f"{offset}-{offset + wanted - 1}"
                raise ModelFileError(self.name, f"asked for bytes {asked}, the server gave {quote(found[0])}")
            self._stamped(response, size)
            return last + 1 - first
        if response.status == 416:
            if (response.getheader("Content-Range") or "").strip() == "bytes */0" and self.size <= 0:
                self._stamped(response, 0)
                return 0
            self._changed("the range that was asked for is no longer there")
        if self.size >= 0:
            self._changed("the server answers with the whole file")
        length = response.getheader("Content-Length") or ""
        if encoding == "identity" and length.isascii() and length.isdigit() and int(length) <= min(HEAD, wanted):
            self._stamped(response, int(length))
            return int(length)
        raise UnsupportedFileError(
            self.name,
            "the server does not support range requests: it answered with the whole file",
            hint="open(url, stream=True) downloads it to a temporary file",
        )

    def _stamped(self, response: HTTPResponse, size: int) -> None:
        stamp = response.getheader("ETag") or "", response.getheader("Last-Modified") or ""
        if self.size < 0:
            self.size, self.stamp = size, stamp
        elif size != self.size:
            self._changed(f"it had {self.size} bytes and has {size} now")
        elif any(a != b for a, b in zip(stamp, self.stamp, strict=True) if a and b):
            self._changed("its ETag or its date is another one")

    def _changed(self, how: str) -> NoReturn:
        raise ModelFileError(self.name, f"has changed since it was opened: {how}", hint="open it again")

    def cancel(self) -> None:
        """End what other threads are reading at the moment."""
        self._turn += 1
        self._client.interrupt()

    def close(self) -> None:
        """Close the connections that are kept."""
        self._client.close()


def download(place: Location, options: HttpOptions, out: BinaryIO, step: Callable[[int, int | None], None]) -> None:
    """All of a file, in one answer, to the start of `out`; begun anew where the connection breaks.

    Parameters
    ----------
    step
        Called with the bytes so far and their total, where that is known; it may raise.
    """
    client, failed = Client(place, options), 0
    try:
        while True:
            try:
                link, response = client.get(_IDENTITY, (200,))
                try:
                    _copy(response, out, step)
                    return
                finally:
                    client.release(link, response)
            except Again as exc:
                failed += 1
                if failed > options.retries:
                    text = f"{exc} (tried {failed} times)"
                    raise OSError(errno.ECONNABORTED, text, place.shown) from None
                pause = min(PAUSE * 2 ** (failed - 1), LONGEST_PAUSE) * random.uniform(0.5, 1.5)
                time.sleep(max(pause, exc.wait or 0.0))
    finally:
        client.close()


def _copy(response: HTTPResponse, out: BinaryIO, step: Callable[[int, int | None], None]) -> None:
    out.seek(0)
    out.truncate()
    done, total = 0, response.length
    step(0, total)
    while True:
        try:
            piece = response.read(_STEP)
        except (OSError, HTTPException, ValueError) as exc:
            raise Again(f"the connection was lost ({type(exc).__name__})") from None
        if not piece:
            break
        out.write(piece)
        done += len(piece)
        step(done, total)
    if total is not None and done != total:
        raise Again("the server closed the connection")
