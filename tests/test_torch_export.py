"""Exported programs (.pt2) against torch itself, bit for bit; and archives that lie about their weights."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import apsi_inspect as ai
from apsi_inspect.errors import ModelFileError, UnsupportedFileError
from apsi_inspect.ops.scan import scan

torch = pytest.importorskip("torch", reason="torch, the oracle of these tests, is not installed (extra: torch)")
pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of what is deprecated in it

DTYPES = [
    "float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64", "bool", "complex64",
    "float8_e4m3fn", "float8_e5m2", "uint16", "uint32",
]  # fmt: skip


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)
        self.tied = self.linear.weight
        self.turned = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4).T)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("passing", torch.arange(3.0), persistent=False)
        self.constant = torch.tensor([1.0, 2.0])
        for name in DTYPES:
            values = torch.arange(6).reshape(2, 3).to(getattr(torch, name))
            self.register_buffer(f"b_{name}", values)

    def forward(self, x: Any) -> Any:
        return (
            self.linear(x) + self.tied.sum() + self.turned.sum() + self.count + self.passing.sum() + self.constant.sum()
        )


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    program = torch.export.export(Model(), (torch.ones(2, 3),))
    path = tmp_path_factory.mktemp("pt2") / "model.pt2"
    torch.export.save(program, path)
    return path, program


def raw(tensor: Any) -> bytes:
    """The row-major bytes of a tensor."""
    t = tensor.detach().contiguous()
    return bytes(t.reshape(-1).view(torch.uint8).numpy())


def test_every_tensor(exported: tuple[Path, Any]) -> None:
    path, program = exported
    expected = {**program.state_dict, **program.constants}
    with ai.open(path) as model:
        assert model.format == "pytorch"
        assert set(model) == set(expected)
        for name, tensor in expected.items():
            assert model[name].shape == tuple(tensor.shape), name
            assert bytes(model[name].raw()) == raw(tensor), name
        assert model["b_bfloat16"].dtype == ml_dtypes.bfloat16
        assert "exported program" in model.facts["container"]
        assert [f.code for f in model.findings if f.severity != "note"] == []


def test_as_a_tree(exported: tuple[Path, Any]) -> None:
    path, program = exported
    loaded = ai.torch_load(path)
    assert loaded["tied"] is loaded["linear.weight"]
    assert np.array_equal(loaded["turned"], program.state_dict["turned"].detach().numpy())
    tensors = ai.torch_load(path, framework="torch")
    assert all(torch.equal(tensors[k], v) for k, v in program.state_dict.items())


def test_converted(exported: tuple[Path, Any], tmp_path: Path) -> None:
    path, program = exported
    ai.convert(path, tmp_path / "m.safetensors")
    with ai.open(tmp_path / "m.safetensors") as model:
        assert bytes(model["turned"].raw()) == raw(program.state_dict["turned"])


def test_what_would_run_is_not_judged(exported: tuple[Path, Any]) -> None:
    report = scan(exported[0])
    assert report.verdict == "unknown"
    assert "exported program" in report.reason


def rewritten(path: Path, out: Path, change: Callable[[dict[str, Any]], None], drop: str = "/nothing") -> Path:
    """The archive with its list of weights changed, and without the members whose name ends in `drop`."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("weights_config.json"):
                document = json.loads(data)
                change(document["config"])
                data = json.dumps(document).encode()
            if not name.endswith(drop):
                new.writestr(name, data)
    return out


LIES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "too large": (lambda c: c["turned"]["tensor_meta"].update(sizes=[{"as_int": 1 << 40}, {"as_int": 3}]), "turned"),
    "stride": (lambda c: c["turned"]["tensor_meta"].update(strides=[{"as_int": 1 << 30}, {"as_int": 3}]), "turned"),
    "offset": (lambda c: c["turned"]["tensor_meta"].update(storage_offset={"as_int": 5}), "turned"),
    "negative": (lambda c: c["turned"]["tensor_meta"].update(storage_offset={"as_int": -1}), "whole number"),
    "symbolic": (lambda c: c["turned"]["tensor_meta"].update(sizes=[{"as_expr": "s0"}]), "whole number"),
    "true": (lambda c: c["turned"]["tensor_meta"].update(sizes=[{"as_int": True}, {"as_int": 3}]), "whole number"),
    "no sizes": (lambda c: c["turned"]["tensor_meta"].pop("sizes"), "whole number"),
    "dtype": (lambda c: c["turned"]["tensor_meta"].update(dtype=99), "dtype number 99"),
    "no bytes": (lambda c: c["turned"].update(path_name="weight_999"), "not in the archive"),
    "outside": (lambda c: c["turned"].update(path_name="../../secret"), "not in the archive"),
    "no path": (lambda c: c["turned"].pop("path_name"), "path_name"),
    "list": (lambda c: c.update(turned=[1]), "path_name"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies(lie: str, exported: tuple[Path, Any], tmp_path: Path) -> None:
    change, message = LIES[lie]
    path = rewritten(exported[0], tmp_path / "m.pt2", change)
    with pytest.raises(ModelFileError, match=message):
        ai.open(path)


def test_kept_as_a_pickle(exported: tuple[Path, Any], tmp_path: Path) -> None:
    path = rewritten(exported[0], tmp_path / "m.pt2", lambda c: c["turned"].update(use_pickle=True))
    with ai.open(path) as model:
        assert "turned" not in model
        assert any("'turned'" in f.message for f in model.findings if f.severity == "warning")


def test_of_another_kind(exported: tuple[Path, Any], tmp_path: Path) -> None:
    path = rewritten(exported[0], tmp_path / "m.pt2", lambda c: None, drop="_config.json")
    with pytest.raises(UnsupportedFileError, match=r"\.pt2.*AOTInductor"):
        ai.open(path)


def test_of_before_2_8(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.pt2", "w") as new:
        for name in ("serialized_exported_program.json", "serialized_state_dict.pt", "version"):
            new.writestr(name, b"x")
    with pytest.raises(UnsupportedFileError, match=r"exported program \(\.pt2\) of before torch 2\.8"):
        ai.open(tmp_path / "m.pt2")
