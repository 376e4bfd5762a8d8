"""Servers on loopback for the tests of files behind URLs: with and without ranges, slow, lying, breaking off.

Each counts its requests and the bytes of the bodies that it sent. A fault is a method of `Handler` that a test names.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

Content = Callable[[int, int], bytes]  # (offset, nbytes) -> bytes


class File:
    """A file that a server gives: its size, and a function for its bytes, so that it may be sparse."""

    def __init__(self, data: bytes, size: int | None = None) -> None:
        self.data, self.size = data, len(data) if size is None else size

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes of a range; beyond `data` they are zero."""
        return self.data[offset : offset + nbytes].ljust(nbytes, b"\0")


class Server(ThreadingHTTPServer):
    """A server of files by path; use it as a context manager."""

    daemon_threads = True

    def __init__(self, files: Mapping[str, bytes | File], fault: str = "", **settings: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {k: v if isinstance(v, File) else File(v) for k, v in files.items()}
        self.fault, self.settings = fault, settings
        self.requests: list[tuple[str, str | None]] = []  # (path, Range)
        self.heads: list[dict[str, str]] = []
        self.sent = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """Its address, without a path."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Server:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are part of the tests."""


class Handler(BaseHTTPRequestHandler):
    """Ranges as RFC 9110 says, and the faults."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        """Answer, with the fault that the server has."""
        with self.server.lock:
            number = len(self.server.requests)
            self.server.requests.append((self.path, self.headers["Range"]))
            self.server.heads.append({k.lower(): v for k, v in self.headers.items()})
        path = unquote(re.sub(r"^http://[^/]*", "", self.path).partition("?")[0])
        file = self.server.files.get(path)
        if file is None:
            self.plain(404)
        else:
            getattr(self, self.server.fault or "good")(file, number)

    def plain(self, status: int, **headers: str) -> None:
        """An answer without content."""
        self.send_response(status)
        for key, value in {"Content-Length": "0", **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()

    def span(self, file: File) -> tuple[int, int]:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"] or "")
        if not found:
            return 0, file.size
        return int(found[1]), min(int(found[2]) + 1, file.size)

    def head(self, file: File, begin: int, end: int, etag: str = '"one"', **changed: str) -> None:
        """Status and headers of a range (or of all, where none was asked)."""
        part = self.headers["Range"] is not None
        self.send_response(206 if part else 200)
        headers = {"Content-Length": str(end - begin), "ETag": etag, "Last-Modified": "Sun, 06 Nov 1994 08:49:37 GMT"}
        if part:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{file.size}"
        for key, value in {**headers, **{k.replace("_", "-"): v for k, v in changed.items()}}.items():
            if value:
                self.send_header(key, value)
        self.end_headers()

    def body(self, file: File, begin: int, end: int, step: int = 1 << 20, pause: float = 0.0) -> None:
        for at in range(begin, end, step):
            piece = file.read(at, min(step, end - at))
            with self.server.lock:  # counted before the client can have it
                self.server.sent += len(piece)
            self.wfile.write(piece)
            if pause:
                time.sleep(pause)

    def drop(self) -> None:
        """Close the connection here and now."""
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(2)

    def good(self, file: File, number: int, **changed: str) -> None:
        begin, end = self.span(file)
        if begin >= file.size and self.headers["Range"]:
            self.plain(416, Content_Range=f"bytes */{file.size}")
            return
        self.head(file, begin, end, **changed)
        self.body(file, begin, end)

    def no_ranges(self, file: File, number: int) -> None:
        del self.headers["Range"]
        self.good(file, number)

    def endless(self, file: File, number: int) -> None:
        """All of a file without an end or a length, whatever is asked."""
        self.send_response(200)
        self.end_headers()
        self.close_connection = True
        while True:
            self.body(file, 0, 1 << 20)

    def slow(self, file: File, number: int) -> None:
        begin, end = self.span(file)
        self.head(file, begin, end)
        self.body(file, begin, end, step=1 << 17, pause=self.server.settings.get("pause", 0.02))

    def silent(self, file: File, number: int) -> None:
        """Half of the bytes, and then nothing; better the second time."""
        begin, end = self.span(file)
        self.head(file, begin, end)
        if number:
            return self.body(file, begin, end)
        self.body(file, begin, (begin + end) // 2)
        time.sleep(self.server.settings.get("silence", 2.0))
        return self.drop()

    def drops(self, file: File, number: int) -> None:
        """300 000 bytes, then the connection breaks."""
        begin, end = self.span(file)
        self.head(file, begin, end)
        self.body(file, begin, min(end, begin + 300_000))
        if end - begin > 300_000:
            self.drop()

    def always_drops(self, file: File, number: int) -> None:
        begin, end = self.span(file)
        self.head(file, begin, end)
        self.body(file, begin, min(end, begin + 100))
        self.drop()

    def hangs_up(self, file: File, number: int) -> None:
        """A kept connection is closed before the second answer on it."""
        self.good(file, number)
        self.close_connection = True

    def busy(self, file: File, number: int) -> None:
        """503, 429, then well."""
        if number < 2:
            self.plain((503, 429)[number], Retry_After="0")
        else:
            self.good(file, number)

    def status(self, file: File, number: int) -> None:
        self.plain(self.server.settings["status"])

    def changes(self, file: File, number: int) -> None:
        """Another ETag after the first request."""
        self.good(file, number, etag='"one"' if not number else '"two"')

    def grows(self, file: File, number: int) -> None:
        file.size += 1
        self.good(file, number, etag="", Last_Modified="")

    def lies(self, file: File, number: int) -> None:
        """What the Content-Range says can be set."""
        self.good(file, number, Content_Range=self.server.settings["content_range"])

    def zipped(self, file: File, number: int) -> None:
        self.good(file, number, Content_Encoding="gzip")

    def redirects(self, file: File, number: int) -> None:
        self.plain(302, Location=self.server.settings["location"])

    def needs_token(self, file: File, number: int) -> None:
        if self.headers["Authorization"] != self.server.settings["authorization"]:
            self.plain(401)
        else:
            self.good(file, number)

    def expires(self, file: File, number: int) -> None:
        """The address is good for one answer."""
        if number == 1:
            self.plain(403)
        else:
            self.good(file, number)
