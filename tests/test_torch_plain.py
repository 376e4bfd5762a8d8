"""Plain values of PyTorch files against torch itself: containers, dtypes, devices, slices; any protocol of pickle."""

from __future__ import annotations

import collections
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apsi_inspect.errors import ModelFileError, UnknownFormatError
from apsi_inspect.formats.base import load_json
from apsi_inspect.formats.pickle_nodes import Call, Global, Persistent
from apsi_inspect.formats.torch_values import TensorError, describe
from apsi_inspect.ops.open import open as open_model
from apsi_inspect.ops.scan import scan
from apsi_inspect.ops.torch import Skipped, torch_load

torch = pytest.importorskip("torch", reason="torch, the oracle of these tests, is not installed (extra: torch)")

VALUES: dict[str, Any] = {
    "set": {1, 2.5, "x", None, (1, "y"), b"z"},
    "empty set": set(),
    "frozenset": frozenset({1, 2}),
    "nested": [{"s": {frozenset({1}), frozenset()}}],
    "size": torch.Size([2, 3]),
    "tuple": (1, (2, [3])),
    "slice": slice(1, None, 2),
    "range": range(0, 10, 3),
    "complex": 1 - 2j,
    "bytes": b"\x00\xff",
    "big": 1 << 70,
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", VALUES)
def test_as_torch_gives_it(name: str, zipped: bool, protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    value = {"w": torch.ones(2), "v": VALUES[name]}
    torch.save(value, path, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    expected = torch.load(path, weights_only=False)["v"]
    found = torch_load(path).v
    assert found == expected
    assert isinstance(expected, type(found))
    assert type(found) in (type(expected), *type(expected).__mro__)
    assert scan(path).verdict == "safe"
    with open_model(path) as model:
        assert list(model) == ["w"]


@pytest.mark.parametrize("word", ["float16", "bfloat16", "int64", "bool", "float8_e4m3fn", "complex64", "quint8"])
def test_dtypes_are_their_names(word: str, tmp_path: Path) -> None:
    torch.save({"d": getattr(torch, word), "w": torch.ones(1)}, tmp_path / "m.pt")
    assert torch_load(tmp_path / "m.pt").d == str(getattr(torch, word)) == f"torch.{word}"


@pytest.mark.parametrize("name", ["strided", "sparse_coo", "sparse_csr", "per_tensor_affine", "per_channel_symmetric"])
def test_other_names_of_torch(name: str, tmp_path: Path) -> None:
    torch.save({"d": getattr(torch, name), "w": torch.ones(1)}, tmp_path / "m.pt")
    assert torch_load(tmp_path / "m.pt").d == f"torch.{name}" == str(getattr(torch, name))


def test_devices_and_numpy_dtypes(tmp_path: Path) -> None:
    torch.save({"cpu": torch.device("cpu"), "gpu": torch.device("cuda", 1), "n": np.dtype(">f4")}, tmp_path / "m.pt")
    loaded = torch_load(tmp_path / "m.pt")
    assert (loaded.cpu, loaded.gpu) == (str(torch.device("cpu")), str(torch.device("cuda", 1)))
    assert np.dtype(loaded.n) == np.dtype(">f4")


def test_order_of_dicts(tmp_path: Path) -> None:
    """OrderedDict, Counter and defaultdict come as records or dicts in their order."""
    given = {
        "o": collections.OrderedDict([("z", 1), ("a", 2), ("m", 3)]),
        "c": collections.Counter("zzzab"),
        "n": collections.OrderedDict([(3, "x"), (1, "y")]),
        "d": collections.defaultdict(list, {"k": [1]}),
    }
    torch.save(given, tmp_path / "m.pt")
    loaded = torch_load(tmp_path / "m.pt")
    for name, value in given.items():
        assert list(loaded[name].items()) == list(value.items())


def test_sets_of_what_cannot_be_hashed(tmp_path: Path) -> None:
    """torch's tensors can be in a set, NumPy's arrays cannot: those come as a list."""
    torch.save({"s": {torch.ones(2), torch.zeros(3)}}, tmp_path / "m.pt")
    assert sorted(a.shape for a in torch_load(tmp_path / "m.pt").s) == [(2,), (3,)]
    loaded = torch_load(tmp_path / "m.pt", framework="torch").s
    assert type(loaded) is set
    assert {tuple(t.shape) for t in loaded} == {(2,), (3,)}


def test_slices_of_hostile_numbers(tmp_path: Path) -> None:
    """What is no range of modest whole numbers stays a name."""
    head = b"\x80\x04}\x8c\x01kcbuiltins\n"
    huge = b"\x8a\xff" + b"\x7f" * 255
    calls = {
        b"range\nK\x00K\x05K\x00\x87Rs.": "builtins.range",
        b"slice\n" + huge + b"\x85Rs.": "builtins.slice",
        b"range\nN\x85Rs.": "builtins.range",
        b"slice\n)Rs.": "builtins.slice",
    }
    for rest, path in calls.items():
        (tmp_path / "m.pkl").write_bytes(head + rest)
        found = torch_load(tmp_path / "m.pkl").k
        assert isinstance(found, Skipped)
        assert found.path == path


def test_metadata_of_plain_values(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), **{k.replace(" ", "_"): v for k, v in VALUES.items()}}, tmp_path / "m.pt")
    with open_model(tmp_path / "m.pt") as model:
        assert model.metadata["slice"] == "slice(1, None, 2)"
        assert model.metadata["range"] == "range(0, 10, 3)"
        assert sorted(model.metadata["frozenset"]) == [1, 2]
        assert model.metadata["size"] == [2, 3]
        assert not [f for f in model.findings if f.severity == "warning"]


def test_sets_of_pickle_itself(tmp_path: Path) -> None:
    for protocol in range(2, 6):
        (tmp_path / "m.pkl").write_bytes(pickle.dumps({"s": {1, 2, 3}, "f": frozenset("ab")}, protocol))
        loaded = torch_load(tmp_path / "m.pkl")
        assert loaded == {"s": {1, 2, 3}, "f": frozenset("ab")}


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("dtype", ["i1", "<f4", ">f4", "c16", "?"])
@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (0, 3), (5, 1)])
def test_arrays_in_fortran_order(protocol: int, dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    array = np.asfortranarray(np.arange(np.prod(shape)).reshape(shape).astype(dtype))
    (tmp_path / "m.pkl").write_bytes(pickle.dumps({"a": array}, protocol))
    found = open_model(tmp_path / "m.pkl")["a"].numpy()
    assert found.shape == shape
    assert np.array_equal(found, array)


def test_safetensors_are_named_as_such(tmp_path: Path) -> None:
    """A header of 0x0280 bytes begins like a pickle of protocol 2."""
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.ljust(0x280)
    path = tmp_path / "model.bin"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(UnknownFormatError, match="is a safetensors file"):
        torch_load(path)


@pytest.mark.parametrize("scale", ["float", "huge"])
def test_a_quantizer_with_an_absurd_scale(scale: str) -> None:
    value = 1 << 2000 if scale == "huge" else "x"
    store = Persistent(("storage", Global("torch", "QInt8Storage"), "0", "cpu", 1))
    quantizer = (Global("torch", "per_tensor_affine"), value, 0)
    args = (store, 0, (1,), (1,), quantizer)
    with pytest.raises(TensorError, match="scale and zero point are missing or absurd"):
        describe(Call(Global("torch._utils", "_rebuild_qtensor"), args))


def test_an_integer_of_thousands_of_digits() -> None:
    with pytest.raises(ModelFileError, match=r"the header is not valid JSON: an integer of thousands of digits$"):
        load_json('{"a": ' + "1" * 5000 + "}", "f", "the header")
