"""safetensors: files of the reference library, every dtype, every rule of its reader, headers of absurd size."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import save_file

from apsi_inspect import samples
from apsi_inspect.encodings import ENCODINGS
from apsi_inspect.errors import ModelFileError, TruncatedFileError
from apsi_inspect.formats import pieces
from apsi_inspect.formats.safetensors import DTYPES
from apsi_inspect.model import ModelFile
from apsi_inspect.ops.open import open as open_model
from apsi_inspect.ops.open import open_source
from apsi_inspect.source import BytesSource

from . import handmade

WEIGHTS = [Path(samples.path(name)) for name in samples.REAL]


def model_of(blob: bytes, name: str = "model.safetensors") -> ModelFile:
    return open_source(BytesSource(blob, name), "safetensors")


def compare_with_reference(path: Path) -> ModelFile:
    """Names, order, metadata, shapes, dtypes and bytes, as `safe_open` and `deserialize` give them."""
    model = open_model(path)
    with safe_open(path, "np") as reference:
        assert list(model) == list(reference.offset_keys())
        assert sorted(model) == list(reference.keys())
        assert (dict(model.metadata) or None) == (reference.metadata() or None)
        assert model.facts["metadata present"] == (reference.metadata() is not None)
        for name in reference.keys():
            part = reference.get_slice(name)
            assert model[name].encoding == part.get_dtype()
            assert list(model[name].shape) == part.get_shape()
    for name, entry in deserialize(path.read_bytes()):
        assert bytes(model[name].raw()) == bytes(entry["data"])
        assert model[name].nbytes == len(entry["data"])
    return model


@pytest.mark.parametrize("path", WEIGHTS, ids=lambda p: p.name)
def test_real_files(path: Path) -> None:
    model = compare_with_reference(path)
    assert len(model) > 10
    with safe_open(path, "np") as reference:
        for name, tensor in model.items():
            np.testing.assert_array_equal(np.asarray(tensor), reference.get_tensor(name))


def test_files_of_the_reference_writer(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    arrays: dict[str, Any] = {}
    for encoding in DTYPES.values():
        if encoding.block_size == 1:
            dtype = np.dtype(getattr(ml_dtypes, encoding.dtype, encoding.dtype))
            arrays[f"t.{encoding.name}"] = rng.integers(0, 2, (2, 3)).astype(dtype)
            arrays[f"empty.{encoding.name}"] = np.zeros((0, 4), dtype)
    arrays |= {"scalar": np.array(2.5), "名前.é": np.arange(3, dtype=np.int8)}
    arrays |= {'q"\\\t': np.ones((1, 1, 2, 1), np.float16)}
    path = tmp_path / "model.safetensors"
    save_file(arrays, path, {"key": "värde", "": "", "more": "x" * 1000})
    model = compare_with_reference(path)
    assert not model.findings
    for name, x in arrays.items():
        found = np.asarray(model[name])
        assert found.dtype == x.dtype == model[name].dtype
        assert found.tobytes() == x.tobytes()


@pytest.mark.parametrize("metadata", [None, {}, {"a": "b"}], ids=str)
def test_metadata_absent_empty_present(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": np.zeros(2, np.float32)}, path, metadata)
    assert dict(compare_with_reference(path).metadata) == (metadata or {})


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(tmp_path: Path, name: str) -> None:
    encoding = ENCODINGS[name]
    n = 12  # whole bytes in each of them
    path = tmp_path / "model.safetensors"
    raw = bytes(encoding.block_bytes * n // encoding.block_size)
    path.write_bytes(handmade.safetensors([("x", name, [3, 4], raw)]))
    model = compare_with_reference(path)
    assert model["x"].bpw == encoding.bpw
    assert model["x"].numel == n


def test_header_order_is_not_data_order(tmp_path: Path) -> None:
    header = {
        "z": {"data_offsets": [0, 4], "dtype": "F32", "shape": []},
        "b": {"shape": [2], "dtype": "U8", "data_offsets": [6, 8], "extra": {"a": [1, {"b": None}]}},
        "a": {"dtype": "U8", "data_offsets": [4, 6], "shape": [2]},
        "__metadata__": {"k": "v"},
    }
    path = tmp_path / "model.safetensors"
    path.write_bytes(handmade.from_header(json.dumps(header, indent=3), bytes(range(8)), align=8))
    model = compare_with_reference(path)
    assert list(model) == ["z", "a", "b"]
    assert bytes(model["b"].raw()) == b"\x06\x07"


def test_empty_tensors_at_one_place_stand_by_name() -> None:
    header = {n: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in ("z", "é", "a")}
    header["last"] = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    header["end"] = {"dtype": "U8", "shape": [0, 7], "data_offsets": [1, 1]}
    for keys in (list(header), list(reversed(header))):
        blob = handmade.from_header(json.dumps({k: header[k] for k in keys}), b"\0")
        assert list(model_of(blob)) == ["a", "z", "é", "last", "end"]


def test_white_space_and_null_metadata(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    entry = '"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    for header in (f" \n\t\r{{{entry}}} \r\n\t", f'{{"__metadata__":null,{entry}}}', "{}", ' {"__metadata__":{}}'):
        path.write_bytes(handmade.from_header(header, b"\7" if entry in header else b""))
        compare_with_reference(path)


def entry(**change: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | change


def blob(header: Any, data: bytes = bytes(8)) -> bytes:
    return handmade.from_header(header if isinstance(header, (str, bytes)) else json.dumps(header), data)


GOOD = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
# why -> (file, what the message must say); the reference refuses each of them too, except those in STRICTER
REFUSED: dict[str, tuple[bytes, str]] = {
    "7 bytes": (bytes(7), "7 bytes"),
    "length 0": (struct.pack("<Q", 0), "JSON"),
    "length 100 000 001": (struct.pack("<Q", 100_000_001), "100000001"),
    "length 2^64-1": (b"\xff" * 8, "header length"),
    "header beyond the end": (struct.pack("<Q", 50) + b"{}", "header of 50 bytes"),
    "not UTF-8": (blob(b'{"\xff":1}', b""), "UTF-8"),
    "overlong UTF-8": (blob(b'{"\xc0\x80":1}', b""), "UTF-8"),
    "surrogate in UTF-8": (blob(b'{"\xed\xa0\x80":1}', b""), "UTF-8"),
    "byte order mark": (blob("\ufeff{}", b""), "JSON"),
    "NUL padding": (blob("{}\0\0", b""), "JSON"),
    "comment": (blob("{/**/}", b""), "JSON"),
    "trailing comma": (blob(f'{{"w":{GOOD},}}'), "JSON"),
    "two documents": (blob("{}{}", b""), "JSON"),
    "single quotes": (blob("{'a':1}", b""), "JSON"),
    "a list": (blob("[]", b""), "object"),
    "null": (blob("null", b""), "object"),
    "a number": (blob("1", b""), "object"),
    "NaN": (blob('{"w":NaN}', b""), "NaN"),
    "nested 100 000 deep": (blob('{"w":' + "[" * 100_000 + "]" * 100_000 + "}", b""), "nested"),
    "control character in a name": (blob(f'{{"\n":{GOOD}}}'), "JSON"),
    "lone surrogate in a name": (blob(f'{{"\\ud800":{GOOD}}}'), "surrogate"),
    "unknown dtype": (blob({"w": entry(dtype="F33")}), "'w'.*F33"),
    "dtype in lower case": (blob({"w": entry(dtype="f32")}), "'w'.*f32"),
    "dtype is a number": (blob({"w": entry(dtype=4)}), "'w'"),
    "dtype is an object": (blob({"w": entry(dtype={})}), "'w'.*object"),
    "dtype is null": (blob({"w": entry(dtype=None)}), "'w'.*null"),
    "dtype is true": (blob({"w": entry(dtype=True)}), "'w'.*true"),
    "dtype is 1.5": (blob({"w": entry(dtype=1.5)}), "'w'.*number"),
    "dtype is a list": (blob({"w": entry(dtype=["F32"])}), "'w'"),
    "no dtype": (blob({"w": {"shape": [2], "data_offsets": [0, 8]}}), "'w'.*dtype"),
    "no shape": (blob({"w": {"dtype": "F32", "data_offsets": [0, 8]}}), "'w'.*shape"),
    "no data_offsets": (blob({"w": {"dtype": "F32", "shape": [2]}}), "'w'.*data_offsets"),
    "entry is a number": (blob({"w": 1}), "'w'.*number"),
    "entry is null": (blob({"w": None}), "'w'.*null"),
    "entry is a string": (blob({"w": "x"}), "'w'.*string"),
    "shape is null": (blob({"w": entry(shape=None)}), "'w'"),
    "shape is a number": (blob({"w": entry(shape=2)}), "'w'"),
    "shape is a string": (blob({"w": entry(shape="2")}), "'w'"),
    "shape is an object": (blob({"w": entry(shape={})}), "'w'"),
    "shape of lists": (blob({"w": entry(shape=[[2]])}), "'w'"),
    "negative dimension": (blob({"w": entry(shape=[-2])}), "'w'"),
    "two negative dimensions": (blob({"w": entry(shape=[-1, -2])}), "'w'"),
    "dimension -0": (blob('{"w":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}', b""), "-0"),
    "dimension 2.0": (blob({"w": entry(shape=[2.0])}), "'w'"),
    "dimension 2e0": (blob('{"w":{"dtype":"F32","shape":[2e0],"data_offsets":[0,8]}}'), "'w'"),
    "dimension true": (blob({"w": entry(shape=[True, 2])}), "'w'"),
    "dimension 02": (blob('{"w":{"dtype":"F32","shape":[02],"data_offsets":[0,8]}}'), "JSON"),
    "dimension 2^64": (blob({"w": entry(shape=[2**64, 0], data_offsets=[0, 0])}, b""), "'w'"),
    "product 2^64": (blob({"w": entry(shape=[2**32, 2**32])}), "'w'.*overflow"),
    "product 2^64, then 0": (blob({"w": entry(shape=[2**63, 2**63, 0], data_offsets=[0, 0])}, b""), "'w'.*overflow"),
    "bits 2^64": (blob({"w": entry(dtype="U8", shape=[2**61])}), "'w'.*overflow"),
    "dimension of 5000 digits": (blob('{"w":{"dtype":"F32","shape":[' + "9" * 5000 + "]}}"), "header"),
    "one offset": (blob({"w": entry(data_offsets=[8])}), "'w'.*pair"),
    "three offsets": (blob({"w": entry(data_offsets=[0, 4, 8])}), "'w'.*pair"),
    "no offsets": (blob({"w": entry(data_offsets=[])}), "'w'.*pair"),
    "offsets are strings": (blob({"w": entry(data_offsets=["0", "8"])}), "'w'"),
    "offsets are floats": (blob({"w": entry(data_offsets=[0.0, 8.0])}), "'w'"),
    "offset is false": (blob({"w": entry(data_offsets=[False, 8])}), "'w'"),
    "negative offset": (blob({"w": entry(data_offsets=[-8, 0])}), "'w'"),
    "end before begin": (blob({"w": entry(data_offsets=[8, 0])}), "'w'"),
    "offsets around 2^64": (blob({"w": entry(data_offsets=[2**64 - 8, 2**64])}), "'w'"),
    "does not begin at 0": (blob({"w": entry(data_offsets=[4, 12])}, bytes(12)), "'w'.*hole"),
    "hole": (blob({"v": entry(), "w": entry(data_offsets=[9, 17])}, bytes(17)), "'w'.*hole"),
    "overlap": (blob({"v": entry(), "w": entry(data_offsets=[4, 12])}, bytes(12)), "'w'.*overlap"),
    "same range twice": (blob({"v": entry(), "w": entry()}), "overlap"),
    "shape and offsets differ": (blob({"w": entry(shape=[3])}), "'w'.*12 bytes.*8"),
    "half a byte": (blob({"w": entry(dtype="F4", shape=[3], data_offsets=[0, 2])}, bytes(2)), "'w'.*whole bytes"),
    "three F6": (blob({"w": entry(dtype="F6_E2M3", shape=[3], data_offsets=[0, 3])}, bytes(3)), "'w'.*whole bytes"),
    "one byte short": (blob({"w": entry()}, bytes(7)), "'w'.*truncated"),
    "one byte more": (blob({"w": entry()}, bytes(9)), "1 extra bytes"),
    "data without tensors": (blob({}, bytes(3)), "3 extra bytes"),
    "metadata is a list": (blob({"__metadata__": [], "w": entry()}), "__metadata__"),
    "metadata is a string": (blob({"__metadata__": "x", "w": entry()}), "__metadata__"),
    "metadata holds a number": (blob({"__metadata__": {"a": 1}, "w": entry()}), "'a'"),
    "metadata holds null": (blob({"__metadata__": {"a": None}, "w": entry()}), "'a'"),
    "metadata holds an object": (blob({"__metadata__": {"a": {}}, "w": entry()}), "'a'"),
    "metadata is a tensor": (blob({"__metadata__": entry()}), "__metadata__"),
    "metadata twice": (blob(f'{{"__metadata__":{{}},"__metadata__":{{}},"w":{GOOD}}}'), "__metadata__"),
    "dtype twice": (blob('{"w":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}'), "'w'.*dtype"),
    "tensor twice": (blob(f'{{"w":{GOOD},"w":{GOOD}}}'), "'w'"),
    "tensor twice, once escaped": (blob(f'{{"w":{GOOD},"\\u0077":{GOOD}}}'), "'w'"),
    "metadata key twice": (blob(f'{{"__metadata__":{{"a":"1","a":"1"}},"w":{GOOD}}}'), "'a'"),
    "entry is a list": (blob('{"w":["F32",[2],[0,8]]}'), "'w'.*array"),
    "65 dimensions": (blob({"w": entry(shape=[1] * 64 + [2])}), "'w'.*65"),
}  # fmt: skip
STRICTER = {"tensor twice", "tensor twice, once escaped", "metadata key twice", "entry is a list", "65 dimensions"}


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why: str) -> None:
    data, match = REFUSED[why]
    if why in STRICTER:
        deserialize(data)
    else:
        with pytest.raises(SafetensorError):
            deserialize(data)
    with pytest.raises(ModelFileError, match=match) as info:
        model_of(data)
    assert str(info.value).startswith("model.safetensors: ")
    assert len(str(info.value)) < 400


def test_accepted_as_the_reference_does() -> None:
    for header, data in [
        ({"": entry()}, bytes(8)),
        ({"a\0b": entry()}, bytes(8)),
        ({"w": entry(shape=[0, 2**62], data_offsets=[0, 0])}, b""),
        ({"w": entry(shape=[0, 2**63 - 1], data_offsets=[0, 0])}, b""),
        ({"w": entry(dtype="F4", shape=[2, 3], data_offsets=[0, 3])}, bytes(3)),
        ({"w": entry(extra=1, more={"x": [1, 2]})}, bytes(8)),
        ({"w": entry(data_offsets=[1, 9]), "b": entry(dtype="U8", shape=[1], data_offsets=[0, 1])}, bytes(9)),
        ({"w": entry(dtype="BOOL", shape=[8])}, bytes(range(8))),
    ]:
        deserialize(blob(header, data))
        assert set(model_of(blob(header, data))) == set(header)


def test_truncated_is_said() -> None:
    whole = handmade.safetensors([("a", "F32", [4], bytes(16)), ("b", "F32", [4], bytes(16))])
    for n in (3, 8, 20, len(whole) - 20, len(whole) - 1):
        with pytest.raises(TruncatedFileError):
            model_of(whole[:n])


def test_misaligned_values() -> None:
    blob = handmade.safetensors([("a", "U8", [1], b"\1"), ("b", "F64", [2], struct.pack("<2d", 1.5, -2.0))])
    assert np.asarray(model_of(blob)["b"]).tolist() == [1.5, -2.0]


def huge(kind: str, size: int) -> bytes:
    """A header of `size` bytes that is no table of tensors, or one with a fault at its very end."""
    unit, head, tail = {
        "lists": (b"[],", b'{"a":[', b"[]]}"),
        "objects": (b'"":{},', b"{", b'"":{}}'),
        "numbers": (b"0,", b'{"a":[', b"0]}"),
        "long numbers": (b"123456,", b'{"a":[', b"0]}"),
        "floats": (b"1e9,", b'{"a":[', b"0]}"),
        "strings": (b'"ab",', b'{"a":[', b'""]}'),
        "open lists": (b"[", b'{"a":', b"}"),
        "open objects": (b'{"":', b"", b""),
        "digits": (b"1", b'{"a":', b"}"),
        "one string": (b"x", b'{"', b'":1}'),
        "escapes": (b"\\n", b'{"', b'":1}'),
        "quotes": (b'"', b"{", b"}"),
        "white space": (b" ", b"", b"1"),
        "nothing": (b"\0", b"", b""),
        "no UTF-8": (b"\xff", b'{"', b'":1}'),
        "fields": (b'"":"",', b'{"a":{', b'"":1}}'),
        "metadata": (b'"":"",', b'{"__metadata__":{', b'"":""}}'),
    }[kind]
    body = unit * ((size - len(head) - len(tail)) // len(unit))
    text = head + body + tail
    return handmade.from_header(text + b" " * (size - len(text)))


KINDS = ["lists", "objects", "numbers", "long numbers", "floats", "strings", "open lists", "open objects", "digits",
         "one string", "escapes", "quotes", "white space", "nothing", "no UTF-8", "fields", "metadata"]  # fmt: skip
REFUSE = """
import time
t = time.process_time()
try:
    open_model(sys.argv[1]); print("opens")
except ApsiError as exc:
    print(str(exc)[-300:])
print(time.process_time() - t)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_large_hostile_headers(tmp_path: Path, kind: str, measured: Callable[..., tuple[str, float]]) -> None:
    """10 MB here, 100 MB among the slow tests."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(huge(kind, 10_000_000))
    printed, grew = measured(REFUSE, path)
    assert "opens" not in printed
    assert float(printed.splitlines()[-1]) < 2
    assert grew < 100


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_largest_hostile_headers(tmp_path: Path, kind: str, measured: Callable[..., tuple[str, float]]) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(huge(kind, 100_000_000))
    printed, grew = measured(REFUSE, path)
    assert "opens" not in printed
    assert float(printed.splitlines()[-1]) < 5
    assert grew < 310


def test_a_large_header_is_cut_into_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answers, wherever the cuts are."""
    monkeypatch.setattr("apsi_inspect.formats.safetensors.SMALL", 0)
    monkeypatch.setattr(pieces, "LARGE", 0)
    monkeypatch.setattr(pieces, "_MEMBERS", re.compile(pieces._MEMBERS.pattern.replace(b"1,4096", b"1,2")))
    rows = [(f'{i}"\\}}{{,', "F32", [i % 3], bytes(4 * (i % 3))) for i in range(50)]
    for metadata in (None, {}, {"a": "}{][,:", "b": '"' * 100}):
        path = tmp_path / "model.safetensors"
        path.write_bytes(handmade.safetensors(rows, metadata))
        model = open_model(path)
        assert dict(model.metadata) == (metadata or {})
        assert {n: (t.encoding, list(t.shape), bytes(t.raw())) for n, t in model.items()} == {r[0]: r[1:] for r in rows}
    for why, (data, _) in REFUSED.items():
        with pytest.raises(ModelFileError):
            model_of(data)
        assert why


def test_a_large_table(tmp_path: Path, measured: Callable[..., tuple[str, float]]) -> None:
    """A header of more than 16 MB of real tensors costs about a kilobyte a tensor."""
    n, tail = 140_000, "mlp.experts.gate_proj.weight" * 2
    path = tmp_path / "model.safetensors"
    table = (f'"{i}.{tail}":{{"dtype":"U8","shape":[1,1],"data_offsets":[{i},{i + 1}]}}' for i in range(n))
    path.write_bytes(handmade.from_header("{" + ",".join(table) + "}", bytes(n)))
    assert path.stat().st_size > pieces.LARGE
    printed, grew = measured(f"m = open_model(sys.argv[1]); print(len(m), m['77.{tail}'].offset)", path)
    assert printed == f"{n} {path.stat().st_size - n + 77}"
    assert grew < 150


def test_fifty_gigabytes(tmp_path: Path, measured: Callable[..., tuple[str, float]]) -> None:
    n, step = 100, 500_000_000
    spans = [[i * step, (i + 1) * step] for i in range(n)]
    header = {f"blk.{i}.w": entry(shape=[step // 4], data_offsets=span) for i, span in enumerate(spans)}
    path = tmp_path / "model.safetensors"
    with path.open("wb") as f:
        f.write(handmade.from_header(json.dumps(header)))
        f.truncate(f.tell() + n * step)
    code = "m = open_model(sys.argv[1]); print(len(m), bytes(m['blk.99.w'].raw()[-4:]), m.findings)"
    printed, grew = measured(code, path)
    assert printed == f"100 {bytes(4)!r} ()"
    assert grew < 20
