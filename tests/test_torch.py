"""PyTorch files against torch itself, bit for bit: every dtype, layout, container and age."""

from __future__ import annotations

import argparse
import collections
import io
import ipaddress
import pathlib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apsi_inspect.errors import ModelFileError
from apsi_inspect.ops.open import open as open_model
from apsi_inspect.ops.scan import scan
from apsi_inspect.ops.torch import Skipped, torch_load
from apsi_inspect.tree import record

torch = pytest.importorskip("torch", reason="torch, the oracle of these tests, is not installed (extra: torch)")
pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of what is experimental or deprecated in it
Save = Callable[[Any], Path]
WORDS = {
    "float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16", "uint8": "U8", "int8": "I8",
    "int16": "I16", "int32": "I32", "int64": "I64", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
    "complex32": "C32", "complex64": "C64", "complex128": "C128", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip


@pytest.fixture(params=["zip", "stacked"])
def save(request: pytest.FixtureRequest, tmp_path: Path) -> Save:
    """``save(obj)``: the path of a file in each of torch's two formats."""

    def run(obj: Any) -> Path:
        path = tmp_path / "model.pt"
        torch.save(obj, path, _use_new_zipfile_serialization=request.param == "zip")
        return path

    return run


def raw(tensor: Any) -> bytes:
    """The row-major bytes of a tensor."""
    t = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(t.reshape(-1).view(torch.uint8).numpy()) if t.numel() else b""


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, tensor) of a loaded object."""
    if isinstance(node, torch.Tensor):
        yield prefix or "tensor", node
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(node, list | tuple):
        for key, value in enumerate(node):
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))


def check(path: Path, expected: Any = None) -> None:
    """Every tensor that torch loads, with the same bytes, whole and in parts."""
    expected = torch.load(path, map_location="cpu", weights_only=True) if expected is None else expected
    named = dict(leaves(expected))
    with open_model(path) as model:
        assert list(model) == list(named)
        for name, tensor in named.items():
            found = model[name]
            assert found.shape == tuple(tensor.shape)
            assert found.encoding == WORDS[str(tensor.dtype).removeprefix("torch.")]
            assert bytes(found.raw()) == raw(tensor), name
            values = found.numpy()
            assert values.shape == found.shape
            if found.encoding != "C32":
                assert values.tobytes() == raw(tensor)
            if tensor.dim() and tensor.numel() and found.encoding != "C32":
                assert found[1:, ...].tobytes() == raw(tensor[1:])


def some(dtype: Any, *shape: int) -> Any:
    """Random bits as a tensor (of bools, random bools)."""
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    size = torch.empty(0, dtype=dtype).element_size()
    bits = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8)
    return bits.view(dtype)


@pytest.mark.parametrize("name", WORDS)
def test_dtypes(name: str, save: Save) -> None:
    dtype = getattr(torch, name)
    state = {"matrix": some(dtype, 6, 5), "scalar": some(dtype, 1)[0], "empty": torch.empty(0, 3, dtype=dtype)}
    check(save(state), state)  # of the newer dtypes torch cannot load what it writes in its old format


def test_complex32_values(save: Save) -> None:
    t = torch.randn(5, dtype=torch.complex64).to(torch.complex32)
    with open_model(save({"t": t})) as model:
        assert np.array_equal(model["t"].numpy(), t.to(torch.complex64).numpy())


def test_float4(tmp_path: Path) -> None:
    packed = torch.randint(0, 256, (4, 3), dtype=torch.uint8)
    torch.save({"t": packed.view(torch.float4_e2m1fn_x2)}, tmp_path / "m.pt")
    with open_model(tmp_path / "m.pt") as model:
        assert (model["t"].encoding, model["t"].shape) == ("F4", (4, 6))
        assert bytes(model["t"].raw()) == raw(packed)
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
        codes = np.stack([packed.numpy() & 15, packed.numpy() >> 4], -1).reshape(4, 6)
        assert np.array_equal(model["t"].numpy().astype(np.float32), table[codes])


def test_layouts(save: Save) -> None:
    t = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    check(
        save(
            {
                "whole": t,
                "transposed": t.transpose(1, 3),
                "channels_last": t.contiguous(memory_format=torch.channels_last),
                "slice": t[1, :, 1:3],
                "step": t[:, ::2, :, 1::3],
                "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 7),
                "diagonal": t[0, 0].diagonal(),
                "one": t[1:, 2:, 3:, 4:],
                "window": torch.arange(9.0).unfold(0, 4, 2),
                "bytes": torch.arange(24, dtype=torch.uint8).reshape(4, 6).T,
                "wide": torch.randn(4, 3, dtype=torch.complex128).T,
                "conjugate": torch.randn(3, 2, dtype=torch.complex64).T.conj(),
                "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
                "parameter": torch.nn.Parameter(torch.ones(3, 2).T),
                "buffer": torch.nn.Buffer(torch.ones(2)),
            }
        )
    )


def test_every_flat_range_of_a_strided_tensor(save: Save) -> None:
    t = torch.arange(3 * 4 * 5, dtype=torch.int16).reshape(3, 4, 5).permute(2, 0, 1)
    with open_model(save({"t": t})) as model:
        found, whole = model["t"], raw(t)
        for a in range(0, 120, 7):
            for n in (0, 1, 2, 13, 120 - a):
                n = min(n, 120 - a)
                assert bytes(found.source.read_at(found.offset + a, n)) == whole[a : a + n]


def test_ties(save: Save) -> None:
    t = torch.randn(4, 4)
    path = save({"a": t, "b": t, "transposed": t.T, "row": t[1]})
    check(path)
    with open_model(path) as model:
        assert model.table.parameters == 16 + 4  # a row is a part, not the same bytes
    tree = torch_load(path)
    assert tree.a is tree.b


def test_a_training_checkpoint(save: Save) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.LSTM(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25, betas=(0.5, 0.75))
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "best": float("nan")}
    path = save(state)
    check(path)
    with open_model(path) as opened:
        assert opened.metadata["epoch"] == 3
        assert np.isnan(opened.metadata["best"])
        assert opened.metadata["optimizer.param_groups.0.lr"] == 0.25
        assert opened.metadata["optimizer.param_groups.0.betas"] == [0.5, 0.75]
        assert "optimizer.state.0.exp_avg" in opened
        assert opened.findings == ()
    tree = torch_load(path)
    assert isinstance(tree, record)
    assert list(tree.optimizer.state) == list(optimizer.state_dict()["state"])
    assert tree.optimizer.param_groups[0]["betas"] == (0.5, 0.75)
    assert scan(path).verdict == "safe"


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_torch_load(framework: str, save: Save) -> None:
    t = torch.randn(3, 4)
    state = {
        "f": t, "h": t.bfloat16(), "e": t.to(torch.float8_e5m2), "t": t.T, "i": torch.tensor(7), "z": torch.empty(0, 2),
        "list": [t[0], (1, "two", None, 2.5, True, b"raw")], 5: t[1], "size": t.shape,
    }  # fmt: skip
    found, expected = torch_load(save(state), framework), state
    for key in ("f", "h", "e", "t", "i", "z", 5):
        value = found[key]
        assert isinstance(value, torch.Tensor if framework == "torch" else np.ndarray)
        assert tuple(value.shape) == tuple(expected[key].shape)
        assert (raw(value) if framework == "torch" else value.tobytes()) == raw(expected[key])
        if framework == "torch":
            assert value.dtype == expected[key].dtype
            value.zero_()  # the file is not touched
        else:
            assert not value.flags.writeable
    assert found["list"][1] == (1, "two", None, 2.5, True, b"raw")
    assert list(found["size"]) == [3, 4]


def test_one_tensor(save: Save) -> None:
    path = save(torch.eye(3))
    check(path)
    assert np.array_equal(torch_load(path), np.eye(3))


def test_objects_are_named_and_not_made(save: Save) -> None:
    state: dict[str, Any] = {"w": torch.ones(2), "args": argparse.Namespace(lr=0.5, layers=[1, 2])}
    state |= {"path": pathlib.PurePosixPath("a/b")}
    state |= {"device": torch.device("cuda:1"), "dtype": torch.float16}
    state |= {"address": ipaddress.IPv4Address("127.0.0.1"), "complex": 1 + 2j}
    state |= {"scalar": np.float64(1.5), "array": np.arange(6, dtype=np.int16).reshape(2, 3), "set": {1, 2}}
    state |= {"default": collections.defaultdict(int, {"a": 1})}
    path = save(state)
    with open_model(path) as model:
        m = model.metadata
        assert (m["args.lr"], m["args.layers"], m["path"]) == (0.5, [1, 2], "a/b")
        assert (m["device"], m["dtype"], m["scalar"]) == ("cuda:1", "torch.float16", 1.5)
        assert (m["set"], m["default.a"]) == ([1, 2], 1)
        assert m["address"] == "<ipaddress.IPv4Address>"
        assert np.array_equal(model["array"].numpy(), state["array"])
        said = "\n".join(f.message for f in model.findings)
        assert "skipped: ipaddress.IPv4Address ×1" in said
        for name in ("argparse.Namespace ×1", "multiarray.scalar ×1", "_reconstruct ×1", "defaultdict ×1"):
            assert name in said
    with pytest.warns(UserWarning, match="skipped"):
        tree = torch_load(path)
    assert tree.args == Skipped("argparse.Namespace", {"lr": 0.5, "layers": [1, 2]})
    assert scan(path).verdict == "unknown"


def test_a_whole_module(save: Save) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    path = save(module)
    check(path, dict(module.state_dict()))
    assert "skipped: torch.nn.modules.container.Sequential ×1" in open_model(path).findings[0].message


def test_torchscript(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Conv1d(4, 2, 1))
    path = tmp_path / "model.pt"
    torch.jit.script(module).save(str(path))
    with open_model(path) as model:
        for name, tensor in module.state_dict().items():
            assert bytes(model[name].raw()) == raw(tensor)
        assert model.facts["container"] == "ZIP, TorchScript"
        assert model.findings == ()
    report = scan(path)
    assert report.verdict == "unknown"  # its code is not judged
    assert report.findings[0].code == "torchscript"


def test_quantized(save: Save) -> None:
    x = torch.randn(4, 6) * 3
    kinds = ((torch.qint8, "I8"), (torch.quint8, "U8"), (torch.qint32, "I32"))
    state: dict[str, Any] = {w: torch.quantize_per_tensor(x, 0.05, 3, d) for d, w in kinds}
    scales, zeros = torch.rand(4).double() / 10 + 0.01, torch.tensor([0, 3, -3, 7])
    state["channel"] = torch.quantize_per_channel(x, scales, zeros, 0, torch.qint8)
    other = torch.rand(6).double() + 0.01
    state["other"] = torch.quantize_per_channel(x, other, torch.zeros(6).long(), 1, torch.qint8)
    path = save(state)
    with open_model(path) as model:
        for name, q in state.items():
            found = model[name]
            assert bytes(found.raw()) == raw(q.int_repr())
            assert found.numpy().tobytes() == raw(q.dequantize()), name
            assert found.dtype == np.float32
        assert model["I8"].affine == (0.05, 3, None, None)
        assert model["channel"].affine is not None
        assert model["channel"].affine.axis == 0
        assert np.array_equal(model["channel.scale"].numpy(), scales.numpy())
        assert model.table.parameters == 5 * 24
    assert torch_load(path)["I8"].tobytes() == raw(state["I8"].dequantize())


def test_sparse_nested_and_meta(save: Save) -> None:
    dense = torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, 4.0]])
    state = {"coo": dense.to_sparse(), "csr": dense.to_sparse_csr(), "meta": torch.empty(1000, 1000, device="meta")}
    with open_model(save(state)) as model:
        assert np.array_equal(model["coo.indices"].numpy(), state["coo"].coalesce().indices().numpy())
        assert np.array_equal(model["csr.values"].numpy(), state["csr"].values().numpy())
        assert model.metadata["coo"].startswith("sparse_coo tensor 2 × 3")
        assert "meta" not in model
        assert "1000 × 1000 on the meta device" in model.metadata["meta"]
        assert [f.code for f in model.findings] == ["no-data"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_protocols(protocol: int, tmp_path: Path) -> None:
    state = {"a": torch.randn(3), "n": [1, 2.5, "x" * 300, b"y" * 300, -(1 << 70)]}
    torch.save(state, tmp_path / "m.pt", pickle_protocol=protocol)
    check(tmp_path / "m.pt", state)
    assert torch_load(tmp_path / "m.pt").n == state["n"]


def test_a_buffer_and_odd_roots(tmp_path: Path) -> None:
    out = io.BytesIO()
    torch.save({"w": torch.ones(3)}, out)
    (tmp_path / "renamed.ckpt").write_bytes(out.getvalue())
    check(tmp_path / "renamed.ckpt")


def rezip(path: Path, method: int, change: dict[str, bytes | None] | None = None) -> None:
    """Write an archive again with `zipfile`: other method, members changed or left out."""
    with zipfile.ZipFile(path) as z:
        old = {info.filename: z.read(info) for info in z.infolist()}
    for name, data in (change or {}).items():
        full = f"{path.stem}/{name}"
        old = {k: v for k, v in old.items() if k != full} | ({full: data} if data is not None else {})
    with zipfile.ZipFile(path, "w", method) as z:
        for name, data in old.items():
            z.writestr(name, data)


def test_deflated(tmp_path: Path) -> None:
    t = torch.arange(1000.0).reshape(10, 100)
    torch.save({"t": t, "T": t.T, "part": t[3:5]}, tmp_path / "m.pt")
    rezip(tmp_path / "m.pt", zipfile.ZIP_DEFLATED)
    check(tmp_path / "m.pt")
    assert open_model(tmp_path / "m.pt").facts["deflated tensors"] == 2


@pytest.mark.parametrize("name", ["byteorder", ".format_version", ".storage_alignment", ".data/serialization_id"])
def test_optional_records(name: str, tmp_path: Path) -> None:
    torch.save({"t": torch.ones(3)}, tmp_path / "m.pt")
    rezip(tmp_path / "m.pt", zipfile.ZIP_STORED, {name: None})
    check(tmp_path / "m.pt")


def test_big_endian(tmp_path: Path) -> None:
    state = {"f": torch.arange(3.0), "h": torch.arange(3).half(), "c": torch.randn(2, dtype=torch.complex64)}
    torch.save(state, tmp_path / "m.pt")
    swapped = {f"data/{i}": t.numpy().byteswap().tobytes() for i, t in enumerate(state.values())}
    rezip(tmp_path / "m.pt", zipfile.ZIP_STORED, {**swapped, "byteorder": b"big"})
    expected = torch.load(tmp_path / "m.pt")
    with open_model(tmp_path / "m.pt") as model:
        assert model.byte_order == "big"
        for name, tensor in expected.items():
            assert model[name].numpy().tobytes() == raw(tensor) == raw(state[name])


def test_a_wrong_checksum_is_said(tmp_path: Path) -> None:
    torch.save({"t": torch.ones(3)}, tmp_path / "m.pt")
    with zipfile.ZipFile(tmp_path / "m.pt") as z:
        crc = next(i.CRC for i in z.infolist() if i.filename.endswith("data.pkl"))
    data = (tmp_path / "m.pt").read_bytes().replace(crc.to_bytes(4, "little"), b"\1\2\3\4")
    (tmp_path / "m.pt").write_bytes(data)
    check(tmp_path / "m.pt")
    assert [f.code for f in open_model(tmp_path / "m.pt").findings] == ["crc"]


def test_cut_and_changed(save: Save, tmp_path: Path) -> None:
    whole = save({"a": torch.ones(2, 2), "b": torch.ones(2, 2).T}).read_bytes()
    path = tmp_path / "cut.pt"
    for n in range(0, len(whole) - 1, 37):
        path.write_bytes(whole[:n])
        with pytest.raises(ModelFileError):
            open_model(path)
