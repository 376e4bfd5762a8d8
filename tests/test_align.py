"""Names of two models: equal, by gguf's own maps, without a prefix, tied; and never on a guess."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

import apsi_inspect as ai
from apsi_inspect.ops.align import Pair, align
from apsi_inspect.ops.hf_layouts import PERMUTED, SHIFTED, TRANSPOSED, Facts, Layout

ONE = np.ones((4, 4), np.float32)


def names_in(path: Path, *names: str, metadata: dict[str, str] | None = None) -> ai.ModelFile:
    save_file(dict.fromkeys(names, ONE), path, metadata)
    return ai.open(path)


def gguf_of(path: Path, arch: str, *names: str, **keys: int) -> ai.ModelFile:
    w = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        w.add_uint32(f"{arch}.{key.replace('__', '.')}", value)
    for n in names:
        w.add_tensor(n, ONE)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return ai.open(path)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma2", "bert", "gpt2", "phi3", "falcon", "mamba", "t5"])
def test_names_are_those_of_the_gguf_package(arch: str) -> None:
    """Every name of its table, in the first blocks and in one far behind."""
    find = Facts(arch, None, None).table()
    assert find is not None
    key = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch)
    table = gguf.get_tensor_name_map(key, 124)
    for number in ("0", "1", "123"):
        checked = 0
        for name, (_, expected) in table.mapping.items():
            if f".{number}." in f".{name}." and f".{number}." in expected and name != expected:
                for suffix in (".weight", ".bias"):
                    assert find(name + suffix) == expected + suffix, name
                checked += 1
        assert checked > 5


def test_names_that_no_table_has() -> None:
    find = Facts("llama", 4, 2).table()
    assert find is not None
    for name in ("x", "", ".", "model.layers.0.nothing.weight", "model.layers.x.self_attn.q_proj.weight"):
        assert find(name) is None
    far = "9" * 5000
    assert find(f"model.layers.{far}.self_attn.q_proj.weight") == f"blk.{far}.attn_q.weight"
    nothing = Facts("no architecture", None, None).table()
    assert nothing is not None
    assert nothing("model.embed_tokens.weight") is None


def test_the_tables_name_architectures() -> None:
    known = set(gguf.MODEL_ARCH_NAMES.values())
    later = {"nanbeige"}  # of llama.cpp, not yet of the gguf package
    assert PERMUTED | SHIFTED | TRANSPOSED.keys() <= known | later


def test_hugging_face_and_gguf(tmp_path: Path) -> None:
    hf = names_in(
        tmp_path / "a.safetensors", "model.embed_tokens.weight", "model.norm.weight",
        "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.bias",
        "model.layers.1.mlp.up_proj.weight", "model.layers.1.self_attn.rotary_emb.inv_freq",
    )  # fmt: skip
    g = gguf_of(
        tmp_path / "b.gguf", "llama", "token_embd.weight", "output_norm.weight", "blk.1.attn_q.weight",
        "blk.1.attn_k.bias", "blk.1.ffn_up.weight", "rope_freqs.weight",
        attention__head_count=2, attention__head_count_kv=1,
    )  # fmt: skip
    there, back = align(hf, g), align(g, hf)
    assert {p.b: (p.a, p.how, p.layout) for p in there.pairs} == {
        "token_embd.weight": ("model.embed_tokens.weight", "map", None),
        "output_norm.weight": ("model.norm.weight", "map", None),
        "blk.1.attn_q.weight": ("model.layers.1.self_attn.q_proj.weight", "map", Layout("a", heads=2)),
        "blk.1.attn_k.bias": ("model.layers.1.self_attn.k_proj.bias", "map", Layout("a", heads=1)),
        "blk.1.ffn_up.weight": ("model.layers.1.mlp.up_proj.weight", "map", None),
    }
    assert {(p.b, p.a, p.layout and p.layout.heads) for p in back.pairs} == {
        (p.a, p.b, p.layout and p.layout.heads) for p in there.pairs
    }
    said = " ".join(f.message for f in there.notes)
    for word in ("inv_freq", "rope_freqs", "architecture 'llama'"):
        assert word in said


def test_a_prefix_before_the_map(tmp_path: Path) -> None:
    """``bert.`` is no part of gguf's names, and the oldest checkpoints call weight and bias gamma and beta."""
    layer = "encoder.layer.0.attention.self.query.weight"
    hf = names_in(
        tmp_path / "a.safetensors", f"bert.{layer}", "bert.embeddings.LayerNorm.gamma", "bert.embeddings.position_ids"
    )
    g = gguf_of(tmp_path / "b.gguf", "bert", "blk.0.attn_q.weight", "token_embd_norm.weight")
    aligned = align(hf, g)
    assert {(p.a, p.b) for p in aligned.pairs} == {
        (f"bert.{layer}", "blk.0.attn_q.weight"), ("bert.embeddings.LayerNorm.gamma", "token_embd_norm.weight"),
    }  # fmt: skip
    assert any("without 'bert.'" in f.message for f in aligned.notes)


def test_facts_survive_a_conversion(tmp_path: Path) -> None:
    """A GGUF that became safetensors has its keys as text, and GGUF's names."""
    gguf_of(tmp_path / "g.gguf", "llama", "blk.0.attn_q.weight", attention__head_count=2)
    ai.convert(tmp_path / "g.gguf", tmp_path / "g.safetensors")
    hf = names_in(tmp_path / "hf.safetensors", "model.layers.0.self_attn.q_proj.weight")
    (pair,) = align(hf, ai.open(tmp_path / "g.safetensors")).pairs
    assert pair == Pair("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight", "map", Layout("a", heads=2))


def test_a_prefix_that_one_model_has(tmp_path: Path) -> None:
    a = names_in(tmp_path / "a.safetensors", "x.weight", "y.weight", "same")
    b = names_in(tmp_path / "b.safetensors", "model.x.weight", "model.y.weight", "same", "z")
    pairs = align(a, b).pairs
    assert {(p.a, p.b, p.how) for p in pairs} == {
        ("x.weight", "model.x.weight", "prefix"), ("y.weight", "model.y.weight", "prefix"), ("same", "same", "name"),
        (None, "z", ""),
    }  # fmt: skip


def test_nothing_is_matched_on_a_guess(tmp_path: Path) -> None:
    a = names_in(tmp_path / "a.safetensors", "x.weight")
    b = names_in(tmp_path / "b.safetensors", "one.x.weight", "two.x.weight")
    aligned = align(a, b)
    assert all(p.a is None or p.b is None for p in aligned.pairs)
    assert len(aligned.pairs) == 3
    assert any(f.severity == "warning" and "'one.'" in f.message for f in aligned.notes)
    hf = names_in(tmp_path / "c.safetensors", "model.norm.weight", "norm.weight")  # both are output_norm
    g = gguf_of(tmp_path / "d.gguf", "llama", "output_norm.weight")
    assert all(p.a is None or p.b is None for p in align(hf, g).pairs)


def test_tied_output(tmp_path: Path) -> None:
    hf = names_in(tmp_path / "a.safetensors", "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
    g = gguf_of(tmp_path / "b.gguf", "llama", "token_embd.weight", "output_norm.weight")
    assert Pair("lm_head.weight", "token_embd.weight", "tied") in align(hf, g).pairs
    assert Pair("token_embd.weight", "lm_head.weight", "tied") in align(g, hf).pairs
    other = names_in(tmp_path / "c.safetensors", "model.embed_tokens.weight", "model.norm.weight")
    assert Pair("lm_head.weight", "model.embed_tokens.weight", "tied") in align(hf, other).pairs


def test_two_names_of_the_same_bytes(tmp_path: Path) -> None:
    """A tied tensor of an .apsim tree is stored once."""
    x = np.ones((3, 3), np.float32)
    ai.save_model(tmp_path / "a.apsim", ai.record(first=x, second=x))
    b = names_in(tmp_path / "b.safetensors", "first")
    a = ai.open(tmp_path / "a.apsim")
    pairs = align(a, b).pairs
    assert [(p.a, p.b) for p in pairs if p.a == "first"] == [("first", "first")]
    assert len(pairs) == 1


def test_codes_and_their_scales(tmp_path: Path) -> None:
    a = ai.open(ai.samples.path("fracast.safetensors"))
    b = ai.open(ai.samples.path("fracast-int8.safetensors"))
    pairs = align(a, b).pairs
    assert len(pairs) == len(a)
    assert {p.a for p in pairs} == set(a)
    assert sum(p.how == "codes" for p in pairs) == 20


def test_many_names_are_aligned_quickly(tmp_path: Path) -> None:
    a = names_in(tmp_path / "a.safetensors", *(f"model.layers.{i}.self_attn.v_proj.weight" for i in range(4000)))
    g = gguf_of(tmp_path / "b.gguf", "llama", *(f"blk.{i}.attn_v.weight" for i in range(4000)))
    assert all(p.how == "map" for p in align(a, g).pairs)
