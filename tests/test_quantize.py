"""`quantize`, `quantize_model`, `QTensor`: codes of the independent implementation, slices, trees, refusals."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import warnings
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pint
import pytest

import apsi_inspect as ai
from apsi_inspect.errors import ValueRefusedError
from apsi_inspect.qtensor import QTensor

FORMATS = ["int8", "int4", "fp8", "fp8_e5m2", "fp6", "fp6_e3m2", "fp4", "bf16"]
LARGEST = {"int8": 127, "int4": 7, "fp8": 448, "fp8_e5m2": 57344, "fp6": 7.5, "fp6_e3m2": 28, "fp4": 6}
rng = np.random.default_rng(0)
X = rng.normal(size=(6, 70)).astype("f4")
u: Any = pint.get_application_registry()  # type: ignore[no-untyped-call]


def test_golden(data: Path) -> None:
    golden = np.load(data / "golden/qtensors.npz")
    m = ai.open(data / "golden/qtensors.apsim")
    for name, t in m.items():
        q = t.qparams
        assert q is not None
        made = ai.quantize(golden[f"{name}::source"], t.encoding, q.axis, q.block or "axis")
        assert made.packed.tobytes() == bytes(t.raw()), name
        assert np.asarray(made).tobytes() == golden[name].tobytes(), name
        assert (made.shape, made.block, made.scale_shape) == (t.shape, q.block, q.scale_shape)


@pytest.mark.parametrize("fmt", FORMATS)
def test_codes_times_scale(fmt: str) -> None:
    """`codes` and `scale` mean what they say, in plain arithmetic."""
    q = ai.quantize(X, fmt, axis=1, block=32)
    codes = q.codes
    assert codes.shape == X.shape
    values = codes.astype("f4")
    if fmt == "bf16":
        assert q.scale is None
        assert codes.dtype == ml_dtypes.bfloat16
    else:
        assert np.abs(values).max() <= LARGEST[fmt]
        assert q.scale is not None
        values = values * np.repeat(q.scale, 32, axis=1)[:, :70]
        amax = np.stack([np.abs(X[:, i : i + 32]).max(1) for i in (0, 32, 64)], 1)
        np.testing.assert_array_equal(q.scale, amax / np.float32(LARGEST[fmt]))
    np.testing.assert_array_equal(values, np.asarray(q))
    np.testing.assert_array_equal(values, q.dequantize())
    assert q.dequantize().dtype == np.float32


def test_defaults() -> None:
    found = {f: (ai.quantize(X, f).axis, ai.quantize(X, f).block) for f in FORMATS}
    whole, blocks = (1, None), (1, 32)
    assert found == {
        "int8": whole, "fp8": whole, "fp8_e5m2": whole, "bf16": (None, None),
        "int4": blocks, "fp6": blocks, "fp6_e3m2": blocks, "fp4": blocks,
    }  # fmt: skip
    assert ai.quantize(X, "int4", block="axis").block is None
    assert ai.quantize(X, "int4", axis=None).scale.shape == ()  # type: ignore[union-attr]
    assert ai.quantize(X, ai.int4).format == "int4"
    assert ai.quantize(np.float32(3), "int8").scale == np.float32(3) / np.float32(127)
    assert ai.quantize(X[:, :20], "int4").block is None


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_slices(fmt: str, axis: int | None) -> None:
    q = ai.quantize(X, fmt, axis, None if axis is None else 4)
    whole = np.asarray(q)
    keys: Any = (
        0,
        -1,
        slice(2, 5),
        (slice(None), 3),
        (2, slice(5, 9)),
        Ellipsis,
        (slice(None, None, 2), slice(1, None, 3)),
        [],
    )
    for key in keys:
        np.testing.assert_array_equal(q[key], whole[key])
    assert len(q) == 6
    assert q.ndim == 2
    assert q.size == 420


def test_views_and_copies() -> None:
    q = ai.quantize(X, "int8")
    assert np.asarray(q, "f8").dtype == np.float64
    with pytest.raises(ValueError, match="copy"):
        np.array(q, copy=False)
    assert q.codes is q.packed


@pytest.mark.parametrize("fmt", FORMATS)
def test_bits_per_weight(fmt: str) -> None:
    q = ai.quantize(np.ones((4, 64), "f4"), fmt, block=None if fmt == "bf16" else 32)
    bits = {"int8": 8, "fp8": 8, "fp8_e5m2": 8, "int4": 4, "fp4": 4, "fp6": 6, "fp6_e3m2": 6, "bf16": 16}[fmt]
    assert q.bpw == bits + (0 if fmt == "bf16" else 1)
    assert f"{q.bpw:.3g} bpw" in repr(q)
    assert fmt in repr(q)


def test_repr() -> None:
    x = rng.normal(size=(4, 64)).astype("f4")
    q = ai.quantize(u.Quantity(x, "km"), "int4")
    assert "[km]" in repr(q)
    plain = ai.quantize(x, "int4")
    assert repr(plain).endswith(" dB>")
    noise = float(np.sum((x.astype("f8") - np.asarray(plain)) ** 2))
    assert plain.sqnr_db(x) == pytest.approx(10 * np.log10(float(np.sum(x.astype("f8") ** 2)) / noise))
    gone = ai.quantize(x + 1, "int8")
    assert "dB" not in repr(gone)
    assert "int4" in str(plain)
    assert "<div" in plain._repr_html_()


@pytest.mark.parametrize("fmt", FORMATS)
def test_text_and_html(fmt: str, tmp_path: Path) -> None:
    q = ai.quantize(X, fmt)
    error = f"{q.sqnr_db(X):.1f} dB"
    head, *rest = str(q).split("\n")
    assert head == f"QTensor  {fmt}"
    assert all(line.startswith("  ") for line in rest)
    for text in (str(q), q._repr_html_()):
        assert error in text
        assert "signal to noise" in text
        assert "offset" not in text
        assert "<dt>file" not in text
        assert "file " not in text
        assert ("scales" in text) == ("packing" in text) == (fmt != "bf16")
    assert error in repr(q)
    ai.save_model(tmp_path / "m", {"w": q})
    with ai.open(tmp_path / "m") as m:
        head, *rest = str(m["w"]).split("\n")
        assert head == f"w  {fmt}"
        assert all(line.startswith("  ") for line in rest)
        assert "values -" in rest[-1]
        assert "file m" in str(m["w"])


def test_error() -> None:
    q = ai.quantize(X, "bf16")
    assert ai.quantize(np.zeros((2, 2)), "int8").sqnr_db(np.zeros((2, 2))) == np.inf
    for bad in (X[:1], X.T, X[None], 1.0):
        with pytest.raises(ValueRefusedError, match="shape"):
            q.sqnr_db(bad)
    with pytest.raises(ValueRefusedError, match="array of numbers"):
        q.sqnr_db("X")
    for value in (np.nan, np.inf):
        x = X.copy()
        x[0, 0] = value
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            q = ai.quantize(x, "bf16")
            assert np.isnan(q.sqnr_db(x))
            assert "dB" not in repr(q) + str(q)


def test_error_of_a_tensor_of_a_file(tmp_path: Path) -> None:
    """It is told while the model is open, and the file is not kept open for it."""
    ai.save_model(tmp_path / "m", {"w": X})
    expected = repr(ai.quantize(X, "int8"))
    assert expected.endswith(" dB>")
    m = ai.open(tmp_path / "m")
    closed, gone = (ai.quantize(m["w"], "int8") for _ in range(2))
    assert repr(closed) == repr(gone) == repr(ai.quantize_model(m, "int8").w) == expected
    m.close()
    assert "dB" not in repr(closed)
    del m
    gc.collect()
    assert "dB" not in repr(gone)


def test_pickle_and_copy() -> None:
    q = ai.quantize(u.Quantity(X, "km"), "int4")
    for again in (pickle.loads(pickle.dumps(q)), copy.copy(q), copy.deepcopy(q)):
        assert np.array_equal(np.asarray(again), np.asarray(q))
        assert (again.format, again.shape, again.axis, again.block, again.unit) == ("int4", (6, 70), 1, 32, q.unit)
        assert "dB" not in repr(again)


class TestInputs:
    @pytest.mark.parametrize(
        "x",
        [
            X.tolist(),
            np.asfortranarray(X),
            X.astype(">f4"),
            X.astype("f8"),
        ],
    )
    def test_same_codes(self, x: Any) -> None:
        assert np.array_equal(ai.quantize(x, "int4").packed, ai.quantize(X, "int4").packed)

    def test_torch(self) -> None:
        torch = pytest.importorskip("torch", reason="tensors of torch as input")
        for x in (torch.from_numpy(X), torch.from_numpy(X.T.copy()).T):
            assert np.array_equal(ai.quantize(x, "int4").packed, ai.quantize(X, "int4").packed)

    def test_bfloat16_of_torch(self) -> None:
        torch = pytest.importorskip("torch", reason="bfloat16 and gradients of torch as input")
        b = torch.from_numpy(X).to(torch.bfloat16)
        expected = ai.quantize(X.astype(ml_dtypes.bfloat16), "int8")
        q = ai.quantize(b, "int8")
        assert np.array_equal(q.packed, expected.packed)
        assert repr(q).endswith(" dB>")
        w = torch.from_numpy(X.copy()).requires_grad_()
        assert repr(ai.quantize(w, "int8")) == repr(ai.quantize(X, "int8"))

    def test_units_stay(self) -> None:
        q = ai.quantize(u.Quantity(X, "degC"), "int8")
        assert q.dequantize().units == u.degC
        again = ai.quantize(q, "fp8")
        assert again.unit == q.unit

    def test_tensor_of_a_file(self, tmp_path: Path) -> None:
        ai.save_model(tmp_path / "m", {"w": u.Quantity(X, "km")})
        q = ai.quantize(ai.open(tmp_path / "m")["w"], "int8")
        assert np.array_equal(q.packed, ai.quantize(X, "int8").packed)
        assert str(q.unit) == "km"

    @pytest.mark.parametrize("fmt", [f for f in FORMATS if f != "bf16"])
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_not_finite(self, fmt: str, bad: float) -> None:
        x = X.copy()
        x[1, 2] = x[3, 4] = bad
        with pytest.raises(ValueRefusedError, match="2 of 420 values are not finite"):
            ai.quantize(x, fmt)
        with pytest.raises(ValueRefusedError, match=r"tensor 'l\.0\.w': 2 of 420"):
            ai.quantize_model({"l": [{"w": x}]}, fmt)
        assert not np.isfinite(np.asarray(ai.quantize(x, "bf16"))[1, 2])

    REFUSED: ClassVar[Any] = [
        ("int3", {}),
        ("int8", {"axis": 2}),
        ("int8", {"block": 0}),
        ("int8", {"axis": None, "block": 2}),
        ("int8", {"block": "row"}),
        ("int8", {"axis": None, "block": np.int64(2)}),
        ("int8", {"block": True}),
        ("int8", {"block": np.True_}),
        ("int8", {"block": 32.0}),
        ("int8", {"axis": 1.0}),
        ("int8", {"axis": "a"}),
        ("int8", {"axis": True}),
        (["int8"], {}),
    ]

    @pytest.mark.parametrize(("fmt", "kwargs"), REFUSED)
    def test_refused(self, fmt: str, kwargs: Any) -> None:
        with pytest.raises(ValueRefusedError):
            ai.quantize(X, fmt, **kwargs)

    def test_integers_of_numpy(self) -> None:
        numbers: Any = (np.int64(-2), np.int8(4))
        q = ai.quantize(X, "int8", *numbers)
        assert (q.axis, q.block) == (0, 4)
        assert type(q.axis) is type(q.block) is int
        assert np.array_equal(q.packed, ai.quantize(X, "int8", 0, 4).packed)

    @pytest.mark.parametrize(
        ("x", "message"),
        [
            ("abc", "^str is no array.*open or load the file first"),
            (Path("a.gguf"), "is no array.*open or load the file first"),
            (None, "^NoneType is no array"),
            ({"w": X}, "^dict is no array"),
            (["a", 1.0], "its values are <U"),
            (np.array(["a"]), "its values are <U1; only real"),
            ([[1.0], [1.0, 2.0]], "makes no array"),
            ([None], "its values are object"),
            (np.zeros(3, "M8[s]"), "its values are datetime"),
            (np.zeros(3, "V4"), "only real numbers"),
            (1j, "its values are complex"),
        ],
    )
    @pytest.mark.parametrize("fmt", FORMATS)
    def test_no_array(self, x: Any, message: str, fmt: str) -> None:
        with pytest.raises(ValueRefusedError, match=message):
            ai.quantize(x, fmt)

    @pytest.mark.parametrize("fmt", FORMATS)
    def test_complex(self, fmt: str, tmp_path: Path) -> None:
        ai.save_model(tmp_path / "m", {"w": X.astype("c8")})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(ValueRefusedError, match=r"^its values are complex; only real numbers"):
                ai.quantize(X.astype("c16"), fmt)
            with (
                ai.open(tmp_path / "m") as m,
                pytest.raises(ValueRefusedError, match=r"^tensor 'w': its values are comp"),
            ):
                ai.quantize(m["w"], fmt)


class TestModel:
    def test_which(self) -> None:
        w = rng.normal(size=(4, 64))
        tree = {
            "a": w,
            "tied": w,
            "b": np.ones(64),
            "i": np.ones((2, 2), "i4"),
            "n": None,
            "l": [(w.astype("f2"),), u.Quantity(w, "m")],
        }
        q = ai.quantize_model(tree, "int8")
        assert list(q) == list(tree)
        assert q.a is q.tied
        assert isinstance(q.a, QTensor)
        assert q.b is tree["b"]
        assert q.i is tree["i"]
        assert isinstance(q.l[0], tuple)
        assert isinstance(q.l[0][0], QTensor)
        assert str(q.l[1].unit) == "m"
        assert q.n is None
        again = ai.quantize_model(q, "fp4")
        assert again.a is q.a

    def test_globs(self) -> None:
        tree = {"embed": X, "l": [{"w": X + 1}, {"w": X + 2}], "head": X + 3}
        q = ai.quantize_model(tree, "int4", include=["l.*", "head"], exclude="l.1.*")
        assert [isinstance(t, QTensor) for t in (q.embed, q.l[0].w, q.l[1].w, q.head)] == [False, True, False, True]
        q = ai.quantize_model({"b": np.ones(64)}, "int8", min_ndim=1)
        assert isinstance(q.b, QTensor)

    @pytest.mark.parametrize("include", ["zzz", "b", ["zzz", "y*"], []])
    def test_globs_that_choose_nothing(self, include: Any) -> None:
        tree = {"w": X, "b": np.ones(64)}
        with pytest.raises(ValueRefusedError, match=r"include=.* chooses no floating tensor of 2.*tensors are w, b"):
            ai.quantize_model(tree, "int8", include=include)
        q = ai.quantize_model(tree, "int8", include=["w", "zzz"])
        assert ai.quantize_model(q, "int8", include="w").w is q.w
        assert ai.quantize_model({"b": tree["b"]}, "int8").b is tree["b"]

    @pytest.mark.parametrize("path", ["m.safetensors", Path("m.safetensors")])
    def test_path(self, path: Any) -> None:
        with pytest.raises(ValueRefusedError, match=r"'m\.safetensors' is a path: open or load the file first"):
            ai.quantize_model(path, "int8")

    def test_opened_model(self, tmp_path: Path) -> None:
        from apsi_inspect import samples

        samples.write(tmp_path, ["tiny-llama.gguf"])
        with ai.open(tmp_path / "tiny-llama.gguf") as m:
            q = ai.quantize_model(m, "int8", include="blk.0.attn*")
            name = "blk.0.attn_q.weight"
            assert np.array_equal(q.blk[0].attn_q.weight.packed, ai.quantize(np.asarray(m[name]), "int8").packed)

    def test_saved_and_loaded(self, tmp_path: Path) -> None:
        tree = {"w": X, "b": X[0]}
        path = ai.save_model(tmp_path / "m.apsim", ai.quantize_model(tree, ai.int4))
        loaded = ai.load_model(path)
        assert np.array_equal(np.asarray(loaded.w), np.asarray(ai.quantize(X, "int4")))
        assert np.array_equal(loaded.b, X[0])


class TestQTensor:
    def test_refuses_what_does_not_fit(self) -> None:
        q = ai.quantize(X, "int4", 1, 32)
        good: dict[str, Any] = {
            "format": "int4",
            "packed": q.packed,
            "scale": q.scale,
            "shape": q.shape,
            "axis": 1,
            "block": 32,
        }
        assert np.array_equal(np.asarray(QTensor(**good)), np.asarray(q))
        bad: list[dict[str, Any]] = [
            {"format": "int5"},
            {"packed": q.packed[:-1]},
            {"packed": q.packed.astype("i1")},
            {"scale": None},
            {"scale": q.scale.astype("f8")},  # type: ignore[union-attr]
            {"scale": q.scale[:, :1]},  # type: ignore[index]
            {"shape": (6, 72)},
            {"axis": None},
            {"block": 16},
            {"block": 0},
            {"block": -1},
            {"block": True},
            {"block": 32.0},
            {"axis": 1.0},
            {"axis": 3},
            {"axis": "a"},
            {"shape": (6.0, 70)},
            {"format": ["int4"]},
        ]
        for change in bad:
            with pytest.raises(ValueRefusedError):
                QTensor(**{**good, **change})

    @pytest.mark.parametrize(("shape", "axis"), [((0,), 0), ((3, 0), 1), ((0, 4), 0), ((), None), ((0,), None)])
    def test_degenerate(self, shape: Any, axis: Any) -> None:
        for fmt in FORMATS:
            q = ai.quantize(np.zeros(shape, "f4"), fmt, axis, None)
            assert np.asarray(q).shape == shape
            assert q.codes.shape == shape
            assert repr(q)

    @pytest.mark.parametrize("fmt", ["int4", "fp4", "fp6", "fp6_e3m2"])
    @pytest.mark.parametrize("n", range(1, 10))
    def test_odd_widths(self, fmt: str, n: int) -> None:
        x = rng.normal(size=(3, n)).astype("f4")
        q = ai.quantize(x, fmt, 1, "axis")
        np.testing.assert_array_equal(q.codes.astype("f4") * q.scale, np.asarray(q))

    def test_every_code(self) -> None:
        nibbles = np.arange(256, dtype=np.uint8).reshape(1, -1)
        q = QTensor("int4", nibbles, np.ones((), np.float32), (1, 512))
        expected = list(itertools.chain.from_iterable((b & 15, b >> 4) for b in range(256)))
        signed = [v - 16 if v > 7 else v for v in expected]
        assert q.codes.reshape(-1).tolist() == signed
        assert np.asarray(q).reshape(-1).tolist() == signed
