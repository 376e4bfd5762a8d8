"""PyTorch files: `torch.save` archives, TorchScript, and the older stacked pickles (`docs/formats.md`, section 4).

Contract: nothing of the file is run and torch is not needed. The pickle is read into inert nodes (`pickle_reader.py`),
walked once (`torch_tree.py`), and every tensor is checked against its storage before it is listed. A pickle that asks
for a name that runs code (`os.system` …) is refused here and described by `apsi model scan`; any other unknown name
stands as a placeholder that is listed. `tests/test_torch.py` compares with torch, `tests/test_pickle_attacks.py` runs
the attacks.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import ModelFileError, UnknownFormatError, UnsupportedFileError, quote
from ..model import Finding, ModelFile
from .base import Format, PausedGC
from .pickle_globals import verdict
from .pickle_machine import Machine
from .pickle_nodes import PickleError
from .pickle_reader import MAX_PICKLE, run
from .torch_place import Place, Placed, place_all
from .torch_tree import Walk
from .zip_archive import STORED, Member, read_members, read_small

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ..source import ByteSource

LEGACY_MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
_FRAMED = b"\x95" + (len(LEGACY_MAGIC) - 2).to_bytes(8, "little")  # from protocol 4 on
_SIDE = ("version", "byteorder", ".format_version", ".storage_alignment", ".data/serialization_id", ".data/version")


class Loaded(NamedTuple):
    """A file's object: the root node, its walk, and the model that lists its tensors."""

    model: ModelFile
    root: Any
    walk: Walk


def sniff(head: bytes, size: int) -> bool:
    """A ZIP archive, a pickle (the old format is several), or the tar of the oldest."""
    return head.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")) or is_tar(head)


def is_legacy(head: bytes) -> bool:
    """The magic number that stacked pickles begin with, in any protocol of pickle."""
    magic = head[:1] + b"\x02" + head[2:].removeprefix(_FRAMED)
    return head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and magic.startswith(LEGACY_MAGIC)


def is_tar(head: bytes) -> bool:
    """A tar whose first member is one of those that PyTorch 0.1 wrote."""
    first = head[:100].rstrip(b"\0").removeprefix(b"./")
    return len(head) >= 512 and first in (b"sys_info", b"pickle", b"storages", b"tensors")


def read(source: ByteSource) -> ModelFile:
    """Open a PyTorch file."""
    return load(source).model


def load(source: ByteSource) -> Loaded:
    """Open a PyTorch file and keep the object it holds."""
    head = source.read_at(0, min(512, source.size))
    with PausedGC():
        if head.startswith(b"PK\x03\x04"):
            return _load_zip(source)
        from . import torch_legacy

        return torch_legacy.load_tar(source) if is_tar(head) else torch_legacy.load(source)


class Archive(NamedTuple):
    """The members of an archive without their common folder."""

    root: str
    members: Mapping[str, Member]
    strangers: list[str]


def open_archive(source: ByteSource, members: Mapping[str, Member]) -> Archive:
    """Those members of an archive that are PyTorch's.

    Raises
    ------
    ModelFileError
        It is no sound ZIP archive, or none of PyTorch's.
    """
    pickles = [name for name in members if name == "data.pkl" or name.endswith("/data.pkl")]
    top = [name for name in pickles if name.count("/") <= 1]
    if len(pickles) > 1:
        shown = ", ".join(quote(n) for n in pickles[:3])
        raise ModelFileError(source.name, f"has more than one data.pkl ({shown}): which one counts is ambiguous")
    if not top:
        raise _no_pickle(source, members)
    root = top[0].removesuffix("data.pkl")
    inside = {name.removeprefix(root): m for name, m in members.items() if name.startswith(root)}
    strangers = [name for name in members if not name.startswith(root)]
    return Archive(root.rstrip("/"), inside, strangers)


def _no_pickle(source: ByteSource, members: Mapping[str, Member]) -> ModelFileError:
    names = {name.rpartition("/")[2] for name in members}
    if "serialized_exported_program.json" in names:
        reason = "is an exported program (.pt2) of before torch 2.8; those of torch.export.save since 2.8 are read"
        return UnsupportedFileError(source.name, reason)
    if "archive_format" in names or "model.json" in names:
        return UnsupportedFileError(
            source.name,
            "is an exported program of another kind than .pt2, or TorchScript of before 1.2; what torch.save and "
            "torch.export.save write and later TorchScript are read",
        )
    if any(name.endswith(".npy") for name in members):
        return UnknownFormatError(source.name, "is a NumPy .npz archive, not a model file")
    shown = ", ".join(quote(n) for n in list(members)[:3]) or "none"
    reason = f"is a ZIP archive, but not a PyTorch file: it has no data.pkl (members: {shown})"
    return UnknownFormatError(source.name, reason)


def follow(machine: Machine, file: str, what: str) -> Any:
    """The object of a pickle; refuses what runs code when it is loaded in Python.

    Raises
    ------
    ModelFileError
        The pickle is damaged, or asks for a dangerous name.
    """
    try:
        root = run(machine)
    except PickleError as exc:
        refuse_dangerous(machine, file, what)
        raise ModelFileError(file, str(exc), what) from None
    refuse_dangerous(machine, file, what)
    return root


def refuse_dangerous(machine: Machine, file: str, what: str) -> None:
    """Refuse a pickle that asks for a name that runs code."""
    bad = [path for path in machine.globals if verdict(path) == "dangerous"]
    if not bad and not machine.computed:
        return
    named = ", ".join(quote(path) for path in bad[:5] if not path.startswith("(computed)"))
    reasons = [f"asks for {named}"] if named else []
    reasons += machine.computed[:2]
    raise ModelFileError(
        file,
        f"is unsafe: the pickle {'; '.join(reasons)}. Loading it in Python would run code; nothing was run here",
        what,
        "apsi model scan lists all of it",
    )


def _load_zip(source: ByteSource) -> Loaded:
    from . import torch_export

    members = read_members(source)
    exported = torch_export.archive_of(source, members)
    if exported is not None:
        return torch_export.load(source, exported)
    archive = open_archive(source, members)
    order = byte_order_of(source, archive)
    member = archive.members["data.pkl"]
    data = read_small(source, member, MAX_PICKLE)
    machine = Machine(data)
    what = f"{archive.root}/data.pkl" if archive.root else "data.pkl"
    root = follow(machine, source.name, what)
    findings = _crc(data, member, what) + _trailing(machine, what)
    walk = Walk(source.name, root)
    placed = place_all(source, walk, storages_of(source, archive), order, member.offset)
    script = "constants.pkl" in archive.members
    facts = {
        "container": "ZIP, TorchScript" if script else "ZIP",
        "root": archive.root,
        "pickle protocol": machine.protocol,
        "byte order": order,
    }
    findings += _members(archive, script)
    return finish(source, root, walk, placed, [machine], findings, facts, order)


def byte_order_of(source: ByteSource, archive: Archive) -> str:
    """``"little"`` or ``"big"``."""
    member = archive.members.get("byteorder")
    if member is None:
        return "little"
    text = read_small(source, member, 64).strip()
    if text not in (b"little", b"big"):
        raise ModelFileError(source.name, f"byteorder is {quote(text.decode('latin-1'))}, little or big was expected")
    return text.decode()


def storages_of(source: ByteSource, archive: Archive) -> Any:
    """A function from a storage's key to where its bytes are."""
    inflated: dict[str, ByteSource] = {}
    deflated = [m for n, m in archive.members.items() if n.startswith("data/") and m.method != STORED]
    packed, unpacked = sum(m.packed for m in deflated), sum(m.size for m in deflated)

    def find(key: str) -> Place | None:
        member = archive.members.get(f"data/{key}")
        if member is None:
            return None
        if member.method == STORED:
            return Place(source, member.offset, member.size, f"data/{key}")
        from .relaid import InflatedSource

        if key not in inflated:
            inflated[key] = InflatedSource(source, member, packed, unpacked)
        return Place(inflated[key], member.offset, member.size, f"data/{key}")

    return find


def _crc(data: bytes, member: Member, what: str) -> list[Finding]:
    import zlib

    if zlib.crc32(data) == member.crc:
        return []
    text = f"{what}: its CRC is not the one in the archive (checksum mismatch; torch does not look at it)"
    return [Finding("warning", "crc", text)]


def _trailing(machine: Machine, what: str) -> list[Finding]:
    rest = len(machine.data) - machine.position
    if not rest:
        return []
    return [Finding("warning", "after-stop", f"{what}: {rest} bytes after the end of the pickle were not looked at")]


def _members(archive: Archive, script: bool) -> list[Finding]:
    """Members that no PyTorch file has."""
    known = ("data/", "code/", "constants/", "extra/", ".data/", "tensors/") if script else ("data/",)
    odd = [
        name
        for name in archive.members
        if name not in ("data.pkl", "constants.pkl", *_SIDE) and not name.startswith(known) and not name.endswith("/")
    ]
    odd = [*archive.strangers, *odd]
    if not odd:
        return []
    shown = ", ".join(quote(n) for n in odd[:3])
    return [Finding("warning", "unexpected-member", f"{len(odd)} unexpected members in the archive, not read: {shown}")]


def finish(
    source: ByteSource,
    root: Any,
    walk: Walk,
    placed: Placed,
    machines: list[Machine],
    findings: list[Finding],
    facts: dict[str, Any],
    order: str = "little",
) -> Loaded:
    """The model of a walk whose tensors have been placed."""
    counts: dict[str, int] = {}
    for machine in machines:
        for path, n in machine.globals.items():
            counts[path] = counts.get(path, 0) + n
    script = str(facts.get("container")).endswith("TorchScript")
    findings = [*findings, *_skipped(counts, walk, script), *_remarks(walk, placed)]
    facts |= {"storages": placed.storages, "storage bytes": placed.storage_bytes} | placed.facts
    classes = [path for path in counts if path.startswith("__torch__")]
    if classes:
        facts["TorchScript classes"] = len(classes)
    model = ModelFile(
        source.name,
        "pytorch",
        placed.columns,
        [source],
        metadata=walk.metadata,
        findings=findings,
        facts=facts,
        byte_order=order,
        views=placed.views,
        affine=placed.affine,
    )
    return Loaded(model, root, walk)


def _skipped(counts: Mapping[str, int], walk: Walk, script: bool) -> list[Finding]:
    """What the pickle asks for beyond tensors and plain values; `script`: of a TorchScript archive."""
    expected = ("__torch__.", "torch.jit._pickle.") if script else ("torch.jit._pickle.",)
    made: dict[str, list[str]] = {"known": [], "unknown": []}
    for path, n in counts.items():
        kind = verdict(path, script)
        if kind in made and not path.startswith(expected):
            made[kind].append(f"{quote(path, 120)[1:-1]} ×{walk.classes.get(path, n)}")
    out = []
    if made["unknown"]:
        text = f"skipped: {_first(made['unknown'])}; nothing of them was imported, what they hold is shown as data"
        out.append(Finding("warning", "skipped", text))
    if made["known"]:
        text = f"{_first(made['known'])}: read as plain data here; torch.load with weights_only=True refuses the file"
        out.append(Finding("warning", "not-weights-only", text))
    return out


def _first(items: list[str], most: int = 8) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def _remarks(walk: Walk, placed: Placed) -> list[Finding]:
    out = []
    if walk.cycles:
        out.append(Finding("note", "cycle", "a container of the pickle contains itself; it is followed once"))
    if walk.absent:
        out.append(Finding("warning", "no-data", f"not among the tensors: {_first(walk.absent, 4)}"))
    if placed.expanded:
        text = f"{len(placed.expanded)} tensors are expanded views, larger than what is stored: "
        out.append(Finding("note", "expanded", text + ", ".join(quote(n) for n in placed.expanded[:3])))
    return out


TORCH = Format("pytorch", (".pt", ".pt2", ".pth", ".bin", ".ckpt", ".pth.tar", ".jit", ".pkl", ".th"), sniff, read)
