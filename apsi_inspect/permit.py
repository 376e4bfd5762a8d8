"""Permissions: which files this package may load and save, asked in the one place where each is opened.

Contract: without a restriction everything is allowed that the operating system allows. Inside ``with permissions(…)``
(and under ``apsi run``) a file is opened only where every restriction in force names it or a folder above it; symbolic
links and ``..`` are followed first, so that a link does not lead out of a folder. The restriction holds for the whole
process, all threads included. Every file that is opened or saved is announced to `sys.addaudithook` as ``apsi.open`` or
``apsi.save`` with its name. It guards the functions of this package and is no sandbox: other Python code in the process
can open what it likes (`docs/threat-model.md`). `tests/test_permissions.py` enforces this.
"""

from __future__ import annotations

import errno
import os
import sys

from .errors import ValueRefusedError, visible

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType
    from typing import Self

    Path = str | os.PathLike[str]
    Allowed = bool | Path | Iterable[Path] | None

_DOING = {"read": "loading", "write": "saving"}
_PORTS = {"http": 80, "https": 443}
_active: list[permissions] = []  # every one must allow


class permissions:  # noqa: N801  # used like a function: `with ai.permissions(read=["models"]):`
    """Restrict what this package may load and save, as a context manager.

    Parameters
    ----------
    read
        What may be loaded: True for everything, or files, folders (with all below them) and URLs (with all below
        them); what is not given is not allowed.
    write
        What may be saved, in the same way.
    fs
        For both.

    Raises
    ------
    ValueRefusedError
        An entry is empty or no path.

    Notes
    -----
    Where something is not allowed a `PermissionError` names the file and the permission that it takes. Restrictions
    nest: an inner one can only take away. They hold for the whole process.

    Examples
    --------
    >>> with ai.permissions(read=["models"], write=["out"]):
    ...     ai.convert("models/tiny.gguf", "out/tiny.safetensors")
    """

    __slots__ = ("read", "write")

    def __init__(self, read: Allowed = None, write: Allowed = None, fs: Allowed = None) -> None:
        both = _roots(fs, "fs")
        self.read = _union(_roots(read, "read"), both)
        self.write = _union(_roots(write, "write"), both)

    def __enter__(self) -> Self:
        _active.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        last = max(i for i, p in enumerate(_active) if p is self)
        del _active[last]

    def __repr__(self) -> str:
        shown = (f"{n}={'True' if v is None else list(v)}" for n, v in (("read", self.read), ("write", self.write)))
        return visible(f"<permissions: {', '.join(shown)}>")


def check_read(name: Path, address: str | None = None, *, local: bool = False) -> None:
    """Announce that a file or URL is opened, and refuse what is not allowed (PermissionError).

    Parameters
    ----------
    name
        Its name for people, without secrets.
    address
        Of a URL: what is asked for in truth; never shown.
    local
        It is a path whatever it looks like.
    """
    text = os.fsdecode(name)
    sys.audit("apsi.open", text)
    _check("read", text, address or text, local)


def check_write(name: Path) -> None:
    """Announce that a file is saved, replaced or removed, and refuse what is not allowed (PermissionError)."""
    text = os.fsdecode(name)
    sys.audit("apsi.save", text)
    _check("write", text, text, True)


def _check(what: str, name: str, address: str, local: bool) -> None:
    place: str | None = None
    for p in tuple(_active):
        roots: tuple[str, ...] | None = getattr(p, what)
        if roots is None:
            continue
        if place is None:
            place = os.path.realpath(address) if local else _place(address)
        if not any(_below(place, root) for root in roots):
            flag = f"apsi run --allow-{what}=PATH, or permissions({what}=[PATH])"
            raise PermissionError(errno.EACCES, f"{_DOING[what]} it is not allowed here: it takes {flag}", name)


def _roots(given: Allowed, argument: str) -> tuple[str, ...] | None:
    """Places that are allowed; None: all."""
    if given is True:
        return None
    if given is None or given is False:
        return ()
    entries = [given] if isinstance(given, (str, os.PathLike)) else list(given)
    for entry in entries:
        if not isinstance(entry, (str, os.PathLike)) or not os.fspath(entry):
            raise ValueRefusedError(f"{argument}= takes True or paths, got {entry!r:.40}")
    places = []
    for entry in entries:
        name = os.path.expanduser(os.fsdecode(entry))
        place = _place(name)
        if not place:
            from .remote_url import masked

            raise ValueRefusedError(f"{argument}= takes no URL with .. or :: in it: {visible(masked(name), 200)}")
        places.append(place)
    return tuple(places)


def _union(a: tuple[str, ...] | None, b: tuple[str, ...] | None) -> tuple[str, ...] | None:
    return None if a is None or b is None else a + b


def is_url(name: str) -> bool:
    """Whether a name is a URL (``scheme://…``) and no path."""
    scheme, found, _ = name.partition("://")
    return bool(found) and len(scheme) > 1 and scheme[0].isalpha() and all(c.isalnum() or c in "+-.:" for c in scheme)


def file_of(url: str) -> str | None:
    """The path that a ``file://`` URL means; None for another URL."""
    scheme, _, rest = url.partition("://")
    if scheme.lower() not in ("file", "local"):
        return None
    from urllib.parse import unquote

    return unquote(rest.removeprefix("localhost"))


def _place(name: str) -> str:
    """Where a name leads: the real path, or the URL without user, query and usual port; "" where a URL is ambiguous."""
    if not is_url(name):
        return os.path.realpath(name)
    path = file_of(name)
    if path is not None:
        return os.path.realpath(path)
    from urllib.parse import unquote, urlsplit

    scheme, _, rest = name.partition("://")
    scheme = scheme.lower()
    if scheme not in _PORTS:  # what stands there is the name: no server decodes it
        host, slash, path = rest.partition("/")
        chained = "::" in name
        return "" if chained or _winding(path) else f"{scheme}://{host.rpartition('@')[2].lower()}{slash}{path}"
    try:
        parts = urlsplit(name)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return ""
    host = f"[{host}]" if ":" in host else host
    at = "" if port in (None, _PORTS[scheme]) else f":{port}"
    return "" if _winding(parts.path) else f"{scheme}://{host}{at}{unquote(parts.path) or '/'}"


def _winding(path: str) -> bool:
    """Whether some server may find ``..`` in it: nobody knows from here how often it decodes, and what it splits at."""
    from urllib.parse import unquote

    for _ in range(8):
        if any(part.partition(";")[0] in (".", "..") for part in path.replace("\\", "/").split("/")):
            return True
        path, before = unquote(path), path
        if path == before:
            return False
    return True


def _below(place: str, root: str) -> bool:
    separator = "/" if is_url(root) else os.sep
    return place == root or place.startswith(root if root.endswith(separator) else root + separator)
