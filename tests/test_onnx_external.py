"""External data of ONNX models: against onnx, and every way out of the model's folder."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from apsi_inspect.errors import ModelFileError
from apsi_inspect.ops.open import open as open_model

from .test_onnx import model_of, same, save


def external(folder: Path, location: str = "w.bin", **entries: str) -> Path:
    """A model of one external tensor of four float32."""
    t = TensorProto(name="w", dims=[4], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        t.external_data.add(key=key, value=value)
    folder.mkdir(exist_ok=True, parents=True)
    return save(folder / "m.onnx", model_of(t))


DATA = np.arange(16, dtype=np.float32)


def test_external_data_of_onnx(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = [numpy_helper.from_array(rng.standard_normal((50, n)).astype(np.float32), f"t{n}") for n in range(1, 20)]
    m = model_of(*tensors)
    path = tmp_path / "m.onnx"
    onnx.save_model(m, path, save_as_external_data=True, location="m.onnx.data", size_threshold=1024)
    with open_model(path) as model:
        assert len(model.files) == 2
        for t in tensors:
            same(model[t.name], t)
        assert {r.file for r in model.table.frame.itertuples()} == {"m.onnx", "m.onnx.data"}


@pytest.mark.parametrize("location", ["w.bin", "sub/w.bin", "./w.bin", "sub/../w.bin", "a..b"])
@pytest.mark.parametrize(
    "entries", [{}, {"offset": "16", "length": "16"}, {"offset": "16", "checksum": "x", "other": ""}]
)
def test_external_data(location: str, entries: dict[str, str], tmp_path: Path) -> None:
    path = external(tmp_path, location, **entries)
    (tmp_path / "sub").mkdir()
    (tmp_path / location).write_bytes(DATA.tobytes())
    start = 4 if "offset" in entries else 0
    with open_model(path) as model:
        assert model["w"].numpy().tolist() == DATA[start : start + 4].tolist()


BAD_PLACES = {
    "../w.bin": "outside", "sub/../../w.bin": "outside", "/etc/hostname": "outside", "C:\\w.bin": "outside",
    "C:w.bin": "outside", "..\\w.bin": "outside", "file:///etc/hostname": "outside", "": "outside",
    "w\0.bin": "outside",
    ".": "directory", "sub": "not a regular file|directory", "none.bin": "missing", "sub/none.bin": "missing",
}  # fmt: skip


@pytest.mark.parametrize("location", BAD_PLACES)
def test_places_outside(location: str, tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(DATA.tobytes())
    path = external(tmp_path / "model", location)
    (tmp_path / "model" / "sub").mkdir()
    with pytest.raises(ModelFileError, match=BAD_PLACES[location]) as caught:
        open_model(path)
    assert "'w'" in str(caught.value)


@pytest.mark.parametrize("kind", ["file", "folder", "relative", "inside", "fifo"])
def test_links(kind: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "w.bin").write_bytes(DATA.tobytes())
    folder = tmp_path / "model"
    path = external(folder, "data/w.bin" if kind == "folder" else "w.bin")
    if kind == "file":
        (folder / "w.bin").symlink_to(secret / "w.bin")
    elif kind == "relative":
        (folder / "w.bin").symlink_to("../secret/w.bin")
    elif kind == "folder":
        (folder / "data").symlink_to(secret)
    elif kind == "fifo":
        os.mkfifo(folder / "w.bin")
    else:
        (folder / "real.bin").write_bytes(DATA.tobytes())
        (folder / "w.bin").symlink_to("real.bin")
        assert open_model(path)["w"].numpy().tolist() == [0, 1, 2, 3]
        return
    with pytest.raises(ModelFileError, match="not a regular file" if kind == "fifo" else "link to outside"):
        open_model(path)


def test_a_cache_of_links(tmp_path: Path) -> None:
    """As Hugging Face keeps models: names are links to blobs, all in the folder where the model itself is."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots" / "1").mkdir(parents=True)
    external(tmp_path / "made").rename(tmp_path / "blobs" / "aa")
    (tmp_path / "blobs" / "bb").write_bytes(DATA.tobytes())
    for name, blob in (("m.onnx", "aa"), ("w.bin", "bb")):
        (tmp_path / "snapshots" / "1" / name).symlink_to(f"../../blobs/{blob}")
    assert open_model(tmp_path / "snapshots" / "1" / "m.onnx")["w"].numpy().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("entries", "word"),
    [
        ({"offset": "56"}, "are needed, it has 64"),
        ({"offset": str(1 << 62)}, "are needed"),
        ({"offset": "-16"}, "not a number"),
        ({"offset": "0x10"}, "not a number"),
        ({"offset": "1_6"}, "not a number"),
        ({"length": "-1"}, "not a number"),
        ({"length": "12"}, "length of 12"),
        ({"length": "64"}, "length of 64"),
    ],
)
def test_external_numbers(entries: dict[str, str], word: str, tmp_path: Path) -> None:
    path = external(tmp_path, **entries)
    (tmp_path / "w.bin").write_bytes(DATA.tobytes())
    with pytest.raises(ModelFileError, match=word):
        open_model(path)
