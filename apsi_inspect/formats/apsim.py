""".apsim: a safetensors file whose `__metadata__` adds units, quantized tensors, the tree, digests, signatures.

`docs/apsim-format.md` is normative. Here the header is read and checked (sections 1 to 5, and the form of 6 and 7);
digests and signatures are reported as present, not checked. A safetensors file whose metadata says
``format: apsi-model`` is one, whatever its name. `tests/test_apsim_read.py` opens the files of an independent writer.
"""

from __future__ import annotations

import re
from math import isfinite

from ..encodings import ENCODINGS
from ..encodings.scaled import CODE_DTYPE, PACKING, QParams
from ..errors import ModelFileError, UnknownFormatError, UnsupportedFileError, quote
from ..model import Columns, Finding, ModelFile
from ..tree import MAX_DEPTH, TreeError, from_skeleton, prefix_conflict, unmark
from ..units import Unit, UnitError, parse_unit, valid_symbol
from . import safetensors
from .base import Format, load_json, unique

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ..source import ByteSource
    from .safetensors import Header

BASE_KEYS = {"format", "version", "apsi", "units", "qtensors", "metadata", "sha256", "shard"}
CHUNK = 8_388_608
MAX_INT = (1 << 53) - 1
HEX64 = re.compile(r"[0-9a-f]{64}")
_SHARD = re.compile(r"([1-9][0-9]{0,4})/([1-9][0-9]{0,4})")
_QFIELDS = {"format", "shape", "axis", "packing", "scale_shape", "unit"}


class _Reader:
    """One header on its way to a model; every method checks one section of the specification."""

    def __init__(self, source: ByteSource, header: Header) -> None:
        self.source, self.file, self.columns = source, source.name, header.columns
        self.index = dict(zip(header.columns.names, range(len(header.columns.names)), strict=True))
        self.meta: dict[str, str] = header.metadata or {}
        self.data_size = header.size - 8 - header.length
        self.findings: list[Finding] = []

    def fail(self, reason: str, where: str | None = None, hint: str | None = None) -> ModelFileError:
        return ModelFileError(self.file, reason, where, hint)

    def text(self, key: str) -> Any:
        """The JSON text under a metadata key, or None."""
        if key not in self.meta:
            return None
        value = load_json(self.meta[key], self.file, f"metadata key {key!r}", object_pairs_hook=unique)
        check_json(value, self.file, f"metadata key {key!r}")
        return value

    def objects(self, key: str) -> dict[str, Any]:
        if key not in self.meta:
            return {}
        value = self.text(key)
        if not isinstance(value, dict):
            raise self.fail("is not a JSON object", f"metadata key {key!r}")
        return value

    def profile(self) -> None:
        """Section 2: version, and the digest that protects additions."""
        version = self.meta.get("version")
        if version != "1":
            raise UnsupportedFileError(
                self.file, f".apsim version {quote(str(version))}; version 1 is known", "metadata key 'version'"
            )
        for key in ("apsi", "sha256"):
            if key not in self.meta:
                raise self.fail(f"has no {key!r}, which every .apsim file has", "the metadata")
        for key in ("sha256", "meta_sha256"):
            if key in self.meta and not HEX64.fullmatch(self.meta[key]):
                raise self.fail("is not a SHA-256 in lower-case hex", f"metadata key {key!r}")
        extra = sorted(self.meta.keys() - BASE_KEYS)
        if extra and "meta_sha256" not in self.meta:
            raise self.fail(
                f"key {quote(extra[0])} is beyond the base profile, but there is no 'meta_sha256' to protect it",
                "the metadata",
                "the file was changed after it was written",
            )
        if max(self.columns.dims, default=0) > MAX_INT:
            raise self.fail("the table holds an integer above 2^53-1")
        check_depth(self.columns.names, self.file)

    def shard(self) -> tuple[int, int] | None:
        if "shard" not in self.meta:
            return None
        found = _SHARD.fullmatch(self.meta["shard"])
        if not found or int(found[1]) > int(found[2]):
            raise self.fail(f"{quote(self.meta['shard'])} is not i/N", "metadata key 'shard'")
        return int(found[1]), int(found[2])

    def symbols(self) -> dict[str, str | None]:
        """Section 4: display symbols, each checked against the grammar before anything reads it."""
        out: dict[str, str | None] = {}
        for name, symbol in self.objects("unit_symbols").items():
            if name not in self.index:
                raise self.fail(f"names {quote(name)}, which is not there", "metadata key 'unit_symbols'")
            out[name] = symbol if valid_symbol(symbol) else None
            if out[name] is None:
                self.findings.append(
                    Finding(
                        "warning",
                        "unit-symbol",
                        f"unit symbol {quote(str(symbol), 40)} of tensor {quote(name)} breaks the grammar, not used",
                    )
                )
        return out

    def unit(self, value: Any, symbol: str | None, name: str) -> Unit:
        try:
            return parse_unit(value, symbol)
        except UnitError as exc:
            raise self.fail(str(exc), f"unit of tensor {quote(name)}") from None

    def quantized(self, symbols: dict[str, str | None]) -> tuple[dict[str, QParams], dict[str, tuple[Any, ...]]]:
        """Section 5: quantization parameters, and (format, shape, nbytes, unit) of each quantized tensor."""
        qparams: dict[str, QParams] = {}
        logical: dict[str, tuple[Any, ...]] = {}
        for name, entry in self.objects("qtensors").items():
            where = f"quantized tensor {quote(name)}"
            try:
                qparams[name], logical[name] = self._quantized(name, entry)
            except _RefusedError as exc:
                raise self.fail(str(exc), where) from None
            unit = entry["unit"]
            if unit is not None:
                logical[name] = (*logical[name], self.unit(unit, symbols.get(name), name))
            else:
                logical[name] = (*logical[name], None)
        return qparams, logical

    def _quantized(self, name: str, entry: Any) -> tuple[QParams, tuple[Any, ...]]:
        fmt, shape, axis, packing, scale_shape, block = _fields(entry)
        codes = self._tensor(name, CODE_DTYPE[fmt], _file_shape(shape, packing))
        if fmt == "bf16":
            _require(axis is None and scale_shape is None and block is None, "bf16 has no axis, scales or block")
            return QParams(None, None, None, 0, 0, packing), (fmt, shape, self.columns.sizes[codes])
        if scale_shape is None:
            raise _RefusedError("scale_shape is missing")
        _check_scales(shape, axis, block, scale_shape)
        scales = self._tensor(f"{name}__qscale", "F32", scale_shape)
        offset, nbytes = int(self.columns.offsets[scales]), int(self.columns.sizes[scales])
        params = QParams(axis, block, scale_shape, offset, nbytes, packing)
        return params, (fmt, shape, self.columns.sizes[codes] + nbytes)

    def _tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> int:
        i = self.index.get(name)
        if i is None:
            raise _RefusedError(f"tensor {quote(name)} is not there")
        found = self.columns.encodings[self.columns.codes[i]].name, self.columns.shape(i)
        _require(
            found == (dtype, shape), f"{quote(name)} is {found[0]} {list(found[1])}, {dtype} {list(shape)} was expected"
        )
        return i

    def units(self, symbols: dict[str, str | None], quantized: dict[str, tuple[Any, ...]]) -> dict[str, Unit]:
        """Section 4: units of plain tensors, then those of the quantized ones."""
        out: dict[str, Unit] = {}
        for name, value in self.objects("units").items():
            if name not in self.index or name in quantized or _companion(name, quantized):
                what = "which is not there" if name not in self.index else "which is quantized"
                raise self.fail(f"names {quote(name)}, {what}", "metadata key 'units'")
            out[name] = self.unit(value, symbols.get(name), name)
        out |= {name: row[-1] for name, row in quantized.items() if row[-1] is not None}
        stray = next((n for n in symbols if n not in out), None)
        if stray is not None:
            raise self.fail(f"names {quote(stray)}, which has no unit", "metadata key 'unit_symbols'")
        return out

    def logical(self, quantized: dict[str, tuple[Any, ...]]) -> tuple[Columns, dict[str, int]]:
        """The table with each quantized tensor and its scales as one row."""
        c = self.columns
        stray = next((n for n in c.names if n.endswith("__qscale") and not _companion(n, quantized)), None)
        if stray is not None:
            self.findings.append(
                Finding("warning", "stray-scale", f"tensor {quote(stray)} ends in __qscale but belongs to no tensor")
            )
        if not quantized:
            return c, self.index
        keep = [i for i, n in enumerate(c.names) if not _companion(n, quantized)]
        encodings = list(c.encodings) + [ENCODINGS[f] for f in sorted({row[0] for row in quantized.values()})]
        place = {e.name: i for i, e in enumerate(encodings)}
        names: list[str] = []
        codes, dims, starts, sizes = list[int](), list[int](), [0], list[int]()
        for i in keep:
            name = c.names[i]
            row = quantized.get(name)
            names.append(name)
            codes.append(place[row[0]] if row else c.codes[i])
            dims += row[1] if row else c.shape(i)
            starts.append(len(dims))
            sizes.append(row[2] if row else c.sizes[i])
        columns = Columns(names, encodings, codes, dims, starts, [c.offsets[i] for i in keep], sizes)
        return columns, dict(zip(names, range(len(names)), strict=True))

    def skeleton(self, columns: Columns) -> Any:
        """Section 3: the tree names every tensor, and only tensors that are there."""
        if "tree" not in self.meta:
            if prefix_conflict(columns.names):
                self.findings.append(
                    Finding(
                        "warning", "flat-names", "one name is a leaf and the prefix of another: read as a flat record"
                    )
                )
            return None
        node = self.text("tree")
        check_tree(node, set(columns.names), self.file)
        return node

    def user_metadata(self) -> Any:
        try:
            return unmark(self.text("metadata"))
        except TreeError as exc:
            raise self.fail(str(exc), "metadata key 'metadata'") from None

    def integrity(self) -> dict[str, Any]:
        """Sections 6 and 7, form only: what is there to be checked."""
        chunks = self.objects("chunks") if "chunks" in self.meta else None
        if chunks is not None:
            count = -(-self.data_size // CHUNK)
            digests = chunks.get("sha256")
            good = (
                chunks.keys() == {"size", "sha256", "root"}
                and chunks["size"] == CHUNK
                and isinstance(digests, list)
                and len(digests) == count > 1
                and all(isinstance(d, str) and HEX64.fullmatch(d) for d in [*digests, chunks["root"]])
            )
            if not good:
                raise self.fail(
                    f"is not {count} SHA-256 digests of {CHUNK}-byte chunks and a root", "metadata key 'chunks'"
                )
        signature = self.objects("signature") if "signature" in self.meta else None
        if signature is not None:
            check_signature(signature, self.file)
        return {
            "digests": "present, not checked",
            "chunks": len(chunks["sha256"]) if chunks else 0,
            "signature": f"present, not checked (key {signature['key_id']})" if signature else "none",
        }


class _RefusedError(Exception):
    """A quantized entry that breaks section 5."""


def _require(good: bool, reason: str) -> None:
    if not good:
        raise _RefusedError(reason)


def _is_dims(value: Any) -> bool:
    return isinstance(value, list) and all(type(d) is int and 0 <= d <= MAX_INT for d in value)


def _fields(entry: Any) -> tuple[str, tuple[int, ...], int | None, str, tuple[int, ...] | None, int | None]:
    _require(isinstance(entry, dict) and entry.keys() - {"block"} == _QFIELDS, f"fields are not {sorted(_QFIELDS)}")
    fmt, axis, block, scale_shape = entry["format"], entry["axis"], entry.get("block"), entry["scale_shape"]
    _require(isinstance(fmt, str) and fmt in PACKING, f"unknown format {quote(str(fmt))}")
    _require(entry["packing"] == PACKING[fmt], f"packing {quote(str(entry['packing']))}, {PACKING[fmt]!r} was expected")
    _require(_is_dims(entry["shape"]), "shape is not a list of non-negative integers")
    _require(axis is None or type(axis) is int, "axis is not an integer")
    _require("block" not in entry or (type(block) is int and block >= 1), "block is not a positive integer")
    _require(scale_shape is None or _is_dims(scale_shape), "scale_shape is not a list of non-negative integers")
    return fmt, tuple(entry["shape"]), axis, PACKING[fmt], None if scale_shape is None else tuple(scale_shape), block


def _file_shape(shape: tuple[int, ...], packing: str) -> tuple[int, ...]:
    if packing == "none":
        return shape
    *outer, last = shape or (1,)
    return (*outer, -(-last // 2) if packing == "nibble" else 3 * -(-last // 4))


def _check_scales(shape: tuple[int, ...], axis: int | None, block: int | None, scale_shape: tuple[int, ...]) -> None:
    if axis is None:
        _require(scale_shape == () and block is None, "one scale for the whole tensor has scale_shape [] and no block")
        return
    _require(0 <= axis < len(shape), f"axis {axis} is outside the shape {list(shape)}")
    whole = shape[axis]
    count = -(-whole // block) if block else min(whole, 1)
    expected = (*shape[:axis], count, *shape[axis + 1 :])
    _require(scale_shape == expected, f"scale_shape {list(scale_shape)}, {list(expected)} was expected")


def _companion(name: str, quantized: dict[str, tuple[Any, ...]]) -> bool:
    return name.endswith("__qscale") and name[: -len("__qscale")] in quantized


def check_json(value: Any, file: str, what: str) -> None:
    """Section 1: depth at most 256, integers in range of a float64, no lone surrogate."""
    stack = [(value, 0)]
    while stack:
        node, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise ModelFileError(file, f"is nested deeper than {MAX_DEPTH}", what)
        if isinstance(node, dict):
            stack += [(v, depth + 1) for v in node.values()] + [(k, depth + 1) for k in node]
        elif isinstance(node, list):
            stack += [(v, depth + 1) for v in node]
        elif isinstance(node, str) and not node.isascii() and any("\ud800" <= c <= "\udfff" for c in node):
            raise ModelFileError(file, "holds a lone surrogate", what)
        elif isinstance(node, (int, float)) and not _in_range(node):
            raise ModelFileError(file, "holds a number that overflows a float64", what)


def _in_range(number: float) -> bool:
    try:
        return isfinite(number)
    except OverflowError:
        return False


def check_depth(names: Sequence[str], file: str) -> None:
    """Section 1: at most 256 components in a dotted name."""
    deep = next((name for name in names if len(name) >= MAX_DEPTH and name.count(".") >= MAX_DEPTH), None)
    if deep is not None:
        raise ModelFileError(file, f"has more than {MAX_DEPTH} components between dots", f"tensor {quote(deep)}")


def check_tree(node: Any, names: set[str], file: str) -> None:
    """Section 3: a well-formed skeleton that names every tensor of `names` and no other."""
    seen: set[str] = set()

    def leaf(name: str) -> None:
        if name not in names:
            raise TreeError(f"names {quote(name)}, which is not there")
        seen.add(name)

    try:
        from_skeleton(node, leaf)
    except TreeError as exc:
        raise ModelFileError(file, str(exc), "the tree") from None
    if seen != names:
        raise ModelFileError(file, f"does not name tensor {quote(min(names - seen))}", "the tree")


_SIGNATURE = {
    "alg": re.compile("HMAC-SHA256"),
    "key_id": re.compile("[0-9a-f]{16}"),
    "mac": HEX64,
}


def check_signature(signature: Any, file: str) -> None:
    """Section 7, form: exactly the four fields, scrypt with exactly the fixed parameters."""
    kdf = signature.get("kdf") if isinstance(signature, dict) else None
    good = (
        isinstance(signature, dict)
        and signature.keys() == {*_SIGNATURE, "kdf"}
        and all(isinstance(signature[k], str) and p.fullmatch(signature[k]) for k, p in _SIGNATURE.items())
        and (
            kdf is None
            or (
                isinstance(kdf, dict)
                and kdf.keys() == {"name", "n", "r", "p", "salt"}
                and [kdf["name"], kdf["n"], kdf["r"], kdf["p"]] == ["scrypt", 32768, 8, 1]
                and all(type(kdf[k]) is int for k in "nrp")
                and isinstance(kdf["salt"], str)
                and re.fullmatch("[0-9a-f]{32}", kdf["salt"]) is not None
            )
        )
    )
    if not good:
        raise ModelFileError(
            file, "is not a signature of the form that .apsim defines (unknown or wrong field)", "signature"
        )


def read_header(source: ByteSource, header: Header) -> ModelFile:
    """The model that a parsed header with ``format: apsi-model`` describes."""
    reader = _Reader(source, header)
    reader.profile()
    shard = reader.shard()
    symbols = reader.symbols()
    qparams, quantized = reader.quantized(symbols)
    units = reader.units(symbols, quantized)
    columns, index = reader.logical(quantized)
    skeleton = reader.skeleton(columns)
    facts = {"version": 1, "writer": reader.meta["apsi"], **reader.integrity()}
    if shard:
        facts["shard"] = f"{shard[0]}/{shard[1]}"
        reader.findings.append(
            Finding(
                "warning",
                "one-shard",
                f"this is shard {shard[0]} of {shard[1]}; open the .apsim.index.json for the whole",
            )
        )
    metadata = reader.user_metadata()
    return ModelFile(
        source.name,
        "apsim",
        columns,
        [source],
        metadata=metadata if isinstance(metadata, dict) else {} if metadata is None else {"metadata": metadata},
        findings=reader.findings,
        facts=facts,
        index=index,
        units=units,
        qparams=qparams,
        skeleton=skeleton,
    )


def is_apsim(header: Header) -> bool:
    """True where the metadata says so (the file's name does not count)."""
    return header.metadata is not None and header.metadata.get("format") == "apsi-model"


def read_any(source: ByteSource) -> ModelFile:
    """Open a safetensors file: as .apsim where its metadata says so."""
    header = safetensors.parse_header(source)
    if is_apsim(header):
        return read_header(source, header)
    model = safetensors.model_of(source, header)
    if source.name.endswith(".apsim"):
        finding = Finding(
            "warning",
            "not-apsim",
            "is a plain safetensors file, not .apsim (no format: apsi-model); opened as safetensors",
        )
        model.findings = (*model.findings, finding)
    return model


def read(source: ByteSource) -> ModelFile:
    """Open as .apsim, or refuse."""
    header = safetensors.parse_header(source)
    if not is_apsim(header):
        raise UnknownFormatError(
            source.name,
            "is a safetensors file, but not .apsim: its metadata has no format: apsi-model",
            hint="open it as safetensors",
        )
    return read_header(source, header)


APSIM = Format("apsim", (".apsim", ".safetensors"), safetensors.sniff, read_any)
