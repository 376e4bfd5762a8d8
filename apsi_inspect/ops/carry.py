"""Metadata, units and tree on their way from one container to another, so that they come back.

Contract (`docs/convert.md` has the table): `carried` takes from an opened model what it says of itself; `to_gguf`,
`to_strings` and `to_json` give the form of each container. What a container has no place for goes into keys of our own
(``gguf.types``, ``apsi.json``, ``apsi.keys``, ``apsi.metadata``, ``apsi.units``, ``apsi.tree``), from which `carried`
restores it. `tests/test_carry.py` sends every form through every other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import ModelFileError, ValueRefusedError, quote
from ..formats.apsim_write import compact, unit_entry
from ..formats.base import load_json, unique
from ..formats.gguf_extras import METADATA, TREE, UNITS
from ..formats.gguf_keys import known_type, resolve
from ..formats.gguf_values import CODES, Items, Value, infer, type_text
from ..tree import TreeError, unmark
from ..tree_write import mark
from ..units import Unit, UnitError, parse_unit, valid_symbol
from .changes import KeyChange

if TYPE_CHECKING:
    from ..model import ModelFile

    Typed = list[tuple[str, Value]]

TYPES, TEXTS, ORDER = "gguf.types", "apsi.json", "apsi.keys"
UNIT_TABLE, SYMBOLS = "apsi.units", "apsi.unit_symbols"
# They describe how one GGUF file stores its tensors; another file states its own.
OF_THE_FILE = ("general.alignment", "general.file_type", "general.quantization_version")
_TYPE = re.compile(r"ARRAY\[(.*)\]")


class Carried(NamedTuple):
    """What a model says of itself.

    Attributes
    ----------
    typed
        GGUF keys in order, with their types.
    loose
        JSON values: the strings of safetensors, the record of .apsim.
    present
        True where the source has metadata at all, be it empty.
    units, skeleton
        Units of tensors, and the tree where the names do not rebuild it.
    """

    typed: Typed
    loose: dict[str, Any]
    present: bool
    units: dict[str, Unit]
    skeleton: Any


def carried(model: ModelFile) -> Carried:
    """What an opened model says of itself."""
    if model.format == "gguf":
        return _from_gguf(model)
    if model.format == "apsim":
        loose = dict(model.metadata)
        types = loose.pop(TYPES, None)
        typed = _restore(types, loose, model.path) if isinstance(types, Mapping) else []
        return Carried(typed, loose, bool(model.metadata), dict(model.units), model.skeleton)
    return _from_strings(model)


def _from_gguf(model: ModelFile) -> Carried:
    typed: Typed = []
    loose: dict[str, Any] = {}
    types = getattr(model.metadata, "types", {})
    for key, value in model.metadata.items():
        if key == METADATA and isinstance(value, str):
            loose = _json(value, model.path, key, dict)
        elif not key.startswith((UNITS, "split.")) and key != TREE:
            typed.append((key, _value(value, types[key])))
    twice = dict(known_keys(loose, model.architecture))
    typed = [(k, v) for k, v in typed if k not in twice or _same(v, twice[k]) is False]
    return Carried(typed, loose, bool(typed or loose), dict(model.units), model.skeleton)


def _value(value: Any, kind: str) -> Value:
    """A value of an opened file with the type it has there."""
    return infer(value, None if kind.startswith("ARRAY") else kind)


def _same(a: Value, b: Value) -> bool:
    return a.kind == b.kind and plain(a) == plain(b)


def _from_strings(model: ModelFile) -> Carried:
    loose: dict[str, Any] = dict(model.metadata)
    path = model.path
    types = loose.pop(TYPES, None)
    texts = loose.pop(TEXTS, None)
    units, symbols, tree = (loose.pop(k, None) for k in (UNIT_TABLE, SYMBOLS, TREE))
    whole, order = loose.pop(METADATA, None), loose.pop(ORDER, None)
    typed: Typed = []
    if types is not None:
        kinds = _json(types, path, TYPES, dict)
        values = {k: loose[k] if v == "STRING" else _json(loose[k], path, k) for k, v in kinds.items() if k in loose}
        for key in values:
            del loose[key]
        typed = _restore(kinds, values, path)
    for key in _json(texts, path, TEXTS, list) if texts is not None else []:
        if key in loose:
            loose[key] = _json(loose[key], path, key)
    if whole is not None:
        loose |= _json(whole, path, METADATA, dict)
    if order is not None:
        named = [k for k in map(str, _json(order, path, ORDER, list)) if k in loose]
        loose = {**{k: loose[k] for k in named}, **loose}
    present = bool(model.facts.get("metadata present", loose))
    return Carried(typed, loose, present, _units(units, symbols, model), _tree(tree, model))


def _json(text: Any, path: str, what: str, kind: type = object) -> Any:
    value = load_json(str(text), path, f"metadata key {what!r}", object_pairs_hook=unique)
    try:
        value = unmark(value)
    except TreeError as exc:
        raise ModelFileError(path, str(exc), f"metadata key {what!r}") from None
    if not isinstance(value, kind):
        raise ModelFileError(path, f"is not a JSON {'object' if kind is dict else 'array'}", f"metadata key {what!r}")
    return value


def _units(units: Any, symbols: Any, model: ModelFile) -> dict[str, Unit]:
    if units is None:
        return {}
    shown = _json(symbols, model.path, SYMBOLS, dict) if symbols is not None else {}
    out = {}
    for name, entry in _json(units, model.path, UNIT_TABLE, dict).items():
        symbol = shown.get(name)
        try:
            unit = parse_unit(entry, symbol if valid_symbol(symbol) else None)
        except UnitError as exc:
            raise ModelFileError(model.path, str(exc), f"unit of tensor {quote(name)}") from None
        if name in model.index:
            out[name] = unit
    return out


def _tree(text: Any, model: ModelFile) -> Any:
    from ..formats.apsim import check_json, check_tree

    if text is None:
        return None
    node = load_json(text, model.path, TREE, object_pairs_hook=unique)
    check_json(node, model.path, TREE)
    check_tree(node, set(model.columns.names), model.path)
    return node


def _restore(types: Mapping[str, Any], values: Mapping[str, Any], path: str) -> Typed:
    """Typed keys from JSON values and their type texts; taken out of `values` where that is a dict."""
    out: Typed = []
    for key, text in types.items():
        if key not in values:
            continue
        try:
            out.append((key, _typed(str(text), values[key], key)))
        except ValueRefusedError as exc:
            raise ModelFileError(path, str(exc), f"metadata key {TYPES!r}") from None
        if isinstance(values, dict):
            del values[key]
    return out


def _typed(text: str, value: Any, key: str) -> Value:
    found = _TYPE.fullmatch(text)
    if found is None:
        if text not in CODES and text != "STRING":
            raise ValueRefusedError(f"{quote(text)} is no GGUF type")
        return infer(value, text, key)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueRefusedError(f"{quote(key)} is {text}, found {type(value).__name__}")
    inner = _split(found[1])
    if not inner[0].startswith("ARRAY"):
        return infer(list(value), text, key)
    kinds = inner * len(value) if len(inner) == 1 else inner
    items = [_typed(k, v, key).value for k, v in zip(kinds, value, strict=False)] if inner != ["ARRAY"] else []
    return Value("ARRAY", Items("ARRAY", items, len(items)))


def _split(text: str) -> list[str]:
    """Type texts between commas that stand in no bracket."""
    out, depth = [""], 0
    for c in text:
        depth += (c == "[") - (c == "]")
        if c == "," and not depth:
            out.append("")
        else:
            out[-1] += c
    return out


def plain(value: Value) -> Any:
    """A typed value as JSON: numbers, strings, lists; float32 as the float64 of the same value."""
    if value.kind == "FLOAT32":
        return float(np.float32(value.value))
    if value.kind != "ARRAY":
        return value.value
    return _plain_items(value.value)


def marked(value: Value) -> Any:
    """`plain` with the markers of `tree_write.mark`; long arrays that need none are not walked in Python."""
    out = plain(value)
    if value.kind != "ARRAY":
        return mark(out)
    element = value.value.element
    narrow = element in CODES and CODES[element][2] in ("u1", "i1", "u2", "i2", "u4", "i4")
    safe = narrow or element in ("BOOL", "STRING")
    if element in ("FLOAT32", "FLOAT64"):
        safe = bool(np.isfinite(np.asarray(out, np.float64)).all())
    return out if safe else mark(out)


def _plain_items(items: Items) -> list[Any]:
    element, values, count = items
    if element == "ARRAY":
        return [_plain_items(v) for v in values]
    if isinstance(values, (bytes, memoryview)):
        values = _strings(values, count) if element == "STRING" else np.frombuffer(values, "<" + CODES[element][2])
    if element == "FLOAT32":
        values = np.asarray(values, np.float32)
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def _strings(raw: bytes | memoryview, count: int) -> list[str]:
    out, pos = [], 0
    for _ in range(count):
        n = int.from_bytes(raw[pos : pos + 8], "little")
        out.append(bytes(raw[pos + 8 : pos + 8 + n]).decode("utf-8", "backslashreplace"))
        pos += 8 + n
    return out


def known_keys(loose: Mapping[str, Any], architecture: str | None) -> Typed:
    """The entries of a record that are keys runtimes know, with a value of the type that they expect."""
    stated = loose.get("general.architecture", loose.get("general_architecture"))
    name = architecture or (stated if isinstance(stated, str) else None)
    out: dict[str, Value] = {}
    for written, value in loose.items():
        try:
            key = resolve(written, name)
            known = known_type(key)
            if known is not None and key not in (*OF_THE_FILE, *out) and not key.startswith("split."):
                out[key] = infer(value, known, key)
        except ValueRefusedError:
            continue  # not a key of a runtime: the record has it all the same
    return list(out.items())


def to_gguf(c: Carried, architecture: str | None) -> tuple[Typed, list[KeyChange]]:
    """The keys of a GGUF file, without units and tree."""
    keys: dict[str, Value] = {}
    changes = []
    for key, value in known_keys(c.loose, architecture):
        keys[key] = value
        changes.append(KeyChange(key, "added", f"a key that runtimes know, out of {METADATA}"))
    keys |= dict(c.typed)
    if architecture is not None:
        keys = {"general.architecture": Value("STRING", architecture), **keys}
        keys["general.architecture"] = Value("STRING", architecture)
    if c.loose:
        keys[METADATA] = Value("STRING", compact(mark(c.loose)))
        entries = "1 entry" if len(c.loose) == 1 else f"{len(c.loose)} entries"
        changes.append(KeyChange(METADATA, "renamed", f"holds {entries} as JSON"))
    return list(keys.items()), changes


def without_file_keys(typed: Typed) -> tuple[Typed, list[KeyChange]]:
    """Without what describes the GGUF file that it came from."""
    why = "it describes how the GGUF file stores its tensors"
    dropped = [KeyChange(k, "dropped", why) for k, _ in typed if k in OF_THE_FILE]
    return [(k, v) for k, v in typed if k not in OF_THE_FILE], dropped


def to_json(c: Carried) -> tuple[dict[str, Any] | None, list[KeyChange]]:
    """The record of an .apsim file, marked."""
    typed, changes = without_file_keys(c.typed)
    out: dict[str, Any] = {**mark(c.loose), **{"$" * k.startswith("$") + k: marked(v) for k, v in typed}}
    for key in c.loose.keys() & dict(typed).keys():
        changes.append(KeyChange(key, "dropped", "the GGUF key of the same name takes its place"))
    if typed:
        out[TYPES] = {"$" * k.startswith("$") + k: type_text(v) for k, v in typed}
        changes.append(KeyChange(TYPES, "added", "the types of the GGUF keys"))
    return out if out or c.present else None, changes


def to_strings(c: Carried, skeleton: Any) -> tuple[dict[str, str] | None, list[KeyChange]]:
    """The strings of a safetensors file, units and tree among them."""
    typed, changes = without_file_keys(c.typed)
    out = {k: v if isinstance(v, str) else compact(mark(v)) for k, v in c.loose.items()}
    texts = [k for k, v in c.loose.items() if not isinstance(v, str)]
    for key, value in typed:
        if key in out:
            changes.append(KeyChange(key, "dropped", "the GGUF key of the same name takes its place"))
            texts = [k for k in texts if k != key]
        out[key] = value.value if value.kind == "STRING" else compact(marked(value))
    extra = {
        TYPES: {k: type_text(v) for k, v in typed},
        TEXTS: texts,
        ORDER: list(c.loose) if texts and list(c.loose) != sorted(c.loose) else [],  # strings alone have no order
        UNIT_TABLE: {k: unit_entry(u) for k, u in sorted(c.units.items())},
        SYMBOLS: {k: u.symbol for k, u in sorted(c.units.items()) if u.symbol is not None},
    }
    for key, table in extra.items():
        if table:
            out[key] = compact(table)
            changes.append(KeyChange(key, "added", "for the way back"))
    if skeleton is not None:
        out[TREE] = compact(skeleton)
        changes.append(KeyChange(TREE, "added", "for the way back"))
    return out if out or c.present else None, changes
