"""An independent checker of .apsim files: the specification's arithmetic with hashlib, hmac and json alone."""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
import unicodedata
from pathlib import Path
from typing import Any

CHUNK = 8_388_608
SIZES = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


def jcs(value: Any) -> bytes:
    """RFC 8785 for objects, arrays, strings, integers and the three words."""
    if isinstance(value, dict):
        keys = sorted(value, key=lambda k: k.encode("utf-16-be"))
        return b"{" + b",".join(jcs(k) + b":" + jcs(value[k]) for k in keys) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(map(jcs, value)) + b"]"
    assert not isinstance(value, float)
    return json.dumps(value, ensure_ascii=False).encode("utf-8")


def split(path: Path) -> tuple[dict[str, Any], dict[str, str], bytes]:
    """Table, metadata and data of a file, with the layout rules of section 1 checked."""
    raw = path.read_bytes()
    (n,) = struct.unpack("<Q", raw[:8])
    text, data = raw[8 : 8 + n], raw[8 + n :]
    header = json.loads(text)
    meta = header.pop("__metadata__", {})
    assert n % 8 == 0
    compact = json.dumps(
        {"__metadata__": meta, **header} if meta else header, ensure_ascii=False, separators=(",", ":")
    )
    assert text == compact.encode().ljust(n, b" ")
    assert n - len(compact.encode()) < 8
    assert list(meta) == sorted(meta)
    position, rows = 0, []
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        assert begin == position
        assert begin % SIZES.get(entry["dtype"], 1) == 0
        position = end
        rows.append((begin, end, name))
    assert position == len(data)
    assert rows == sorted(rows)
    full = [(-SIZES.get(header[n]["dtype"], 1), n) for b, e, n in rows if e > b]
    assert full == sorted(full)
    return header, meta, data


def check(path: Path) -> tuple[dict[str, Any], dict[str, str], bytes]:
    """Section 6 of one file."""
    header, meta, data = split(path)
    table = jcs(header)
    assert meta["format"] == "apsi-model"
    assert meta["version"] == "1"
    assert meta["sha256"] == hashlib.sha256(table + data).hexdigest()
    covered = {k: v for k, v in meta.items() if k not in ("meta_sha256", "signature")}
    assert meta["meta_sha256"] == hashlib.sha256(jcs(covered)).hexdigest()
    if len(data) > CHUNK:
        pieces = [hashlib.sha256(data[i : i + CHUNK]).digest() for i in range(0, len(data), CHUNK)]
        root = hashlib.sha256(table + b"".join(pieces)).hexdigest()
        expected = {"size": CHUNK, "sha256": [p.hex() for p in pieces], "root": root}
        assert meta["chunks"] == json.dumps(expected, separators=(",", ":"))
    else:
        assert "chunks" not in meta
    return header, meta, data


def key_of(key: bytes | str, kdf: dict[str, Any] | None) -> bytes:
    """The HMAC key K of section 7."""
    material = key
    if isinstance(key, str):
        assert kdf is not None
        assert (kdf["name"], kdf["n"], kdf["r"], kdf["p"]) == ("scrypt", 32768, 8, 1)
        secret, salt = unicodedata.normalize("NFC", key).encode(), bytes.fromhex(kdf["salt"])
        material = hashlib.scrypt(secret, salt=salt, n=32768, r=8, p=1, maxmem=1 << 26, dklen=32)
    else:
        assert kdf is None
    assert isinstance(material, bytes)
    return hashlib.sha256(b"apsi-model key 1\n" + material).digest()


def check_signature(
    signature: dict[str, Any], key: bytes | str, shards: list[dict[str, str]], index: str | None = None
) -> None:
    """Section 7."""
    assert list(signature) == ["alg", "key_id", "kdf", "mac"]
    k = key_of(key, signature["kdf"])
    assert signature["key_id"] == hmac.new(k, b"apsi-model key id", "sha256").digest()[:8].hex()
    payload = {
        "alg": "HMAC-SHA256",
        "key_id": signature["key_id"],
        "kdf": signature["kdf"],
        "shards": [{"sha256": s["sha256"], "meta_sha256": s["meta_sha256"]} for s in shards],
        "index_sha256": index,
    }
    mac = hmac.new(k, b"apsi-model signature 1\n" + jcs(payload), "sha256").hexdigest()
    assert signature["mac"] == mac


def check_signed(path: Path, key: bytes | str) -> None:
    """Sections 6 and 7 of a signed file."""
    _, meta, _ = check(path)
    check_signature(json.loads(meta["signature"]), key, [meta])


def check_sharded(index: Path, key: bytes | str | None = None) -> dict[str, Any]:
    """Section 8: every shard, the map in both directions, the index's own digest."""
    document = json.loads(index.read_text(encoding="utf-8"))
    metadata = document["metadata"]
    where: dict[str, str] = {}
    total = 0
    for i, row in enumerate(metadata["shards"], 1):
        header, meta, data = check(index.parent / row["file"])
        assert meta["shard"] == f"{i}/{len(metadata['shards'])}"
        assert not {"metadata", "tree", "signature"} & meta.keys()
        assert (row["sha256"], row["meta_sha256"]) == (meta["sha256"], meta["meta_sha256"])
        where |= dict.fromkeys(header, row["file"])
        total += len(data)
    assert document["weight_map"] == where
    assert metadata["total_size"] == total
    covered = {k: v for k, v in metadata.items() if k not in ("index_sha256", "signature")}
    assert metadata["index_sha256"] == hashlib.sha256(jcs(covered)).hexdigest()
    if key is not None:
        check_signature(metadata["signature"], key, metadata["shards"], metadata["index_sha256"])
    return document
