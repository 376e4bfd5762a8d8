"""Exact round trips: every structure, dtype, bit, layout, library and unit; what cannot be kept is refused before."""

from __future__ import annotations

import collections
import functools
import hashlib
import os
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pint
import pytest
import safetensors.numpy
from hypothesis import given

import apsi_inspect as ai
from apsi_inspect.errors import ModelFileError, UnknownFormatError, ValueRefusedError

from . import apsim_oracle
from .trees import DTYPES, bits, same, same_bits, trees

u = pint.get_application_registry()


def trip(tree: Any, folder: Path, **kwargs: Any) -> Any:
    path = ai.save_model(folder / "m.apsim", tree, **kwargs)
    return ai.load_model(path)


@given(trees)
def test_any_tree(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    folder = tmp_path_factory.mktemp("t")
    try:
        loaded = trip(tree, folder)
    except ValueRefusedError as exc:
        if "would both be stored as" not in str(exc) or list(folder.iterdir()):
            raise
        return
    assert same(tree, loaded)
    apsim_oracle.check(folder / "m.apsim")
    again = ai.save_model(folder / "n.apsim", loaded)
    assert Path(again).read_bytes() == (folder / "m.apsim").read_bytes()
    lazy = ai.load_model(folder / "m.apsim", verify="lazy")
    assert same(tree, arrays(lazy))


@given(trees)
def test_any_tree_in_shards(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    folder = tmp_path_factory.mktemp("t")
    try:
        loaded = trip(tree, folder, shard=20)
    except ValueRefusedError:
        return
    assert same(tree, loaded)


def arrays(node: Any) -> Any:
    """A lazily loaded tree, read."""
    if isinstance(node, dict):
        return {k: arrays(v) for k, v in node.items()}
    if isinstance(node, (list, tuple)):
        return type(node)(arrays(v) for v in node) if isinstance(node, tuple) else [arrays(v) for v in node]
    return node


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_pattern(dtype: np.dtype[Any], tmp_path: Path) -> None:
    if dtype.itemsize <= 2:
        a = np.arange(2 if dtype == np.bool_ else 1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)
    else:
        a = bits(np.random.default_rng(0), dtype, (64, 64))
    loaded = trip({"a": a}, tmp_path).a
    assert same_bits(a, loaded)
    assert not loaded.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        loaded[0] = loaded[1]


@pytest.mark.parametrize("name", ["float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"])
def test_packed_floats(name: str, tmp_path: Path) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    n = 16 if "4" in name[:6] else 64
    a = np.tile(np.arange(n, dtype=np.uint8), 6).view(dtype).reshape(6, n)
    for given_ in (a, a.T, a[::2]):
        assert same_bits(np.ascontiguousarray(given_), trip({"a": given_}, tmp_path).a)
    odd = a.reshape(-1)[:3]
    with pytest.raises(ValueRefusedError, match=r"^x\.y: 3 elements.*whole bytes"):
        trip({"x": {"y": odd}}, tmp_path)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i8", "u2", "c8"])
def test_large_arrays_of_any_layout(dtype: str, tmp_path: Path) -> None:
    """Above the size of a piece, where arrays go out in parts."""
    a = bits(np.random.default_rng(0), np.dtype(dtype), (3, 1100, 2100))
    tree = {
        "fortran": np.asfortranarray(a),
        "transposed": a.transpose(2, 0, 1),
        "strided": a[:, ::3, 1::2],
        "reversed": a[::-1, ::-1],
        "big": a.astype(np.dtype(dtype).newbyteorder(">")),
        "broadcast": np.broadcast_to(a[:1], (4, 1100, 2100)),
        "wide": np.asfortranarray(a.reshape(1, -1)),
    }
    loaded = trip(tree, tmp_path)
    assert same(tree, loaded)


def torch_or_skip() -> Any:
    """torch, whose tensors some tests save; an extra of its own."""
    return pytest.importorskip("torch", reason="torch is not installed (extra: torch)")


class TestStructure:
    def test_containers(self, tmp_path: Path) -> None:
        a = [np.full(2, i) for i in range(9)]
        tree = {"l": a[:2], "t": (a[3],), "e": {}, "el": [], "et": (), "n": None, "nested": {"e2": {"e3": []}}}
        assert same(tree, trip(tree, tmp_path))

    @pytest.mark.parametrize("root", [{}, [], (), [{}], ({},), {"": np.zeros(1)}, {"a": {"": {"": np.zeros(1)}}}])
    def test_small_roots(self, root: Any, tmp_path: Path) -> None:
        assert same(root, trip(root, tmp_path))

    @pytest.mark.parametrize("root", [np.zeros(1), None, 1, "x", {1, 2}, object()])
    def test_other_roots(self, root: Any, tmp_path: Path) -> None:
        with pytest.raises(ValueRefusedError, match="wrap it in a record"):
            trip(root, tmp_path)

    def test_ties(self, tmp_path: Path) -> None:
        a, q = np.arange(3.0), ai.quantize(np.ones((2, 4)), "int8")
        tree = {"embed": a, "head": a, "l": [q, {"again": q}], "copy": a.copy()}
        loaded = trip(tree, tmp_path)
        assert loaded.embed is loaded.head
        assert loaded.l[0] is loaded.l[1].again
        assert loaded.copy is not loaded.embed
        assert len(ai.open(tmp_path / "m.apsim")) == 3
        assert [type(v) for v in loaded.values()] == [np.ndarray, np.ndarray, list, np.ndarray]

    def test_dotted_keys(self, tmp_path: Path) -> None:
        tree = {
            "a": {"b": np.zeros(1)},
            "a.b": np.ones(1),
            "a%2Eb": np.full(1, 2.0),
            "l": {"0": np.full(1, 3.0)},
            "%": {},
        }
        assert same(tree, trip(tree, tmp_path))
        assert set(ai.open(tmp_path / "m.apsim")) == {"a.b", "a%2Eb", "a%252Eb", "l.0"}
        # The later one has no dots in its keys to escape.
        with pytest.raises(
            ValueRefusedError, match=r"""^\["a\.b"\] and \["a"\]\["b"\] would both be stored as .a\.b."""
        ):
            trip({"a.b": np.ones(1), "a": {"b": np.zeros(1)}}, tmp_path)
        with pytest.raises(ValueRefusedError, match=r"""^\["l\.0"\] and \["l"\]\[0\] would both be stored"""):
            trip({"l.0": np.ones(1), "l": [np.zeros(1)]}, tmp_path)

    def test_literals(self, tmp_path: Path) -> None:
        tree = [
            0,
            -1,
            2**53 - 1,
            2**53,
            -(2**53),
            10**4095,
            0.1,
            -0.0,
            1e300,
            float("inf"),
            float("-inf"),
            True,
            None,
            "",
            "\n$",
        ]
        assert same(tree, trip(tree, tmp_path))
        assert repr(trip([-0.0, float("nan")], tmp_path)) == "[-0.0, nan]"
        with pytest.raises(ValueRefusedError, match="4096 digits"):
            trip([10**4096], tmp_path)

    def test_records_of_other_kinds(self, tmp_path: Path) -> None:
        tree = collections.OrderedDict([("b", np.zeros(1)), ("a", ai.record(x=np.ones(1)))])
        loaded = trip(tree, tmp_path)
        assert list(loaded) == ["b", "a"]
        assert loaded.a.x[0] == 1

    REFUSED: ClassVar[Any] = [
        ({"a": {0: np.zeros(1)}}, r"^a: key 0 is int"),
        ({0: np.zeros(1), "0": np.ones(1)}, r"the root: key 0"),
        ({"a": [collections.namedtuple("P", "x")(np.zeros(1))]}, r"^a\[0\]: a named tuple"),
        ({"a": {"b": object()}}, r"^a\.b: object"),
        ({"a": b"x"}, r"^a: bytes"),
        ({"a": {1, 2}}, r"^a: set"),
        ({"a": 1j}, r"^a: complex"),
        ({"a": SimpleNamespace(x=1)}, r"^a: types"),
        ({"a": "\ud800"}, r"^a holds a lone surrogate"),
        ({"\ud800": np.zeros(1)}, r"key holds a lone surrogate"),
        ({"a": {"__metadata__": np.zeros(1)}, "__metadata__": np.zeros(1)}, r"^__metadata__: .*named"),
        ({"a": {"x__qscale": np.zeros(1)}}, r"^a\.x__qscale: .*'a\.x__qscale'"),
        ({"o": np.array([1, "a"], object)}, r"^o: dtype object"),
        ({"s": np.array(["x"])}, r"^s: dtype <U1"),
        ({"d": np.array(["2020-01-01"], "M8[D]")}, r"^d: dtype datetime"),
        ({"l": np.array([1], np.longdouble)}, r"^l: dtype (float|long)"),
        ({"c": np.array([1], np.complex128)}, r"^c: dtype complex128"),
        ({"r": np.zeros(2, [("a", "f4")])}, r"^r: dtype"),
        ({"i": np.zeros(2, ml_dtypes.int4)}, r"^i: dtype int4"),
        ({"m": np.ma.masked_array([1.0], [True])}, r"^m: a masked array"),
        (
            {"x" * 3: functools.reduce(lambda t, _: {"a": t}, range(3000), {"w": np.zeros(1)})},
            r"nested deeper than 256",
        ),
        ({"a" + ".b" * 300: np.zeros(1)}, r"components"),
    ]

    @pytest.mark.parametrize(("tree", "message"), REFUSED, ids=[m for _, m in REFUSED])
    def test_refused(self, tree: Any, message: str, tmp_path: Path) -> None:
        path = tmp_path / "m.apsim"
        ai.save_model(path, {"old": np.zeros(1)})
        before = path.read_bytes()
        with pytest.raises(ValueRefusedError, match=message) as caught:
            ai.save_model(path, tree)
        assert str(caught.value).isprintable()
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["m.apsim"]

    def test_tree_that_contains_itself(self, tmp_path: Path) -> None:
        tree: dict[str, Any] = {}
        tree["me"] = tree
        with pytest.raises(ValueRefusedError, match="contains itself"):
            trip(tree, tmp_path)

    def test_odd_keys(self, tmp_path: Path) -> None:
        tree = {
            "a\0b": np.zeros(1),
            "": np.ones(1),
            "k" * 10_000: np.full(1, 2.0),
            "keys": np.full(1, 3.0),
            "$tuple": {},
        }
        assert same(tree, trip(tree, tmp_path))


class TestLibraries:
    def test_torch(self, tmp_path: Path) -> None:
        torch = pytest.importorskip(
            "torch", reason="torch, whose tensors are saved here, is not installed (extra: torch)"
        )
        t = torch.arange(24, dtype=torch.float32).reshape(4, 6)
        tree = {
            "f32": t,
            "param": torch.nn.Parameter(t + 1),
            "t": t.T,
            "strided": t[::2, 1::2],
            "bf16": (t / 7).to(torch.bfloat16),
            "bf16 t": (t / 7).to(torch.bfloat16).T,
            "e4m3": t.to(torch.float8_e4m3fn),
            "e5m2": t.to(torch.float8_e5m2),
            "f16": t.half(),
            "i64": t.long(),
            "u16": t.to(torch.uint16),
            "bool": t > 3,
            "c64": torch.complex(t, -t),
            "conj": torch.complex(t, -t).conj(),
            "scalar": torch.tensor(3.5),
            "empty": torch.zeros(0, 3),
        }
        loaded = trip(tree, tmp_path)
        for name, value in tree.items():
            x = value.detach().contiguous().resolve_conj()
            raw = x.reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
            assert np.asarray(loaded[name]).tobytes() == raw, name
            assert loaded[name].shape == tuple(value.shape)
            assert loaded[name].dtype.name == str(value.dtype).removeprefix("torch.")

    def test_torch_ties(self, tmp_path: Path) -> None:
        torch = torch_or_skip()

        class Tied(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = torch.nn.Embedding(5, 4)
                self.head = torch.nn.Linear(4, 5, bias=False)
                self.head.weight = self.embed.weight

        loaded = trip(Tied().state_dict(), tmp_path)
        assert list(loaded) == ["embed.weight", "head.weight"]
        assert loaded["embed.weight"] is loaded["head.weight"]

    @pytest.mark.parametrize("kind", ["sparse", "meta", "complex128"])
    def test_torch_refused(self, kind: str, tmp_path: Path) -> None:
        torch = torch_or_skip()
        bad = {
            "sparse": torch.zeros(2, 2).to_sparse(),
            "meta": torch.zeros(2, device="meta"),
            "complex128": torch.zeros(2, dtype=torch.complex128),
        }
        with pytest.raises(ValueRefusedError, match=r"^a\.b: "):
            trip({"a": {"b": bad[kind]}}, tmp_path)

    def test_array_likes(self, tmp_path: Path) -> None:
        """jax arrays and their like: whatever has shape, dtype and ``__array__``."""

        class Like:
            shape, dtype = (2,), np.dtype(ml_dtypes.bfloat16)

            def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
                return np.array([1, 2], ml_dtypes.bfloat16)

        loaded = trip({"x": Like()}, tmp_path)
        assert loaded.x.dtype == ml_dtypes.bfloat16

    def test_pandas_is_refused(self, tmp_path: Path) -> None:
        import pandas as pd

        with pytest.raises(ValueRefusedError, match=r"^s: pandas"):
            trip({"s": pd.Series([1.0])}, tmp_path)

    def test_nothing_is_imported(self, tmp_path: Path) -> None:
        import subprocess

        code = """
import sys, numpy as np, apsi_inspect as ai
ai.save_model(sys.argv[1], {"a": np.zeros(3)})
ai.load_model(sys.argv[1])
print([m for m in ("torch", "jax", "pint", "pandas", "numba", "rfc8785") if m in sys.modules])
"""
        args = [sys.executable, "-c", code, str(tmp_path / "m")]
        assert subprocess.run(args, capture_output=True, text=True, check=True).stdout.strip() == "[]"

    def test_numpy_scalars(self, tmp_path: Path) -> None:
        loaded = trip({"f": np.float64(1.5), "b": np.bool_(True), "i": np.int8(-3)}, tmp_path)
        assert [(v.shape, v.dtype.name, v.item()) for v in loaded.values()] == [
            ((), "float64", 1.5), ((), "bool", True), ((), "int8", -3),
        ]  # fmt: skip

    def test_tensors_of_a_file(self, tmp_path: Path, data: Path) -> None:
        from apsi_inspect import samples

        samples.write(tmp_path, ["tiny-llama.gguf"])
        m = ai.open(tmp_path / "tiny-llama.gguf")
        loaded = trip({"n": m["output_norm.weight"]}, tmp_path)
        assert np.array_equal(loaded.n, np.asarray(m["output_norm.weight"]))
        with pytest.raises(ValueRefusedError, match=r"^q: encoding Q4_K"):
            trip({"q": m["blk.0.attn_q.weight"]}, tmp_path)


UNITS = [
    "km",
    "J",
    "N*m",
    "degC",
    "degF",
    "delta_degC",
    "rad",
    "percent",
    "µm",
    "m**0.5",
    "byte",
    "1/s",
    "W/m**2/K",
    "eV",
]


class TestUnits:
    @pytest.mark.parametrize("text", UNITS)
    def test_kept(self, text: str, tmp_path: Path) -> None:
        q = u.Quantity(np.float32([1, 2.5]), text)
        loaded = trip({"q": q, "plain": np.ones(1)}, tmp_path)
        assert loaded.q.units == q.units
        assert str(loaded.q.units) == str(q.units)
        assert same_bits(q.magnitude, loaded.q.magnitude)
        assert not loaded.q.magnitude.flags.writeable
        assert isinstance(loaded.plain, np.ndarray)

    def test_torque_is_no_energy(self, tmp_path: Path) -> None:
        loaded = trip({"j": u.Quantity(1.0, "J"), "nm": u.Quantity(1.0, "N*m")}, tmp_path)
        assert f"{loaded.j.units:~}" == "J"
        assert f"{loaded.nm.units:~}" == "N * m" or f"{loaded.nm.units:~}" == "m * N"

    def test_scalars_and_dimensionless(self, tmp_path: Path) -> None:
        loaded = trip({"t": u.Quantity(3, "s"), "one": u.Quantity(np.ones(2), "")}, tmp_path)
        assert loaded.t.magnitude.shape == ()
        assert loaded.t.magnitude.dtype == np.int64
        assert loaded.one.units == u.dimensionless

    def test_quantized_with_unit(self, tmp_path: Path) -> None:
        q = ai.quantize(u.Quantity(np.ones((2, 64)), "km/h"), "int4")
        loaded = trip({"q": q}, tmp_path).q
        assert loaded.dequantize().units == u.Unit("km/h")
        assert loaded.unit == q.unit

    @pytest.mark.parametrize("text", ["dBm", "pixel", "dB", "pixel/m"])
    def test_refused(self, text: str, tmp_path: Path) -> None:
        with pytest.raises(ValueRefusedError, match=r"^a\.b: unit"):
            trip({"a": {"b": u.Quantity(np.ones(1), text)}}, tmp_path)

    def test_symbol_that_disagrees(self, data: Path) -> None:
        with pytest.warns(UserWarning, match="'kg' does not mean m"):
            loaded = ai.load_model(data / "golden/bad/units_edited.apsim", verify=False)
        assert loaded.mass.units == u.m

    def test_hostile_symbol(self, data: Path) -> None:
        with pytest.warns(UserWarning, match="breaks the grammar"):
            loaded = ai.load_model(data / "golden/bad/symbol_bomb.apsim")
        assert loaded.mass.units == u.kg
        assert loaded.height.units == u.km


class TestQuantized:
    @pytest.mark.parametrize("fmt", ["int8", "int4", "fp8", "fp8_e5m2", "fp6", "fp6_e3m2", "fp4", "bf16"])
    @pytest.mark.parametrize("axis", [None, 0, 1, -1])
    def test_kept(self, fmt: str, axis: int | None, tmp_path: Path) -> None:
        q = ai.quantize(np.random.default_rng(0).normal(size=(5, 7)), fmt, axis, None if axis is None else 2)
        loaded = trip({"q": q}, tmp_path).q
        assert (loaded.format, loaded.shape, loaded.axis, loaded.block, loaded.unit) == (
            q.format,
            q.shape,
            q.axis,
            q.block,
            None,
        )
        assert same_bits(q.packed, loaded.packed)
        assert (q.scale is None) == (loaded.scale is None)
        assert q.scale is None or same_bits(q.scale, loaded.scale)
        assert np.array_equal(np.asarray(q), np.asarray(loaded))

    def test_golden_values(self, data: Path) -> None:
        expected = np.load(data / "golden/qtensors.npz")
        loaded = ai.load_model(data / "golden/qtensors.apsim")
        names = list(ai.open(data / "golden/qtensors.apsim"))
        assert len(names) == 40
        for name in names:
            group, _, leaf = name.rpartition(".")
            assert np.asarray(loaded[group][leaf]).tobytes() == expected[name].tobytes()


class TestGolden:
    def test_dtypes(self, data: Path) -> None:
        expected = np.load(data / "golden/dtypes.npz")
        for file in ("dtypes", "base_profile"):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                loaded = ai.load_model(data / "golden" / f"{file}.apsim")
            flat = {**loaded, "größe.Δ": loaded["größe"]["Δ"]}
            for name in expected.files:
                assert np.asarray(flat[name]).tobytes() == expected[name].tobytes(), name

    def test_trees(self, data: Path) -> None:
        t = ai.load_model(data / "golden/tree.apsim")
        assert list(t) == ["layers", "a", "a.b", "rec", "t", "none", "lr", "n", "inf", "name", "empty", "void"]
        assert t.layers[0].b is t.layers[1].b
        assert (t.none, t.lr, t.n, t.inf, t.name, t.empty, t.void) == (
            None, 0.1, 12345678901234567890, float("-inf"), "mlp", [], {},
        )  # fmt: skip
        assert isinstance(t.t, tuple)
        assert list(t.rec) == ["0"]
        tied = ai.load_model(data / "golden/list_root_tied.apsim")
        assert tied[0].W is tied[1].W
        assert ai.open(data / "golden/no_tensors.apsim").metadata == {
            "note": "empty", "best": float("inf"), "$odd": 1, "n": 9007199254740993,
        }  # fmt: skip

    def test_units(self, data: Path) -> None:
        t = ai.load_model(data / "golden/units.apsim")
        found = {k: str(v.units) for k, v in t.items() if not isinstance(v, np.ndarray)}
        assert found == {
            "angle": "radian", "energy": "joule", "mass": "kilogram", "temp": "degree_Celsius", "height": "kilometer",
            "noise": "kilogram * meter ** 2 / ampere / second ** 2.5",
        }  # fmt: skip


class TestMapping:
    def test_views_of_the_file(self, tmp_path: Path) -> None:
        tree = {
            "a": np.arange(1000, dtype="f8"),
            "b": u.Quantity(np.ones(9, "f4"), "m"),
            "q": ai.quantize(np.ones((4, 32)), "int8"),
        }
        loaded = trip(tree, tmp_path)
        for a in (loaded.a, loaded.b.magnitude, loaded.q.packed, loaded.q.scale):
            assert not a.flags.owndata
            assert not a.flags.writeable
            assert a.flags.aligned

    def test_a_view_cannot_change_the_file(self, tmp_path: Path) -> None:
        trip({"a": np.zeros(4)}, tmp_path)
        digest = hashlib.sha256((tmp_path / "m.apsim").read_bytes()).hexdigest()
        a = ai.load_model(tmp_path / "m.apsim").a
        with pytest.raises(ValueError, match="read-only"):
            a[0] = 99
        with pytest.raises(ValueError, match="cannot set WRITEABLE"):
            a.flags.writeable = True
        assert hashlib.sha256((tmp_path / "m.apsim").read_bytes()).hexdigest() == digest

    def test_nothing_leaks(self, tmp_path: Path) -> None:
        path = tmp_path / "m.apsim"
        ai.save_model(path, {"a": np.zeros(4), "b": np.ones((4, 4))}, shard=100)

        def held() -> tuple[int, int]:
            with open("/proc/self/maps") as f:
                return len(os.listdir("/proc/self/fd")), sum(str(tmp_path) in line for line in f)

        ai.load_model(path)
        before = held()
        for _ in range(300):
            np.array(ai.load_model(path).a)
            ai.load_model(path, verify="lazy")
            ai.verify(path)
        assert held() == before
        assert before[1] == 0

    def test_the_arrays_outlive_everything(self, tmp_path: Path) -> None:
        a = trip({"a": np.arange(5.0)}, tmp_path).a
        (tmp_path / "m.apsim").unlink()
        assert a.tolist() == [0, 1, 2, 3, 4]

    def test_many_readers(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        tree = {str(i): rng.normal(size=1000) for i in range(20)}
        ai.save_model(tmp_path / "m.apsim", tree)
        loaded = ai.load_model(tmp_path / "m.apsim", verify="lazy")
        errors = []

        def work() -> None:
            for k, v in tree.items():
                if not np.array_equal(np.asarray(loaded[k]), v):
                    errors.append(k)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not errors


class TestWhatIsNoModel:
    def test_plain_safetensors(self, tmp_path: Path) -> None:
        path = tmp_path / "m.apsim"
        ai.save_safetensors(path, {"a": np.zeros(1)})
        with pytest.raises(UnknownFormatError, match=r"safetensors, not \.apsim \(use load_safetensors\)"):
            ai.load_model(path)

    def test_one_shard(self, data: Path) -> None:
        with pytest.warns(UserWarning, match="shard 1 of 3"):
            loaded = ai.load_model(data / "golden/sharded/model-00001-of-00003.apsim")
        assert list(loaded.layers[0]) == ["W", "b"]

    @pytest.mark.parametrize("verify", ["Lazy", None, 2, "no"])
    def test_bad_mode(self, verify: Any, data: Path) -> None:
        with pytest.raises(ValueRefusedError, match="'lazy'"):
            ai.load_model(data / "golden/tree.apsim", verify=verify)

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            ai.load_model(tmp_path / "m.apsim")

    @pytest.mark.parametrize("version", ["999", "x", None, "1.0"])
    def test_version(self, version: Any, tmp_path: Path) -> None:
        from . import handmade

        meta = {
            "format": "apsi-model",
            "apsi": "x",
            "sha256": "0" * 64,
            **({} if version is None else {"version": version}),
        }
        (tmp_path / "m").write_bytes(handmade.safetensors([], meta))
        with pytest.raises(ModelFileError, match="version"):
            ai.load_model(tmp_path / "m", verify=False)


class TestSafetensors:
    def test_round_trip(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        tree = {"l": [{"w": rng.normal(size=(3, 4)).astype("f4")}, {"w": rng.normal(size=(3, 4)).T}], "b": np.int8(3)}
        path = ai.save_safetensors(tmp_path / "m.safetensors", tree, {"format": "pt", "z": "é"})
        assert same({"l": tree["l"], "b": np.asarray(tree["b"])}, ai.load_safetensors(path))
        with safetensors.safe_open(path, "np") as f:
            assert f.metadata() == {"format": "pt", "z": "é"}
            np.testing.assert_array_equal(f.get_tensor("l.1.w"), tree["l"][1]["w"])
        apsim_oracle.split(Path(path))
        assert dict(ai.open(path).metadata) == {"format": "pt", "z": "é"}

    @pytest.mark.parametrize("dtype", [d for d in DTYPES if d != ml_dtypes.float8_e8m0fnu], ids=str)
    def test_dtypes_as_the_library(self, dtype: np.dtype[Any], tmp_path: Path) -> None:
        a = bits(np.random.default_rng(0), dtype, (3, 5))
        path = ai.save_safetensors(tmp_path / "m.safetensors", {"a": a})
        safetensors.numpy.save_file({"a": a}, tmp_path / "n.safetensors")
        assert Path(path).read_bytes() == (tmp_path / "n.safetensors").read_bytes()

    def test_ties(self, tmp_path: Path) -> None:
        a = np.ones((2, 2))
        path = ai.save_safetensors(
            tmp_path / "m.safetensors", {"embed": {"w": a}, "head": {"w": a}, "n": [a]}, {"k": "v"}
        )
        assert list(ai.open(path)) == ["embed.w"]
        assert dict(ai.open(path).metadata) == {"k": "v", "head.w": "embed.w", "n.0": "embed.w"}
        loaded = ai.load_safetensors(path)
        assert loaded.head.w is loaded.embed.w is loaded.n[0]

    def test_shards(self, tmp_path: Path) -> None:
        tree = {f"w{i}": np.full(10, i, "f4") for i in range(5)}
        index = ai.save_safetensors(tmp_path / "m.safetensors", tree, {"format": "pt"}, shard=90)
        assert sorted(os.listdir(tmp_path)) == [
            *(f"m-0000{i}-of-00003.safetensors" for i in (1, 2, 3)), "m.safetensors.index.json",
        ]  # fmt: skip
        assert same(tree, ai.load_safetensors(index))
        assert same(tree, ai.load_safetensors(tmp_path))
        import json

        document = json.loads(Path(index).read_text())
        assert document["metadata"] == {"total_size": 200}
        for name, file in document["weight_map"].items():
            assert name in safetensors.numpy.load_file(tmp_path / file)
        ai.save_safetensors(tmp_path / "m.safetensors", tree)
        assert os.listdir(tmp_path) == ["m.safetensors"]

    REFUSED: ClassVar[Any] = [
        ({"a": u.Quantity(np.ones(1), "m")}, None, "^a: has a unit"),
        ({"a": ai.quantize(np.ones((2, 2)), "int8")}, None, "^a: is quantized"),
        ({"a": [1]}, None, r"^a\.0: a plain value"),
        ({"a": np.zeros(1)}, {"k": 1}, "strings only"),
        ({"a": np.zeros(1)}, {1: "k"}, "strings only"),
        ({"a": np.zeros(1)}, {"k": "\ud800"}, "surrogate"),
        ({"__metadata__": np.zeros(1)}, None, "^__metadata__"),
    ]

    @pytest.mark.parametrize(("tree", "metadata", "message"), REFUSED, ids=[r[2] for r in REFUSED])
    def test_refused(self, tree: Any, metadata: Any, message: str, tmp_path: Path) -> None:
        with pytest.raises(ValueRefusedError, match=message):
            ai.save_safetensors(tmp_path / "m.safetensors", tree, metadata)
        assert os.listdir(tmp_path) == []

    def test_any_metadata_is_kept(self, tmp_path: Path) -> None:
        """A file is read and written again with everything that was in it."""
        safetensors.numpy.save_file(
            {"a": np.zeros(3, "f4")}, tmp_path / "x", {"format": "pt", "modelspec.title": "t\n"}
        )
        with ai.open(tmp_path / "x") as m:
            ai.save_safetensors(tmp_path / "y", m, m.metadata)
        assert dict(ai.open(tmp_path / "y").metadata) == {"format": "pt", "modelspec.title": "t\n"}

    def test_an_apsim_file_as_plain(self, tmp_path: Path) -> None:
        ai.save_model(
            tmp_path / "m.apsim", {"q": ai.quantize(np.ones((2, 2)), "int8"), "b": u.Quantity(np.ones(1), "m")}
        )
        loaded = ai.load_safetensors(tmp_path / "m.apsim")
        assert set(loaded) == {"q", "q__qscale", "b"}

    def test_leaf_and_prefix(self, tmp_path: Path) -> None:
        safetensors.numpy.save_file({"a": np.zeros(1), "a.b": np.ones(1)}, tmp_path / "x")
        assert set(ai.load_safetensors(tmp_path / "x")) == {"a", "a.b"}


def test_progress(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    tree = {"a": np.zeros(20_000_000, "u1")}
    path = ai.save_model(tmp_path / "m", tree, progress=lambda a, b: seen.append((a, b)))
    assert seen[-1] == (20_000_000, 20_000_000)
    assert len(seen) == 3
    seen.clear()
    ai.load_model(path, progress=lambda a, b: seen.append((a, b)))
    assert seen[-1] == (20_000_000, 20_000_000)
