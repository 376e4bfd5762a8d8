"""Writing .apsim: the canonical metadata, digests and signature of one file or of shards (`docs/apsim-format.md`).

Contract: the same input gives the same bytes (a fresh scrypt salt aside). The header's length is known before the data,
so the data is written once, hashed while it is written, and the header put before it at the end. What is written is
what `formats.apsim` accepts: it checks the header before the first byte goes out. `tests/test_apsim_write.py` writes
the golden files of another implementation again, byte for byte.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from ..errors import ModelFileError, ValueRefusedError
from ..integrity import digests, signing
from ..tree_write import needs_skeleton
from ..units import Unit
from . import apsim, safetensors
from .safetensors_write import Blob, blocks, header, layout, table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from ..atomic import Pending

    Progress = Callable[[int], None]

NO_DIGEST = "0" * 64


class Item(NamedTuple):
    """A logical tensor: a plain one, or codes with their scales.

    Attributes
    ----------
    entry
        Its ``qtensors`` entry without the unit; None for a plain tensor.
    """

    values: Blob
    scales: Blob | None = None
    entry: dict[str, Any] | None = None
    unit: Unit | None = None

    @property
    def name(self) -> str:
        """Name of the logical tensor."""
        return self.values.name

    @property
    def blobs(self) -> list[Blob]:
        """What stands in the table."""
        return [self.values] if self.scales is None else [self.values, self.scales]

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(b.nbytes for b in self.blobs)


class Extras(NamedTuple):
    """What stands in the metadata beside the tensors' own: JSON texts, and who writes."""

    writer: str
    metadata: str | None = None
    tree: str | None = None
    shard: str | None = None


def compact(value: Any) -> str:
    """An inner JSON text."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise ValueRefusedError("nested too deeply for a JSON text") from None


def unit_entry(unit: Unit) -> Any:
    """A unit as `units` holds it."""
    if unit.is_coherent:
        return list(unit.dim)
    return {"dim": list(unit.dim), "scale": repr(float(unit.scale)), "offset": repr(float(unit.offset))}


def tensor_metadata(items: Sequence[Item]) -> dict[str, str]:
    """`units`, `unit_symbols` and `qtensors`, each where there is something in it."""
    units: dict[str, Any] = {}
    symbols: dict[str, str] = {}
    quantized: dict[str, Any] = {}
    for item in sorted(items, key=lambda i: i.name):
        unit = None if item.unit is None else unit_entry(item.unit)
        if item.entry is not None:
            block = {k: v for k, v in item.entry.items() if k == "block" and v is not None}
            quantized[item.name] = {**{k: v for k, v in item.entry.items() if k != "block"}, "unit": unit, **block}
        elif unit is not None:
            units[item.name] = unit
        if item.unit is not None and item.unit.symbol is not None:
            symbols[item.name] = item.unit.symbol
    parts = {"units": units, "unit_symbols": symbols, "qtensors": quantized}
    return {key: compact(value) for key, value in parts.items() if value}


def logical_order(items: Sequence[Item]) -> list[Item]:
    """The order in which the tensors would stand in one file, each where its values (or codes) do."""
    by_name = {item.name: item for item in items}
    return [by_name[b.name] for b in layout([blob for item in items for blob in item.blobs]) if b.name in by_name]


def tree_text(skeleton: Any, groups: Sequence[Sequence[Item]]) -> str | None:
    """The ``tree`` of files that hold these groups of tensors; None where the names say it all."""
    names = [item.name for group in groups for item in logical_order(group)]
    return compact(skeleton) if needs_skeleton(skeleton, names) else None


class Written(NamedTuple):
    """The digests of a file that was written, for an index."""

    sha256: str
    meta_sha256: str


def write(
    out: Pending,
    items: Sequence[Item],
    extras: Extras,
    by: signing.Signer | None = None,
    progress: Progress | None = None,
) -> Written:
    """Write one .apsim file."""
    ordered = layout([blob for item in items for blob in item.blobs])
    entries = table(ordered)
    size = sum(b.nbytes for b in ordered)
    fields = _fields(items, extras)
    first, _ = _complete(entries, fields, _placeholder(size), by)
    _check(out.path, first, size)
    canonical = digests.jcs(entries)
    position = len(first)
    with digests.Hashing(canonical, size) as hashing:
        for block in blocks(ordered, digests.CHUNK):
            hashing.feed(block)
            end = out.write_at(position, block)
            if progress is not None:
                progress(end - position)
            position = end
        found = hashing.finish()
    last, written = _complete(entries, fields, found, by)
    assert len(last) == len(first)
    out.write_at(0, [last])
    return written


def planned_size(items: Sequence[Item], extras: Extras, by: signing.Signer | None = None) -> int:
    """Bytes of the file that `write` would make; no value is read."""
    entries = table(layout([blob for item in items for blob in item.blobs]))
    size = sum(item.nbytes for item in items)
    first, _ = _complete(entries, _fields(items, extras), _placeholder(size), by)
    return len(first) + size


def _fields(items: Sequence[Item], extras: Extras) -> dict[str, str]:
    fields = {"format": "apsi-model", "version": "1", "apsi": extras.writer, **tensor_metadata(items)}
    own = {"metadata": extras.metadata, "tree": extras.tree, "shard": extras.shard}
    return fields | {k: v for k, v in own.items() if v is not None}


def _placeholder(size: int) -> digests.Digests:
    """Digests of the right length, before the data is known."""
    count = -(-size // digests.CHUNK)
    return digests.Digests(NO_DIGEST, [bytes(32)] * count if count > 1 else None, NO_DIGEST)


def _complete(
    entries: dict[str, Any], fields: dict[str, str], found: digests.Digests, by: signing.Signer | None
) -> tuple[bytes, Written]:
    """The header with digests and signature in it; its length does not depend on their values."""
    metadata = {**fields, "sha256": found.sha256}
    if found.chunks is not None and found.root is not None:
        metadata["chunks"] = digests.chunks_text(found.chunks, found.root)
    metadata["meta_sha256"] = digests.meta_sha256(metadata)
    written = Written(metadata["sha256"], metadata["meta_sha256"])
    if by is not None:
        metadata["signature"] = compact(signing.sign(by, [written]))
    return header(entries, metadata), written


class _Planned:
    """A header that is not yet on disk, as a source for the reader."""

    def __init__(self, name: str, text: bytes, size: int) -> None:
        self.name, self.text, self.size = name, text, len(text) + size

    def read_at(self, offset: int, nbytes: int) -> bytes:
        return self.text[offset : offset + nbytes]

    def view(self, offset: int, nbytes: int) -> memoryview:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to release."""


def _check(path: str, text: bytes, size: int) -> None:
    """Refuse to write what the reader would refuse."""
    source = _Planned(path, text, size)
    try:
        apsim.read_header(source, safetensors.parse_header(source))
    except ModelFileError as exc:
        raise ValueRefusedError(f"this cannot be stored: {exc.where + ': ' if exc.where else ''}{exc.reason}") from None


def split(items: Sequence[Item], limit: int) -> list[list[Item]]:
    """Shards of at most `limit` bytes, filled in order; a larger tensor gets one of its own."""
    shards: list[list[Item]] = [[]]
    room = limit
    for item in logical_order(items):
        if item.nbytes > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(item)
        room -= item.nbytes
    return shards


def index_text(
    files: Sequence[str],
    shards: Sequence[Sequence[Item]],
    written: Sequence[Written],
    extras: Extras,
    by: signing.Signer | None,
) -> bytes:
    """The index of a sharded checkpoint."""
    rows = [{"file": f, "sha256": w.sha256, "meta_sha256": w.meta_sha256} for f, w in zip(files, written, strict=True)]
    total = sum(item.nbytes for shard in shards for item in shard)
    metadata: dict[str, Any] = {"total_size": total, "format": "apsi-model", "version": "1", "apsi": extras.writer}
    metadata |= {k: v for k, v in (("metadata", extras.metadata), ("tree", extras.tree)) if v is not None}
    metadata["shards"] = rows
    metadata["index_sha256"] = index_sha256(metadata)
    if by is not None:
        metadata["signature"] = signing.sign(by, written, metadata["index_sha256"])
    weight_map = {
        b.name: file
        for file, shard in zip(files, shards, strict=True)
        for b in layout([blob for item in shard for blob in item.blobs])
    }
    text = json.dumps({"metadata": metadata, "weight_map": weight_map}, ensure_ascii=False, indent=2).encode("utf-8")
    if len(text) > 100_000_000:
        raise ValueRefusedError(f"the index would take {len(text)} bytes; 100000000 are allowed")
    return text


def index_sha256(metadata: dict[str, Any]) -> str:
    """Digest of an index's `metadata` without what cannot cover itself."""
    import hashlib

    covered = {k: v for k, v in metadata.items() if k not in ("index_sha256", "signature")}
    return hashlib.sha256(digests.jcs(covered)).hexdigest()
