"""A small HTTP client for ranges of large files: connections that are kept, redirects, proxies, what a status means.

Contract: a certificate is checked; a redirect never leads from https to http or to anything that is not http; what the
user gave to be sent along (a token, headers) goes to the server he named and to no other. A status that may pass
(429, 5xx) and a lost connection are `Again`, which the caller tries again; all others are errors that say what to do.
The standard library's client is used and none of fsspec, because a server that ignores `Range` must be refused before
its body is read, and because an answer is to be continued where it broke off. `tests/test_remote.py` enforces this.
"""

from __future__ import annotations

import base64
import errno
import os
import re
import socket
import ssl
import threading
from collections.abc import Mapping
from functools import cache
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, InvalidURL
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urljoin, urlsplit
from urllib.parse import quote as encoded
from urllib.request import getproxies, proxy_bypass

from .errors import ModelFileError, ValueRefusedError, quote, visible
from .remote_url import masked

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .remote_url import Location

_REDIRECTS = (301, 302, 303, 307, 308)
_PASSING = (408, 425, 429, 500, 502, 503, 504)
_MAX_REDIRECTS = 6
_MAX_IDLE = 8
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # RFC 9110, 5.1
_LONGEST_WAIT = 60.0  # seconds that a server may ask us to wait
_ERRNO = {401: errno.EACCES, 403: errno.EACCES, 404: errno.ENOENT, 410: errno.ENOENT, 407: errno.EACCES}
_ADVICE = {
    401: "it needs credentials: storage_options={'token': …} or {'headers': …}",
    403: "not allowed: the credentials do not reach so far, or a signed address has expired",
    407: "the proxy needs credentials",
}


class HttpOptions(NamedTuple):
    """What `storage_options` may say for http and https.

    Attributes
    ----------
    headers
        Sent along to the server that was named, and to no other.
    token
        Sent as ``Authorization: Bearer``.
    timeout
        Seconds that a connection may be silent.
    retries
        How often in a row something that may pass is tried again.
    """

    headers: Mapping[str, str] = MappingProxyType({})
    token: str | None = None
    timeout: float = 30.0
    retries: int = 5

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> HttpOptions:
        """Options of a mapping; unknown ones are refused."""
        unknown = sorted(map(str, given.keys() - set(cls._fields)))
        if unknown:
            known = ", ".join(cls._fields)
            raise ValueRefusedError(f"storage_options for http: {quote(unknown[0])} is not known; known: {known}")
        options = cls(**given)
        if not isinstance(options.headers, Mapping):  # its text may be a secret, as the values may be
            raise ValueRefusedError("storage_options for http: headers= takes a dict of names and texts")
        for key in options.headers:
            if not isinstance(key, str) or _HEADER.fullmatch(key) is None:
                raise ValueRefusedError(f"storage_options for http: {quote(str(key))} is no name of a header")
        for key, value in [*options.headers.items(), ("token", options.token or "")]:
            if not isinstance(value, str) or not value.isprintable() or max(value, default="") > "\xff":
                raise ValueRefusedError(f"storage_options for http: {quote(str(key))} is no printable text (Latin-1)")
        for key, number in (("timeout", options.timeout), ("retries", options.retries)):
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < 1e6:
                raise ValueRefusedError(f"storage_options for http: {key} is {number!r:.40}, a number was expected")
        if not options.timeout:
            raise ValueRefusedError("storage_options for http: timeout is 0, seconds above 0 were expected")
        return options


class Again(Exception):  # noqa: N818  (not an error yet)
    """Something that may be different the next time.

    Attributes
    ----------
    wait
        Seconds that the server asked to wait.
    stale
        A kept connection was closed by the server in the meantime: no failure at all.
    got
        Bytes of the body that came before.
    """

    def __init__(self, reason: str, wait: float | None = None, stale: bool = False, got: int = 0) -> None:
        super().__init__(reason)
        self.wait, self.stale, self.got = wait, stale, got


class _Link(NamedTuple):
    """A connection, and what stands before the path where it leads through a proxy."""

    connection: HTTPConnection
    origin: tuple[str, str, int]
    prefix: str
    headers: dict[str, str]


class Client:
    """Requests for one file, from any number of threads.

    Parameters
    ----------
    place
        The file.
    options
        What the user gave.
    """

    def __init__(self, place: Location, options: HttpOptions) -> None:
        self.name, self._options = place.shown, options
        self._first = self._url = place.url  # what was asked for, and where redirects led
        self._home = _origin(urlsplit(place.url))
        self._own = _own_headers(place.url, options)
        self._lock = threading.Lock()
        self._idle: list[_Link] = []
        self._busy: list[_Link] = []
        self.requests = 0

    def get(self, headers: Mapping[str, str], accepted: tuple[int, ...]) -> tuple[_Link, HTTPResponse]:
        """Ask for the file; give the link back with `release`.

        Raises
        ------
        Again
            It may work the next time.
        OSError
            Missing, not allowed, or out of reach.
        ModelFileError
            A redirect to where we do not go.
        """
        url = self._url
        for _ in range(_MAX_REDIRECTS):
            link, response = self._send(url, headers)
            if response.status in accepted:
                self._url = url
                return link, response
            self.release(link, response)
            if response.status in _REDIRECTS:
                url = self._redirected(url, response.getheader("Location"))
            elif url == self._url != self._first and response.status in (400, 401, 403, 404, 410):
                self._url = url = self._first  # the address that a redirect gave has expired
            else:
                raise self._refusal(response)
        raise ModelFileError(self.name, f"the server redirects more than {_MAX_REDIRECTS - 1} times")

    def _redirected(self, url: str, location: str | None) -> str:
        try:
            # encoded where the server has not; a header is read as Latin-1, whatever it was
            where = encoded((location or "").encode("latin-1"), safe="/%:@!$&'()*+,;=~-._?#[]")
            target = urlsplit(urljoin(url, where))
            good = target.scheme in ("http", "https") and bool(target.hostname) and location is not None
            _origin(target)
        except ValueError:
            good = False
        if not good:
            raise ModelFileError(self.name, f"the server redirects to {quote(_brief(location))}, which is not followed")
        if urlsplit(url).scheme == "https" and target.scheme == "http":
            raise ModelFileError(self.name, f"the server redirects from https to {quote(_brief(target.geturl()))}")
        return target.geturl()

    def _refusal(self, response: HTTPResponse) -> Exception:
        status = response.status
        text = f"HTTP {status} {visible(response.reason, 80)}"
        if status in _PASSING:
            return Again(text, _seconds(response.getheader("Retry-After")))
        advice = f": {_ADVICE[status]}" if status in _ADVICE else ""
        return OSError(_ERRNO.get(status, errno.EIO), f"{text}{advice}", self.name)

    def _send(self, url: str, headers: Mapping[str, str]) -> tuple[_Link, HTTPResponse]:
        parts = urlsplit(url)
        origin = _origin(parts)
        own = self._own if origin == self._home else {}
        try:
            link, kept = self._take(origin)
        except InvalidURL as exc:  # a host that cannot be one
            raise OSError(errno.EHOSTUNREACH, _why(exc), self.name) from None
        target = link.prefix + (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        try:
            link.connection.request("GET", target, headers={**link.headers, **own, **headers})
            self.requests += 1
            return link, link.connection.getresponse()
        except BaseException as exc:
            self.discard(link)
            if isinstance(exc, OSError | HTTPException | UnicodeError):
                raise self._failure(exc, kept) from None
            raise

    def _failure(self, exc: OSError | HTTPException | UnicodeError, kept: bool) -> Exception:
        final = isinstance(exc, ssl.SSLCertVerificationError | InvalidURL | UnicodeError) or (
            isinstance(exc, socket.gaierror) and exc.errno != socket.EAI_AGAIN
        )
        if final:
            return OSError(errno.EHOSTUNREACH, _why(exc), self.name)
        return Again(_why(exc), stale=kept and not isinstance(exc, TimeoutError))

    def _take(self, origin: tuple[str, str, int]) -> tuple[_Link, bool]:
        with self._lock:
            for i in reversed(range(len(self._idle))):
                if self._idle[i].origin == origin:
                    link = self._idle.pop(i)
                    self._busy.append(link)
                    return link, True
            link = _connect(origin, self._options.timeout, self.name)
            self._busy.append(link)
            return link, False

    def release(self, link: _Link, response: HTTPResponse) -> None:
        """Keep the connection where the answer was read to its end, else close it."""
        done = response.isclosed() and link.connection.sock is not None
        with self._lock:
            if link in self._busy and done and len(self._idle) < _MAX_IDLE:
                self._busy.remove(link)
                self._idle.append(link)
                return
        self.discard(link)

    def discard(self, link: _Link) -> None:
        """Close a connection."""
        with self._lock:
            if link in self._busy:
                self._busy.remove(link)
        link.connection.close()

    def interrupt(self) -> None:
        """End what other threads are waiting for."""
        with self._lock:
            for link in self._busy:
                if link.connection.sock is not None:
                    try:  # of the socket itself: TLS would wait for its lock
                        socket.socket.shutdown(link.connection.sock, socket.SHUT_RDWR)
                    except OSError:
                        continue  # it is down already

    def close(self) -> None:
        """Close the connections that are kept."""
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            link.connection.close()

    def __del__(self) -> None:
        if hasattr(self, "_idle"):  # a model that was dropped without `close`
            self.close()


def _origin(parts: SplitResult) -> tuple[str, str, int]:
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _own_headers(url: str, options: HttpOptions) -> dict[str, str]:
    """What goes to the server that was named only."""
    parts = urlsplit(url)
    own = dict(options.headers)
    if options.token:
        own["Authorization"] = f"Bearer {options.token}"
    elif parts.username is not None:
        own["Authorization"] = _basic(parts)
    return own


def _basic(parts: SplitResult) -> str:
    pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    return "Basic " + base64.b64encode(pair.encode()).decode("ascii")


def _connect(origin: tuple[str, str, int], timeout: float, name: str) -> _Link:
    """A connection, through the proxy that the environment names."""
    scheme, host, port = origin
    address = getproxies().get(scheme)
    if not address or proxy_bypass(host):
        return _Link(_connection(scheme, host, port, timeout), origin, "", {})
    proxy = urlsplit(address if "://" in address else f"http://{address}")
    if proxy.scheme != "http" or not proxy.hostname:
        raise ModelFileError(name, f"the proxy {quote(masked(address))} is not an http:// one, which is needed")
    headers = {"Proxy-Authorization": _basic(proxy)} if proxy.username is not None else {}
    link = _connection(scheme, proxy.hostname, proxy.port or 80, timeout)
    if scheme == "https":
        link.set_tunnel(host, port, headers)
        return _Link(link, origin, "", {})
    shown = f"[{host}]" if ":" in host else host
    return _Link(link, origin, f"http://{shown}" + (f":{port}" if port != 80 else ""), headers)


def _connection(scheme: str, host: str, port: int, timeout: float) -> HTTPConnection:
    if scheme == "https":
        return HTTPSConnection(host, port, timeout=timeout, context=_certificates())
    return HTTPConnection(host, port, timeout=timeout)


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()


def _brief(url: str | None) -> str:
    return masked(url or "nowhere")[:200].partition("?")[0]


def _seconds(text: str | None) -> float | None:
    """The wait that a Retry-After asks for, as far as we are ready to wait."""
    return min(float(text), _LONGEST_WAIT) if text is not None and text.isascii() and text.isdigit() else None


def _why(exc: OSError | HTTPException | UnicodeError) -> str:
    """What went wrong, without the address."""
    if isinstance(exc, TimeoutError):
        return "the server does not answer in time"
    if isinstance(exc, OSError) and not isinstance(exc, ssl.SSLError) and (exc.errno or 0) in errno.errorcode:
        return os.strerror(exc.errno or 0)
    if isinstance(exc, UnicodeError):
        return "the name of the host cannot be one"
    text = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
    return visible(f"{type(exc).__name__}: {text}" if text else type(exc).__name__, 200)
