"""Exported programs (`torch.export.save`, ``.pt2``) of torch 2.8 and later: their weights and constants as tensors.

Contract: as in `torch.py`: nothing of the file is run. The archive says in JSON where each tensor's raw bytes are, with
its sizes and strides; that becomes the same nodes as those of a pickled state dict and is checked in the same way. The
program itself and its sample inputs are not read. Layout: `docs/formats.md`, 4.7. `tests/test_torch_export.py` compares
with torch.
"""

from __future__ import annotations

from ..errors import ModelFileError, UnsupportedFileError, quote
from ..model import Finding
from .base import load_json, unique
from .pickle_nodes import Call, Dict, Global, Persistent
from .torch import Archive, Loaded, byte_order_of, finish, storages_of
from .torch_place import place_all
from .torch_plain import is_int
from .torch_tree import Walk
from .zip_archive import read_small

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ..source import ByteSource
    from .zip_archive import Member

MAX_CONFIG = 100_000_000
_KINDS = ("weights", "constants")
# torch._export.serde.schema.ScalarType -> the name of the dtype
_DTYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64",
    9: "complex32", 10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16", 28: "uint16", 29: "float8_e4m3fn",
    30: "float8_e5m2", 31: "float8_e4m3fnuz", 32: "float8_e5m2fnuz", 33: "float8_e8m0fnu", 34: "uint32", 35: "uint64",
}  # fmt: skip
_STRIDED = 7  # torch._export.serde.schema.Layout


def archive_of(source: ByteSource, members: Mapping[str, Member]) -> Archive | None:
    """The members of an exported program; None where the archive is none.

    Raises
    ------
    ModelFileError
        It is one of a kind that is not read.
    """
    marks = [n for n in members if n.rpartition("/")[2] == "archive_format" and n.count("/") <= 1]
    if len(marks) != 1 or read_small(source, members[marks[0]], 64).strip() != b"pt2":
        return None
    root = marks[0].removesuffix("archive_format")
    inside = {name.removeprefix(root): m for name, m in members.items() if name.startswith(root)}
    if not any(name.endswith("_config.json") for name in inside):
        raise UnsupportedFileError(
            source.name,
            "is an exported program (.pt2) without a list of its weights: compiled (AOTInductor), or of before torch "
            "2.8; those of torch.export.save since 2.8 are read",
        )
    return Archive(root.rstrip("/"), inside, [name for name in members if not name.startswith(root)])


def load(source: ByteSource, archive: Archive) -> Loaded:
    """Open an exported program."""
    root, absent = _state(source, archive)
    order = byte_order_of(source, archive)
    walk = Walk(source.name, root)
    walk.absent += absent
    placed = place_all(source, walk, storages_of(source, archive), order, 0)
    facts: dict[str, Any] = {"container": "ZIP, exported program (.pt2)", "root": archive.root, "byte order": order}
    programs = [n for n in archive.members if n.startswith("models/")]
    text = f"the program ({', '.join(map(quote, programs[:3]))}) is not read, only its weights and constants"
    findings = [Finding("note", "program", text)] if programs else []
    return finish(source, root, walk, placed, [], findings, facts, order)


def _state(source: ByteSource, archive: Archive) -> tuple[Dict, list[str]]:
    """Tensors by name, as a pickled state dict would have them, and what is there without being a tensor."""
    root, absent = Dict(), []
    made: dict[Any, Call] = {}  # tensors of one storage, shape and strides are one: tied weights
    configs = [(kind, n) for kind in _KINDS for n in archive.members if _is_config(kind, n)]
    several = len({n.rpartition("/")[2].removesuffix(f"_{kind}_config.json") for kind, n in configs}) > 1
    for kind, config in configs:
        model = config.rpartition("/")[2].removesuffix(f"_{kind}_config.json")
        text = read_small(source, archive.members[config], MAX_CONFIG).decode("utf-8", "replace")
        document = load_json(text, source.name, config, object_pairs_hook=unique)
        entries = document.get("config") if isinstance(document, dict) else None
        if not isinstance(entries, dict):
            raise ModelFileError(source.name, "has no object 'config'", config)
        for name, entry in entries.items():
            full = f"{model}.{name}" if several else name
            key, call = _tensor(source.name, archive, kind, name, entry)
            if call is None:
                absent.append(f"{quote(full)}: kept as a pickle or an object, not read")
            else:
                root.pairs.append((full, made.setdefault(key, call)))
    return root, absent


def _is_config(kind: str, name: str) -> bool:
    return name.startswith(f"data/{kind}/") and name.endswith(f"_{kind}_config.json") and name.count("/") == 2


def _tensor(file: str, archive: Archive, kind: str, name: str, entry: Any) -> tuple[Any, Call | None]:
    """A tensor as the call that a pickle would have for it, and what makes it the same as another."""
    where = f"tensor {quote(name)}"
    path = entry.get("path_name") if isinstance(entry, dict) else None
    if not isinstance(path, str):
        raise ModelFileError(file, "has no path_name", where)
    meta = entry.get("tensor_meta")
    if entry.get("use_pickle") or not isinstance(meta, dict) or meta.get("layout") != _STRIDED:
        return None, None
    dtype = _DTYPES.get(meta["dtype"]) if type(meta.get("dtype")) is int else None
    if dtype is None:
        raise ModelFileError(file, f"has dtype number {str(meta.get('dtype'))[:20]}, which is not known", where)
    start = _number(file, where, meta.get("storage_offset"))
    sizes, strides = (tuple(_number(file, where, n) for n in _list(meta.get(k))) for k in ("sizes", "strides"))
    member = archive.members.get(f"data/{kind}/{path}")
    if member is None:
        raise ModelFileError(file, f"its bytes, data/{kind}/{quote(path)[1:-1]}, are not in the archive", where)
    pid = ("storage", Global("torch", "UntypedStorage"), f"{kind}/{path}", "cpu", member.size)
    args = (Persistent(pid), start, sizes, strides, False, None, Global("torch", dtype))
    return (kind, path, dtype, start, sizes, strides), Call(Global("torch._utils", "_rebuild_tensor_v3"), args)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [None]


def _number(file: str, where: str, value: Any) -> int:
    """A size, stride or offset: ``{"as_int": 3}``."""
    number = value.get("as_int") if isinstance(value, dict) else None
    if not isinstance(number, int) or not is_int(number):
        raise ModelFileError(file, "has a size, stride or offset that is no whole number", where)
    return number
