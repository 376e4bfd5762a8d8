"""A large safetensors header in pieces, each a JSON object of its own, parsed one at a time.

`json.loads` makes up to 25 bytes of objects of every byte of text: 100 MB of ``[],[],…`` would take 2.5 GB and 15 s. So
a large header is first matched, without making anything, against the shape of a table of tensors; what fits is cut
after every few thousand entries, and what does not is refused at once. Nothing else is decided here: whatever is cut is
parsed and checked as a small header is. `tests/test_safetensors.py` has the hostile headers.
"""

from __future__ import annotations

import re

from ..errors import ModelFileError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

LARGE = 1 << 24  # bytes: up to here, what looks usual is one piece
ENTRIES = 4096
MAX_STRINGS = 1_000_000  # of metadata

_SPACE = rb"[ \t\r\n]*+"
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_NUMBERS = rb"\[[^\[\]{}\":]{0,4096}+\]"
_BARE = rb'[^"{}\[\]]{1,1024}+'  # colons, commas, numbers, white space
# An entry: an object of at least the three fields and at most a dozen more, none of them deeper than a list of numbers.
_ENTRY = rb"\{(?=[^}]{40})(?:" + _STRING + rb"|" + _BARE + rb"|" + _NUMBERS + rb"){1,64}+\}"
_STRINGS = rb"\{(?:" + _STRING + rb"|" + _BARE + rb"){0,%d}+\}" % (4 * MAX_STRINGS)
_METADATA = rb'"__metadata__"' + _SPACE + rb":" + _SPACE + rb"(?:null|" + _STRINGS + rb")"
_MEMBER = rb"(?:" + _METADATA + rb"|" + _STRING + _SPACE + rb":" + _SPACE + _ENTRY + rb")" + _SPACE
_BEGIN = re.compile(_SPACE + rb"\{" + _SPACE)
_MEMBERS = re.compile(rb"(?s)(?:" + _MEMBER + rb"(?:," + _SPACE + rb"|(?=\}))){1,%d}+" % ENTRIES)
_END = re.compile(rb"\}" + _SPACE + rb"\Z")


def _looks_usual(text: bytes) -> bool:
    """Brackets and commas of about as many tensors as there are fields ``data_offsets``: counting is cheap.

    Between two of them stand a key and a value at most.
    """
    n = text.count(b'"data_offsets"') + 64
    return text.count(b"[") + text.count(b"{") <= 3 * n and text.count(b",") <= 12 * n


def pieces(text: bytes, file: str) -> Iterator[bytes]:
    """The header as one JSON object or more; their members, one after the other, are its members.

    Raises
    ------
    ModelFileError
        The header is large, and no table of tensors.
    """
    if len(text) < LARGE and _looks_usual(text):
        yield text
        return
    begin = _BEGIN.match(text)
    position = begin.end() if begin else 0
    while begin and not _END.match(text, position):
        members = _MEMBERS.match(text, position)
        if members is None:
            break
        piece = members[0].rstrip()
        position = members.end()
        if piece.endswith(b",") and not _END.match(text, position):
            piece = piece[:-1]  # a comma before the end is left for the parser to refuse
        yield b"{" + piece + b"}"
    else:
        if begin:
            return
    raise ModelFileError(
        file,
        f"header of {len(text)} bytes: what begins at byte {position} of it is not read",
        hint=f"either no entry of a tensor table, or absurdly large: at most {MAX_STRINGS} metadata texts, "
        "16 fields an entry and 4096 characters of shape are read in a header of this size",
    )
