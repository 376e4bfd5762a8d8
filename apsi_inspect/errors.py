"""Every exception this package raises by itself, and the quoting of hostile text in their messages.

::

    ApsiError
    ├── ModelFileError            a file that cannot be used (names file, place, reason, what to do)
    │   ├── UnknownFormatError    its content is no model format we know
    │   ├── TruncatedFileError    it ends before what its header declares
    │   ├── UnsupportedFileError  well formed, but of a version or kind that is not supported
    │   └── VerificationError     its digests or its signature do not hold (`.status` says how)
    ├── TensorNotFoundError       (also a KeyError) no tensor of that name
    ├── ValueRefusedError         (also a ValueError) an argument or a tensor's values cannot be used
    └── MissingPackageError       (also an ImportError) an optional package is needed; names the extra

A missing or unreadable file stays the operating system's own OSError. `tests/test_errors.py` checks the messages.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

# Characters that move the cursor, hide text or reorder it: C0, DEL, C1, line separators, bidi and zero-width marks.
_UNSAFE = (
    range(0x00, 0x20),
    range(0x7F, 0xA0),
    (0xAD, 0x61C, 0x180E, 0xFEFF),
    range(0x200B, 0x2010),
    range(0x2028, 0x202F),
    range(0x2060, 0x2070),
    range(0xD800, 0xE000),
    range(0xFFF9, 0xFFFC),
    range(0x13430, 0x13440),
    range(0x1BCA0, 0x1BCA4),
    range(0x1D173, 0x1D17B),
    range(0xE0000, 0xE0080),
)
_SHORT = {0x09: "\\t", 0x0A: "\\n", 0x0D: "\\r"}


class _Escapes:
    """A table for `str.translate`, asked for one character at a time: to make it whole takes longer than a report."""

    def __getitem__(self, c: int) -> str:
        if not any(c in part for part in _UNSAFE):
            raise LookupError
        return _SHORT.get(c) or (f"\\x{c:02x}" if c < 0x100 else f"\\u{c:04x}" if c < 0x10000 else f"\\U{c:08x}")


def visible(text: str, limit: int | None = None) -> str:
    """Text from a file, safe to print on one line: control and bidi characters escaped, the middle cut at `limit`."""
    if limit is not None and len(text) > limit:
        head = max(limit * 2 // 3, 1)
        tail = max(limit - head - 1, 0)
        text = text[:head] + "…" + (text[-tail:] if tail else "")
    return text if text.isprintable() else text.translate(_Escapes())  # nothing unsafe is printable


def quote(text: str, limit: int = 80) -> str:
    """A name from a file as it stands in a message: quoted, safe, and cut at `limit`."""
    return f"'{visible(text, limit)}'"


def brief(value: object, limit: int = 80) -> str:
    """Any value from a file (a list, a number, of whatever size and depth) as it stands in a message."""
    try:
        return visible(str(value), limit)
    except RecursionError:
        return "something nested very deeply"


class ApsiError(Exception):
    """Root of every exception that this package raises by itself."""


class ModelFileError(ApsiError):
    """A model file that cannot be used.

    Parameters
    ----------
    file
        The file's name as the user gave it.
    reason
        What is wrong: expected and found.
    where
        The place in the file: a tensor, a key, a byte offset.
    hint
        What the user can do.
    """

    def __init__(self, file: str, reason: str, where: str | None = None, hint: str | None = None) -> None:
        self.file, self.reason, self.where, self.hint = file, reason, where, hint
        super().__init__(file, reason, where, hint)

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return visible(f"{self.file}: {place}{self.reason}" + (f" ({self.hint})" if self.hint else ""))

    def _repr_html_(self) -> str:
        import html

        return f"<pre>{html.escape(str(self))}</pre>"


class UnknownFormatError(ModelFileError):
    """The content of the file is no model format we know."""


class TruncatedFileError(ModelFileError):
    """The file ends before what its header declares."""


class UnsupportedFileError(ModelFileError):
    """The file is well formed, but of a version or kind that is not supported."""


class VerificationError(ModelFileError):
    """The digests or the signature of a file do not hold.

    Attributes
    ----------
    status
        ``"damaged"``, ``"unsigned"``, ``"other-key"``, ``"incomplete"`` or ``"not-checked"`` (nothing to check with).
    """

    def __init__(
        self, file: str, reason: str, where: str | None = None, hint: str | None = None, status: str = "damaged"
    ) -> None:
        super().__init__(file, reason, where, hint)
        self.status = status


class TensorNotFoundError(ApsiError, KeyError):
    """No tensor of that name; the message offers the nearest ones."""

    def __init__(self, name: str, file: str, near: Iterable[str] = ()) -> None:
        self.name, self.file, self.near = name, file, tuple(near)
        super().__init__(name, file, self.near)

    def __str__(self) -> str:
        near = ", ".join(quote(n) for n in self.near)
        return f"{visible(self.file)}: no tensor {quote(str(self.name))}" + (f"; did you mean {near}?" if near else "")


class ValueRefusedError(ApsiError, ValueError):
    """An argument, or the values of a tensor, cannot be used; nothing was written."""


class MissingPackageError(ApsiError, ImportError):
    """An optional package is needed for this."""

    def __init__(self, package: str, what: str, extra: str | None = None) -> None:
        self.package, self._args = package, (package, what, extra)
        install = f"pip install 'apsi-inspect[{extra}]'" if extra else f"pip install {package}"
        super().__init__(f"{what} needs the package {package}: {install}", name=package)

    def __reduce__(self) -> tuple[type, tuple[str, str, str | None]]:
        return type(self), self._args
