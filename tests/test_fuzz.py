"""Structurally valid files, broken in every way: they open, or give one of our own errors, within bounds.

Opened means that every tensor's description, all metadata and the tree can be had. `--hypothesis-profile deep` tries
many more.
"""

from __future__ import annotations

import copy
import json
import struct
import time
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apsi_inspect.errors import ApsiError
from apsi_inspect.formats.gguf import TYPES
from apsi_inspect.formats.safetensors import DTYPES
from apsi_inspect.model import ModelFile
from apsi_inspect.ops.open import open as open_model
from apsi_inspect.ops.open import open_source
from apsi_inspect.source import BytesSource

from . import handmade
from .handmade import Gguf

DATA = Path(__file__).parent / "data"
ABSURD = [0, 1, 2, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1]
HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1, -0.0, 1.5, 1e308, 2**53, 2**63, 2**64, 10**30, "", "x", "\0", "../x", "1/2", "nan",
    "[", "{}", "9" * 5000, [], [[]], {}, [0], [1, 2], [0] * 7, [-1], ["a"], {"a": 1}, {"$int": "1"}, {"$record": []},
    {"$tuple": []}, {"$literal": 1}, {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}, [[[[[[]]]]]], "a" * 1000,
]  # fmt: skip


def peak() -> int:
    """Peak memory of this process in kB."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmHWM"))


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    before = peak()
    yield
    assert peak() - before < 300_000  # of which Hypothesis itself takes much


# What moves the cursor, hides or reorders text; Arabic's marks of a number are of the same category, and are visible.
_VISIBLE = {*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD}


def safe_line(text: str) -> bool:
    return not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and ord(c) not in _VISIBLE for c in text)


def look_at_everything(model: ModelFile) -> None:
    for name, tensor in model.items():
        assert tensor.info.name == name
        assert len(tensor.raw()) <= tensor.nbytes
        assert tensor.offset >= 0
        assert (tensor.numel, tensor.bpw, tensor.ndim, str(tensor.unit)) is not None
    for value in model.metadata.values():
        if hasattr(value, "tolist"):
            assert len(value.tolist()) == len(value)
    for finding in model.findings:
        assert safe_line(finding.message), ascii(finding.message)
    model.tree()
    json.dumps(model.facts, default=str)


def survives(opening: Callable[[], ModelFile]) -> ModelFile | None:
    """Our own error, one printable line; or a model all of which can be looked at; within a second."""
    found: ModelFile | None
    start = time.process_time()
    try:
        found = opening()
    except ApsiError as exc:
        message, found = str(exc), None
    else:
        message = ""
        look_at_everything(found)
    assert time.process_time() - start < 3
    assert safe_line(message), ascii(message)
    assert len(message) < 1500
    return found


def open_blob(blob: bytes, format: str | None = None) -> ModelFile | None:
    return survives(lambda: open_source(BytesSource(blob, "model.x"), format))


@st.composite
def broken(draw: st.DrawFn, blob: bytes) -> bytes:
    """The bytes with a few changes: bits, numbers, cuts, insertions, repeats."""
    data = bytearray(blob)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        kind = draw(st.sampled_from(["bit", "byte", "number", "cut", "delete", "insert", "repeat"]))
        if kind == "bit" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "byte" and data:
            data[at] = draw(st.sampled_from([0, 1, 0x22, 0x2C, 0x5B, 0x5C, 0x7B, 0x7D, 0x80, 0xFF]))
        elif kind == "number":
            width, order = draw(st.sampled_from([2, 4, 8])), draw(st.sampled_from("<>"))
            value = draw(st.sampled_from(ABSURD)) & ((1 << 8 * width) - 1)
            data[at : at + width] = struct.pack(order + {2: "H", 4: "I", 8: "Q"}[width], value)
        elif kind == "cut":
            del data[at:]
        elif kind == "delete":
            del data[at : at + draw(st.integers(1, 16))]
        elif kind == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=16))
        else:
            data[at:at] = data[at : at + draw(st.integers(1, 64))]
    return bytes(data)


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """A JSON value with something in it replaced, removed, added or renamed."""
    value = copy.deepcopy(value)
    node, trail = value, []
    while isinstance(node, (dict, list)) and node and (not trail or draw(st.integers(0, 3))):
        key = draw(st.sampled_from(sorted(node))) if isinstance(node, dict) else draw(st.integers(0, len(node) - 1))
        trail.append((node, key))
        node = node[key]
    if not trail:
        return draw(st.sampled_from(HOSTILE))
    parent, key = trail[-1]
    kind = draw(st.sampled_from(["replace", "remove", "add", "rename", "nudge"]))
    hostile = draw(st.sampled_from(HOSTILE))
    if kind == "remove":
        del parent[key]
    elif kind == "add" and isinstance(parent, list):
        parent.insert(key, hostile)
    elif kind == "add":
        parent[draw(st.sampled_from(["", "x", "__metadata__", "a.b", "$record", "x__qscale"]))] = hostile
    elif kind == "rename" and isinstance(parent, dict):
        parent[draw(st.sampled_from(["", "x", "a", "__metadata__"]))] = parent.pop(key)
    elif kind == "nudge" and type(node) is int:
        parent[key] = node + draw(st.sampled_from([-1, 1, 8, -8, 2**53, 2**63, 2**64]))
    else:
        parent[key] = hostile
    return value


# --- safetensors

NAMES = st.text(max_size=8) | st.sampled_from(["a", "a.b", "0", "1", "a.0", "b.0.w"])
STRINGS = st.text(max_size=12)


@st.composite
def safetensors_parts(draw: st.DrawFn) -> tuple[dict[str, Any], bytes, dict[str, tuple[str, list[int], bytes]]]:
    """Header, data, and what is in it."""
    table: dict[str, Any] = {}
    content: dict[str, tuple[str, list[int], bytes]] = {}
    data = b""
    for name in draw(st.lists(NAMES, unique=True, max_size=5)):
        encoding = DTYPES[draw(st.sampled_from(list(DTYPES)))]
        outer = draw(st.lists(st.integers(0, 3), max_size=3))
        shape = [*outer, encoding.block_size] if encoding.block_size > 1 else outer
        count = 1
        for d in shape:
            count *= d
        nbytes = count * encoding.block_bytes // encoding.block_size
        raw = (draw(st.binary(min_size=3, max_size=3)) * nbytes)[:nbytes]
        fields = [("dtype", encoding.name), ("shape", shape), ("data_offsets", [len(data), len(data) + len(raw)])]
        fields += draw(st.sampled_from([[], [("extra", 1)], [("extra", {"a": [None, {}]})]]))
        table[name] = dict(draw(st.permutations(fields)))
        content[name] = (encoding.name, shape, raw)
        data += raw
    if draw(st.booleans()):
        table["__metadata__"] = draw(st.none() | st.dictionaries(STRINGS, STRINGS, max_size=3))
    return dict(draw(st.permutations(list(table.items())))), data, content


def dumped(draw: st.DrawFn, header: Any) -> bytes:
    text = json.dumps(header, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])))
    return text.encode("utf-8", "surrogatepass") + b" " * draw(st.integers(0, 9))


@given(st.data())
def test_safetensors_valid(data: st.DataObject) -> None:
    header, raw, content = data.draw(safetensors_parts())
    model = open_blob(handmade.from_header(dumped(data.draw, header), raw), "safetensors")
    assert model is not None
    assert {n: (t.encoding, list(t.shape), bytes(t.raw())) for n, t in model.items()} == content
    assert dict(model.metadata) == (header.get("__metadata__") or {})


@given(st.data())
def test_safetensors_with_a_changed_header(data: st.DataObject) -> None:
    header, raw, _ = data.draw(safetensors_parts())
    text = dumped(data.draw, data.draw(changed(header)))
    open_blob(handmade.from_header(text, raw), data.draw(st.sampled_from([None, "safetensors", "apsim"])))


@given(st.data())
def test_safetensors_with_broken_bytes(data: st.DataObject) -> None:
    header, raw, _ = data.draw(safetensors_parts())
    blob = data.draw(broken(handmade.from_header(dumped(data.draw, header), raw)))
    open_blob(blob, data.draw(st.sampled_from([None, "safetensors"])))


# --- GGUF

KINDS = [*handmade.SCALARS, "STRING"]
LIMITS = {"B": (0, 255), "b": (-128, 127), "H": (0, 2**16 - 1), "h": (-(2**15), 2**15 - 1), "I": (0, 2**32 - 1)}
LIMITS |= {"i": (-(2**31), 2**31 - 1), "Q": (0, 2**64 - 1), "q": (-(2**63), 2**63 - 1)}


def values(kind: str) -> st.SearchStrategy[Any]:
    if kind == "STRING":
        return STRINGS
    if kind == "ARRAY":
        inner = st.sampled_from(KINDS).flatmap(lambda k: st.tuples(st.just(k), st.lists(values(k), max_size=5)))
        nested = st.tuples(st.just("ARRAY"), st.lists(inner, max_size=3))
        return inner | nested | st.tuples(st.just("ARRAY"), st.lists(nested, max_size=2))
    code = handmade.SCALARS[kind][1]
    if code in "fd":
        return st.floats(width=32 if code == "f" else 64)
    return st.booleans() if code == "?" else st.integers(*LIMITS[code])


def plain(kind: str, value: Any) -> Any:
    return [plain(value[0], v) for v in value[1]] if kind == "ARRAY" else value


@st.composite
def gguf_parts(draw: st.DrawFn) -> tuple[Gguf, list[Any], list[Any], int]:
    """A version and byte order, keys, tensors, alignment."""
    version, order = draw(st.sampled_from([(1, "<"), (2, "<"), (3, "<"), (2, ">"), (3, ">")]))
    g, align = Gguf(version, order), draw(st.sampled_from([32, 32, 1, 8, 64]))
    keys: list[tuple[str, str, Any]] = []
    for name in draw(st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=5)):
        kind = draw(st.sampled_from([*KINDS, "ARRAY", "ARRAY"]))
        keys.append((name, kind, draw(values(kind))))
    if align != 32:
        keys.append(("general.alignment", "UINT32", align))
    tensors = []
    for name in draw(st.lists(NAMES, unique=True, max_size=4)):
        type_id = draw(st.sampled_from(list(TYPES)))
        encoding = TYPES[type_id]
        rows = draw(st.lists(st.integers(0, 3), max_size=3))
        row = draw(st.integers(0, 2)) * encoding.block_size
        shape = [*rows, row] if encoding.is_block or draw(st.booleans()) else []
        count = 1
        for d in shape:
            count *= d
        tensors.append((name, shape, type_id, b"\7" * (count // encoding.block_size * encoding.block_bytes)))
    return g, keys, tensors, align


def same(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


@given(gguf_parts())
def test_gguf_valid(parts: tuple[Any, ...]) -> None:
    g, keys, tensors, align = parts
    model = open_blob(g.file(keys, tensors, align=align))
    assert model is not None
    for key, kind, value in keys:
        found = model.metadata[key]
        assert same(found.tolist() if kind == "ARRAY" else found, plain(kind, value))
    assert [(t.name, list(t.shape), t.encoding, bytes(t.raw())) for t in model.values()] == [
        (name, shape, TYPES[type_id].name, raw) for name, shape, type_id, raw in tensors
    ]
    assert {f.code for f in model.findings} <= {"no-architecture", "wrong-extension"}


@given(st.data())
def test_gguf_with_broken_bytes(data: st.DataObject) -> None:
    g, keys, tensors, align = data.draw(gguf_parts())
    open_blob(data.draw(broken(g.file(keys, tensors, align=align))), "gguf")


@given(st.data())
def test_gguf_with_an_absurd_field(data: st.DataObject) -> None:
    """Every number of the file, one after the other: the packing itself is made to lie."""
    g, keys, tensors, align = data.draw(gguf_parts())
    count = [0]
    pack = g.pack

    def counting(code: str, *numbers: Any) -> bytes:
        count[0] += 1
        return pack(code, *numbers)

    g.pack = counting  # type: ignore[method-assign]
    g.file(keys, tensors, align=align)
    target, value = data.draw(st.integers(1, count[0])), data.draw(st.sampled_from(ABSURD))
    count[0] = 0

    def lying(code: str, *numbers: Any) -> bytes:
        raw = counting(code, *numbers)
        if count[0] != target:
            return raw
        width = {1: 1, 2: 2, 4: 4}.get(len(raw), 8)
        lie = (value & ((1 << 8 * width) - 1)).to_bytes(width, "little" if g.order == "<" else "big")
        at = data.draw(st.integers(0, (len(raw) - 1) // width)) * width
        return raw[:at] + lie + raw[at + width :]

    g.pack = lying  # type: ignore[method-assign]
    open_blob(g.file(keys, tensors, align=align), "gguf")


# --- .apsim and indexes

GOLDEN = sorted((DATA / "golden").glob("*.apsim")) + sorted((DATA / "golden" / "sharded").glob("*.apsim"))
INNER = ["units", "unit_symbols", "qtensors", "tree", "metadata", "chunks", "signature"]


def split_header(blob: bytes) -> tuple[dict[str, Any], bytes]:
    (n,) = struct.unpack_from("<Q", blob)
    return json.loads(blob[8 : 8 + n]), blob[8 + n :]


@given(st.data())
def test_apsim_with_a_changed_header(data: st.DataObject) -> None:
    header, raw = split_header(data.draw(st.sampled_from(GOLDEN)).read_bytes())
    for _ in range(data.draw(st.integers(1, 2))):
        header = data.draw(changed(header))
    if not isinstance(header, dict):
        header = {"__metadata__": header}
    open_blob(handmade.from_header(json.dumps(header), raw))


@given(st.data())
def test_apsim_with_changed_inner_texts(data: st.DataObject) -> None:
    header, raw = split_header(data.draw(st.sampled_from(GOLDEN)).read_bytes())
    metadata = header["__metadata__"]
    metadata.setdefault("meta_sha256", "0" * 64)
    key = data.draw(st.sampled_from(INNER))
    value = json.loads(metadata[key]) if key in metadata else data.draw(st.sampled_from(HOSTILE))
    for _ in range(data.draw(st.integers(1, 2))):
        value = data.draw(changed(value))
    text = json.dumps(value)
    metadata[key] = data.draw(broken(text.encode())).decode("utf-8", "replace") if data.draw(st.booleans()) else text
    open_blob(handmade.from_header(json.dumps(header), raw))


@given(st.data())
def test_apsim_with_broken_bytes(data: st.DataObject) -> None:
    blob = data.draw(st.sampled_from(GOLDEN)).read_bytes()
    open_blob(data.draw(broken(blob)))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The index of a checkpoint of each kind, in folders of their own."""
    found = {}
    for name, folder in (("apsim", "golden/sharded"), ("safetensors", "cases/shards/sh-ok")):
        target = tmp_path_factory.mktemp(name)
        for p in (DATA / folder).iterdir():
            (target / p.name).write_bytes(p.read_bytes())
            if p.name.endswith(".index.json"):
                found[name] = target / p.name
    return found


@pytest.mark.parametrize("kind", ["apsim", "safetensors"])
@given(data=st.data())
def test_index_changed(sharded: dict[str, Path], kind: str, data: st.DataObject) -> None:
    path = sharded[kind]
    index = json.loads(path.read_text())
    for _ in range(data.draw(st.integers(1, 2))):
        index = data.draw(changed(index))
    blob = json.dumps(index).encode()
    if data.draw(st.booleans()):
        blob = data.draw(broken(blob))
    other = path.with_name("other.index.json")
    other.write_bytes(blob)
    survives(lambda: open_model(other))


# --- depth

NESTED = {
    "safetensors": [
        '{"w":{"dtype":"F32","shape":%s,"data_offsets":[0,8]}}',
        '{"w":{"dtype":%s,"shape":[2],"data_offsets":[0,8]}}',
        '{"w":{"dtype":"F32","shape":[2],"data_offsets":%s}}',
        '{"w":{"dtype":"F32","shape":[2],"data_offsets":[%s,8]}}',
        '{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":%s}}', '{"w":%s}', '{"__metadata__":%s}',
        '{"__metadata__":{"a":%s}}',
    ],
    "apsim": ["%s", '{"w":%s}', '{"$record":[["a",%s]]}', '[{"$literal":%s}]'],
}  # fmt: skip


@pytest.mark.parametrize("depth", [250, 257, 330, *range(940, 1001, 6)])
def test_depth_around_every_limit(depth: int) -> None:
    """JSON is refused at about Python's recursion limit: just below it, messages must not run into that either."""
    for text in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        for form in NESTED["safetensors"]:
            open_blob(handmade.from_header(form % text, bytes(8)), "safetensors")
        for key in INNER:
            for form in NESTED["apsim"]:
                metadata = {"format": "apsi-model", "version": "1", "apsi": "x", key: form % text}
                metadata |= dict.fromkeys(("sha256", "meta_sha256"), "0" * 64)
                open_blob(handmade.safetensors([("w", "F32", [2], bytes(8))], metadata))


# --- every byte

SMALL = {
    "safetensors": handmade.safetensors([("a", "F32", [2], bytes(8)), ("b.0", "F4", [2], b"x")], {"k": "v"}),
    "gguf": Gguf().file(
        [
            ("general.architecture", "STRING", "x"),
            ("a", "ARRAY", ("STRING", ["x", ""])),
            ("n", "ARRAY", ("ARRAY", [("INT8", [1])])),
        ],
        [("w", [2, 32], 8, bytes(68)), ("b", [], 0, bytes(4))],
    ),
    "apsim": (DATA / "golden" / "list_root_tied.apsim").read_bytes(),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_truncated_at_every_byte(name: str) -> None:
    blob = SMALL[name]
    whole = open_blob(blob)
    assert whole is not None
    opened = [n for n in range(len(blob)) if open_blob(blob[:n]) is not None]
    # Only the padding behind the last tensor of a GGUF file may be missing.
    assert opened == ([] if name != "gguf" else list(range(len(blob) - 28, len(blob))))


@pytest.mark.parametrize("name", SMALL)
def test_every_byte_changed(name: str) -> None:
    blob = SMALL[name]
    for i, byte in enumerate(blob):
        for other in {0, 255, 0x20, 0x22, 0x39, byte ^ 0xFF, byte ^ 1, byte ^ 0x80, (byte + 1) & 255} - {byte}:
            open_blob(blob[:i] + bytes([other]) + blob[i + 1 :])


@pytest.mark.parametrize("name", SMALL)
def test_every_byte_removed_or_doubled(name: str) -> None:
    blob = SMALL[name]
    for i in range(len(blob)):
        open_blob(blob[:i] + blob[i + 1 :])
        open_blob(blob[: i + 1] + blob[i:])
