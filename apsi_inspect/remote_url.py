"""Addresses: what is a URL, how it is shown without its secrets, what stands beside it, where ``hf://`` leads.

Contract: `shown` has neither user, password nor query, so that no message, repr or report repeats a secret; the address
itself is kept apart and is only ever given to the server it names. `tests/test_remote.py` enforces this.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from .errors import ValueRefusedError, quote
from .permit import is_url

_HTTP = ("http://", "https://")
_HF = re.compile(r"(?i)hf://([^/@:?#]+/[^/@:?#]+)(?:@((?:refs/(?:pr|convert)/)?[^/]+))?(?:/(.*))?")
_LEGAL = "/%:@!$&'()*+,;=~-._"
# What is looked for in a repository where no file is named.
HF_FILES = ("model.safetensors.index.json", "model.safetensors")


class Location(NamedTuple):
    """A file somewhere else.

    Attributes
    ----------
    url
        Its address; it may hold secrets and is never printed.
    shown
        The address for people: without user, password and query.
    """

    url: str
    shown: str

    def beside(self, name: str) -> Location:
        """The file of that name in the same folder; a query (a token for all of it) goes with it."""
        from urllib.parse import quote as encoded

        shown = f"{self.shown.rpartition('/')[0]}/{name}"
        if not self.url.lower().startswith(_HTTP):
            return Location(f"{self.url.rpartition('/')[0]}/{name}", shown)
        before, mark, query = self.url.partition("?")
        return Location(f"{before.rpartition('/')[0]}/{encoded(name, safe='/~')}{mark}{query}", shown)


def masked(url: str) -> str:
    """An address for people: without user, password, query and fragment, percent signs decoded; a path as it is."""
    if not is_url(url):
        return url
    from urllib.parse import unquote

    parts = []
    for part in url.split("::"):
        scheme, mark, rest = part.partition("://")
        host, slash, path = re.split(r"\?", rest, maxsplit=1)[0].partition("/")
        if f"{scheme}{mark}".lower() in _HTTP:
            path = unquote(path.partition("#")[0])
        parts.append(f"{scheme}{mark}{host.rpartition('@')[2]}{slash}{path}")
    return "::".join(parts)


def locate(url: str) -> Location:
    """The address behind what the user gave.

    Raises
    ------
    ValueRefusedError
        It names a folder, or is no address.
    """
    if url.lower().startswith("hf://"):
        return _hugging_face(url)
    path = url.split("?")[0]
    if path.endswith("/") or path.partition("://")[2].count("/") == 0:
        hint = "name a file in it, such as model.safetensors or model.safetensors.index.json"
        raise ValueRefusedError(f"{quote(masked(url), 200)} is a folder, which cannot be listed: {hint}")
    if url.lower().startswith(_HTTP):
        return Location(_legal(url), masked(url))
    return Location(url, masked(url))


def _legal(url: str) -> str:
    """An http address with every character encoded that must be; what is encoded already stays."""
    from urllib.parse import quote as encoded
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        if parts.port is not None and not parts.hostname:
            raise ValueError("it names no host")
    except ValueError as exc:
        raise ValueRefusedError(f"{quote(masked(url), 200)} is no address: {exc}") from None
    if not parts.hostname:
        raise ValueRefusedError(f"{quote(masked(url), 200)} is no address: it names no host")
    return parts._replace(
        scheme=parts.scheme.lower(), path=encoded(parts.path, _LEGAL), query=encoded(parts.query, _LEGAL + "?"),
        fragment="",
    ).geturl()  # fmt: skip


def hf_repository(url: str) -> bool:
    """Whether an ``hf://`` address names a repository only, and no file in it."""
    found = _HF.fullmatch(url)
    return found is not None and not found[3]


def _hugging_face(url: str) -> Location:
    from urllib.parse import quote as encoded

    found = _HF.fullmatch(url)
    if found is None or not found[3] or found[3].endswith("/"):
        raise ValueRefusedError(f"{quote(masked(url), 200)}: hf://ORGANISATION/REPOSITORY[@REVISION]/FILE was expected")
    repository, revision, file = found[1], found[2] or "main", found[3]
    base = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    path = "/".join(map(encoded, (*repository.split("/"), "resolve"))) + f"/{encoded(revision, safe='%')}"
    return Location(_legal(f"{base.rstrip('/')}/{path}/{encoded(file)}"), masked(url))
