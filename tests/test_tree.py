"""Section 3 of the specification: names to tree, the `tree` skeleton, records."""

from __future__ import annotations

import copy
import pickle
import time
from math import isnan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apsi_inspect.tree import MAX_DEPTH, TreeError, from_names, from_skeleton, literal, prefix_conflict, record, unmark


def tree(*names: str) -> Any:
    return from_names(names, str.upper)


def test_lists_are_zero_to_n() -> None:
    assert tree("l.0.w", "l.1.w") == {"l": [{"w": "L.0.W"}, {"w": "L.1.W"}]}
    assert tree("l.1", "l.0") == {"l": ["L.0", "L.1"]}
    assert tree("0", "1") == ["0", "1"]
    assert tree("l.1", "l.2") == {"l": {"1": "L.1", "2": "L.2"}}
    assert tree("l.0", "l.2") == {"l": {"0": "L.0", "2": "L.2"}}
    assert tree("l.00") == {"l": {"00": "L.00"}}
    assert tree("l.0", "l.01") == {"l": {"0": "L.0", "01": "L.01"}}
    assert tree("l.\u0660") == {"l": {"\u0660": "L.\u0660"}}
    assert tree("l.0", "l." + "1" * 5000)["l"].keys() == {"0", "1" * 5000}
    assert tree("l.0", "l.x") == {"l": {"0": "L.0", "x": "L.X"}}
    assert len(tree(*(f"l.{i}" for i in range(11)))["l"]) == 11


def test_key_order_is_that_of_first_appearance() -> None:
    assert list(tree("b.x", "a.x", "b.y")) == ["b", "a"]
    assert list(tree("b.x", "a.x", "b.y").b) == ["x", "y"]


def test_empty_names_and_components() -> None:
    assert tree() == {}
    assert tree("") == {"": ""}
    assert tree("a..b", ".", "c.") == {"a": {"": {"b": "A..B"}}, "": {"": "."}, "c": {"": "C."}}


@pytest.mark.parametrize("names", [("a", "a.b"), ("a.b", "a"), ("x", "a.b.c", "a.b"), ("a.0", "a.0.w")])
def test_a_leaf_that_is_also_a_prefix(names: tuple[str, ...]) -> None:
    assert tree(*names) is None


NAMES = st.lists(st.text("a.b\0-", max_size=6), unique=True, max_size=8)


@given(NAMES)
def test_prefix_conflict_is_what_building_the_tree_finds(names: list[str]) -> None:
    assert prefix_conflict(names) == (from_names(names, str) is None)
    assert prefix_conflict(names) == any(b.startswith(a + ".") for a in names for b in names)


def test_depth_is_bounded() -> None:
    found = tree(".".join("a" * 10_000))
    assert repr(found).startswith("record(a=record(")
    for _ in range(MAX_DEPTH - 1):
        found = found["a"]
    assert list(found) == [".".join("a" * (10_000 - MAX_DEPTH + 1))]


def test_skeleton() -> None:
    node = {
        "$record": [
            ["a", "x"],
            ["list", ["x", []]],
            ["tuple", {"$tuple": ["y", {"$record": []}]}],
            ["lit", {"$literal": 0.1}],
            ["a.b", {"$literal": {"$int": "12345678901234567890"}}],
            ["", {"$literal": {"$float": "-inf"}}],
        ]
    }
    found = from_skeleton(node, str.upper)
    assert found == {
        "a": "X", "list": ["X", []], "tuple": ("Y", {}), "lit": 0.1, "a.b": 12345678901234567890, "": float("-inf"),
    }  # fmt: skip
    assert list(found) == ["a", "list", "tuple", "lit", "a.b", ""]
    assert isinstance(found["tuple"][1], record)


@pytest.mark.parametrize(
    "node",
    [
        "x", {"$literal": 1}, None, 1, True, 0.5, {}, {"a": "x"}, {"$record": {}}, {"$record": "x"},
        {"$record": [["a"]]},
        {"$record": [["a", "x", "y"]]}, {"$record": [[1, "x"]]}, {"$record": [["a", "x"], ["a", "y"]]},
        {"$record": ["ab"]}, {"$tuple": {}}, {"$tuple": [], "$record": []}, [None], [1],
        [{"$other": []}], [{"$literal": []}],
        [{"$literal": {}}], [{"$literal": {"$int": 1}}], [{"$literal": {"$int": "01"}}], [{"$literal": {"$int": "+1"}}],
        [{"$literal": {"$int": "1" * 4098}}], [{"$literal": {"$int": "1\n"}}], [{"$literal": {"$int": "\u0661"}}],
        [{"$literal": {"$float": "NaN"}}], [{"$literal": {"$float": 1.0}}], [{"$literal": {"$int": "1", "x": 1}}],
    ],
    ids=lambda v: repr(v)[:60],
)  # fmt: skip
def test_skeleton_refused(node: Any) -> None:
    with pytest.raises(TreeError):
        from_skeleton(node, str)


def test_skeleton_depth() -> None:
    node: Any = "x"
    for _ in range(MAX_DEPTH):
        node = [node]
    from_skeleton(node, str)
    with pytest.raises(TreeError, match="deep"):
        from_skeleton([node], str)


def test_literals() -> None:
    for value in (None, True, False, 0, -1, 0.5, "text", ""):
        assert literal(value) is value
    assert literal({"$int": "-0"}) == 0
    assert literal({"$int": "9" * 4096}) == 10**4096 - 1
    found = literal({"$float": "nan"})
    assert isinstance(found, float)
    assert isnan(found)


def test_unmark() -> None:
    assert unmark({"$$odd": 1, "$$$x": 2, "a": [{"$int": "1"}, {"b": {"$float": "inf"}}]}) == {
        "$odd": 1, "$$x": 2, "a": [1, {"b": float("inf")}],
    }  # fmt: skip
    assert unmark({"$$int": "5"}) == {"$int": "5"}
    assert unmark(None) is None
    for bad in ({"$odd": 1}, {"a": {"$x": 1}}, {"$int": "1", "a": 2}, {"$int": 5}, {"$float": "1.0"}):
        with pytest.raises(TreeError):
            unmark(bad)


def test_record() -> None:
    r = record(a=1, b=record(c=2))
    assert r.b.c == r["b"]["c"] == 2
    r.d = 3
    assert r["d"] == 3
    del r.d
    assert "d" not in r
    assert "a" in dir(r)
    assert repr(r) == "record(a=1, b=record(c=2))"
    assert r == {"a": 1, "b": {"c": 2}}
    assert not hasattr(r, "missing")
    with pytest.raises(AttributeError, match="no key 'missing'"):
        _ = r.missing
    with pytest.raises(AttributeError):
        del r.missing
    for twin in (copy.copy(r), copy.deepcopy(r), pickle.loads(pickle.dumps(r))):
        assert type(twin) is record
        assert twin == r


def test_many_deep_names_are_quick() -> None:
    """Names that share nothing make a node per component: their number is bounded."""
    names = [f"{i}." + "a." * 250 + "w" for i in range(20_000)]
    start = time.process_time()
    assert tree(*names) is None
    assert time.process_time() - start < 8
