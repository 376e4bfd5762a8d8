"""Where the tensors of a PyTorch file stand: each described tensor checked against its storage, as columns.

Contract: a storage has exactly the bytes that its type and number of elements take, a tensor lies inside its storage; a
tensor whose elements do not lie in order gets a source that lays them out (`relaid.py`). `tests/test_torch.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from ..encodings import ENCODINGS
from ..encodings.affine import Affine
from ..errors import ModelFileError, quote
from ..model import Columns
from .relaid import HeldSource, StridedSource, check_extent
from .torch_values import Inline, Storage, Strided, row_major

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..source import ByteSource
    from .torch_tree import Walk

    Find = Callable[[str], "Place | None"]

MAX_BYTES = 1 << 60  # of one tensor


class Place(NamedTuple):
    """The bytes of a storage."""

    source: ByteSource
    offset: int
    nbytes: int
    label: str


class Placed(NamedTuple):
    """The tensors of a walk as columns, and what was seen on the way."""

    columns: Columns
    views: dict[str, ByteSource]
    affine: dict[str, Affine]
    storages: int
    storage_bytes: int
    expanded: list[str]
    facts: dict[str, Any]


class _Placer:
    def __init__(self, source: ByteSource, find: Find, order: str, inline_at: int) -> None:
        self.source, self.find, self.order, self.inline_at = source, find, order, inline_at
        self.views: dict[str, ByteSource] = {}
        self.affine: dict[str, Affine] = {}
        self.seen: dict[str, Place] = {}
        self.expanded: list[str] = []
        self.strided = self.deflated = 0
        self.locations: dict[str, int] = {}

    def fail(self, name: str, reason: str) -> ModelFileError:
        return ModelFileError(self.source.name, reason, f"tensor {quote(name)}")

    def storage(self, name: str, storage: Storage) -> Place:
        """Where a storage is; its size must be what it says."""
        place = self.seen.get(storage.key) or self.find(storage.key)
        encoding = ENCODINGS[storage.encoding]
        wanted = storage.numel * encoding.block_bytes
        if place is None:
            raise self.fail(name, f"its storage data/{quote(storage.key)[1:-1]} is not in the file")
        if place.nbytes != wanted:
            raise self.fail(
                name,
                f"its storage {place.label} has a size of {place.nbytes} bytes, "
                f"{storage.numel} elements of {encoding.name} take {wanted} (mismatch)",
            )
        if storage.key not in self.seen:
            self.seen[storage.key] = place
            self.locations[storage.location] = self.locations.get(storage.location, 0) + 1
        if storage.part is None:
            return place
        first, count = storage.part
        if first + count > storage.numel:
            raise self.fail(name, f"its part of storage {place.label} reaches beyond it")
        n = encoding.block_bytes
        return Place(place.source, place.offset + first * n, count * n, place.label)

    def strided_tensor(self, name: str, t: Strided) -> tuple[int, int]:
        """Offset and bytes of a tensor over a storage."""
        place, encoding = self.storage(name, t.storage), ENCODINGS[t.encoding]
        size, width = encoding.block_size, encoding.block_bytes
        have = place.nbytes // width * size
        check_extent(self.source.name, name, have, t.start, t.shape, t.strides)
        nbytes = t.numel // size * width
        if nbytes > MAX_BYTES or t.numel % size:
            raise self.fail(name, f"has {t.numel} elements of {encoding.name}, which no file can hold")
        offset = place.offset + t.start // size * width
        if not t.numel:
            return place.offset, 0
        transform = (encoding.dtype, t.conj, t.neg) if t.conj or t.neg else None
        if transform and self.order == "big":
            raise self.fail(name, "is the conjugate or negative of big-endian values, which is not read")
        in_order = row_major(t.shape, t.strides) and not transform
        if not in_order:
            self.strided += 1
            if nbytes > place.nbytes:
                self.expanded.append(name)
            self.views[name] = StridedSource(
                place.source, place.offset, place.nbytes, t.start, t.shape, t.strides, width, transform
            )
        elif place.source is not self.source:
            self.deflated += 1
            self.views[name] = place.source
        return offset, nbytes

    def inline(self, name: str, t: Inline) -> tuple[int, int]:
        """Offset and bytes of an array inside the pickle; the offset is nominal."""
        encoding = ENCODINGS[t.encoding]
        wanted = encoding.block_bytes
        for n in t.shape:
            wanted *= n
        if len(t.data) != wanted:
            raise self.fail(name, f"is a NumPy array of {wanted} bytes, but {len(t.data)} are there")
        data = t.data
        if t.big != (self.order == "big") and encoding.swap:
            data = _swapped(data, encoding.swap[0][1])
        offset = self.inline_at
        self.inline_at += max(wanted, 1)
        self.views[name] = HeldSource(self.source.name, offset, data)
        return offset, wanted


def _swapped(data: bytes, width: int) -> bytes:
    out = bytearray(len(data))
    for i in range(width):
        out[i::width] = data[width - 1 - i :: width]
    return bytes(out)


def place_all(source: ByteSource, walk: Walk, find: Find, order: str, inline_at: int) -> Placed:
    """Columns of all tensors of a walk.

    Raises
    ------
    ModelFileError
        A tensor does not fit its storage, or the storage is not there.
    """
    p = _Placer(source, find, order, inline_at)
    names: list[str] = []
    used: dict[str, int] = {}
    codes: list[int] = []
    dims: list[int] = []
    starts, offsets, sizes = [0], [], []
    for name, t in walk.tensors:
        offset, nbytes = p.inline(name, t) if isinstance(t, Inline) else p.strided_tensor(name, t)
        names.append(name)
        codes.append(used.setdefault(t.encoding, len(used)))
        dims += t.shape
        starts.append(len(dims))
        offsets.append(offset)
        sizes.append(nbytes)
        if isinstance(t, Strided) and t.quantizer is not None:
            p.affine[name] = Affine(*t.quantizer)
    encodings = [ENCODINGS[word] for word in used]
    columns = Columns(names, encodings, codes, dims, starts, offsets, sizes)
    facts: dict[str, Any] = {}
    if p.strided:
        facts["strided tensors"] = f"{p.strided}, read in row-major order"
    if p.deflated:
        facts["deflated tensors"] = p.deflated
    devices = {k: n for k, n in p.locations.items() if k not in ("", "cpu")}
    if devices:
        facts["saved from"] = ", ".join(f"{quote(k, 40)[1:-1]} ({n})" for k, n in list(devices.items())[:8])
    total = sum(place.nbytes for place in p.seen.values())
    return Placed(columns, p.views, p.affine, len(p.seen), total, p.expanded, facts)
