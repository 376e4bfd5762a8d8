"""A user's metadata to typed GGUF keys in file order: records flattened, underscores resolved, the file's own keys set.

The rules are those of `docs/convert.md`: nothing is guessed silently, what was decided for the user is in the notes.
`tests/test_gguf_write.py` enforces them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ValueRefusedError, quote
from ..formats.gguf import FILE_TYPES
from ..formats.gguf_keys import infer_architecture, known_type, resolve
from ..formats.gguf_values import Value, infer
from ..formats.gguf_write import ALIGNMENT, QUANTIZATION_VERSION, check_alignment, without_own
from ..model import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..encodings import Encoding

ARCHITECTURE, FILE_TYPE = "general.architecture", "general.file_type"
VERSION, ALIGN = "general.quantization_version", "general.alignment"
# Where the mixtures of llama.cpp have several names, the one with the fewest raised tensors.
_FILE_TYPE_IDS = {name: i for i, name in FILE_TYPES.items()} | {
    "F32": 0,
    "Q3_K": 11,
    "Q4_K": 14,
    "Q5_K": 16,
    "MXFP4": 38,
}


class Keys(NamedTuple):
    """Typed keys in order, the alignment they state, and what was decided."""

    keys: list[tuple[str, Value]]
    alignment: int
    notes: list[Finding]


def flat_items(metadata: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Keys and values, records inside joined to their key with dots."""
    for key, value in metadata.items():
        if type(key) is not str or not key:
            raise ValueRefusedError(f"metadata key {key!r:.60}: keys are strings that are not empty")
        if isinstance(value, Mapping):
            yield from flat_items(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def typed_keys(metadata: Mapping[str, Any] | None, architecture: str | None = None) -> Keys:
    """The keys of a user's record.

    Parameters
    ----------
    metadata
        Keys with dots or underscores, records in records, values of `formats.gguf_values.infer`.
    architecture
        Sets `general.architecture`.

    Raises
    ------
    ValueRefusedError
        A key that means nothing or too much, or a value that GGUF cannot hold.
    """
    given = list(flat_items(metadata or {}))
    notes: list[Finding] = []
    stated = [v for k, v in given if k in (ARCHITECTURE, "general_architecture")]
    if architecture is not None and stated and stated[0] != architecture:
        raise ValueRefusedError(f"architecture={architecture!r}, but the metadata says {quote(str(stated[0]))}")
    name = architecture if architecture is not None else stated[0] if stated else None
    if name is None:
        name = infer_architecture(k for k, _ in given)
        if name is not None:
            text = f"{ARCHITECTURE} is set to {name!r}, whose keys stand in the metadata"
            notes.append(Finding("note", "architecture", text))
    if name is not None and (not isinstance(name, str) or not name):
        raise ValueRefusedError(f"architecture {name!r:.40} is not a name")
    keys: dict[str, Value] = {} if name is None else {ARCHITECTURE: Value("STRING", name)}
    for written, value in given:
        key = resolve(written, name)
        if key in keys and key != ARCHITECTURE:
            raise ValueRefusedError(f"metadata key {quote(key)} is given twice (once as {quote(written)})")
        known = known_type(key)
        keys[key] = infer(value, known, key)
        notes += _notes(key, keys[key], known)
    alignment = keys[ALIGN].value if ALIGN in keys else ALIGNMENT
    check_alignment(alignment)
    ordered = list(keys.items()) if alignment != ALIGNMENT else without_own(list(keys.items()))
    return Keys(ordered, alignment, notes)


def _notes(key: str, value: Value, known: str | None) -> list[Finding]:
    """A type that the user has forced although runtimes expect another."""
    if known is None or value.kind == "ARRAY" or known.startswith("ARRAY") or value.kind == known:
        return []
    text = f"{quote(key)} is stored as {value.kind}, as given; runtimes expect {known}"
    return [Finding("warning", "key-type", text)]


def file_keys(found: Keys, asked: Encoding | None, stored: Iterable[tuple[Encoding, int]]) -> Keys:
    """The keys with those that say how the tensors are stored.

    Parameters
    ----------
    asked
        The encoding the user wants; None: whichever holds most of the elements gives the file type.
    stored
        Encoding and number of elements of every tensor.
    """
    sums: dict[str, int] = {}
    blocks = False
    for encoding, numel in stored:
        blocks = blocks or encoding.is_block
        if encoding.name in _FILE_TYPE_IDS:
            sums[encoding.name] = sums.get(encoding.name, 0) + numel
    keys, notes = dict(found.keys), list(found.notes)
    main = asked.name if asked is not None and asked.name in sums else max(sums, key=sums.__getitem__, default=None)
    if main is not None and (asked is not None or FILE_TYPE not in keys):
        new = Value("UINT32", _FILE_TYPE_IDS[main])
        if keys.get(FILE_TYPE, new).value != new.value:
            text = f"{FILE_TYPE} is set to {new.value} ({FILE_TYPES[new.value]}), it was {keys[FILE_TYPE].value}"
            notes.append(Finding("note", "file-type", text))
        keys[FILE_TYPE] = new
    if blocks and VERSION not in keys:
        keys[VERSION] = Value("UINT32", QUANTIZATION_VERSION)
    return Keys(list(keys.items()), found.alignment, notes)


def with_alignment(found: Keys, alignment: int | None) -> Keys:
    """The keys with another alignment."""
    if alignment is None:
        return found
    check_alignment(alignment)
    keys = [(k, v) for k, v in found.keys if k != ALIGN]
    if alignment != ALIGNMENT:
        keys.append((ALIGN, Value("UINT32", alignment)))
    return Keys(keys, alignment, found.notes)
