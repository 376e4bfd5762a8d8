"""Writing safetensors: one canonical layout, streamed; the same tensors always give the same bytes.

Contract: tensors stand by descending item size and then by name (code points), so that each is aligned to its item
size; the header has ``__metadata__`` first with sorted keys, then the table in the order of the data, no white space,
and spaces at its end up to a multiple of 8. Tensor values are never held: a `Blob` gives its bytes in pieces.
`tests/test_save_load.py` compares the files with those of the `safetensors` library.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from ..errors import ValueRefusedError, quote
from .safetensors import DTYPES, MAX_HEADER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Any

    from ..atomic import Pending

BLOCK = 8_388_608  # bytes that are handed on at a time; the chunk of .apsim
MAX_INT = (1 << 53) - 1


class Blob(NamedTuple):
    """The bytes of one tensor, ready to be stored.

    Attributes
    ----------
    dtype
        The safetensors word.
    shape
        As the header says it.
    nbytes
        Bytes of all pieces together.
    pieces
        Gives contiguous byte buffers, one after the other; may be asked again.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    pieces: Callable[[], Iterable[Any]]


def itemsize(dtype: str) -> int:
    """Bytes of an element; 1 for those below a byte."""
    encoding = DTYPES[dtype]
    return encoding.block_bytes if encoding.block_size == 1 else 1


def layout(blobs: Iterable[Blob]) -> list[Blob]:
    """The order in a file; empty tensors that share a position stand by name there."""
    ordered = sorted(blobs, key=lambda b: (-itemsize(b.dtype), b.name))
    if all(b.nbytes for b in ordered):
        return ordered
    places, position = [], 0
    for b in ordered:
        places.append((position, position + b.nbytes, b.name))
        position += b.nbytes
    return [ordered[i] for i in sorted(range(len(ordered)), key=places.__getitem__)]


def table(blobs: Iterable[Blob]) -> dict[str, Any]:
    """The header's entries for blobs in file order."""
    out: dict[str, Any] = {}
    position = 0
    for b in blobs:
        if b.name in out:
            raise ValueRefusedError(f"two tensors are named {quote(b.name)}")
        out[b.name] = {"dtype": b.dtype, "shape": list(b.shape), "data_offsets": [position, position + b.nbytes]}
        position += b.nbytes
        if max((position, *b.shape)) > MAX_INT:
            raise ValueRefusedError(f"tensor {quote(b.name)}: a size above 2^53-1")
    return out


def header(entries: dict[str, Any], metadata: dict[str, str] | None) -> bytes:
    """Length, header and padding: everything before the data."""
    whole = dict(entries)
    if metadata is not None:
        whole = {"__metadata__": dict(sorted(metadata.items())), **entries}
    text = json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise ValueRefusedError(f"the header would take {len(text)} bytes; safetensors allows {MAX_HEADER}")
    return len(text).to_bytes(8, "little") + text


def blocks(blobs: Iterable[Blob], size: int = BLOCK) -> Iterator[list[memoryview]]:
    """The data section in blocks of exactly `size` bytes (the last one shorter), each a list of buffers."""
    block: list[memoryview] = []
    room = size
    for b in blobs:
        count = 0
        for piece in b.pieces():
            view = memoryview(piece).cast("B")
            count += view.nbytes
            while view.nbytes:
                part, view = view[:room], view[room:]
                block.append(part)
                room -= part.nbytes
                if not room:
                    yield block
                    block, room = [], size
        if count != b.nbytes:
            raise ValueRefusedError(f"tensor {quote(b.name)} gave {count} bytes, {b.nbytes} were expected")
    if block:
        yield block


def write(
    out: Pending,
    blobs: Sequence[Blob],
    metadata: dict[str, str] | None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write a plain safetensors file."""
    ordered = layout(blobs)
    position = out.write_at(0, [header(table(ordered), metadata)])
    for block in blocks(ordered):
        end = out.write_at(position, block)
        if progress is not None:
            progress(end - position)
        position = end
