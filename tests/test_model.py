"""Opening by content, and what a `ModelFile` promises: a frozen Mapping whose tensors outlive it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from apsi_inspect.errors import ModelFileError, TensorNotFoundError, UnknownFormatError, ValueRefusedError
from apsi_inspect.model import Columns, Finding, Tensor
from apsi_inspect.ops.open import open as open_model
from apsi_inspect.ops.open import open_source
from apsi_inspect.source import BytesSource

from . import handmade
from .handmade import Gguf

RAW = np.arange(6, dtype="<f4").tobytes()
ST = handmade.safetensors([("a.w", "F32", [2, 3], RAW), ("b", "I8", [], b"\5")], {"k": "v"})
GG = Gguf().file([("general.architecture", "STRING", "llama")], [("a.w", [2, 3], 0, RAW), ("b", [], 24, b"\5")])
BLOBS = {"safetensors": ST, "gguf": GG}
both = pytest.mark.parametrize("format", BLOBS)


@both
def test_mapping(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"model.{format}"
    path.write_bytes(BLOBS[format])
    model = open_model(path)
    assert isinstance(model, Mapping)
    assert list(model) == list(model.keys()) == ["a.w", "b"]
    assert len(model) == 2
    assert "b" in model
    assert "c" not in model
    assert 3 not in model
    assert model.get("c") is None
    assert [t.name for t in model.values()] == ["a.w", "b"]
    assert (model.path, model.format, model.files) == (str(path), format, [str(path)])
    assert model.file_size == len(BLOBS[format])
    assert hash(model) == hash(model)
    assert model in [model]
    assert model != open_model(path)
    tensor = model["a.w"]
    assert isinstance(tensor, Tensor)
    assert (tensor.shape, tensor.ndim, tensor.numel, tensor.size) == ((2, 3), 2, 6, 6)
    assert (tensor.nbytes, tensor.bpw) == (24, 32.0)
    assert tensor.encoding == "F32"
    assert tensor.unit is tensor.qparams is None
    assert len(tensor) == 2
    assert bytes(tensor.raw()) == path.read_bytes()[tensor.offset : tensor.offset + 24]
    np.testing.assert_array_equal(np.asarray(tensor), np.arange(6).reshape(2, 3))
    with pytest.raises(TypeError, match="0-dimensional"):
        len(model["b"])
    assert isinstance(model.info(1).shape, tuple)


def test_unknown_names_offer_near_ones() -> None:
    model = open_source(BytesSource(ST, "m"), "safetensors")
    with pytest.raises(TensorNotFoundError, match=r"did you mean 'a\.w'"):
        model["a.W"]
    with pytest.raises(KeyError):
        model["nothing like it"]
    with pytest.raises(TensorNotFoundError):
        model[3]  # type: ignore[index]


@both
def test_values_outlive_the_model(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"model.{format}"
    path.write_bytes(BLOBS[format])
    with open_model(path) as model:
        tensor = model["a.w"]
        values, raw = np.asarray(tensor), tensor.raw()
    del model
    gc.collect()
    path.unlink()
    np.testing.assert_array_equal(values, np.arange(6).reshape(2, 3))
    assert raw.nbytes == 24
    assert not values.flags.writeable
    with pytest.raises(ModelFileError, match="is closed"):
        np.asarray(tensor)


@both
def test_no_descriptor_is_left(tmp_path: Path, format: str) -> None:
    path, bad = tmp_path / f"model.{format}", tmp_path / "bad"
    path.write_bytes(BLOBS[format])
    bad.write_bytes(BLOBS[format][:-50])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with open_model(path) as model:
            np.asarray(model["a.w"])
        with pytest.raises(ModelFileError):
            open_model(bad)
    del model
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_findings_and_columns_are_plain_tuples() -> None:
    model = open_source(BytesSource(ST, "m.gguf"))
    assert isinstance(model.findings, tuple)
    assert isinstance(model.findings[0], Finding)
    assert isinstance(model.columns, Columns)
    assert model.columns.shape(0) == (2, 3)
    assert model.columns.shape(1) == ()
    with pytest.raises(AttributeError):
        model.columns.names = []  # type: ignore[misc]


@both
def test_tree(format: str) -> None:
    tree = open_source(BytesSource(BLOBS[format], "m")).tree()
    assert isinstance(tree["a"]["w"], Tensor)  # type: ignore[call-overload]
    assert list(tree) == ["a", "b"]


# --- by content, not by name


@pytest.mark.parametrize("name", ["m.gguf", "m.apsim", "m.bin", "m.json", "model", "M.GGUF", "m.safetensors.gguf"])
def test_wrong_extension_is_said_not_trusted(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(ST)
    model = open_model(tmp_path / name)
    assert model.format == "safetensors"
    found = {f.code: f for f in model.findings}
    assert set(found) & {"wrong-extension", "not-apsim"}
    if name == "model":
        assert found["wrong-extension"].severity == "note"


@pytest.mark.parametrize("name", ["m.safetensors", "M.SafeTensors", "m.gguf", "m.GGUF"])
def test_right_extension(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(BLOBS[name.lower()[2:]])
    assert not open_model(tmp_path / name).findings


def test_format_can_be_forced(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(ST)
    assert open_model(tmp_path / "x", "safetensors").format == "safetensors"
    with pytest.raises(ModelFileError):
        open_model(tmp_path / "x", "gguf")
    with pytest.raises(ValueRefusedError, match=r"known: .*gguf"):
        open_model(tmp_path / "x", "GGUF2")


STRANGERS = {
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 12\n", "git lfs pull"),
    "html": (b"<!doctype html>\n<html><head>", "HTML"),
    "html with white space": (b"\xef\xbb\xbf \n<HTML>", "HTML"),
    "gzip": (b"\x1f\x8b\x08" + bytes(20), "gzip"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(20), "HDF5"),
    "old ggml": (b"tjgg" + bytes(20), "before GGUF"),
    "swapped": (b"FUGG" + bytes(20), "FUGG"),
    "empty": (b"", "empty"),
    "text": (b"hello, world", "hello"),
    "zeros": (bytes(100), "magic"),
    "one byte": (b"\xff", "magic"),
}  # fmt: skip


@pytest.mark.parametrize("suffix", [".bin", ".safetensors", ".gguf", ".apsim", ""])
@pytest.mark.parametrize("kind", STRANGERS)
def test_strangers_are_named(tmp_path: Path, kind: str, suffix: str) -> None:
    content, match = STRANGERS[kind]
    path = tmp_path / f"model{suffix}"
    path.write_bytes(content)
    with pytest.raises(ModelFileError) as info:
        open_model(path)
    assert str(info.value).startswith(str(path))
    if suffix in (".bin", "") or kind not in ("text", "zeros", "one byte"):
        assert match in str(info.value)
        assert isinstance(info.value, UnknownFormatError)


def test_pipes_and_devices_do_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path / "pipe.gguf", Path("/dev/zero"), Path("/dev/stdin")):
        errors: list[BaseException] = []

        def attempt(path: Path = path, errors: list[BaseException] = errors) -> None:
            try:
                open_model(path)
            except (ModelFileError, OSError) as exc:
                errors.append(exc)

        thread = threading.Thread(target=attempt, daemon=True)
        thread.start()
        thread.join(3)
        assert not thread.is_alive()
        assert errors


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="without a model file"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "._model.safetensors").write_bytes(b"junk of another system")
    (tmp_path / "._model.safetensors.index.json").write_bytes(b"junk of another system")
    (tmp_path / "model.safetensors").write_bytes(ST)
    assert open_model(tmp_path).path == str(tmp_path / "model.safetensors")
    assert open_model(str(tmp_path) + "/").format == "safetensors"
    (tmp_path / "other.gguf").write_bytes(GG)
    with pytest.raises(ModelFileError, match=r"2 models: 'model\.safetensors', 'other\.gguf'.*name one"):
        open_model(tmp_path)


def test_missing_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_model(tmp_path / "none.gguf")


def test_bytes_and_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(GG)
    monkeypatch.chdir(tmp_path)
    for path in ("m.gguf", "./m.gguf", b"m.gguf", Path("m.gguf")):
        assert list(open_model(path)) == ["a.w", "b"]  # type: ignore[arg-type]
    assert open_model("m.gguf").path == "m.gguf"
    assert open_model(".").path == os.path.join(".", "m.gguf")
