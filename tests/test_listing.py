"""Listing: natural order, logical parameters, sums, folding. Expected values are counted by hand in the test."""

from __future__ import annotations

from pathlib import Path

import pytest

import apsi_inspect as ai
from apsi_inspect import listing

from . import handmade


def model_of(folder: Path, tensors: list[tuple[str, str, list[int]]], name: str = "m.safetensors") -> ai.ModelFile:
    bits = {"F32": 32, "F16": 16, "U8": 8, "I8": 8, "I32": 32, "F4": 4, "F8_E4M3": 8, "U32": 32}
    rows = []
    for tensor, dtype, shape in tensors:
        numel = 1
        for d in shape:
            numel *= d
        rows.append((tensor, dtype, shape, bytes(numel * bits[dtype] // 8)))
    path = folder / name
    path.write_bytes(handmade.safetensors(rows))
    return ai.open(path)


def test_natural_order() -> None:
    names = ["blk.10.w", "blk.2.w", "a", "blk.2.b", "blk.1"]
    assert sorted(names, key=listing.natural_key) == ["a", "blk.1", "blk.2.b", "blk.2.w", "blk.10.w"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 40, "3.0 TiB")],
)
def test_human_size(value: int, text: str) -> None:
    assert listing.human_size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00 k"),
        (85_001, "85.0 k"),
        (134_515_008, "134.5 M"),
        (999_960, "1.00 M"),
        (7_241_732_096, "7.24 B"),
        (2 * 10**12, "2.00 T"),
        (5 * 10**16, "50000.0 T"),
    ],
)
def test_human_count(value: int, text: str) -> None:
    assert listing.human_count(value) == text


def test_packed_four_bit_elements_count_as_weights(tmp_path: Path) -> None:
    m = model_of(tmp_path, [("w", "F4", [4, 6])])
    t = listing.totals(m)
    assert (t.parameters, t.nbytes, t.bpw) == (24, 12, 4.0)


def test_companions_of_quantized_weights_are_no_parameters(tmp_path: Path) -> None:
    m = model_of(
        tmp_path,
        [
            ("a.weight", "F8_E4M3", [4, 8]),
            ("a.weight_scale", "F32", [4, 1]),
            ("a.input_scale", "F32", [1]),
            ("b.qweight", "I8", [2, 2]),
            ("b.scale", "F32", [2]),
            ("c.scale", "F32", [3]),  # belongs to nothing: a parameter
            ("d.biases", "F32", [3]),  # no MLX scales beside it: a parameter
        ],
    )
    assert {r.name for r in listing.rows(m) if r.role} == {"a.weight_scale", "a.input_scale", "b.scale"}
    assert listing.totals(m).parameters == 32 + 4 + 3 + 3


def test_packed_words_count_their_weights(tmp_path: Path) -> None:
    """GPTQ packs eight 4-bit weights a word: 64 x 16 weights are 8 x 16 words, zero points 1 x 2, scales 1 x 16."""
    m = model_of(
        tmp_path,
        [
            ("g.qweight", "I32", [8, 16]),
            ("g.qzeros", "I32", [1, 2]),
            ("g.scales", "F16", [1, 16]),
            ("g.g_idx", "I32", [64]),
            ("experts.down_blocks", "U8", [2, 3, 4, 16]),
            ("experts.down_scales", "U8", [2, 3, 4]),
            ("n.weight", "U8", [512, 1]),
            ("n.weight.absmax", "U8", [16]),
            ("n.weight.quant_map", "F32", [16]),
            ("n.weight.quant_state.bitsandbytes__nf4", "U8", [80]),
        ],
    )
    assert listing.totals(m).parameters == 64 * 16 + 2 * 3 * 4 * 32 + 1024


def test_blocks_and_folding(tmp_path: Path) -> None:
    layers = [(f"model.layers.{i}.{part}", "F32", [4, 4]) for i in range(11) for part in ("up.weight", "down.weight")]
    odd = [("model.layers.11.up.weight", "F16", [4, 4]), ("model.layers.11.down.weight", "F32", [4, 4])]
    m = model_of(tmp_path, [*layers, *odd, ("norm.weight", "F32", [4]), ("lm_head", "F32", [2, 2])])
    assert [b.label for b in listing.blocks(m)] == ["lm_head", *(f"model.layers.{i}" for i in range(12)), "norm"]
    assert listing.blocks(m)[1] == ("model.layers.0", 2, 32, 128)
    groups = {g.label: g for g in listing.folded(m)}
    assert groups.keys() == {"model.layers", "norm.weight", "lm_head"}
    same, other = groups["model.layers"].children
    assert (same.label, same.count, same.numbers, same.tensors, same.parameters) == ("N", 11, "0–10", 22, 11 * 32)
    assert (other.label, other.count, other.nbytes) == ("11", 1, 32 + 64)
    assert sorted(c.label for c in same.children) == ["down.weight", "up.weight"]


def test_a_chain_with_one_repeated_level_is_one_line(tmp_path: Path) -> None:
    m = model_of(tmp_path, [(f"blk.{i}.w", "F32", [2]) for i in (0, 1, 2, 5)])
    (group,) = listing.folded(m)
    assert (group.label, group.count, group.numbers, group.tensors) == ("blk.N.w", 4, "0–2, 5", 4)


def test_a_name_that_is_also_a_prefix(tmp_path: Path) -> None:
    m = model_of(tmp_path, [("a", "F32", [2]), ("a.b", "F32", [3]), ("a.b.c", "F32", [4])])
    assert sum(g.parameters for g in listing.folded(m)) == 9
    assert set(m.tree()) == {"a", "a.b", "a.b.c"}


def test_glob_and_sort(tmp_path: Path) -> None:
    m = model_of(tmp_path, [("a.1", "F32", [3]), ("b.10", "F32", [2]), ("b.9", "F32", [5])])
    assert [r.name for r in listing.rows(m, "b.*")] == ["b.9", "b.10"]
    assert [r.name for r in listing.rows(m, sort="-nbytes")] == ["b.9", "a.1", "b.10"]
    assert [r.name for r in listing.rows(m, sort="-name")] == ["b.10", "b.9", "a.1"]
    with pytest.raises(ai.ValueRefusedError, match="no column 'nope'"):
        listing.rows(m, sort="nope")


def test_real_model_counts_what_its_author_counted() -> None:
    for name in ("fracast.safetensors", "fracast-int8.safetensors"):
        m = ai.open(ai.samples.path(name))
        assert listing.totals(m).parameters == int(m.metadata["parameter_count"]) == 85_001


def test_absurdly_deep_names_fold_quickly(tmp_path: Path) -> None:
    names = [".".join(f"{i}x{j}" for j in range(250)) for i in range(2000)]
    m = model_of(tmp_path, [(name, "U8", [1]) for name in names])
    assert len(listing.folded(m)) == 2000
    assert max(len(g.label.split(".")) for g in listing.folded(m)) == 250  # labels keep the whole name
