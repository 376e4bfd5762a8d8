"""PyTorch's older files: stacked pickles (before 1.6), the tar of 0.1, and a plain pickle with NumPy arrays.

Contract as in `torch.py`. Layouts: `docs/formats.md`, 4.5 and 4.6. A stream is read in growing pieces, as its end is
not known before it has been followed; the data behind it is never read.
"""

from __future__ import annotations

from ..encodings import ENCODINGS
from ..errors import ModelFileError, TruncatedFileError, quote
from .pickle_machine import Machine
from .pickle_nodes import Call, Global, Persistent, PickleError
from .pickle_reader import MAX_PICKLE, run
from .torch import Loaded, finish, is_legacy, refuse_dangerous
from .torch_place import Place, place_all
from .torch_tree import Walk
from .torch_values import Storage, TensorError, storage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..model import Finding
    from ..source import ByteSource

_MAGIC = 0x1950A86A20F9469CFC6C
_FIRST = 1 << 18  # bytes of the first try


class _Stream:
    """Pickles one after the other in a file."""

    def __init__(self, source: ByteSource, position: int = 0, end: int | None = None) -> None:
        self.source, self.position = source, position
        self.end = source.size if end is None else end
        self.machines: list[Machine] = []

    def load(self, what: str) -> Any:
        """The next object; refuses what runs code."""
        room = min(self.end - self.position, MAX_PICKLE)
        length = min(_FIRST, room)
        while True:
            machine = Machine(self.source.read_at(self.position, length))
            try:
                value = run(machine)
            except PickleError as exc:
                refuse_dangerous(machine, self.source.name, what)
                if length < room:  # perhaps it only goes on beyond this piece
                    length = min(8 * length, room)
                    continue
                raise ModelFileError(self.source.name, str(exc), what) from None
            refuse_dangerous(machine, self.source.name, what)
            self.position += machine.position
            self.machines.append(machine)
            return value

    def number(self) -> int:
        """The next 64-bit number."""
        if self.position + 8 > self.end:
            raise TruncatedFileError(self.source.name, f"ends at byte {self.source.size}, in the data of its storages")
        value = int.from_bytes(self.source.read_at(self.position, 8), "little", signed=True)
        self.position += 8
        return value

    def skip(self, nbytes: int, key: str) -> int:
        """Begin of the next `nbytes` bytes, which must be there."""
        begin = self.position
        if nbytes < 0 or begin + nbytes > self.end:
            raise TruncatedFileError(
                self.source.name,
                f"needs {nbytes} bytes from byte {begin}, but the file has {self.source.size} bytes",
                f"storage {quote(key)}",
                "the file is truncated or its header is wrong",
            )
        self.position += nbytes
        return begin


def load(source: ByteSource) -> Loaded:
    """Stacked pickles, or one plain pickle."""
    stream = _Stream(source)
    if not is_legacy(source.read_at(0, min(64, source.size))):
        return _load_plain(stream)
    if stream.load("the magic number") != _MAGIC:
        raise ModelFileError(source.name, "its magic number is not PyTorch's")
    version, info = stream.load("the protocol version"), stream.load("sys_info")
    if version != 1001:
        raise ModelFileError(source.name, f"has version {str(version)[:40]} of the old format; 1001 is known")
    at = stream.position
    root = stream.load("the object")
    keys = stream.load("the storage keys")
    if not isinstance(keys, list) or not all(isinstance(k, (str, int, bytes)) for k in keys):
        raise ModelFileError(source.name, "its list of storage keys is no list of keys")
    places = _data(stream, [_key(k) for k in keys], _known(stream.machines))
    walk = Walk(source.name, root)
    placed = place_all(source, walk, places.get, "little", at)
    facts: dict[str, Any] = {"container": "stacked pickles (before PyTorch 1.6)", "byte order": "little"}
    if hasattr(info, "get") and info.get("little_endian") is False:
        facts["written on"] = "a big-endian machine"
    return finish(source, root, walk, placed, stream.machines, _trailing(stream), facts)


def _trailing(stream: _Stream) -> list[Finding]:
    from ..model import Finding

    rest = stream.end - stream.position
    if not rest:
        return []
    return [Finding("warning", "trailing", f"{rest} bytes after the end of the data were not looked at")]


def _load_plain(stream: _Stream) -> Loaded:
    root = stream.load("the object")
    walk = Walk(stream.source.name, root)
    placed = place_all(stream.source, walk, lambda key: None, "little", 0)
    facts = {"container": "a plain pickle", "pickle protocol": stream.machines[0].protocol}
    return finish(stream.source, root, walk, placed, stream.machines, _trailing(stream), facts)


def _key(key: Any) -> str:
    return key.decode("latin-1") if isinstance(key, bytes) else str(key)


def _known(machines: list[Machine]) -> dict[str, Storage]:
    """The storages that persistent ids name, by key."""
    known: dict[str, Storage] = {}
    for machine in machines:
        for node in machine.persistent:
            try:
                found = storage(node)
            except TensorError:
                continue
            known.setdefault(found.key, found)
    return known


def _data(stream: _Stream, keys: list[str], known: dict[str, Storage]) -> dict[str, Place]:
    """Where the bytes of each storage are: a number of elements, then the bytes."""
    places = {}
    for key in keys:
        if key not in known:
            raise ModelFileError(stream.source.name, f"its storage {quote(key)} has no type")
        numel = stream.number()
        nbytes = numel * ENCODINGS[known[key].encoding].block_bytes
        places[key] = Place(stream.source, stream.skip(nbytes, key), nbytes, key)
    return places


def load_tar(source: ByteSource) -> Loaded:
    """The tar of PyTorch 0.1: a pickle whose persistent ids name tensors, and the tensors."""
    members = tar_members(source)
    for name in ("pickle", "storages", "tensors"):
        if name not in members:
            raise ModelFileError(source.name, f"is a tar of PyTorch 0.1 without its member {quote(name)}")
    pickles = _Stream(source, *members["pickle"])
    at = pickles.position
    root = pickles.load("pickle")
    storages, places = _tar_storages(_Stream(source, *members["storages"]))
    tensors = _tar_tensors(_Stream(source, *members["tensors"]), storages)
    made = {key: Call(Global("torch._utils", "_rebuild_tensor"), args) for key, args in tensors.items()}
    root = _resolve(root, made)
    walk = Walk(source.name, root)
    placed = place_all(source, walk, places.get, "little", at)
    return finish(source, root, walk, placed, pickles.machines, [], {"container": "tar (PyTorch 0.1)"})


def tar_members(source: ByteSource) -> dict[str, tuple[int, int]]:
    """Name -> begin and end of the members of a tar."""
    members: dict[str, tuple[int, int]] = {}
    at = 0
    while at + 512 <= source.size and len(members) < 64:
        head = source.read_at(at, 512)
        if not head.strip(b"\0"):
            break
        name = head[:100].rstrip(b"\0").decode("latin-1").removeprefix("./")
        text = head[124:136].strip(b"\0 ")
        if not text or text.strip(b"01234567"):
            raise ModelFileError(source.name, f"tar member {quote(name)} has no size")
        size = int(text, 8)
        if at + 512 + size > source.size:
            raise TruncatedFileError(source.name, f"tar member {quote(name)} reaches beyond the end of the file")
        if name in members:
            raise ModelFileError(source.name, f"tar member {quote(name)} stands twice")
        members[name] = at + 512, at + 512 + size
        at += 512 + -(-size // 512) * 512
    return members


def _count(value: Any, file: str, what: str) -> int:
    if not isinstance(value, int) or not 0 <= value <= 1_000_000:
        raise ModelFileError(file, f"its number of {what} is {str(value)[:40]}")
    return value


def _triple(value: Any, file: str, what: str) -> tuple[str, Any, Any]:
    if not isinstance(value, tuple) or len(value) != 3:
        raise ModelFileError(file, f"an entry of its {what} is not what PyTorch 0.1 wrote")
    return _key(value[0]), value[1], value[2]


def _tar_storages(stream: _Stream) -> tuple[dict[str, Persistent], dict[str, Place]]:
    file = stream.source.name
    storages: dict[str, Persistent] = {}
    places: dict[str, Place] = {}
    for _ in range(_count(stream.load("storages"), file, "storages")):
        key, location, kind = _triple(stream.load("storages"), file, "storages")
        numel = stream.number()
        node = Persistent(("storage", kind, key, location, max(numel, 0)))
        try:
            nbytes = numel * ENCODINGS[storage(node).encoding].block_bytes
        except TensorError as exc:
            raise ModelFileError(file, str(exc), f"storage {quote(key)}") from None
        storages[key], places[key] = node, Place(stream.source, stream.skip(nbytes, key), nbytes, key)
    views = stream.load("storage views")
    for view in views if isinstance(views, (list, tuple)) else ():
        if not isinstance(view, tuple) or len(view) != 4 or _key(view[1]) not in storages:
            raise ModelFileError(file, "a view of its storages is not what PyTorch 0.1 wrote")
        root = storages[_key(view[1])].pid
        storages[_key(view[0])] = Persistent((*root, (_key(view[0]), view[2], view[3])))
    return storages, places


def _tar_tensors(stream: _Stream, storages: dict[str, Persistent]) -> dict[str, tuple[Any, ...]]:
    """Key -> the arguments of `_rebuild_tensor`."""
    file = stream.source.name
    tensors: dict[str, tuple[Any, ...]] = {}
    for _ in range(_count(stream.load("tensors"), file, "tensors")):
        key, store, _kind = _triple(stream.load("tensors"), file, "tensors")
        if _key(store) not in storages:
            raise ModelFileError(file, "has a storage that is not in the file", f"tensor {quote(key)}")
        ndim = stream.number() & 0xFFFFFFFF
        if ndim > 64:
            raise ModelFileError(file, f"has {ndim} dimensions", f"tensor {quote(key)}")
        size = tuple(stream.number() for _ in range(ndim))
        stride = tuple(stream.number() for _ in range(ndim))
        tensors[key] = storages[_key(store)], stream.number(), size, stride
    return tensors


def _resolve(root: Any, made: dict[str, Call]) -> Any:
    """Put the tensors where the pickle refers to them; containers are changed in place."""
    from .pickle_nodes import Dict

    def put(value: Any) -> Any:
        if isinstance(value, Persistent) and isinstance(value.pid, (str, int)):
            return made.get(str(value.pid), value)
        stack.append(value)
        return tuple(put(v) for v in value) if isinstance(value, tuple) and len(value) < 64 else value

    stack: list[Any] = []
    seen: set[int] = set()
    root = put(root)
    while stack:
        node = stack.pop()
        if id(node) in seen or not isinstance(node, (Dict, list, Call)):
            continue
        seen.add(id(node))
        if isinstance(node, Dict):
            node.pairs = [(k, put(v)) for k, v in node.pairs]
        elif isinstance(node, list):
            node[:] = [put(v) for v in node]
        else:
            node.args, node.state = tuple(put(a) for a in node.args), put(node.state)
    return root
