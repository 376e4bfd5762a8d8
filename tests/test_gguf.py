"""GGUF: files of the reference writer against its reader, versions and byte orders put together by hand, bad files."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from apsi_inspect.errors import ModelFileError, TruncatedFileError, UnsupportedFileError
from apsi_inspect.formats import gguf as gguf_format
from apsi_inspect.formats import gguf_metadata
from apsi_inspect.formats.gguf import TYPES
from apsi_inspect.model import ModelFile
from apsi_inspect.ops.open import open as open_model
from apsi_inspect.ops.open import open_source
from apsi_inspect.source import BytesSource

from . import handmade
from .handmade import Gguf

ORDERS = {"little": gguf.GGUFEndian.LITTLE, "big": gguf.GGUFEndian.BIG}
VALUES: dict[str, Any] = {
    "UINT8": 255, "INT8": -128, "UINT16": 65535, "INT16": -32768, "UINT32": 2**32 - 1, "INT32": -(2**31),
    "FLOAT32": 0.1, "UINT64": 2**64 - 1, "INT64": -(2**63), "FLOAT64": 0.1, "BOOL": True, "STRING": "naïve ☃ \0 \n",
}  # fmt: skip


def model_of(blob: bytes, name: str = "model.gguf") -> ModelFile:
    return open_source(BytesSource(blob, name))


def f32(x: float) -> float:
    found: float = struct.unpack("<f", struct.pack("<f", x))[0]
    return found


def write(path: Path, fill: Callable[[gguf.GGUFWriter], None], **options: Any) -> None:
    writer = gguf.GGUFWriter(path, "llama", **options)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("order", ORDERS)
def test_every_metadata_type_of_the_reference_writer(tmp_path: Path, order: str) -> None:
    def fill(w: gguf.GGUFWriter) -> None:
        for kind, value in VALUES.items():
            getattr(w, f"add_{kind.lower()}")(f"x.{kind.lower()}", value)
        w.add_array("x.ints", [1, -2, 3])
        w.add_array("x.floats", [0.5, 0.1])
        w.add_array("x.bools", [True, False, True])
        w.add_array("x.strings", ["a", "", "ß", "☃" * 100])
        w.add_array("x.bytes", b"\x00\xff")
        w.add_array("x.nested", [[1, 2], [3], [4, 5, 6]])
        w.add_array("x.deep", [[["a", "b"], ["c"]], [["d"]]])
        w.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))

    path = tmp_path / "model.gguf"
    write(path, fill, endianess=ORDERS[order])
    model = open_model(path)
    assert not model.findings
    assert model.byte_order == model.facts["byte order"] == order
    assert model.architecture == "llama"
    reader = gguf.GGUFReader(path)
    own = [key for key in reader.fields if not key.startswith("GGUF.")]
    assert list(model.metadata) == own
    for kind, value in VALUES.items():
        key = f"x.{kind.lower()}"
        assert model.metadata.types[key] == kind
        assert model.metadata[key] == (f32(value) if kind == "FLOAT32" else value)
        assert type(model.metadata[key]) is type(value)
        assert [t.name for t in reader.fields[key].types] == [kind]
    m = model.metadata
    assert m["x.ints"].tolist() == [1, -2, 3]
    assert m["x.floats"].tolist() == [0.5, f32(0.1)]
    assert m["x.bools"].tolist() == [True, False, True]
    assert m["x.strings"].tolist() == ["a", "", "ß", "☃" * 100]
    assert m["x.bytes"].tolist() == [0, 255]
    assert m["x.nested"].tolist() == [[1, 2], [3], [4, 5, 6]]
    assert m["x.deep"].tolist() == [[["a", "b"], ["c"]], [["d"]]]
    assert m.types["x.deep"] == "ARRAY[ARRAY]"
    assert m.types["x.bytes"] == "ARRAY[UINT8]"
    np.testing.assert_array_equal(np.asarray(model["t"]), np.arange(6, dtype=np.float32).reshape(2, 3))


PLAIN = {n: np.dtype(n.replace("F", "float").replace("I", "int")) for n in "F16 F32 F64 I8 I16 I32 I64".split()}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("align", [None, 8, 64, 4096])
def test_tensors_of_the_reference_writer(tmp_path: Path, order: str, align: int | None) -> None:
    rng = np.random.default_rng(7)
    arrays = {name: rng.integers(-100, 100, (3, 5)).astype(dtype) for name, dtype in PLAIN.items()}
    arrays |= {"scalar": np.array(1.5, np.float32), "one": np.ones(1, np.int8), "4d": np.ones((2, 1, 3, 1), np.float32)}

    def fill(w: gguf.GGUFWriter) -> None:
        if align:
            w.add_custom_alignment(align)
        for name, x in arrays.items():
            w.add_tensor(name, x)

    path = tmp_path / "model.gguf"
    write(path, fill, endianess=ORDERS[order])
    model = open_model(path)
    assert not model.findings
    assert model.facts["alignment"] == (align or 32)
    reader = gguf.GGUFReader(path)
    assert list(model) == [t.name for t in reader.tensors] == list(arrays)
    for t in reader.tensors:
        found = model[t.name]
        assert found.encoding == t.tensor_type.name
        assert found.offset == t.data_offset
        assert found.nbytes == t.n_bytes
        assert found.shape == arrays[t.name].shape == tuple(map(int, reversed(t.shape)))
        assert found.numel == t.n_elements
        np.testing.assert_array_equal(np.asarray(found), arrays[t.name])
        assert np.asarray(found).dtype == arrays[t.name].dtype


def test_every_block_type_of_the_reference_writer(tmp_path: Path) -> None:
    kinds = [k for k in gguf.GGML_QUANT_SIZES if k.name not in ("Q8_1",) and TYPES[k.value].is_block]
    raws = {}

    def fill(w: gguf.GGUFWriter) -> None:
        for i, kind in enumerate(kinds):
            _, nbytes = gguf.GGML_QUANT_SIZES[kind]
            raws[kind.name] = np.full((3, 2 * nbytes), i, np.uint8)
            w.add_tensor(kind.name, raws[kind.name], raw_dtype=kind)

    path = tmp_path / "model.gguf"
    write(path, fill)
    model = open_model(path)
    assert list(model) == [k.name for k in kinds]
    for kind in kinds:
        size, nbytes = gguf.GGML_QUANT_SIZES[kind]
        tensor = model[kind.name]
        assert (tensor.encoding, tensor.shape, tensor.nbytes) == (kind.name, (3, 2 * size), 6 * nbytes)
        assert bytes(tensor.raw()) == raws[kind.name].tobytes()


def split(folder: Path, **options: Any) -> list[Path]:
    def fill(w: gguf.GGUFWriter) -> None:
        w.add_string("x.key", "value")
        for i in range(7):
            w.add_tensor(f"t{i}", np.full((2, 32), i, np.float32))

    write(folder / "model.gguf", fill, **options)
    return sorted(folder.glob("model*.gguf"))


@pytest.mark.parametrize("small_first", [False, True])
def test_split_model(tmp_path: Path, small_first: bool) -> None:
    parts = split(tmp_path, split_max_tensors=3, small_first_shard=small_first)
    assert len(parts) > 2
    for part in parts:  # any part opens the whole
        model = open_model(part)
        assert list(model) == [f"t{i}" for i in range(7)]
        assert model.files == [str(p) for p in parts]
        assert model.metadata["x.key"] == "value"
        assert [float(np.asarray(t).max()) for t in model.values()] == list(range(7))
        assert {f.severity for f in model.findings} <= {"note"}
    assert open_model(tmp_path).files == [str(p) for p in parts]


def test_split_model_with_a_part_missing(tmp_path: Path) -> None:
    parts = split(tmp_path, split_max_tensors=3)
    parts[1].unlink()
    model = open_model(parts[0])
    (finding,) = (f for f in model.findings if f.code == "incomplete")
    assert finding.severity == "error"
    assert "part 1 of 3" in finding.message
    assert parts[1].name in finding.message
    assert len(model) == 3


def test_split_model_under_another_name(tmp_path: Path) -> None:
    parts = split(tmp_path, split_max_tensors=3)
    moved = parts[1].rename(tmp_path / "other.gguf")
    codes = {f.code: f.message for f in open_model(moved).findings}
    assert "part 2 of 3" in codes["incomplete"]


def test_split_parts_of_different_models(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    parts, others = split(tmp_path / "a", split_max_tensors=3), split(tmp_path / "b", split_max_tensors=3)
    parts[1].write_bytes(others[2].read_bytes())
    with pytest.raises(ModelFileError, match=r"split.no is 2, 1 was expected"):
        open_model(parts[0])


@pytest.mark.parametrize("count", [2**16 - 1, 2**63, 2**64 - 1])
def test_split_count_out_of_all_proportion(tmp_path: Path, count: int) -> None:
    g = Gguf()
    keys = [("general.architecture", "STRING", "x"), ("split.no", "UINT16", 0), ("split.count", "UINT64", count)]
    path = tmp_path / "model-00001-of-00002.gguf"
    path.write_bytes(g.file(keys, [("t", [1], 0, bytes(4))]))
    assert "incomplete" in {f.code for f in open_model(path).findings}


@pytest.mark.parametrize(("version", "order"), [(1, "<"), (2, "<"), (3, "<"), (2, ">"), (3, ">")])
def test_versions_and_byte_orders(version: int, order: str) -> None:
    g = Gguf(version, order)
    keys: list[tuple[str, str, Any]] = [(f"x.{k}", k, v) for k, v in VALUES.items()]
    keys += [
        ("general.architecture", "STRING", "x"),
        ("a.str", "ARRAY", ("STRING", ["one", "", "three"])),
        ("a.u16", "ARRAY", ("UINT16", [1, 2])),
        ("a.nested", "ARRAY", ("ARRAY", [("INT64", [1, -1]), ("STRING", ["x"])])),
        ("a.none", "ARRAY", ("FLOAT64", [])),
    ]
    raw = struct.pack(order + "6f", *range(6))
    model = model_of(g.file(keys, [("w", [2, 3], 0, raw), ("q", [2, 32], 8, bytes(68)), ("b", [], 24, b"\x05")]))
    assert not model.findings
    assert (model.facts["version"], model.byte_order) == (version, {"<": "little", ">": "big"}[order])
    for kind, value in VALUES.items():
        assert model.metadata[f"x.{kind}"] == (f32(value) if kind == "FLOAT32" else value)
    assert model.metadata["a.str"].tolist() == ["one", "", "three"]
    assert model.metadata["a.u16"].tolist() == [1, 2]
    assert model.metadata["a.nested"].tolist() == [[1, -1], ["x"]]
    assert model.metadata["a.none"].tolist() == []
    assert [(t.name, t.encoding, t.shape) for t in model.values()] == [
        ("w", "F32", (2, 3)), ("q", "Q8_0", (2, 32)), ("b", "I8", ()),
    ]  # fmt: skip
    np.testing.assert_array_equal(np.asarray(model["w"]), np.arange(6, dtype=np.float32).reshape(2, 3))
    assert np.asarray(model["b"]) == 5


def test_arrays_behave_like_sequences() -> None:
    words = [f"w{i}" for i in range(50)]
    blob = Gguf().file([("s", "ARRAY", ("STRING", words)), ("i", "ARRAY", ("INT32", list(range(50))))])
    metadata = model_of(blob).metadata
    for key, expected in (("s", words), ("i", list(range(50)))):
        a = metadata[key]
        assert len(a) == 50
        assert list(a) == a.tolist() == expected
        assert a == expected
        assert a != expected[:-1]
        for part in ((3,), (-3, None), (47, 99), (10, 5), (None, None, 7), (None, None, -1)):
            assert list(a[slice(*part)]) == expected[slice(*part)]
        assert [a[0], a[-1], a[np.int64(7)]] == [expected[0], expected[-1], expected[7]]
        for i in (50, -51):
            with pytest.raises(IndexError):
                a[i]
        assert np.asarray(a).tolist() == expected
        assert expected[3] in a
        assert "50" in repr(a)


def test_array_bool_bytes_are_truth_values() -> None:
    blob = bytearray(Gguf().file([("b", "ARRAY", ("BOOL", [True, False, True]))]))
    blob[-1] = 7
    a = model_of(bytes(blob)).metadata["b"]
    assert a.tolist() == [True, False, True]
    assert np.asarray(a).dtype == bool
    assert np.asarray(a).sum() == 2


def test_text_that_is_not_utf8() -> None:
    g = Gguf()
    blob = b"GGUF" + g.pack("IQQ", 3, 1, 2)
    blob += g.string(b"k\xff") + g.value("STRING", b"v\xfe") + g.string("s") + g.value("ARRAY", ("STRING", [b"\xff"]))
    blob += g.info(b"t\xfd", [1], 0, 0)
    blob += bytes(-len(blob) % 32) + bytes(32)
    model = model_of(blob)
    assert model.metadata["k\\xff"] == "v\\xfe"
    assert model.metadata["s"].tolist() == ["\\xff"]
    assert list(model) == ["t\\xfd"]
    assert [f.code for f in model.findings].count("bad-utf8") == 3


def good(**change: Any) -> bytes:
    """One F32 tensor of shape (2, 3); parts of it can be replaced."""
    g = Gguf()
    parts: dict[str, Any] = {
        "magic": b"GGUF", "version": g.pack("I", 3), "tensors": g.pack("Q", 1), "keys": g.pack("Q", 1),
        "key": g.string("general.architecture"), "value": g.value("STRING", "llama"), "name": g.string("w"),
        "rank": g.pack("I", 2), "dims": g.pack("QQ", 3, 2), "type": g.pack("I", 0), "offset": g.pack("Q", 0),
    }  # fmt: skip
    head = b"".join((parts | change).values())
    return head + bytes(-len(head) % 32) + bytes(32)


def q(value: int) -> bytes:
    return struct.pack("<Q", value & (2**64 - 1))


REFUSED: dict[str, tuple[bytes, type[ModelFileError], str]] = {
    "version 0": (good(version=b"\0\0\0\0"), UnsupportedFileError, "version 0"),
    "version 4": (good(version=b"\4\0\0\0"), UnsupportedFileError, "version 4"),
    "version 4, big-endian": (good(version=b"\0\0\0\4"), UnsupportedFileError, "version 4"),
    "tensor count -1": (good(tensors=q(-1)), TruncatedFileError, "declares"),
    "key count -1": (good(keys=q(-1)), TruncatedFileError, "declares"),
    "empty key": (good(key=q(0)), ModelFileError, "empty"),
    "key longer than the file": (good(key=q(60_000) + b"x"), TruncatedFileError, "truncated"),
    "key of 1 GB": (good(key=q(10**9) + b"x"), ModelFileError, "65535"),
    "value type 13": (good(value=b"\x0d\0\0\0"), ModelFileError, "type 13"),
    "string of 2^63": (good(value=b"\x08\0\0\0" + q(2**63)), ModelFileError, "1 GiB"),
    "array of arrays of arrays": (
        good(value=b"\x09\0\0\0" + (b"\x09\0\0\0" + q(1)) * 6 + b"\0\0\0\0" + q(0)), ModelFileError, "nested",
    ),
    "array of 2^60": (good(value=b"\x09\0\0\0" + b"\0\0\0\0" + q(2**60)), TruncatedFileError, "general.architecture"),
    "array of type 13": (good(value=b"\x09\0\0\0" + b"\x0d\0\0\0" + q(1)), ModelFileError, "type 13"),
    "rank 2^32-1": (good(rank=b"\xff\xff\xff\xff"), ModelFileError, "'w'"),
    "rank 9": (good(rank=b"\x09\0\0\0"), ModelFileError, "'w'.*9 dim"),
    "dimension 2^63": (good(dims=q(2**63) + q(0)), ModelFileError, "'w'"),
    "product wraps to 0": (good(dims=q(2**32) + q(2**32)), TruncatedFileError, "'w'"),
    "type 4": (good(type=b"\4\0\0\0"), UnsupportedFileError, "'w'.*Q4_2"),
    "type 43": (good(type=b"\x2b\0\0\0"), UnsupportedFileError, "'w'.*43"),
    "rows of half a block": (good(type=b"\2\0\0\0"), ModelFileError, "'w'.*multiple of 32"),
    "offset beyond the end": (good(offset=q(64)), TruncatedFileError, "'w'"),
    "offset 2^64-1": (good(offset=q(-1)), TruncatedFileError, "'w'"),
    "name of 1 GB": (good(name=q(10**9)), ModelFileError, "name of tensor 0"),
    "name longer than the file": (good(name=q(60_000)), TruncatedFileError, "number 0"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why: str) -> None:
    blob, kind, match = REFUSED[why]
    with pytest.raises(kind, match=match) as info:
        model_of(blob)
    assert str(info.value).startswith("model.gguf: ")


def test_the_good_file_is_good() -> None:
    assert not model_of(good()).findings


def test_gaps_and_order_are_read_with_a_warning() -> None:
    g = Gguf()
    head = b"GGUF" + g.pack("IQQ", 3, 2, 1) + g.string("general.architecture") + g.value("STRING", "x")
    head += g.info("b", [8], 0, 128) + g.info("a", [8], 0, 0)
    data = bytes(range(32)) + bytes(96) + bytes(range(32, 64))
    model = model_of(head + bytes(-len(head) % 32) + data)
    assert [f.code for f in model.findings] == ["layout"]
    assert bytes(model["a"].raw()) == bytes(range(32))
    assert bytes(model["b"].raw()) == bytes(range(32, 64))


def test_names_and_ranks_that_the_c_loader_refuses() -> None:
    keys = [("general.architecture", "STRING", "x")]
    for letter, most in (("n", 63), ("ß", 31), ("☃", 21)):
        for n in (most, most + 1):
            model = model_of(Gguf().file(keys, [(letter * n, [1], 0, bytes(4))]))
            assert ("long-name" in {f.code for f in model.findings}) == (n > most)
    model = model_of(Gguf().file(keys, [("w", [1] * 8, 0, bytes(4))]))
    assert model["w"].shape == (1,) * 8
    assert "rank" in {f.code for f in model.findings}


def test_metadata_only_and_empty() -> None:
    model = model_of(Gguf().file([("general.architecture", "STRING", "x")]))
    assert (len(model), model.architecture, model.findings) == (0, "x", ())
    assert len(model_of(Gguf().file())) == 0


def test_opening_reads_no_array(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("an array was decoded")

    for name in ("_strings", "_numbers", "_offsets"):
        monkeypatch.setattr(gguf_metadata.Array, name, never)
    keys: list[tuple[str, str, Any]] = [("general.architecture", "STRING", "x")]
    keys += [("s", "ARRAY", ("STRING", ["a"] * 5000)), ("i", "ARRAY", ("INT8", [1] * 5000))]
    model = model_of(Gguf().file(keys, [("w", [1], 0, bytes(4))]))
    assert [len(model.metadata[k]) for k in ("s", "i")] == [5000, 5000]


def test_long_strings_are_read_when_asked_for(tmp_path: Path) -> None:
    long = "☃" * 400_000
    path = tmp_path / "model.gguf"
    path.write_bytes(Gguf().file([("a", "STRING", long), ("b", "STRING", "after")]))
    with open_model(path) as model:
        assert model.metadata["a"] == long
        assert dict(model.metadata) == {"a": long, "b": "after"}
        assert "a" in model.metadata


SPARSE = {
    "16 strings of 1 GiB": (lambda g: [(f"k{i}", "STRING", 1 << 30) for i in range(16)], 0),
    "a billion tensors": (lambda g: [], 10**9),
    "a billion keys": (lambda g: 10**9, 0),
    "an array of 2^30 numbers": (lambda g: [("k", "ARRAY", (10, 1 << 30))], 0),
    "an array of 2^30 strings": (lambda g: [("k", "ARRAY", (8, 1 << 30))], 0),
    "an array of 2^21 strings": (lambda g: [("k", "ARRAY", (8, 1 << 21))], 0),
    "an array of 2^30 arrays": (lambda g: [("k", "ARRAY", (9, 1 << 30))], 0),
}  # fmt: skip


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_files(tmp_path: Path, name: str, measured: Callable[..., tuple[str, float]]) -> None:
    """A file of 50 GB that holds a page or two of data, and declares whatever it likes."""
    g, (make, tensors) = Gguf(), SPARSE[name]
    keys = make(g)
    path = tmp_path / "model.gguf"
    with path.open("wb") as f:
        f.write(b"GGUF" + g.pack("IQQ", 3, tensors, keys if isinstance(keys, int) else len(keys)))
        for key, kind, value in keys if isinstance(keys, list) else ():
            f.write(g.string(key) + g.pack("I", handmade.type_id(kind)))
            if kind == "STRING":
                f.write(g.pack("Q", value))
                f.seek(value, os.SEEK_CUR)
            else:
                f.write(g.pack("IQ", *value))
        f.truncate(50 * 10**9)
    code = """
import time
t = time.process_time()
try:
    m = open_model(sys.argv[1]); print("opens", list(m.metadata.keys())[:1])
except ApsiError as exc:
    print(exc)
print(time.process_time() - t)
"""
    printed, grew = measured(code, path)
    seconds = float(printed.splitlines()[-1])
    assert grew < 50
    assert seconds < 3, printed


def test_fifty_gigabytes_of_tensors(tmp_path: Path, measured: Callable[..., tuple[str, float]]) -> None:
    g, n, rows = Gguf(), 100, 125_000_000
    head = b"GGUF" + g.pack("IQQ", 3, n, 1) + g.string("general.architecture") + g.value("STRING", "llama")
    head += b"".join(g.info(f"blk.{i}.w", [rows], 0, i * rows * 4) for i in range(n))
    path = tmp_path / "model.gguf"
    with path.open("wb") as f:
        f.write(head)
        f.truncate(len(head) + -len(head) % 32 + n * rows * 4)
    code = "m = open_model(sys.argv[1]); print(len(m), bytes(m['blk.99.w'].raw()[-4:]), m.findings)"
    printed, grew = measured(code, path)
    assert printed == f"100 {bytes(4)!r} ()"
    assert grew < 20


def test_numbers_of_the_module() -> None:
    assert gguf_format.MAX_NAME == 63
    assert math.log2(gguf_metadata.MAX_STRING) == 30


def test_a_string_that_is_not_utf8_is_said(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(Gguf().file([("general.architecture", "STRING", "llama"), ("x.s", "STRING", b"a\xffb")]))
    m = open_model(path)
    assert m.metadata["x.s"] == "a\\xffb"
    assert [(f.severity, f.code) for f in m.findings] == [("warning", "bad-utf8")]
    assert "'x.s'" in m.findings[0].message
