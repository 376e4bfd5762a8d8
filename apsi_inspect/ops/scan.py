"""`scan`: what a file would run when it is loaded elsewhere. Nothing of the file is run here.

Contract: `.verdict` is ``"unsafe"`` where something that runs code was found, ``"safe"`` only where every part that a
loader would execute was read to its end and asks for nothing but tensors and plain values, else ``"unknown"``: what
could not be read is never safe. `tests/test_scan.py` enforces this on attacks and on sound files.
"""

from __future__ import annotations

import os
import re
from contextlib import closing, suppress

from ..errors import ApsiError, ModelFileError, UnknownFormatError, quote, visible
from ..formats.base import open_beside, plain_file_name
from ..formats.pickle_globals import verdict as verdict_of
from ..formats.pickle_machine import Machine
from ..formats.pickle_nodes import PickleError
from ..formats.pickle_reader import MAX_PICKLE, run
from ..formats.safetensors import sniff as is_safetensors
from ..formats.torch import is_legacy, is_tar
from ..formats.zip_archive import Member, read_members, read_small
from ..model import Finding
from ..remote_url import masked
from ..source import BytesSource
from .open import source_of
from .scan_report import ScanReport, Seen
from .scan_text import hidden_pickles, json_findings, text_findings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..model import ModelFile
    from ..source import ByteSource

MAX_NESTED = 3  # archives in archives
MAX_FILES = 10_000
_PICKLE = tuple(bytes((0x80, n)) for n in range(6))
_LEGACY_PICKLES = 5
_EXECUTABLES = (b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe", b"#!")
_JSON_LIMIT = 64 << 20
_CONTROL = re.compile("[\\x00-\\x08\\x0e-\\x1a\\x1c-\\x1f\\x7f]")  # of no text; ESC colours some


def scan(path: str | os.PathLike[str]) -> ScanReport:
    """Look for what a file would run when it is loaded with Python, torch, transformers or an inference engine.

    Parameters
    ----------
    path
        A file of any kind (PyTorch, pickle, GGUF, safetensors, ONNX, JSON), the index of a sharded checkpoint, a URL of
        one of these, or a folder: then every file in it.

    Returns
    -------
    ScanReport
        ``.verdict`` is ``"safe"``, ``"unsafe"`` or ``"unknown"``; ``.findings`` say why, ``.globals`` is every name
        that a pickle asks for, ``.coverage`` what was read.

    Raises
    ------
    OSError
        The file is missing or unreadable.
    """
    name = os.fsdecode(path)
    scanner = _Scanner()
    if os.path.isdir(name):
        for found in _files(name):
            scanner.file(found, os.path.relpath(found, name))
        if not scanner.seen.parts:
            scanner.unread("", "the folder holds no file")
    else:
        scanner.file(name, "")
    return scanner.seen.report(masked(name))


def _files(folder: str) -> list[str]:
    found: list[str] = []
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        found += [os.path.join(where, n) for n in sorted(names) if not n.startswith(".")]
        if len(found) > MAX_FILES:
            raise ModelFileError(folder, f"holds more than {MAX_FILES} files")
    return found


class _Scanner:
    """Goes through a file and what is inside it, and collects what it sees."""

    def __init__(self) -> None:
        self.seen = Seen()
        self.script = False  # inside of a TorchScript archive

    def unread(self, where: str, reason: str) -> None:
        """Something that could not be read: the verdict is no longer safe."""
        self.seen.add(Finding("warning", "not-read", f"{where}: {reason}" if where else reason), unsure=True)

    def file(self, path: str, where: str) -> None:
        """One file on disk or behind a URL, and the shards that it names."""
        with closing(source_of(path)) as source:
            self.source(source, where, 0)
            self.reader(source, where)
            if source.name.endswith(".index.json"):
                self.shards(source, where)

    def reader(self, source: ByteSource, where: str) -> None:
        """A pickle that our own reader refuses asks for more than tensors and plain values, or for absurdly many."""
        from .open import open_source

        head = source.read_at(0, min(1024, source.size))
        if not (head.startswith(b"PK") or is_tar(head) or _looks_pickled(head, source.name)):
            return
        try:
            open_source(source)
        except UnknownFormatError:  # a pickle that is no model (Protocol 0 has no magic): it was read all the same
            return
        except ApsiError as exc:
            self.unread(where, f"it cannot be opened: {exc.reason if isinstance(exc, ModelFileError) else exc}")

    def shards(self, source: ByteSource, where: str) -> None:
        import json

        try:
            index = json.loads(source.read_at(0, min(source.size, _JSON_LIMIT)))
            names = sorted(set(map(str, index["weight_map"].values())))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.unread(where, "the index of the shards cannot be read")
            return
        for name in names[:MAX_FILES]:
            try:
                shard = open_beside(source, name) if plain_file_name(name) else None
            except (FileNotFoundError, ModelFileError):
                shard = None
            if shard is None:
                self.unread(where, f"shard {quote(name)} is not there")
            else:
                with closing(shard):
                    self.source(shard, name, 0)

    def source(self, source: ByteSource, where: str, depth: int) -> None:
        """Anything, by its first bytes."""
        head = source.read_at(0, min(1024, source.size))
        if not head:
            self.unread(where, "the file is empty")
        elif is_safetensors(head, source.size) and not _follows(source):
            self.model(source, where)
        elif head.startswith(b"PK"):
            self.archive(source, where, depth)
        elif is_tar(head):
            self.tar(source, where)
        elif _looks_pickled(head, source.name):
            self.stream(source, where)
        elif _text_ending(source.name):
            self.text(source, where)
        elif head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
            self.json(source, where)
        elif head.startswith(_EXECUTABLES) and not head.startswith(b"#!"):
            self.executable(where)
        elif source.name.endswith((".py", ".sh", ".bat")) or head.startswith(b"#!"):
            text = f"{where or 'the file'} is program text; some loaders run it (trust_remote_code)"
            self.seen.add(Finding("warning", "program", text), unsure=True)
        else:
            self.model(source, where)

    def model(self, source: ByteSource, where: str) -> None:
        """A format without code: its metadata is looked at."""
        from .open import open_source

        try:
            model = open_source(source)
        except ApsiError as exc:
            self.unread(where, str(exc))
            return
        self.seen.read(f"the metadata of {model.format}")
        for finding in model.findings:
            self.seen.add(finding)
        for key, value in model.metadata.items():
            for text in _strings(value):
                for finding, unsure in text_findings(str(key), text, where):
                    self.seen.add(finding, unsure)
        self.graph(model, where)

    def graph(self, model: ModelFile, where: str) -> None:
        """Operators of an ONNX graph that are somebody's own code."""
        foreign = model.facts.get("foreign domains")
        if foreign:
            text = f"the graph uses operators of {visible(str(foreign), 120)}, which need a library of somebody's own"
            self.seen.add(Finding("warning", "foreign-operators", text), unsure=True)

    def text(self, source: ByteSource, where: str) -> None:
        raw = source.read_at(0, min(source.size, _JSON_LIMIT))
        data = raw.decode("utf-8", "replace")
        if source.size > _JSON_LIMIT or "\ufffd" in data or _CONTROL.search(data):
            self.unread(where, "is called a text, but is none (or a very long one)")
        machine = Machine(raw)  # a pickle of protocol 0 is text
        with suppress(PickleError):
            run(machine)
        if any(verdict_of(path) == "dangerous" for path in machine.globals):
            self.names(machine, where)
        self.seen.read("a text")
        if not source.name.endswith((".txt", ".md")):
            for finding, unsure in text_findings("chat_template", data, where):
                self.seen.add(finding, unsure)

    def json(self, source: ByteSource, where: str) -> None:
        """JSON beside a model: templates, and names of code to be run."""
        import json

        if source.size > _JSON_LIMIT:
            self.unread(where, f"JSON of {source.size} bytes, at most {_JSON_LIMIT} are read")
            return
        try:
            document = json.loads(source.read_at(0, source.size).decode("utf-8-sig"))
        except (ValueError, RecursionError):
            self.unread(where, "is not valid JSON")
            return
        self.seen.read("JSON")
        for finding, unsure in json_findings(document, where):
            self.seen.add(finding, unsure)

    def archive(self, source: ByteSource, where: str, depth: int) -> None:
        """Every member of a ZIP archive."""
        try:
            members = read_members(source)
        except ModelFileError as exc:
            self.unread(where, str(exc))
            return
        pickles = [n.removesuffix("data.pkl") for n in members if n == "data.pkl" or n.endswith("/data.pkl")]
        self.script = any(f"{root}constants.pkl" in members for root in pickles)
        for member in members.values():
            tensor_bytes = any(member.name.startswith(f"{root}data/") for root in pickles)
            if not tensor_bytes and not member.name.endswith(("/", ".npy")):
                self.member(source, member, f"{where}:{member.name}" if where else member.name, depth)
        if any(n == "archive_format" or n.endswith("/archive_format") for n in members):
            self.unread(where, "an exported program (.pt2): what it would run is not judged")
        elif any(n.endswith("/.data/extern_modules") for n in members):
            self.unread(where, "an archive of torch.package: the Python modules in it are run when it is loaded")
        elif not pickles:
            self.unread(where, "a ZIP archive that is no PyTorch file")
        if len(pickles) > 1:
            self.unread(where, "more than one data.pkl: which one is loaded is ambiguous")

    def member(self, source: ByteSource, member: Member, where: str, depth: int) -> None:
        name = member.name.lower()
        try:
            data = read_small(source, member, MAX_PICKLE)
        except ModelFileError as exc:
            self.unread(where, str(exc))
            return
        if name.endswith((".debug_pkl", "/version", "/byteorder")) or "/.data/" in name:
            return
        if name.endswith(".py") and "/code/" in name:
            text = f"{where}: TorchScript code, which torch.jit.load compiles; it was not judged"
            self.seen.add(Finding("note", "torchscript", text), unsure=True)
        elif name.endswith((".pkl", ".pickle")) or data.startswith(_PICKLE):
            self.pickles(data, where)
        elif data.startswith(b"PK\x03\x04") and depth < MAX_NESTED:
            self.source(BytesSource(data, f"{source.name}:{visible(member.name, 80)}"), where, depth + 1)
        elif data.startswith(b"PK\x03\x04"):
            self.unread(where, "archives are nested too deeply")
        elif name.endswith(".py"):
            text = f"{where} is program text; some loaders run it"
            self.seen.add(Finding("warning", "program", text), unsure=True)
        elif data.startswith(_EXECUTABLES):
            self.executable(where)

    def executable(self, where: str) -> None:
        text = f"{where or 'the file'} is a program or library"
        self.seen.add(Finding("warning", "executable", text), unsure=True)

    def tar(self, source: ByteSource, where: str) -> None:
        from ..formats.torch_legacy import tar_members

        try:
            members = tar_members(source)
        except ModelFileError as exc:
            self.unread(where, str(exc))
            return
        for name, (begin, end) in members.items():
            if end - begin > MAX_PICKLE:
                self.unread(where, f"tar member {quote(name)} is too large to follow")
            elif name in ("storages", "tensors"):
                self.unread(where, f"tar member {quote(name)}: pickles between data, not judged")
            else:
                self.pickles(source.read_at(begin, end - begin), f"{where}:{name}" if where else name)

    def stream(self, source: ByteSource, where: str) -> None:
        """A file of pickles: stacked ones with data behind them, or plain ones."""
        data = source.read_at(0, min(source.size, MAX_PICKLE))
        legacy = is_legacy(data[:64])
        at = self.pickles(data, where, _LEGACY_PICKLES if legacy else None)
        if not legacy and source.size > MAX_PICKLE and at < source.size:
            self.unread(where, f"only the first {MAX_PICKLE} bytes were followed")

    def pickles(self, data: bytes, where: str, most: int | None = None) -> int:
        """Pickles one after the other; returns where they end."""
        at = count = 0
        while at < len(data) and (most is None or count < most):
            machine = Machine(data, at)
            try:
                run(machine)
            except PickleError as exc:
                self.names(machine, where)
                self.unread(where, str(exc) if not count else f"after {count} pickles: {exc}")
                return at
            self.names(machine, where)
            at, count = machine.position, count + 1
        self.seen.read(f"{count} pickles" if count != 1 else "a pickle")
        self.hidden(data[:at], where)
        return at

    def hidden(self, data: bytes, where: str) -> None:
        """Pickles in the strings of a pickle, plain, as base64 or hex, that would run code if somebody loaded them."""
        for inner in hidden_pickles(data):
            bad = [path for path in inner.globals if verdict_of(path) == "dangerous"]
            if bad:
                text = f"a string in the pickle is itself a pickle that asks for {quote(bad[0], 120)}"
                self.seen.add(Finding("warning", "hidden-pickle", f"{where}: {text}" if where else text), unsure=True)

    def names(self, machine: Machine, where: str) -> None:
        """What a pickle asks for."""
        for reason in dict.fromkeys(machine.computed):
            self.seen.add(Finding("error", "computed", f"{where}: {reason}" if where else reason))
        for path, n in machine.globals.items():
            self.seen.name(path, n, verdict_of(path, self.script), where)


def _follows(source: ByteSource) -> bool:
    """Whether a file that looks like safetensors is a pickle as well: what its length begins with may be one's mark."""
    machine = Machine(source.read_at(0, min(source.size, MAX_PICKLE)))
    try:
        run(machine)
    except PickleError:
        return bool(machine.globals)
    return True


def _looks_pickled(head: bytes, name: str) -> bool:
    """Protocol 2 and up by its mark; 0 and 1 by the file's name or a GLOBAL at the start."""
    if head.startswith(_PICKLE):
        return True
    old = name.lower().endswith((".pkl", ".pickle", ".p", ".dat", ".pth", ".pt", ".ckpt"))
    return head[:1] in (b"(", b"c", b"}", b"]", b"i", b"V", b"S", b"I", b"F", b"N") and (
        old or head[:40].split(b"\n")[0][1:].replace(b".", b"").replace(b"_", b"").isalnum()
    ) and not head.startswith((b"GGUF", b"FUGG"))  # fmt: skip


def _text_ending(name: str) -> bool:
    return name.lower().endswith((".txt", ".md", ".jinja", ".j2", ".template", ".yaml", ".yml"))


def _strings(value: object) -> list[str]:
    """The texts in a metadata value; long arrays (vocabularies) are left out."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for v in value.values() for text in _strings(v)]
    if isinstance(value, (list, tuple)) and len(value) <= 1000:
        return [text for v in value for text in _strings(v)]
    return []
