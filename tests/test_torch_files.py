"""PyTorch files without torch: shards, the tar of 0.1, large checkpoints, what the command says and what it imports."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apsi_inspect
from apsi_inspect.errors import ModelFileError, UnknownFormatError
from apsi_inspect.ops.convert import convert
from apsi_inspect.ops.open import open as open_model
from apsi_inspect.ops.scan import scan
from apsi_inspect.ops.torch import torch_load

from . import handmade
from .torch_zip import Entry, archive, file, integer, numbers, state_dict, storage, tensor, text

INDEX = "pytorch_model.bin.index.json"


def write(path: Path, **arrays: Any) -> Path:
    """A torch.save archive of contiguous float32 arrays."""
    values = {k: np.asarray(v, "<f4") for k, v in arrays.items()}
    pickled = {}
    for i, (k, v) in enumerate(values.items()):
        strides = [int(np.prod(v.shape[j + 1 :])) for j in range(v.ndim)]
        pickled[k] = tensor(str(i), v.size, v.shape, strides)
    path.write_bytes(file(state_dict(**pickled), {str(i): v.tobytes() for i, v in enumerate(values.values())}))
    return path


def shards(folder: Path, extra: dict[str, str] | None = None) -> Path:
    write(folder / "pytorch_model-00001-of-00002.bin", a=[1, 2], b=[[3, 4], [5, 6]])
    write(folder / "pytorch_model-00002-of-00002.bin", c=[7])
    names = {"a": 1, "b": 1, "c": 2}
    where = {k: f"pytorch_model-0000{i}-of-00002.bin" for k, i in names.items()} | (extra or {})
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 28}, "weight_map": where}))
    return folder / INDEX


def test_shards(tmp_path: Path) -> None:
    path = shards(tmp_path)
    for found in (open_model(path), open_model(tmp_path)):
        assert (found.format, list(found), len(found.files)) == ("pytorch", ["a", "b", "c"], 2)
        assert found["b"].numpy().tolist() == [[3, 4], [5, 6]]
        assert found.findings == ()
    tree = torch_load(path)
    assert tree.c.tolist() == [7]
    assert scan(path).verdict == "safe"
    assert scan(tmp_path).verdict == "safe"


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({"d": "pytorch_model-00002-of-00002.bin"}, "no shard has it"),
        ({"c": "pytorch_model-00001-of-00002.bin"}, "not in there"),
        ({"c": "missing.bin"}, "missing"),
        ({"c": "../x.bin"}, "unsafe path"),
    ],
)
def test_broken_indexes(extra: dict[str, str], word: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=word):
        open_model(shards(tmp_path, extra))


def test_a_shard_that_is_none(tmp_path: Path) -> None:
    path = shards(tmp_path)
    (tmp_path / "pytorch_model-00002-of-00002.bin").write_bytes(b"lmgg" + bytes(100))
    with pytest.raises(ModelFileError, match="no PyTorch file"):
        open_model(path)


def test_an_unsafe_shard(tmp_path: Path) -> None:
    path = shards(tmp_path)
    unsafe = file(state_dict(c=b"cos\nsystem\n" + text("x") + b"\x85R"))
    (tmp_path / "pytorch_model-00002-of-00002.bin").write_bytes(unsafe)
    with pytest.raises(ModelFileError, match=r"os\.system"):
        open_model(path)
    assert scan(path).verdict == "unsafe"


def old_tar(values: dict[str, np.ndarray[Any, Any]], pickled: bytes) -> bytes:
    """The tar that PyTorch 0.1 wrote: storages, tensors, and a pickle whose persistent ids name tensors."""
    parts = {"sys_info": b"\x80\x02}."}
    keys = list(values)
    parts["storages"] = b"\x80\x02" + integer(len(keys)) + b"."
    parts["tensors"] = b"\x80\x02" + integer(len(keys)) + b"."
    for i, array in enumerate(values.values()):
        head = b"\x80\x02" + integer(100 + i) + text("cpu") + b"ctorch\nFloatStorage\n\x87."
        parts["storages"] += head + struct.pack("<q", array.size) + array.tobytes()
        parts["tensors"] += b"\x80\x02" + integer(i) + integer(100 + i) + b"ctorch\nFloatTensor\n\x87."
        shape, strides = array.T.shape, [s // 4 for s in array.T.strides]
        parts["tensors"] += struct.pack(f"<ii{2 * array.ndim}qq", array.ndim, 0, *shape, *strides, 0)
    parts["storages"] += b"\x80\x02]."
    parts["pickle"] = pickled
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in parts.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def test_the_tar_of_0_1(tmp_path: Path) -> None:
    values = {"a": np.float32([[1, 2, 3], [4, 5, 6]]), "b": np.float32([7])}
    pickled = b"\x80\x02}(" + text("a") + integer(0) + b"Q" + text("b") + integer(1) + b"Qu."
    path = tmp_path / "m.pth"
    path.write_bytes(old_tar(values, pickled))
    with open_model(path) as model:
        assert model.facts["container"] == "tar (PyTorch 0.1)"
        assert {k: model[k].numpy().tolist() for k in model} == {k: v.T.tolist() for k, v in values.items()}
    assert torch_load(path).a.tolist() == values["a"].T.tolist()
    path.write_bytes(old_tar(values, b"\x80\x02cos\nsystem\n" + text("x") + b"\x85R."))
    with pytest.raises(ModelFileError, match=r"os\.system"):
        open_model(path)
    assert scan(path).verdict == "unsafe"
    path.write_bytes(old_tar(values, pickled)[:1500])
    with pytest.raises(ModelFileError):
        open_model(path)


def test_a_view_of_a_storage_in_a_stacked_file(tmp_path: Path) -> None:
    """Before 0.4 a storage could be a part of another: (key, first element, number of elements)."""
    part = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("9") + text("cuda:7") + integer(6)
    part += text("10") + integer(2) + integer(3) + b"\x87tQ"
    hooks = b"\x89ccollections\nOrderedDict\n)R"
    value = b"ctorch._utils\n_rebuild_tensor_v2\n(" + part + integer(1) + numbers([2]) + numbers([1]) + hooks + b"tR"
    data = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}.\x80\x02}" + text("w") + value + b"s."
    data += b"\x80\x02](" + text("9") + b"e." + struct.pack("<q6f", 6, *range(6))
    path = tmp_path / "m.pth"
    path.write_bytes(data)
    with open_model(path) as model:
        assert model["w"].numpy().tolist() == [3, 4]
        assert model.facts["saved from"] == "cuda:7 (1)"
        assert model.findings == ()
    path.write_bytes(data[:-1])
    with pytest.raises(ModelFileError, match="truncated"):
        open_model(path)
    path.write_bytes(data + b"x")
    assert [f.code for f in open_model(path).findings] == ["trailing"]


def test_a_large_checkpoint(tmp_path: Path, measured: Callable[..., tuple[str, float]]) -> None:
    """5 GB (a sparse file) of 400 tensors, some of them transposed: opened within a second and 150 MB."""
    rows, n = 3200, 400
    nbytes = rows * 1000 * 4
    values = b"".join(text(f"layers.{i}.w") + tensor(str(i), rows * 1000, [rows, 1000], [1, rows]) for i in range(n))
    head = archive([Entry("m/data.pkl", b"\x80\x02}(" + values + b"u."), Entry("m/version", b"3\n")])
    body, directory = head[: head.index(b"PK\x01\x02")], head[head.index(b"PK\x01\x02") : -22]
    path = tmp_path / "m.pt"
    with open(path, "wb") as f:
        f.write(body)
        for i in range(n):
            name = f"m/data/{i}".encode()
            begin = f.tell()
            f.write(b"PK\x03\x04" + struct.pack("<HHHHHIIIHH", 0, 0, 0, 0, 0, 0, 0, 0, len(name), 0) + name)
            f.seek(nbytes, 1)
            more = struct.pack("<HHQQQ", 1, 24, nbytes, nbytes, begin)
            sizes = struct.pack("<III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
            directory += b"PK\x01\x02" + struct.pack("<HHHHHH", 0, 0, 0, 0, 0, 0) + sizes
            directory += struct.pack("<HHHHHII", len(name), len(more), 0, 0, 0, 0, 0xFFFFFFFF) + name + more
        begin, count = f.tell(), n + 2
        end = struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, len(directory), begin)
        f.write(directory + b"PK\x06\x06" + end)
        f.write(b"PK\x06\x07" + struct.pack("<IQI", 0, begin + len(directory), 1))
        f.write(b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0))
    assert path.stat().st_size > 5_000_000_000
    code = """
import time
t = time.process_time(); m = open_model(sys.argv[1]); print(time.process_time() - t, len(m), m["layers.399.w"].shape)
print(bytes(m["layers.7.w"].source.read_at(m["layers.7.w"].offset + 4000, 8)))
"""
    printed, grew = measured(code, path)
    seconds, count_text = printed.split(" ", 1)
    assert float(seconds) < 1
    assert count_text.splitlines() == ["400 (3200, 1000)", repr(bytes(8))]
    assert grew < 150


def test_info_imports_neither_numpy_nor_torch(tmp_path: Path) -> None:
    path = write(tmp_path / "m.pt", w=[1, 2])
    code = (
        "import sys; from apsi_inspect.cli import main\nassert main(['model', 'info', sys.argv[1]]) == 0\n"
        "print([m for m in ('numpy', 'torch', 'onnx', 'pandas', 'numba', 'zipfile') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert "PyTorch" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_extension_and_strangers(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", w=[1, 2])
    assert [f.code for f in open_model(path).findings] == ["wrong-extension"]
    (tmp_path / "m.pt").write_bytes(handmade.safetensors([("w", "F32", [1], bytes(4))]))
    with open_model(tmp_path / "m.pt") as model:
        assert model.format == "safetensors"
    with pytest.raises(UnknownFormatError, match="is a safetensors file, not PyTorch"):
        torch_load(tmp_path / "m.pt")
    (tmp_path / "m.pt").write_bytes(archive([Entry("a/readme.txt", b"hello")]))
    with pytest.raises(UnknownFormatError, match=r"no data\.pkl"):
        open_model(tmp_path / "m.pt")
    (tmp_path / "m.pt").write_bytes(archive([Entry("a.npy", b"\x93NUMPY")]))
    with pytest.raises(UnknownFormatError, match="npz"):
        open_model(tmp_path / "m.pt")
    (tmp_path / "m.pt").write_bytes(archive([Entry("a/archive_format", b"pt2")]))
    with pytest.raises(ModelFileError, match="exported program"):
        open_model(tmp_path / "m.pt")
    both = archive([Entry("a/data.pkl", b"\x80\x02N."), Entry("b/data.pkl", b"\x80\x02N.")])
    (tmp_path / "m.pt").write_bytes(both)
    with pytest.raises(ModelFileError, match="more than one"):
        open_model(tmp_path / "m.pt")


def test_a_plain_pickle_of_numpy_arrays(tmp_path: Path) -> None:
    import pickle

    state: dict[str, Any] = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(3, dtype=">i4")}
    state["n"] = {"x": np.float32(2.5)}
    for protocol in (2, 3, 4, 5):
        (tmp_path / "m.pkl").write_bytes(pickle.dumps(state, protocol))
        with open_model(tmp_path / "m.pkl") as model:
            assert model["w"].numpy().tolist() == state["w"].tolist()
            assert model["b"].numpy().tolist() == [0, 1, 2]
            assert model.metadata["n.x"] == 2.5
            assert [f.code for f in model.findings] == ["not-weights-only"]


def test_views_are_a_source_for_everything(tmp_path: Path) -> None:
    """Conversion, statistics and the table of a file whose tensors share and transpose one storage."""
    base = np.arange(6, dtype=np.float32)
    path = tmp_path / "m.pt"
    whole = tensor("0", 6, [2, 3], [3, 1])
    values = {"a": whole, "t": tensor("0", 6, [3, 2], [1, 3]), "tied": whole}
    path.write_bytes(file(state_dict(**values), {"0": base.tobytes()}))
    expected = {"a": base.reshape(2, 3), "t": base.reshape(2, 3).T, "tied": base.reshape(2, 3)}
    for ending in ("safetensors", "gguf", "apsim"):
        convert(path, tmp_path / f"out.{ending}")
        with open_model(tmp_path / f"out.{ending}") as model:
            assert {k: model[k].numpy().tolist() for k in model} == {k: v.tolist() for k, v in expected.items()}
    table = apsi_inspect.stats(path)
    assert list(table.frame["max"]) == [5, 5, 5]
    with open_model(path) as model:
        assert model["t"].stats().mean == 2.5
        assert model["t"][1:, 0].tolist() == [1, 2]
        assert model.table.parameters == 6


def test_the_storage_class_is_only_a_name(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    args = storage("0", 4, "FloatStorage", "torch.cuda") + integer(0) + numbers([4]) + numbers([1])
    value = b"ctorch._utils\n_rebuild_tensor\n(" + args + b"tR"
    path.write_bytes(file(state_dict(w=value), {"0": bytes(16)}))
    assert open_model(path)["w"].numpy().tolist() == [0] * 4
