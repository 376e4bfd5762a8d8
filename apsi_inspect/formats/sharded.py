"""Sharded checkpoints: an index JSON that maps tensor names to the shard files beside it.

Two kinds: Hugging Face's ``model.safetensors.index.json`` (`docs/formats.md`, 1.5) and ``NAME.apsim.index.json``
(`docs/apsim-format.md`, section 8). Shard names are hostile text: only plain names in the same folder are followed.
Shards are opened one by one and hold no file descriptor. Tests: `tests/test_sharded.py`.
"""

from __future__ import annotations

import os
import re

from ..errors import ModelFileError, UnknownFormatError, UnsupportedFileError, brief, quote
from ..model import Finding, ModelFile
from ..tree import TreeError, prefix_conflict, unmark
from . import apsim, safetensors, torch_shards
from .base import Format, first_duplicate, is_remote, join_columns, load_json, open_beside, plain_file_name, unique

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ..source import ByteSource

MAX_INDEX = 100_000_000
_NUMBERED = re.compile(r"(?s)(.*)-([0-9]{5})-of-([0-9]{5})(\.[a-z]+)")


def sniff(head: bytes, size: int) -> bool:
    """A JSON object with nothing of a length before it (a byte order mark is said, not trusted)."""
    return head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{" and size <= MAX_INDEX


def read(source: ByteSource) -> ModelFile:
    """Open a sharded checkpoint by its index."""
    index = load_index(source)
    weight_map = _weight_map(index, source.name)
    metadata = index.get("metadata")
    if isinstance(metadata, dict) and metadata.get("format") == "apsi-model":
        return _read_apsim(source, metadata, weight_map)
    plain = metadata if isinstance(metadata, dict) else {}
    if weight_map and all(shard.endswith(torch_shards.ENDINGS) for shard in weight_map.values()):
        return torch_shards.read_shards(source, plain, weight_map, open_shard, _check_map)
    return _read_safetensors(source, plain, weight_map)


def load_index(source: ByteSource) -> dict[str, Any]:
    """The JSON of an index, checked as JSON."""
    name = source.name
    if source.size > MAX_INDEX:
        raise ModelFileError(name, f"is {source.size} bytes, an index is at most {MAX_INDEX}")
    raw = source.read_at(0, source.size)
    if raw.startswith(b"\xef\xbb\xbf"):
        raise ModelFileError(name, "index begins with a byte order mark (BOM), UTF-8 JSON without one was expected")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise ModelFileError(name, f"index is not UTF-8 (byte {exc.start})") from None
    index = load_json(text, name, "the index", object_pairs_hook=unique)
    if not isinstance(index, dict) or "weight_map" not in index:
        raise UnknownFormatError(name, "is JSON, but no index of a sharded checkpoint (it has no weight_map)")
    apsim.check_json(index, name, "the index")
    return index


def _weight_map(index: dict[str, Any], file: str) -> dict[str, str]:
    found = index["weight_map"]
    if not isinstance(found, dict):
        raise ModelFileError(file, "weight_map is not an object of tensor name -> shard file")
    for tensor, shard in found.items():
        if not plain_file_name(shard):
            what = quote(shard) if isinstance(shard, str) else brief(shard, 40)
            raise ModelFileError(
                file,
                f"weight_map sends it to shard {what}: only a plain name in the same folder is allowed (unsafe path)",
                f"tensor {quote(tensor)}",
            )
    return found


def open_shard(index: ByteSource, shard: str) -> ByteSource:
    """A shard beside its index."""
    try:
        return open_beside(index, shard)
    except FileNotFoundError:
        raise ModelFileError(
            index.name, f"shard {quote(shard)} of the weight_map is missing", hint="download it to the same folder"
        ) from None


def _check_map(
    index: ByteSource, weight_map: dict[str, str], parts: dict[str, list[str]], strict: bool
) -> list[Finding]:
    """The map and the shards' own tables, both directions."""
    where: dict[str, str] = {}
    for shard, names in parts.items():
        for name in names:
            if name in where:
                raise ModelFileError(
                    index.name,
                    f"stands twice: in {quote(where[name])} and in {quote(shard)} (duplicate in two shards)",
                    f"tensor {quote(name)}",
                )
            where[name] = shard
    for name, shard in weight_map.items():
        if where.get(name) != shard:
            there = f"it is in {quote(where[name])}" if name in where else "no shard has it"
            raise ModelFileError(
                index.name,
                f"weight_map sends it to {quote(shard)}, but it is not in there; {there}",
                f"tensor {quote(name)}",
            )
    extra = [name for name in where if name not in weight_map]
    if not extra:
        return []
    text = f"{len(extra)} tensors of the shards are not in the weight_map, {quote(extra[0])} first"
    if strict:
        raise ModelFileError(index.name, text)
    return [Finding("warning", "not-in-index", text)]


def _orphans(index: ByteSource, shards: list[str]) -> list[Finding]:
    """Files that look like further shards of the same checkpoint but that the index does not name."""
    patterns = {(m[1], m[4]) for m in map(_NUMBERED.fullmatch, shards) if m}
    found: list[str] = []
    if is_remote(index):
        return []
    with os.scandir(os.path.dirname(index.name) or ".") as folder:
        for entry in folder:
            m = _NUMBERED.fullmatch(entry.name)
            if m and (m[1], m[4]) in patterns and entry.name not in shards:
                found.append(entry.name)
    if not found:
        return []
    shown = ", ".join(quote(n) for n in sorted(found)[:3])
    return [Finding("warning", "orphan-shard", f"{len(found)} files beside the index are not in it: {shown}")]


def _total_size(metadata: dict[str, Any], actual: int) -> list[Finding]:
    declared = metadata.get("total_size")
    if isinstance(declared, (int, float)) and not isinstance(declared, bool) and declared != actual:
        text = f"total_size in the index is {declared:.0f} bytes, the shards hold {actual}"
        return [Finding("warning", "total-size", text)]
    return []


def _read_safetensors(source: ByteSource, metadata: dict[str, Any], weight_map: dict[str, str]) -> ModelFile:
    shards = sorted(set(weight_map.values()))
    sources = [open_shard(source, shard) for shard in shards]
    headers = [safetensors.parse_header(s) for s in sources]
    names = {shard: list(h.columns.names) for shard, h in zip(shards, headers, strict=True)}
    findings = _check_map(source, weight_map, names, strict=False)
    columns = join_columns([h.columns for h in headers])
    findings += _orphans(source, shards) + _total_size(metadata, sum(columns.sizes))
    merged: dict[str, Any] = {}
    for h in headers:
        for key, value in (h.metadata or {}).items():
            if merged.setdefault(key, value) != value:
                text = f"metadata key {quote(key)} differs between shards; the first one is shown"
                findings.append(Finding("warning", "shard-metadata", text))
    return ModelFile(
        source.name,
        "safetensors",
        columns,
        sources,
        metadata=merged,
        findings=findings,
        facts={"shards": len(shards), "index metadata": metadata},
    )


def _read_apsim(source: ByteSource, metadata: dict[str, Any], weight_map: dict[str, str]) -> ModelFile:
    file = source.name
    if metadata.get("version") != "1":
        raise UnsupportedFileError(file, f".apsim version {quote(str(metadata.get('version')))}; version 1 is known")
    listed = listed_shards(metadata, file)
    if set(weight_map.values()) - listed.keys():
        stray = min(set(weight_map.values()) - listed.keys())
        raise ModelFileError(file, f"weight_map names shard {quote(stray)}, which is not in metadata.shards")
    models, tables = [], {}
    for number, (shard, row) in enumerate(listed.items(), 1):
        model, table = _apsim_shard(source, shard, row, number, len(listed))
        models.append(model)
        tables[shard] = table
    findings = _check_map(source, weight_map, tables, strict=True)
    columns = join_columns([m.columns for m in models])
    actual = sum(columns.sizes)
    if type(metadata.get("total_size")) is not int or metadata["total_size"] != actual:
        raise ModelFileError(file, f"total_size is {metadata.get('total_size')!r}, the shards hold {actual} bytes")
    findings += [f for m in models for f in m.findings if f.code not in ("one-shard", "flat-names")]
    findings += _orphans(source, list(listed))
    skeleton, user = _inner(metadata, "tree", file), _inner(metadata, "metadata", file)
    apsim.check_depth(columns.names, file)
    if "tree" in metadata:
        apsim.check_tree(skeleton, set(columns.names), file)
    elif prefix_conflict(columns.names):
        findings.append(
            Finding("warning", "flat-names", "one name is a leaf and the prefix of another: read as a flat record")
        )
    try:
        user = unmark(user)
    except TreeError as exc:
        raise ModelFileError(file, str(exc), "metadata of the index") from None
    signature = metadata.get("signature")
    if signature is not None:
        apsim.check_signature(signature, file)
    facts = {
        "version": 1,
        "writer": str(metadata.get("apsi", "")),
        "shards": len(listed),
        "digests": "present, not checked",
        "signature": f"present, not checked (key {signature['key_id']})" if signature else "none",
    }
    return ModelFile(
        file,
        "apsim",
        columns,
        [s for m in models for s in m.sources],
        metadata=user if isinstance(user, dict) else {} if user is None else {"metadata": user},
        findings=findings,
        facts=facts,
        units={k: v for m in models for k, v in m.units.items()},
        qparams={k: v for m in models for k, v in m.qparams.items()},
        skeleton=skeleton,
    )


def listed_shards(metadata: dict[str, Any], file: str) -> dict[str, dict[str, Any]]:
    """The rows of an .apsim index's list of shards, by file name."""
    rows = metadata.get("shards")
    digest = metadata.get("index_sha256")
    if not isinstance(digest, str) or not apsim.HEX64.fullmatch(digest):
        raise ModelFileError(file, "has no index_sha256 in lower-case hex", "metadata of the index")
    if not isinstance(rows, list) or not rows:
        raise ModelFileError(file, "has no list of shards", "metadata of the index")
    for row in rows:
        good = (
            isinstance(row, dict)
            and plain_file_name(row.get("file"))
            and all(isinstance(row.get(k), str) and apsim.HEX64.fullmatch(row[k]) for k in ("sha256", "meta_sha256"))
        )
        if not good:
            raise ModelFileError(
                file, f"'{brief(row)}' is no shard: a plain file name and two SHA-256 were expected (unsafe path?)"
            )
    names = [row["file"] for row in rows]
    twice = first_duplicate(names)
    if twice is not None:
        raise ModelFileError(file, f"shard {quote(twice)} stands twice")
    return dict(zip(names, rows, strict=True))


def which_shard(meta: Mapping[str, str]) -> str:
    """What an .apsim file's metadata says of its place among shards, for messages."""
    return f"is shard {quote(meta['shard'])}" if "shard" in meta else "is a checkpoint of its own"


def _apsim_shard(
    index: ByteSource, shard: str, row: dict[str, Any], number: int, count: int
) -> tuple[ModelFile, list[str]]:
    source = open_shard(index, shard)
    header = safetensors.parse_header(source)
    if not apsim.is_apsim(header):
        raise ModelFileError(source.name, "is not .apsim, although the index names it as a shard")
    model = apsim.read_header(source, header)
    meta = header.metadata or {}
    if meta.get("shard") != f"{number}/{count}":
        raise ModelFileError(
            source.name,
            f"{which_shard(meta)}, the index wants shard {number}/{count} (shards are mixed)",
        )
    for key in ("sha256", "meta_sha256"):
        if meta.get(key) != row[key]:
            raise ModelFileError(
                source.name, f"{key} differs from the index: shards of different checkpoints are mixed"
            )
    return model, list(header.columns.names)


def _inner(metadata: dict[str, Any], key: str, file: str) -> Any:
    if key not in metadata:
        return None
    if not isinstance(metadata[key], str):
        raise ModelFileError(file, "is not a JSON text in a string", f"metadata.{key} of the index")
    value = load_json(metadata[key], file, f"metadata.{key} of the index", object_pairs_hook=unique)
    apsim.check_json(value, file, f"metadata.{key} of the index")
    return value


INDEX = Format("index", (".index.json",), sniff, read)
