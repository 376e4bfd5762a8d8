"""The Numba scans beside the plain parsers: over any file both give the same model, or the same error.

The thresholds below which a scan does not pay are lifted here, so that small files go through the kernels as well.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apsi_inspect.errors import ApsiError
from apsi_inspect.formats import gguf, gguf_metadata, safetensors
from apsi_inspect.formats.gguf import TYPES
from apsi_inspect.formats.safetensors import DTYPES
from apsi_inspect.kernels import scan
from apsi_inspect.ops.open import open_source
from apsi_inspect.source import BytesSource

from . import handmade
from .handmade import Gguf

DATA = Path(__file__).parent / "data"
SMALL = 4_000_000  # bytes of a stored file that is looked at
STORED = sorted(
    p for p in DATA.rglob("*") if p.suffix in (".safetensors", ".gguf", ".apsim") and p.stat().st_size < SMALL
)
USERS = (safetensors, gguf, gguf_metadata)
ABSURD = [0, 1, 7, 63, 64, 255, 2**31, 2**32 - 1, 2**53, 2**59, 2**59 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as context:
        yield context


def outcome(blob: bytes, format: str | None) -> Any:
    """All that a parser finds, in Python's own types; or its error."""
    try:
        model = open_source(BytesSource(blob, "model.x"), format)
    except ApsiError as exc:
        return type(exc).__name__, str(exc)
    c = model.columns
    tensors = [
        (c.names[i], c.encodings[c.codes[i]].name, c.shape(i), c.offsets[i], c.sizes[i]) for i in range(len(c.names))
    ]
    for row in tensors:
        assert [type(x) for x in row[3:]] == [int, int]
    arrays = {k: [v.tolist(), v[-1:], v[len(v) // 2 :][:2]] for k, v in model.metadata.items() if hasattr(v, "tolist")}
    plain = {k: v for k, v in model.metadata.items() if k not in arrays}
    return tensors, list(c.starts), repr(plain), repr(arrays), model.findings, repr(model.facts)


def both(patch: pytest.MonkeyPatch, blob: bytes, format: str | None = None) -> bool:
    """Compare the two; whether the scan gave the tensors, rather than leaving them to the plain parser."""
    gave: list[bool] = []

    def spy(f: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            found = f(*args)
            gave.append(found is not None)
            return found

        return call

    class Spied:
        table_bytes = staticmethod(scan.table_bytes)
        skip_strings = staticmethod(scan.skip_strings)
        string_starts = staticmethod(scan.string_starts)
        safetensors_header = staticmethod(spy(scan.safetensors_header))
        gguf_tensors = staticmethod(spy(scan.gguf_tensors))

    results = []
    for choice in (None, Spied):
        for module in USERS:
            patch.setattr(module, "warm_scan", lambda amount, worth, choice=choice: choice if amount else None)
        results.append(outcome(blob, format))
    assert results[0] == results[1]
    return bool(gave) and all(gave)


# --- stored files


@pytest.mark.parametrize("path", STORED, ids=lambda p: "-".join(p.relative_to(DATA).parts[-3:]))
def test_stored_files(path: Path, patch: pytest.MonkeyPatch) -> None:
    both(patch, path.read_bytes())


def test_there_are_stored_files() -> None:
    assert len(STORED) > 50


# --- safetensors

NAMES = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(["a", "a.b", "", "ß", "名", "a\x7f", "__m"])
SHAPES = st.lists(st.integers(0, 5), max_size=4)


@st.composite
def tables(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A valid header, and the bytes of data behind it."""
    table: dict[str, Any] = {}
    position = 0
    if draw(st.booleans()):
        table["__metadata__"] = draw(st.dictionaries(NAMES, st.sampled_from(["", "x", '{"a":["}"]}', "\\", "ü", ":"])))
    for name in draw(st.lists(NAMES.filter(lambda n: n != "__metadata__"), unique=True, min_size=1, max_size=6)):
        encoding = DTYPES[draw(st.sampled_from(list(DTYPES)))]
        shape = draw(SHAPES)
        shape = [*shape, encoding.block_size] if encoding.block_size > 1 else shape
        nbytes = int(np.prod(shape, dtype=np.int64)) // encoding.block_size * encoding.block_bytes
        entry = {"dtype": encoding.name, "shape": shape, "data_offsets": [position, position + nbytes]}
        table[name] = entry
        position += nbytes
    return table, position


def header_text(table: dict[str, Any]) -> str:
    return json.dumps(table, ensure_ascii=False, separators=(",", ":"))


@given(tables())
def test_valid_headers_are_scanned(patch: pytest.MonkeyPatch, made: tuple[dict[str, Any], int]) -> None:
    table, nbytes = made
    text = header_text(table)
    scanned = both(patch, handmade.from_header(text, bytes(nbytes), align=8), "safetensors")
    names = [n for n in table if n != "__metadata__"]
    assert scanned == ("\\" not in "".join(json.dumps(n, ensure_ascii=False) for n in names))


@given(st.data())
def test_mutated_headers(patch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    table, nbytes = data.draw(tables())
    text = bytearray(header_text(table).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        piece = data.draw(
            st.sampled_from(
                [
                    b"",
                    b" ",
                    b"\n",
                    b",",
                    b":",
                    b'"',
                    b"[",
                    b"]",
                    b"{",
                    b"}",
                    b"\\",
                    b"0",
                    b"1",
                    b"-",
                    b".0",
                    b"e1",
                    b"\x01",
                ]
                + [b"\xff", b"\xc3", b'"a":1', b',"shape":[]', b'"__metadata__":{},', b'"__metadata__":null,', b"00"]
                + [str(n).encode() for n in ABSURD]
            )
        )
        text[at : at + data.draw(st.integers(0, 2))] = piece
    extra = data.draw(st.sampled_from([0, 0, 0, 1, -1]))
    both(patch, handmade.from_header(bytes(text), bytes(max(nbytes + extra, 0))), "safetensors")


@pytest.mark.parametrize(
    "header",
    [
        '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        '{"a":{"dtype":"0U8","shape":[2],"data_offsets":[0,2]}}',
        '{"a":{"dtype":"F8_E4M3FNUZ","shape":[2],"data_offsets":[0,2]}}',
        '{"a":{"dtype":"F8_E4M3FNUZX","shape":[2],"data_offsets":[0,2]}}',
        '{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}',
        '{"a":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}',
        '{"a":{"dtype":"F4","shape":[2,1,2],"data_offsets":[0,2]}}',
        '{"a":{"dtype":"U8","shape":[02],"data_offsets":[0,2]}}',
        '{"a":{"dtype":"U8","shape":[2],"data_offsets":[-0,2]}}',
        '{"a":{"dtype":"U8","shape":[2,],"data_offsets":[0,2]}}',
        '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2,3]}}',
        '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},}',
        '{,"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
        '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}}',
        '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}\n',
        '{"a":{"dtype":"U8","shape":[4294967296,4294967296,2],"data_offsets":[0,2]}}',
        '{"a":{"dtype":"U8","shape":[0,9223372036854775808],"data_offsets":[0,0]}}',
        '{"a":{"dtype":"U8","shape":[18446744073709551618],"data_offsets":[0,2]}}',
        '{"a":{"dtype":"U8","shape":[' + "1," * 63 + '2],"data_offsets":[0,2]}}',
        '{"a":{"dtype":"U8","shape":[' + "1," * 64 + '2],"data_offsets":[0,2]}}',
        '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"__metadata__":{"k":"v"}}',
        '{"__metadata__":{"k":1},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
        '{"__metadata__":{"k":"\\ud800"},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
        '{"__metadata__":{"k":"}"},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
        '{"__metadata__":{"k":"\\"}"},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
        '{"__metadata__":{"a":"b","a":"b"},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
        '{"__metadata__":{},"__metadata__":{},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
        '{"__mXtadata__":{},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
        '{"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        '{"b":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
        '{"b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        "{}",
        '{"__metadata__":{}}',
    ],
)
def test_headers_at_the_edge(patch: pytest.MonkeyPatch, header: str) -> None:
    for align in (1, 8):
        for nbytes in (0, 2):
            both(patch, handmade.from_header(header, bytes(nbytes), align=align), "safetensors")


def test_every_cut_of_a_header() -> None:
    """No cut is read beyond its end, and none gives tensors."""
    table = {
        "__metadata__": {"a": "b"},
        **{f"t{i}": {"dtype": "U8", "shape": [1, 1], "data_offsets": [i, i + 1]} for i in range(3)},
    }
    text = header_text(table).encode()
    encodings = [(n, e.block_size, e.block_bytes) for n, e in DTYPES.items()]
    assert scan.safetensors_header(text, 0, 3, encodings) is not None
    for end in range(len(text)):
        assert scan.safetensors_header(text[:end], 0, 3, encodings) is None
        assert scan.safetensors_header(text[end:], 0, 3, encodings) is None or end == 0


# --- GGUF


@st.composite
def ggufs(draw: st.DrawFn, usual: bool) -> bytes:
    """A valid file; `usual`: little-endian of version 2 or 3, with names as ggml takes them."""
    version, order = draw(st.sampled_from([(2, "<"), (3, "<")] if usual else [(1, "<"), (2, ">"), (3, ">")]))
    names = st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=12)
    tensors = []
    for name in draw(st.lists(names, unique=True, min_size=1, max_size=6)):
        kind = draw(st.sampled_from(sorted(TYPES)))
        e = TYPES[kind]
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        shape = [*shape, e.block_size * draw(st.integers(0, 2))] if e.block_size > 1 else shape
        numel = int(np.prod(shape, dtype=np.int64))
        tensors.append((name, shape, kind, bytes(numel // e.block_size * e.block_bytes)))
    align = draw(st.sampled_from([8, 32, 64]))
    vocabulary = draw(st.lists(st.binary(max_size=6), max_size=12))
    keys = [
        ("general.architecture", "STRING", "llama"),
        ("general.alignment", "UINT32", align),
        ("tokenizer.ggml.tokens", "ARRAY", ("STRING", vocabulary)),
        ("tokenizer.ggml.scores", "ARRAY", ("FLOAT32", [1.0] * len(vocabulary))),
    ]
    return Gguf(version, order).file(keys, tensors, align=align)


@given(ggufs(usual=True))
def test_valid_files_are_scanned(patch: pytest.MonkeyPatch, blob: bytes) -> None:
    assert both(patch, blob)


@given(ggufs(usual=False))
def test_old_and_big_endian_files(patch: pytest.MonkeyPatch, blob: bytes) -> None:
    assert not both(patch, blob)


@given(st.data())
def test_mutated_files(patch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    blob = bytearray(data.draw(ggufs(usual=True)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(blob) - 1))
        kind = data.draw(st.sampled_from(["byte", "number", "cut", "delete", "insert"]))
        if kind == "byte":
            blob[at] = data.draw(st.sampled_from([0, 1, 4, 5, 10, 64, 0x80, 0xFF]))
        elif kind == "number":
            blob[at : at + 8] = struct.pack("<Q", data.draw(st.sampled_from(ABSURD)))
        elif kind == "cut" and at:
            del blob[at:]
        elif kind == "delete":
            del blob[at : at + data.draw(st.integers(1, 9))]
        else:
            blob[at:at] = data.draw(st.binary(min_size=1, max_size=9))
    both(patch, bytes(blob), "gguf")


@pytest.mark.parametrize(
    ("tensors", "scanned"),
    [
        ([("a", [2], 0, bytes(8)), ("b", [], 0, bytes(4))], True),
        ([("", [0], 0, b""), ("b", [3, 0], 8, b"")], True),
        ([("x" * 63, [1], 24, b"1")], True),
        ([("x" * 64, [1], 24, b"1")], False),  # a warning is due
        ([("a\nb", [1], 24, b"1"), ("a", [1], 24, b"1")], False),
        ([("a", [1], 24, b"1"), ("a", [1], 24, b"1")], False),
        ([(b"\xff", [1], 24, b"1")], False),
        ([("a", [1, 1, 1, 1], 24, b"1")], True),
        ([("a", [1, 1, 1, 1, 1], 24, b"1")], False),
        ([("a", [32, 33], 8, bytes(32 * 34))], False),
        ([("a", [], 8, b"")], False),
        ([("a", [1], 4, b"1")], False),
        ([("a", [1], 43, b"1")], False),
        ([("a", [1], 2**32 - 1, b"1")], False),
        ([("a", [2**62, 4], 24, b"")], False),
        ([("a", [2**63], 24, b"")], False),
        ([("a", [64], 24, b"1")], False),
        ([("a", [1], 24, bytes(40)), ("b", [1], 24, b"1")], False),  # a gap
    ],
)
def test_tables_at_the_edge(patch: pytest.MonkeyPatch, tensors: list[Any], scanned: bool) -> None:
    assert both(patch, Gguf().file([("general.architecture", "STRING", "x")], tensors)) == scanned


def test_every_cut_of_a_table() -> None:
    """No cut is read beyond its end, and none gives tensors."""
    made = Gguf()
    table = b"".join(made.info(f"t{i}", [1, 1], 24, 32 * i) for i in range(3))
    blocks = gguf._blocks()
    assert scan.gguf_tensors(table, 0, 1 << 20, 3, blocks, 32) is not None
    for end in range(1, len(table)):
        assert scan.gguf_tensors(table[:end], 0, 1 << 20, 3, blocks, 32) is None


# --- strings


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("order", ["<", ">"])
def test_large_vocabulary(patch: pytest.MonkeyPatch, version: int, order: str) -> None:
    """Strings across the windows of the reader, empty ones, and one longer than a window."""
    words = [b"%d" % i * (i % 7) for i in range(200_000)]
    words[1000], words[150_000] = b"x" * 70_000, b"y" * 1_500_000
    made = Gguf(version, order)
    payload = b"".join(map(made.string, words))
    count = made.pack("I" + made.word, 8, len(words))
    keys = [made.string(b"a") + made.pack("I", 9) + count + payload, made.string(b"b") + made.value("UINT8", 7)]
    blob = b"GGUF" + made.pack("I" + made.word * 2, version, 0, 2) + b"".join(keys)
    both(patch, blob)
    model = open_source(BytesSource(blob, "model.gguf"))
    assert model.metadata["b"] == 7
    for i in (0, 999, 1000, 1001, 149_999, 150_000, 199_999):
        assert model.metadata["a"][i].encode() == words[i]
    both(patch, blob[: len(blob) // 2])


@given(st.lists(st.binary(max_size=9), max_size=20), st.integers(0, 40), st.integers(0, 25))
def test_skip_strings(words: list[bytes], cut: int, count: int) -> None:
    """Against the arithmetic of lengths: all that stand whole, and no further."""
    data = b"".join(struct.pack("<Q", len(w)) + w for w in words)
    data = data[: max(len(data) - cut, 0)] or b"\0"
    ends = [0]
    for w in words[:count]:
        if ends[-1] + 8 + len(w) > len(data):
            break
        ends.append(ends[-1] + 8 + len(w))
    assert scan.skip_strings(data, 0, count) == (ends[-1], count - len(ends) + 1)
    starts = scan.string_starts(data, count) if count else None
    assert (None if starts is None else list(starts)) == (ends[:-1] if count == len(ends) - 1 and count else None)


@pytest.mark.parametrize("length", [2**63 - 1, 2**63, 2**64 - 1, 2**62, 9])
def test_absurd_lengths_stop_the_skipping(length: int) -> None:
    data = struct.pack("<Q", 1) + b"a" + struct.pack("<Q", length) + b"12345678"
    assert scan.skip_strings(data, 0, 5) == (9, 4)
    assert scan.string_starts(data, 2) is None
