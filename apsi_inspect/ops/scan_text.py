"""Texts that something executes: chat templates, code that a loader is told to run, pickles inside strings."""

from __future__ import annotations

import re

from ..errors import quote
from ..formats.pickle_machine import Machine
from ..formats.pickle_nodes import PickleError
from ..formats.pickle_reader import run
from ..model import Finding

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

MAX_NODES = 1_000_000
# What a chat template has no need of, and what breaks out of Jinja are made of.
_BREAKOUT = re.compile(
    r"__\w+__|\b(?:lipsum|cycler|joiner|self\._TemplateReference__context|get_flashed_messages|url_for|request\.application)\b"
    r"|\|\s*attr\b|\battr\s*\(|\b(?:popen|subprocess|os\.system|eval|exec|getattr|globals|builtins)\b|{%-?\s*(?:include|import|from|extends)\b"
)
_CODE = re.compile(
    r"\bimport\s+(?:os|subprocess|socket|sys|pty|shutil|ctypes)\b|__import__\s*\(|\b(?:eval|exec|compile)\s*\(|os\.(?:system|popen)"
    r"|subprocess\.\w+\s*\(|<script\b|powershell|\bcurl\s+http|/bin/(?:ba)?sh\b|\bgASV|\bgAN[9j]|base64\.b64decode"
)
# Keys of Hugging Face configurations that name Python code beside the model.
_REMOTE = ("auto_map", "custom_pipelines", "trust_remote_code")


def text_findings(key: str, text: str, where: str) -> Iterator[tuple[Finding, bool]]:
    """Findings on one text of the metadata, each with whether it leaves the verdict open."""
    place = f"{where}: " if where else ""
    if "chat_template" in key or key.endswith("template"):
        found = _BREAKOUT.search(text)
        if found:
            message = f"{place}{quote(key)} is a template that reaches for {quote(found[0], 40)}: it may run code"
            yield Finding("error", "suspicious-template", message), False
        else:
            message = f"{place}{quote(key)} is a template of {len(text)} characters, executed to render a chat"
            yield Finding("note", "chat-template", message), False
        return
    found = _CODE.search(text)
    if found:
        message = f"{place}{quote(key)} holds what looks like code: {quote(found[0], 60)}"
        yield Finding("warning", "suspicious-text", message), True


def json_findings(document: Any, where: str) -> Iterator[tuple[Finding, bool]]:
    """Findings on a JSON document: its templates, its code, and the names of code to be run."""
    stack: list[tuple[str, Any]] = [("", document)]
    for _ in range(MAX_NODES):
        if not stack:
            return
        key, value = stack.pop()
        if isinstance(value, dict):
            stack += [(str(k), v) for k, v in value.items()]
            named = [k for k in _REMOTE if value.get(k)]
            if named:
                message = f"{where or 'the file'}: {quote(named[0])} makes loaders run Python code (trust_remote_code)"
                yield Finding("warning", "remote-code", message), True
        elif isinstance(value, list):
            stack += [(key, v) for v in value]
        elif isinstance(value, str):
            yield from text_findings(key, value, where)
    yield Finding("warning", "not-read", f"{where or 'the file'}: too many values to look at all"), True


_HIDDEN = re.compile(rb"\x80[\x02-\x05]|gA[I-VJ][A-Za-z0-9+/]{16,}={0,2}|800[2-5][0-9a-f]{20,}")
_TRIES = 64


def hidden_pickles(data: bytes) -> Iterator[Machine]:
    """Pickles inside a pickle's strings, as far as they can be followed; a few are tried."""
    import base64

    for n, found in enumerate(_HIDDEN.finditer(data, 2)):
        if n >= _TRIES:
            return
        text = found[0]
        try:
            if text[:1] == b"\x80":
                inner = data[found.start() : found.start() + 65_536]
            else:
                unit = 4 if text[:1] == b"g" else 2
                whole = text[: len(text) // unit * unit]
                inner = base64.b64decode(whole) if unit == 4 else bytes.fromhex(whole.decode())
        except ValueError:
            continue
        machine = Machine(inner)
        try:
            run(machine)
        except PickleError:
            if not machine.globals:
                continue
        yield machine
