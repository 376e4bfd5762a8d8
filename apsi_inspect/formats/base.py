"""What a container format is, and the checks that all readers share.

A format is one file in this folder that ends in ``X = Format(…)``, and one name in `FORMATS` (`formats/__init__.py`).
`sniff` looks at the first bytes only; `read` reads the header only and gives a checked `ModelFile`, or raises
`ModelFileError`. `tests/test_formats.py` runs the same conformance suite over every format.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from typing import NamedTuple

from ..errors import ModelFileError, quote
from ..model import Finding
from ..source import FileSource

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    from ..model import Columns, ModelFile
    from ..source import ByteSource

MAX_NDIM = 64  # NumPy's own limit
MAX_VALUES = 1 << 21  # in one JSON text
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_TOO_MANY = rf'(?s)(?:(?:{_STRING}|[^",\[{{]++)*+[,\[{{]){{{MAX_VALUES + 1}}}+'


class Format(NamedTuple):
    """One container format.

    Attributes
    ----------
    name
        What ``open(format=…)`` and `ModelFile.format` call it.
    extensions
        Usual file name endings.
    sniff
        ``sniff(head, size)``: could these first bytes begin such a file?
    read
        ``read(source)``: header only.
    """

    name: str
    extensions: tuple[str, ...]
    sniff: Callable[[bytes, int], bool]
    read: Callable[[ByteSource], ModelFile]


def load_json(text: str, source_name: str, what: str, **hooks: Any) -> Any:
    """`json.loads` that refuses NaN, Infinity and absurdly many values; every failure is a ModelFileError."""
    import json

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    # Objects take up to 25 times the space of their text. Strings are looked into only where that can matter.
    if len(text) > MAX_VALUES and sum(map(text.count, ",[{")) > MAX_VALUES and re.match(_TOO_MANY, text):
        raise ModelFileError(source_name, f"{what} holds more than {MAX_VALUES} values")
    try:
        with PausedGC():
            return json.loads(text, parse_constant=refuse, **hooks)
    except RecursionError:
        raise ModelFileError(source_name, f"{what} is nested too deeply") from None
    except json.JSONDecodeError as exc:
        raise ModelFileError(source_name, f"{what} is not valid JSON: {exc.msg} at character {exc.pos}") from None
    except ValueError as exc:  # NaN, and integers of thousands of digits
        reason = "an integer of thousands of digits" if "digits" in str(exc) else str(exc)
        raise ModelFileError(source_name, f"{what} is not valid JSON: {reason}") from None


class PausedGC:
    """No garbage collection inside: parsing makes many objects and no cycles, and looking for some takes most of it."""

    def __enter__(self) -> None:
        self._was = gc.isenabled()
        gc.disable()

    def __exit__(self, *exc: object) -> None:
        if self._was:
            gc.enable()


def warm_scan(amount: int, worth: int) -> Any:
    """`kernels.scan` where at least so much as is worth it is to do, and Numba is loaded already; else None."""
    if amount < worth or "numba" not in sys.modules:
        return None
    from ..kernels import scan

    return scan


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` that refuses duplicate keys."""
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"duplicate key {quote(twice)}")
    return out


def first_duplicate(names: Iterable[str]) -> str | None:
    """The first name that stands a second time."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def plain_file_name(name: object) -> bool:
    """True for a name that can only mean a file in the same folder (path strings inside a file are hostile)."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= 255
        and not any(c in name for c in "/\\:\0")
        and name not in (".", "..")
        and name.isprintable()
    )


def open_beside(source: ByteSource, name: str) -> ByteSource:
    """The file of that name in the same folder, or beside it at the same URL; it holds no descriptor.

    Raises
    ------
    OSError
        It is missing or unreadable.
    """
    beside: Callable[[str], ByteSource] | None = getattr(source, "beside", None)
    if beside is not None:
        return beside(name)
    return FileSource(os.path.join(os.path.dirname(source.name), name), keep_open=False)


def is_remote(source: ByteSource) -> bool:
    """Whether a file is behind a URL, so that its folder cannot be listed."""
    return hasattr(source, "beside")


def is_mapped(source: object) -> bool:
    """Whether a view of a file costs nothing; of one behind a URL it brings the bytes into memory."""
    return bool(getattr(source, "mapped", True))


def join_columns(parts: Sequence[Columns]) -> Columns:
    """The tables of several shards as one; `files` counts the shards."""
    from ..model import Columns

    names: list[str] = []
    encodings: list[Any] = []
    codes: list[int] = []
    dims: list[int] = []
    starts: list[int] = [0]
    offsets: list[int] = []
    sizes: list[int] = []
    files: list[int] = []
    for number, part in enumerate(parts):
        place = {}
        for old, encoding in enumerate(part.encodings):
            if encoding not in encodings:
                encodings.append(encoding)
            place[old] = encodings.index(encoding)
        names += part.names
        codes += [place[int(c)] for c in part.codes]
        base = len(dims)
        dims += map(int, part.dims)
        starts += [base + int(s) for s in part.starts[1:]]
        offsets += map(int, part.offsets)
        sizes += map(int, part.sizes)
        files += [number] * len(part.names)
    return Columns(names, encodings, codes, dims, starts, offsets, sizes, files)


def extension_finding(path: str, model_format: str, extensions: tuple[str, ...]) -> Finding | None:
    """A warning where the file's name promises another format than its content is."""
    if path.lower().endswith(extensions):
        return None
    ending = os.path.splitext(path)[1]
    return Finding(
        "warning" if ending else "note",
        "wrong-extension",
        f"the content is {model_format}, although the name ends in {quote(ending)}"
        if ending
        else f"the content is {model_format}; the name has no extension",
    )
