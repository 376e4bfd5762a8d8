"""The tensor browser's state: filter, order, pages, tree, selection; and that 100 000 tensors stay responsive."""

from __future__ import annotations

import fnmatch
import time
from pathlib import Path

import pytest

import apsi_inspect as ai
from apsi_inspect.notebook.state_pages import Pages
from apsi_inspect.notebook.state_tensors import ANY, PAGE, TensorListState

from . import handmade

NAMES = [
    "blk.10.attn_q.weight",
    "blk.2.attn_q.weight",
    "blk.2.attn_q.bias",
    "blk.2.ffn_up.weight",
    "output_norm.weight",
    "token_embd.weight",
    "blk.2",
    "Attn",
]
SIZES = [4, 2, 1, 8, 3, 16, 5, 1]


@pytest.fixture
def state(tmp_path: Path) -> TensorListState:
    path = tmp_path / "model.safetensors"
    tensors = [
        (n, "F32" if i % 2 else "I32", [k], bytes(4 * k)) for i, (n, k) in enumerate(zip(NAMES, SIZES, strict=True))
    ]
    path.write_bytes(handmade.safetensors(tensors))
    return TensorListState(ai.open(path))


def shown(state: TensorListState) -> list[str]:
    return [r.name for r in state.page_rows()]


def lines(state: TensorListState) -> list[tuple[int, str, int]]:
    return [(n.depth, n.label, len(n.members)) for n in state.page_nodes()]


def test_natural_order_is_the_first(state: TensorListState) -> None:
    assert shown(state) == [
        "Attn",
        "blk.2",
        "blk.2.attn_q.bias",
        "blk.2.attn_q.weight",
        "blk.2.ffn_up.weight",
        "blk.10.attn_q.weight",
        "output_norm.weight",
        "token_embd.weight",
    ]


@pytest.mark.parametrize(
    ("search", "expected"),
    [
        ("ATTN", {n for n in NAMES if "attn" in n.lower()}),
        ("blk.2.*", {n for n in NAMES if fnmatch.fnmatchcase(n, "blk.2.*")}),
        ("attn?q", set()),
        ("  ", set(NAMES)),
        ("nowhere", set()),
    ],
)
def test_a_part_matches_any_case_and_a_glob_the_whole_name(
    state: TensorListState, search: str, expected: set[str]
) -> None:
    state.set_filter(search)
    assert set(shown(state)) == expected
    assert state.count == len(expected)


def test_encoding_narrows_and_an_unknown_one_is_refused(state: TensorListState) -> None:
    state.set_filter("", "I32")
    assert set(shown(state)) == set(NAMES[::2])
    state.set_filter("weight")
    assert set(shown(state)) == {n for n in NAMES[::2] if "weight" in n}
    assert state.encodings == [ANY, "F32", "I32"]
    with pytest.raises(ai.ValueRefusedError, match="Q9"):
        state.set_filter(encoding="Q9")


def test_sort_by_every_column_both_ways(state: TensorListState) -> None:
    sizes = dict(zip(NAMES, SIZES, strict=True))
    state.set_sort("bytes")
    assert [sizes[n] for n in shown(state)] == sorted(SIZES)
    assert shown(state)[:2] == ["Attn", "blk.2.attn_q.bias"]  # equal sizes: natural order
    state.set_sort(descending=True)
    assert [sizes[n] for n in shown(state)] == sorted(SIZES, reverse=True)
    state.set_sort("file order", False)
    assert shown(state) == NAMES
    state.set_sort("encoding")
    assert [r.encoding for r in state.page_rows()] == ["F32"] * 4 + ["I32"] * 4
    with pytest.raises(ai.ValueRefusedError, match="colour"):
        state.set_sort("colour")


def test_the_tree_opens_and_closes_and_follows_the_filter(state: TensorListState) -> None:
    state.show_tree(True)
    assert lines(state) == [(0, "Attn", 1), (0, "blk", 5), (0, "output_norm.weight", 1), (0, "token_embd.weight", 1)]
    state.toggle("blk")
    assert lines(state)[1:5] == [(0, "blk", 5), (1, "2", 1), (1, "2", 3), (1, "10.attn_q.weight", 1)]
    state.toggle("blk.2")
    assert lines(state)[3:6] == [(1, "2", 3), (2, "attn_q", 2), (2, "ffn_up.weight", 1)]
    leaves = [n for n in state.nodes() if n.leaf]
    assert {n.path for n in leaves} == {NAMES[6], NAMES[0], NAMES[3], NAMES[4], NAMES[5], "Attn"}
    assert state.nbytes(state.nodes()[1].members) == 4 * sum(SIZES[:4]) + 4 * SIZES[6]
    state.set_filter("ffn")  # one group with one tensor is one line
    assert lines(state) == [(0, "blk.2.ffn_up.weight", 1)]
    state.set_filter("")
    state.toggle("blk")
    assert len(lines(state)) == 4
    state.show_tree(False)
    assert len(shown(state)) == len(NAMES)


def test_every_tensor_is_reached_once_in_the_open_tree(state: TensorListState) -> None:
    state.show_tree(True)
    while any(not n.leaf and not n.opened for n in state.nodes()):
        state.toggle(next(n.path for n in state.nodes() if not n.leaf and not n.opened))
    assert sorted(n.path for n in state.nodes() if n.leaf) == sorted(NAMES)


def test_select_knows_its_tensors(state: TensorListState) -> None:
    state.select("Attn")
    assert state.selected == "Attn"
    with pytest.raises(ai.TensorNotFoundError):
        state.select("attn")
    assert state.selected == "Attn"
    state.select(None)
    assert state.selected is None


def test_pages_stay_within_the_list() -> None:
    pages = Pages(10, 25)
    assert (pages.count, pages.text) == (3, "1–10 of 25")
    pages.go(99)
    assert (pages.page, list(pages.span), pages.text) == (2, [20, 21, 22, 23, 24], "21–25 of 25")
    pages.go(-1)
    assert pages.page == 0
    pages.go(2)
    pages.resize(12, keep=True)
    assert pages.page == 1
    pages.resize(0)
    assert (pages.count, list(pages.span), pages.text) == (1, [], "none")
    pages.resize(7)
    assert pages.text == "all 7"


def test_100_000_tensors_stay_responsive(tmp_path: Path) -> None:
    n = 100_000
    path = tmp_path / "big.safetensors"
    names = [f"model.layers.{i // 10}.mlp.experts.{i % 10}.w{i % 7}.weight" for i in range(n)]
    path.write_bytes(handmade.safetensors([(name, "U8", [1], b"\0") for name in names]))
    state = TensorListState(ai.open(path))
    start = time.process_time()
    state.set_filter("experts.3.w")
    assert state.count == n // 10
    assert len(state.page_rows()) == PAGE
    state.pages.go(50)
    assert state.page_rows()[0].name == "model.layers.5000.mlp.experts.3.w2.weight"  # 50003 % 7
    assert time.process_time() - start < 0.5
    state.set_filter("")
    start = time.process_time()
    state.show_tree(True)
    assert [(x.path, x.opened) for x in state.page_nodes()[:1]] == [("model.layers", True)]
    assert len(state.nodes()) == 1 + n // 10
    state.toggle("model.layers.7.mlp.experts")
    state.pages.go(1)
    assert len(state.page_nodes()) == PAGE
    assert time.process_time() - start < 3
