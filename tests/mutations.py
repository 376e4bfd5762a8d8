"""Changes of signed .apsim files by somebody without the key, on the bytes alone: nothing of the package is used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import apsim_oracle, handmade

Parts = tuple[dict[str, Any], dict[str, Any], bytes]  # the table, the metadata, the data


def packed(table: dict[str, Any], meta: dict[str, Any], data: bytes, first: str = "", reverse: bool = False) -> bytes:
    """A file of its parts; `first` is text put before everything else in the header's object."""
    items = list({"__metadata__": meta, **table}.items())
    body = json.dumps(dict(items[::-1] if reverse else items), ensure_ascii=False, separators=(",", ":"))
    return handmade.from_header("{" + first + body[1:], data, align=8)


def redigested(table: dict[str, Any], meta: dict[str, Any], data: bytes) -> dict[str, Any]:
    """The metadata with its digests set right again, as anyone can (section 6 of the specification, no chunks)."""
    meta = {**meta, "sha256": hashlib.sha256(apsim_oracle.jcs(table) + data).hexdigest()}
    covered = {k: v for k, v in meta.items() if k not in ("meta_sha256", "signature")}
    return {**meta, "meta_sha256": hashlib.sha256(apsim_oracle.jcs(covered)).hexdigest()}


def text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def flip_data_bit(table: dict[str, Any], meta: dict[str, Any], data: bytes, name: str, bit: int) -> Parts:
    changed = bytearray(data)
    changed[table[name]["data_offsets"][0] + bit // 8] ^= 1 << bit % 8
    return table, meta, bytes(changed)


def swap_data(table: dict[str, Any], meta: dict[str, Any], data: bytes, one: str, other: str) -> Parts:
    (a, b), (c, d) = table[one]["data_offsets"], table[other]["data_offsets"]
    changed = bytearray(data)
    changed[a:b], changed[c:d] = data[c:d], data[a:b]
    return table, meta, bytes(changed)


def drop(table: dict[str, Any], meta: dict[str, Any], data: bytes, name: str) -> Parts:
    kept, out = {}, b""
    for key, entry in table.items():
        if key != name:
            begin, end = entry["data_offsets"]
            kept[key] = {**entry, "data_offsets": [len(out), len(out) + end - begin]}
            out += data[begin:end]
    return kept, meta, out


def unit(table: dict[str, Any], meta: dict[str, Any], data: bytes) -> Parts:
    units = json.loads(meta["units"])
    first = units[min(units)]
    vector = first["dim"] if isinstance(first, dict) else first
    vector[0] = 0 if vector[0] else 1
    return table, {**meta, "units": text(units)}, data


def drop_user_key(table: dict[str, Any], meta: dict[str, Any], data: bytes, key: str) -> Parts:
    user = json.loads(meta["metadata"])
    user.pop(key)
    return table, {**meta, "metadata": text(user)}, data


def renamed(table: dict[str, Any], meta: dict[str, Any], data: bytes, old: str, new: str) -> Parts:
    return {(new if k == old else k): v for k, v in table.items()}, meta, data


def field(table: dict[str, Any], meta: dict[str, Any], data: bytes, name: str, **fields: Any) -> Parts:
    return {**table, name: {**table[name], **fields}}, meta, data


def signature(table: dict[str, Any], meta: dict[str, Any], data: bytes, **fields: Callable[[str], str]) -> Parts:
    signed = json.loads(meta["signature"])
    signed |= {k: change(signed[k]) for k, change in fields.items()}
    return table, {**meta, "signature": text(signed)}, data


def unsigned(table: dict[str, Any], meta: dict[str, Any], data: bytes) -> Parts:
    return table, {k: v for k, v in meta.items() if k != "signature"}, data


# By the names that the cases give them in `expect.mutation`.
MUTATIONS: dict[str, Callable[[dict[str, Any], dict[str, Any], bytes], Parts]] = {
    "flip-data-bit enc.w 5": lambda *p: flip_data_bit(*p, "enc.w", 5),
    "swap-data enc.w dec.w": lambda *p: swap_data(*p, "enc.w", "dec.w"),
    "reshape enc.w 4,4": lambda *p: field(*p, "enc.w", shape=[4, 4]),
    "drop dec.w": lambda *p: drop(*p, "dec.w"),
    "append 16": lambda t, m, d: (t, m, d + b"\x5a" * 16),
    "set-meta-containing unit mm": unit,
    "drop-meta note": lambda *p: drop_user_key(*p, "note"),
    "rename caf\u00e9 cafe\u0301": lambda *p: renamed(*p, "caf\u00e9", "cafe\u0301"),
    "dup-metadata unit mm": lambda *p: p,
    "reorder": lambda *p: p,
    "entry-field enc.w transpose true": lambda *p: field(*p, "enc.w", transpose=True),
    "strip-hmac": unsigned,
    "tag-cut 0": lambda *p: signature(*p, mac=lambda mac: ""),
    "tag-nonascii": lambda *p: signature(*p, mac=lambda mac: mac[:-1] + "\u00e9"),
    "alg none": lambda *p: signature(*p, alg=lambda alg: "none"),
}


def mutate(name: str, signed: Path, changed: Path, redigest: bool = False) -> None:
    """Write the file `changed`: the signed one, changed as `name` says."""
    table, meta, data = MUTATIONS[name](*apsim_oracle.split(signed))
    if redigest:
        meta = redigested(table, meta, data)
    first = ""
    if name.startswith("dup-metadata"):
        first = '"__metadata__":' + text({**meta, "injected": "mm"}) + ","
    changed.write_bytes(packed(table, meta, data, first, reverse=name == "reorder"))
    assert changed.read_bytes() != signed.read_bytes()
