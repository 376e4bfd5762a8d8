"""The tree family of the bank of cases (`tr-`): each is opened or carried out as it says, under its id."""

from __future__ import annotations

import collections
import functools
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import apsi_inspect as ai
from apsi_inspect.errors import ModelFileError, ValueRefusedError

from . import apsim_oracle, test_cases
from .case_steps import CASES, Scripts
from .mutations import packed, redigested
from .test_cases import missing
from .trees import same

steps = Scripts("tr-")


@pytest.mark.parametrize("case", steps.cases.values(), ids=lambda c: c["id"])
def test_case(case: dict[str, Any], tmp_path: Path) -> None:
    steps.scripts[case["id"]](case, tmp_path)


def A(i: int) -> np.ndarray[Any, Any]:
    """An array that is told from the others."""
    return np.arange(i, i + 3, dtype="f4")


def leaves(node: Any) -> int:
    """How many leaves a tree has."""
    if isinstance(node, dict):
        return sum(leaves(v) for v in node.values())
    return sum(leaves(v) for v in node) if isinstance(node, (list, tuple)) else 1


@steps(*(id for id, c in steps.cases.items() if not c["steps"]))
def opened(case: dict[str, Any], folder: Path) -> None:
    """Plain files with odd names: all tensors by name, and all of them in the tree, each as it stands alone."""
    test_cases.test_outcome(case)
    path = CASES / case["entry"]
    with ai.open(path) as model:
        assert leaves(model.tree()) == len(model) == case["expect"]["tree_leaves"]
        stored = {name: bytes(t.raw()) for name, t in model.items()}
    loaded = ai.load_safetensors(path)
    assert leaves(loaded) == case["expect"]["tree_leaves"]
    # As .apsim and back: the same names with the same bytes, and the same tree.
    saved = ai.save_model(folder / "m.apsim", loaded)
    again = ai.load_model(saved)
    assert same(loaded, again)
    with ai.open(saved) as model:
        assert {name: bytes(t.raw()) for name, t in model.items()} == stored


def round_trip(tree: Any, folder: Path, metadata: Any = None) -> Any:
    """Saved, loaded, and the file read by the safetensors library and by the independent checker."""
    path = Path(ai.save_model(folder / "m.apsim", tree, metadata))
    apsim_oracle.check(path)
    with ai.open(path) as model:
        plain = safetensors.numpy.load_file(path)
        assert {n: a.tobytes() for n, a in plain.items()} == {n: bytes(t.raw()) for n, t in model.items()}
    return ai.load_model(path)


def refused(tree: Any, folder: Path, message: str, metadata: Any = None) -> None:
    with pytest.raises(ValueRefusedError, match=message):
        ai.save_model(folder / "no.apsim", tree, metadata)
    assert not (folder / "no.apsim").exists()
    assert not [n for n in os.listdir(folder) if n.startswith(".")]


@steps("tr-int-keys")
def int_keys(case: dict[str, Any], folder: Path) -> None:
    refused({0: A(1), "0": A(2), 1: {"w": A(3)}}, folder, "key 0 is int; keys are strings")


@steps("tr-containers")
def containers(case: dict[str, Any], folder: Path) -> None:
    tree = {"l": [A(1), A(2)], "t": (A(3),), "e": {}, "el": [], "et": (), "n": None, "nested": {"e2": {"e3": []}}}
    assert same(tree, round_trip(tree, folder))
    ordered = collections.OrderedDict([("b", A(1)), ("a", A(2))])
    loaded = round_trip(ordered, folder)
    assert list(loaded) == ["b", "a"]
    assert same(dict(ordered), loaded)
    point = collections.namedtuple("point", "x y")
    refused({"p": [point(A(1), A(2))]}, folder, r"p\[0\]: a named tuple")


@steps("tr-shared")
def shared(case: dict[str, Any], folder: Path) -> None:
    tree = (lambda a: {"embed": a, "head": a})(A(1))
    loaded = round_trip(tree, folder)
    assert same(tree, loaded)
    assert loaded.embed is loaded.head


@steps("tr-odd-dtypes")
def odd_dtypes(case: dict[str, Any], folder: Path) -> None:
    kept = {"b": np.array([True]), "u": np.array([1], "u2")}
    assert same(kept, round_trip(kept, folder))
    others = {
        "o": np.array([1, "a"], object),
        "s": np.array(["x"]),
        "dt": np.array(["2020-01-01"], "M8[D]"),
        "ld": np.array([1], np.longdouble),
        "lc": np.array([1], np.clongdouble),
        "st": np.zeros(2, [("a", "f4")]),
    }
    for name, value in others.items():
        refused({**kept, name: value}, folder, rf"^{name}: dtype")


@steps("tr-deep-obj")
def deep(case: dict[str, Any], folder: Path) -> None:
    tree = functools.reduce(lambda t, _: {"a": t}, range(3000), {"w": A(1)})
    refused(tree, folder, "nested deeper than 256")


@steps("tr-surrogate-key")
def surrogate(case: dict[str, Any], folder: Path) -> None:
    refused({"\ud800": A(1), "a\0b": A(2), "": A(3), "k" * 10000: A(4)}, folder, "a key holds a lone surrogate")
    tree = {"a\0b": A(2), "": A(3), "k" * 10000: A(4)}
    assert same(tree, round_trip(tree, folder))


@steps("tr-metadata-values")
def metadata_values(case: dict[str, Any], folder: Path) -> None:
    meta: dict[str, Any] = {
        "step": 7, "lr": 1e-5, "none": None, "nan": float("nan"), "cfg": {"a": [1, 2]}, "big": 2**63 + 1,
    }  # fmt: skip
    refused({"w": A(1)}, folder, "metadata b: bytes cannot be kept", {**meta, "b": b"x"})
    round_trip({"w": A(1)}, folder, meta)
    with safetensors.safe_open(folder / "m.apsim", "np") as f:
        assert all(type(v) is str for v in f.metadata().values())
    with ai.open(folder / "m.apsim") as model:
        back = dict(model.metadata)
    assert np.isnan(back.pop("nan"))
    meta.pop("nan")
    assert back == meta
    assert {k: type(v) for k, v in back.items() if k != "cfg"} == {k: type(v) for k, v in meta.items() if k != "cfg"}


Parts = tuple[dict[str, Any], dict[str, Any], bytes]


def edited(path: Path, edit: Callable[..., Parts], redigest: bool) -> None:
    """Edit a file; without `redigest` as somebody who only edits, with it as one who sets the digests right again."""
    table, meta, data = edit(*apsim_oracle.split(path))
    path.write_bytes(packed(table, redigested(table, meta, data) if redigest else meta, data))


def scale(value: float) -> Callable[..., Parts]:
    def edit(table: dict[str, Any], meta: dict[str, Any], data: bytes) -> Parts:
        begin = table["q__qscale"]["data_offsets"][0]
        return table, meta, data[:begin] + struct.pack("<f", value) + data[begin + 4 :]

    return edit


def field(**fields: Any) -> Callable[..., Parts]:
    def edit(table: dict[str, Any], meta: dict[str, Any], data: bytes) -> Parts:
        entries = json.loads(meta["qtensors"])
        entries["q"] |= fields
        return table, {**meta, "qtensors": json.dumps(entries)}, data

    return edit


def shorter(table: dict[str, Any], meta: dict[str, Any], data: bytes) -> Parts:
    return {**table, "q__qscale": {**table["q__qscale"], "shape": [4, 1]}}, meta, data


VALUES = {"NaN": scale(float("nan")), "zero": scale(0.0), "negative": scale(-1.0)}
FORMS = {
    "wrong shape": shorter,
    "scale_shape": field(scale_shape=[2, 3]),
    "block 0": field(block=0),
    "block -1": field(block=-1),
    "block 1.0": field(block=2.0),
    "block true": field(block=True),
    "bits 3": field(format="int3"),
    "bits text": field(format="8"),
    "axis": field(axis=2),
    "packing": field(packing="none"),
}


@steps("tr-tampered-quant")
def tampered_quant(case: dict[str, Any], folder: Path) -> None:
    """Every edit is caught by the digests. With the digests set right again, a wrong form is still refused; the values
    of scales are the writer's own business (section 5 allows any float32), and decode without a crash."""
    x = np.random.default_rng(0).normal(size=(2, 4)).astype("f4")
    q = ai.quantize(x, "int4", 1, 2)
    path = folder / "m.apsim"
    for what, edit in {**VALUES, **FORMS}.items():
        for redigest in (False, True):
            ai.save_model(path, {"q": q})
            edited(path, edit, redigest)
            if what in VALUES and redigest:
                first = np.asarray(ai.load_model(path).q)[0, :2]
                plain = np.asarray(q)[0, :2] / q.scale[0, 0]
                np.testing.assert_array_equal(first, plain * {"NaN": np.nan, "zero": 0, "negative": -1}[what])
                continue
            with pytest.raises(ModelFileError) as caught:
                ai.load_model(path)
            if what not in VALUES:
                wanted = [["scale", "group", "block", "bits", "zero", "format", "axis", "shape", "packing"]]
                assert not missing(str(caught.value), wanted), what


@steps("tr-newer-version")
def newer_version(case: dict[str, Any], folder: Path) -> None:
    path = folder / "m.apsim"
    for version in ("999", None, "x", "1.0", "2", ""):
        for redigest in (False, True):
            ai.save_model(path, {"w": A(1)})
            edited(
                path,
                lambda t, m, d, v=version: (t, {k: x for k, x in {**m, "version": v}.items() if x is not None}, d),
                redigest,
            )
            for verify in (True, "lazy", False):
                with pytest.raises(ModelFileError) as caught:
                    ai.load_model(path, verify=verify)
                assert not missing(str(caught.value), case["expect"]["error_mentions"])


LIES: dict[str, Any] = {
    "a tensor that is not there": {"$record": [["a", "a"], ["b", "b"], ["c", "nowhere"]]},
    "a tensor in no branch": {"$record": [["a", "a"]]},
    "a path through a leaf": {"$record": [["a", "a"], ["b", "b"], ["c", "a.b"]]},
    "a key twice": {"$record": [["a", "a"], ["a", "b"]]},
    "no tree": ["a", "b", 7],
    "a leaf as root": "a",
}


@steps("tr-tree-lies")
def tree_lies(case: dict[str, Any], folder: Path) -> None:
    path = folder / "m.apsim"
    for lie in LIES.values():
        for redigest in (False, True):
            ai.save_model(path, {"a": A(1), "b": A(2)})
            edited(path, lambda t, m, d, lie=lie: (t, {**m, "tree": json.dumps(lie)}, d), redigest)
            for verify in (True, "lazy", False):
                with pytest.raises(ModelFileError) as caught:
                    ai.load_model(path, verify=verify)
                assert not missing(str(caught.value), case["expect"]["error_mentions"])
    # One tensor in two branches is no lie: that is how tied tensors are written.
    ai.save_model(path, {"a": A(1), "b": A(2)})
    twice = {"$record": [["a", "a"], ["b", "b"], ["c", {"$tuple": ["a"]}]]}
    edited(path, lambda t, m, d: (t, {**m, "tree": json.dumps(twice)}, d), True)
    loaded = ai.load_model(path)
    assert loaded.c[0] is loaded.a


def test_every_case_is_scripted() -> None:
    assert steps.scripts.keys() == steps.cases.keys()
    assert len(steps.cases) == 16
