"""`hardware_plan`: every number worked out here by arithmetic from published configurations, and sizes from files."""

from __future__ import annotations

import json
import os
import re
import struct
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from apsi_inspect import convert, samples
from apsi_inspect import open as open_model
from apsi_inspect.cli import main
from apsi_inspect.errors import ModelFileError, ValueRefusedError
from apsi_inspect.ops.attention import AttentionShape
from apsi_inspect.ops.attention_config import from_config
from apsi_inspect.ops.attention_gguf import from_gguf
from apsi_inspect.ops.hardware import hardware_plan
from apsi_inspect.ops.hardware_weights import OPTIMIZERS
from apsi_inspect.parts import to_html, to_text

from .handmade import Gguf
from .servers import Server

F16 = 16.0
LLAMA3_70B = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
    "num_hidden_layers": 80, "num_key_value_heads": 8, "max_position_embeddings": 8192, "vocab_size": 128256,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "first_k_dense_replace": 3, "moe_layer_freq": 1,
}  # fmt: skip
MISTRAL_7B = {
    "model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "sliding_window": 4096,
}  # fmt: skip
GEMMA2_9B = {
    "model_type": "gemma2", "hidden_size": 3584, "head_dim": 256, "num_attention_heads": 16, "num_hidden_layers": 42,
    "num_key_value_heads": 8, "sliding_window": 4096,
}  # fmt: skip
GEMMA3_4B = {  # as published: what is missing stands in the class
    "model_type": "gemma3",
    "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024},
    "vision_config": {"num_hidden_layers": 27, "hidden_size": 1152},
}
JAMBA = {
    "model_type": "jamba", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_expand": 2, "sliding_window": None,
}  # fmt: skip
QWEN3_NEXT = {
    "model_type": "qwen3_next", "hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 48,
    "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip


def config(values: dict[str, Any]) -> AttentionShape:
    return from_config(values, "config.json")


def gguf(arch: str, **keys: Any) -> AttentionShape:
    return from_gguf({f"{arch}.{k.replace('__', '.')}": v for k, v in keys.items()}, arch, "m.gguf")


def test_llama_3_70b_keeps_320_kib_a_token() -> None:
    by_config = config(LLAMA3_70B)
    by_keys = gguf("llama", block_count=80, embedding_length=8192, attention__head_count=64, attention__head_count_kv=8)
    assert 80 * 2 * 8 * 128 * 2 == 320 * 1024
    for shape in (by_config, by_keys):
        assert shape.nbytes(1, 1, F16) == 320 * 1024
        assert shape.nbytes(8192, 3, F16) == 3 * 8192 * 320 * 1024
        assert shape.nbytes(8192, 1, 8.5) == 8192 * 80 * 2 * 8 * 128 // 32 * 34  # Q8_0: 34 bytes for 32 elements
        assert shape.kind == "GQA"
    assert by_config.formula(8192, 1, F16) == "80 layers × 8192 tokens × (2 × 8 KV heads × 128) × 2 bytes"
    assert by_config.context_length == 8192


def test_latent_attention_keeps_the_latent_once() -> None:
    each = (512 + 64) * 2
    assert config(DEEPSEEK_V3).nbytes(4096, 2, F16) == 2 * 4096 * 61 * each
    assert config({**DEEPSEEK_V3, "num_hidden_layers": 60}).nbytes(1, 1, F16) == 60 * each  # DeepSeek-V2
    new = {
        "block_count": 62, "nextn_predict_layers": 1, "embedding_length": 7168, "attention__head_count": 128,
        "attention__head_count_kv": 1, "attention__kv_lora_rank": 512, "attention__key_length": 576,
        "attention__value_length": 512, "attention__key_length_mla": 192, "attention__value_length_mla": 128,
        "rope__dimension_count": 64,
    }  # fmt: skip
    shape = gguf("deepseek2", **new)
    assert shape.nbytes(4096, 2, F16) == 2 * 4096 * 61 * each
    assert shape.kind == "MLA"
    old = {k: v for k, v in new.items() if not k.endswith("_mla")}
    old |= {"attention__head_count_kv": 128, "attention__key_length": 192, "attention__value_length": 128}
    shape = gguf("deepseek2", **old)
    assert shape.nbytes(1, 1, F16) == 61 * 128 * (192 + 128) * 2
    assert "key_length_mla" in shape.notes[0]


def test_a_sliding_window_bounds_the_cache() -> None:
    shape = config(MISTRAL_7B)
    assert shape.nbytes(1000, 1, F16) == 32 * 1000 * 2 * 8 * 128 * 2
    assert shape.nbytes(131_072, 1, F16) == 32 * 4096 * 2 * 8 * 128 * 2
    assert shape.kind == "GQA, sliding window of 4096"
    assert "min(131072, 4096)" in shape.formula(131_072, 1, F16)
    for off in ({"sliding_window": None}, {"use_sliding_window": False}):
        assert config({**MISTRAL_7B, **off}).nbytes(131_072, 1, F16) == 32 * 131_072 * 2 * 8 * 128 * 2


def test_gemma_mixes_windows_and_full_attention() -> None:
    each, n = 2 * 8 * 256 * 2, 32_768
    nine = gguf("gemma2", block_count=42, embedding_length=3584, attention__head_count=16, attention__head_count_kv=8,
                attention__key_length=256, attention__value_length=256, attention__sliding_window=4096)  # fmt: skip
    for shape in (config(GEMMA2_9B), nine):
        assert shape.nbytes(n, 1, F16) == (21 * 4096 + 21 * n) * each
        assert shape.kind == "hybrid: 21 × sliding window of 4096, 21 × GQA"
    four = gguf("gemma3", block_count=34, embedding_length=2560, attention__head_count=8, attention__head_count_kv=4,
                attention__key_length=256, attention__value_length=256, attention__sliding_window=1024)  # fmt: skip
    for shape in (config(GEMMA3_4B), four):  # every sixth of 34 layers is full: 5
        assert shape.nbytes(n, 1, F16) == (29 * 1024 + 5 * n) * 2 * 4 * 256 * 2


def test_layer_types_decide_and_unknown_ones_are_said() -> None:
    kinds = ["sliding_attention", "full_attention"] * 12
    oss = {
        "model_type": "gpt_oss", "hidden_size": 2880, "head_dim": 64, "num_attention_heads": 64,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "sliding_window": 128,
    }  # fmt: skip
    for values in ({**oss, "layer_types": kinds}, oss):
        assert config(values).nbytes(8192, 1, F16) == 12 * (128 + 8192) * 2 * 8 * 64 * 2
    odd = config({**oss, "layer_types": ["full_attention"] * 23 + ["wormhole"]})
    assert odd.nbytes(10, 1, F16) == 24 * 10 * 2 * 8 * 64 * 2
    assert "wormhole" in odd.notes[0]
    assert "upper bound" in odd.notes[0]


def test_qwen_slides_only_from_a_layer_on_and_only_if_told() -> None:
    qwen = {
        "model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "sliding_window": 1000, "max_window_layers": 20,
    }  # fmt: skip
    assert config(qwen).nbytes(5000, 1, F16) == 28 * 5000 * 2 * 4 * 128 * 2
    on = config({**qwen, "use_sliding_window": True})
    assert on.nbytes(5000, 1, F16) == (20 * 5000 + 8 * 1000) * 2 * 4 * 128 * 2


def test_jamba_has_four_layers_of_attention_and_28_states() -> None:
    state = 3 * 8192 + 16 * 8192  # last columns of the convolution, and the state; float32
    heads = [8 if i % 8 == 4 else 0 for i in range(32)]
    keys = gguf("jamba", block_count=32, embedding_length=4096, attention__head_count=[32] * 32,
                attention__head_count_kv=heads, ssm__conv_kernel=4, ssm__inner_size=8192,
                ssm__state_size=16)  # fmt: skip
    for shape in (config(JAMBA), keys):
        assert shape.nbytes(1000, 2, F16) == 2 * (4 * 1000 * 2 * 8 * 128 * 2 + 28 * state * 4)
        assert shape.kind == "hybrid: 28 × recurrent, 4 × GQA"


def test_a_state_space_model_needs_the_same_at_any_length() -> None:
    mamba2 = {
        "model_type": "mamba2", "hidden_size": 2560, "num_hidden_layers": 64, "state_size": 128, "conv_kernel": 4,
        "expand": 2, "n_groups": 1,
    }  # fmt: skip
    keys = gguf("mamba2", block_count=64, embedding_length=2560, attention__head_count=0, ssm__conv_kernel=4,
                ssm__inner_size=5120, ssm__state_size=128, ssm__group_count=1)  # fmt: skip
    for shape in (config(mamba2), keys):
        expected = 64 * (3 * (5120 + 2 * 128) + 128 * 5120) * 4
        assert shape.nbytes(1, 1, F16) == shape.nbytes(10**6, 1, F16) == expected
        assert shape.kind == "recurrent"


def test_qwen3_next_by_config_and_by_keys() -> None:
    keys = gguf("qwen3next", block_count=48, embedding_length=2048, attention__head_count=16,
                attention__head_count_kv=2, attention__key_length=256, attention__value_length=256, ssm__conv_kernel=4,
                ssm__inner_size=4096, ssm__state_size=128, ssm__group_count=16, ssm__time_step_rank=32)  # fmt: skip
    state = 3 * (32 * 128 + 2 * 16 * 128) + 32 * 128 * 128
    for shape in (config(QWEN3_NEXT), keys):
        assert shape.nbytes(1000, 1, F16) == 12 * 1000 * 2 * 2 * 256 * 2 + 36 * state * 4


def test_other_families() -> None:
    falcon = {"hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32, "multi_query": True}
    assert config(falcon).kind == "MQA"
    assert config(falcon).nbytes(1, 1, F16) == 32 * 2 * 64 * 2
    gpt2 = config({"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024})
    assert gpt2.kind == "MHA"
    assert gpt2.nbytes(1, 1, F16) == 12 * 2 * 768 * 2
    scout = gguf("llama4", block_count=48, embedding_length=5120, attention__head_count=40, attention__head_count_kv=8)
    assert scout.nbytes(100_000, 1, F16) == (36 * 8192 + 12 * 100_000) * 2 * 8 * 128 * 2
    shared = gguf("gemma3n", block_count=30, embedding_length=2048, attention__head_count=8, attention__head_count_kv=2,
                  attention__key_length=256, attention__value_length=256, attention__sliding_window=512)  # fmt: skip
    assert shared.nbytes(4096, 1, F16) == (16 * 512 + 4 * 4096) * 2 * 2 * 256 * 2  # layers from the 21st share
    phi = gguf("phi3", block_count=2, embedding_length=64, attention__head_count=2, attention__sliding_window=9)
    assert phi.nbytes(100, 1, F16) == 2 * 100 * 2 * 64 * 2
    assert "does not use" in phi.notes[0]


def test_an_encoder_keeps_nothing() -> None:
    bert = {"model_type": "bert", "hidden_size": 384, "num_attention_heads": 12, "num_hidden_layers": 6}
    keys = gguf("bert", block_count=6, embedding_length=384, attention__head_count=12, attention__causal=False)
    for shape in (config(bert), keys):
        assert shape.nbytes(512, 4, F16) == 0
        assert shape.kind == "encoder, no KV cache"
    assert config({**bert, "is_decoder": True}).nbytes(1, 1, F16) == 6 * 2 * 384 * 2


def test_experts_give_active_parameters() -> None:
    plan = hardware_plan(parameters="671B", config=DEEPSEEK_V3)
    routed = 58 * 256 * 3 * 7168 * 2048
    assert plan.active_parameters == 671 * 10**9 - routed + routed * 8 // 256
    assert 37e9 < plan.active_parameters < 38e9  # published: 37 B
    mixtral = {**MISTRAL_7B, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 14336}
    active = hardware_plan(parameters=46_702_792_704, config=mixtral).active_parameters
    assert active is not None
    assert 12.8e9 < active < 12.95e9
    assert any("an estimate" in a and "2 of 8 experts" in a for a in hardware_plan(
        parameters=46_702_792_704, config=mixtral).assumptions)  # fmt: skip


def test_experts_of_a_file_are_counted_from_its_tensors(tmp_path: Path) -> None:
    keys = [
        ("general.architecture", "STRING", "qwen3moe"), ("qwen3moe.block_count", "UINT32", 1),
        ("qwen3moe.embedding_length", "UINT32", 4), ("qwen3moe.attention.head_count", "UINT32", 2),
        ("qwen3moe.attention.head_count_kv", "ARRAY", ("INT32", [1])), ("qwen3moe.expert_count", "UINT32", 8),
        ("qwen3moe.expert_used_count", "UINT32", 2),
    ]  # fmt: skip
    path = tmp_path / "m.gguf"
    tensors = [("blk.0.ffn_up_exps.weight", [8, 3, 4], 0, bytes(384)), ("token_embd.weight", [5, 4], 0, bytes(80))]
    path.write_bytes(Gguf().file(keys, tensors))
    plan = hardware_plan(path, context=100)
    assert (plan.parameters, plan.active_parameters) == (96 + 20, 20 + 24)
    assert plan.cache[0].nbytes == 100 * 2 * 1 * 2 * 2
    assert plan.attention is not None
    assert plan.attention.source == "GGUF keys qwen3moe.*"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Matrices whose rows fill blocks, one whose rows do not, and a vector; with a config.json beside."""
    rng = np.random.default_rng(5)
    shapes = {"a.weight": (8, 256), "b.weight": (4, 100), "c.weight": (300, 512), "norm": (256,)}
    save_file({k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}, tmp_path / "m.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3_70B))
    return tmp_path / "m.safetensors"


@pytest.mark.parametrize("word", ["f16", "bf16", "q8_0", "q4_k", "int8", "int4", "fp4"])
def test_weights_of_a_file_are_what_convert_writes(model: Path, word: str) -> None:
    weights = hardware_plan(model, encodings=[word], shard=200_000).weights[0]
    ending = ".apsim" if word in ("int8", "int4", "fp4") else ".gguf"
    report = convert(model, model.parent / ("out" + ending), word, shard=200_000)
    assert weights.exact
    assert weights.file_bytes == sum(os.path.getsize(f) for f in report.files)
    assert weights.files == len([f for f in report.files if f.endswith(ending)])
    with open_model(report.path) as written:
        stored = sum(t.nbytes for t in written.values())
    assert weights.nbytes == stored
    assert weights.bpw == pytest.approx(8 * stored / (8 * 256 + 400 + 300 * 512 + 256))
    if word == "q4_k":
        assert weights.note == "not as asked: 1 × F16, 1 × F32"


def test_a_file_as_stored_with_the_config_beside_it(model: Path) -> None:
    plan = hardware_plan(model)
    first = plan.weights[0]
    total = 4 * (8 * 256 + 400 + 300 * 512 + 256)
    assert (first.encoding, first.nbytes, first.file_bytes) == ("as stored", total, model.stat().st_size)
    assert plan.exact
    assert plan.attention is not None
    assert plan.attention.source.endswith("config.json")
    assert plan.cache[0].nbytes == 4096 * 320 * 1024
    (model.parent / "config.json").unlink()
    bare = hardware_plan(model)
    assert bare.attention is None
    assert not bare.cache
    assert any("not counted" in a for a in bare.assumptions)
    assert [n.context for n in bare.needs] == [None] * len(bare.needs)


def test_a_model_behind_a_url_has_its_config_beside_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    files = {"/a/m.safetensors": model.read_bytes(), "/b/m.safetensors": model.read_bytes()}
    with Server({**files, "/a/config.json": (model.parent / "config.json").read_bytes()}) as server:
        plan = hardware_plan(f"{server.url}/a/m.safetensors", context=4096, encodings="q8_0")
        assert plan.cache[0].nbytes == 4096 * 320 * 1024
        assert hardware_plan(f"{server.url}/b/m.safetensors").attention is None
        assert hardware_plan(parameters="70B", config=f"{server.url}/a/config.json").attention is not None


def test_estimates_and_devices() -> None:
    plan = hardware_plan(
        parameters="70B", layers=80, hidden=8192, heads=64, kv_heads=8, encodings=["bf16", "q4_k", "int4", "fp8"],
        context=[8192], batch=4, device_memory=["80GB", "24GiB"], overhead=0.2, training="adamw",
    )  # fmt: skip
    count = 70 * 10**9
    expected = {"bf16": 2 * count, "q4_k": count * 144 // 256, "int4": count * 5 // 8}
    expected["fp8"] = ceil(count * (8 + 32 / 8192) / 8)
    assert {w.encoding: w.nbytes for w in plan.weights} == expected
    assert not any(w.exact for w in plan.weights)
    assert plan.weights[0].files == 35
    assert "estimate" in str(plan)
    cache = 4 * 8192 * 320 * 1024
    assert plan.cache[0].nbytes == cache
    for word, nbytes in expected.items():
        for size, text in ((80 * 10**9, "80GB"), (24 * 2**30, "24GiB")):
            assert plan.devices(word, 8192, text) == ceil((nbytes + cache) / (size * 0.8))
    assert sum(t.nbytes for t in plan.training) == 16 * count  # ZeRO: 2 + 2 + 12 bytes a parameter
    assert plan.devices("training: adamw", device="80GB") == ceil(16 * count / 64e9)
    assert re.search(r"devices of 80 GB +18\n +devices of 24 GiB +55\n", str(plan))
    assert re.search(r"Memory, and devices of 80 GB / 24 GiB .*\n +weights +8 192 tokens", str(plan))
    frame = plan.frame
    assert len(frame) == 10
    assert frame["total_bytes"][0] == 2 * count + cache
    document = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    assert document["schema_version"] == 1
    assert document["needs"][0]["devices"] == plan.needs[0].devices


@pytest.mark.parametrize(("optimizer", "each"), [("adamw", 16), ("adamw-8bit", 10), ("lion", 12), ("sgd-momentum", 12),
                                                 ("sgd", 8)])  # fmt: skip
def test_bytes_a_parameter_of_the_optimizers(optimizer: str, each: int) -> None:
    plan = hardware_plan(parameters=10**9, training=optimizer)
    assert sum(t.nbytes for t in plan.training) == each * 10**9
    assert set(OPTIMIZERS) == {"adamw", "adamw-8bit", "lion", "sgd-momentum", "sgd"}


def test_html_and_text_say_the_same_and_escape() -> None:
    evil = "<script>$x$\x1b[31m"
    plan = hardware_plan(parameters="1B", config={**LLAMA3_70B, "layer_types": [evil] * 80})
    text, page = to_text(plan._parts()), to_html(plan._parts())
    assert "<script>" not in page
    assert "\x1b" not in text + page
    for row in plan.cache:
        assert row.formula in text
        assert row.formula.replace("'", "&#x27;") in page


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"layers": 0}, "layers"),
        ({"layers": -3}, "layers"),
        ({"layers": "80"}, "layers"),
        ({"layers": 80, "heads": 8}, "hidden"),
        ({"kv_heads": 8}, "layers"),
        ({"layers": 10**9, "heads": 1, "head_dim": 1}, "layers"),
        ({"context": 0}, "context"),
        ({"context": []}, "context"),
        ({"context": [4096, 1.5]}, "context"),
        ({"batch": 0}, "batch"),
        ({"device_memory": "0GB"}, "device_memory"),
        ({"device_memory": "many"}, "device_memory"),
        ({"device_memory": "9" * 400}, "device_memory"),
        ({"overhead": 1}, "overhead"),
        ({"overhead": float("nan")}, "overhead"),
        ({"shard": None}, "shard"),
        ({"kv_dtype": "int3"}, "kv_dtype"),
        ({"training": "magic"}, "training"),
        ({"encodings": ["zip"]}, "zip"),
        ({"encodings": []}, "encodings"),
        ({"encodings": ["as stored"]}, "as stored"),
        ({"parameters": "0"}, "parameters"),
        ({"parameters": "-5B"}, "parameters"),
        ({"parameters": None}, "parameters"),
        ({"parameters": True}, "parameters"),
        ({"parameters": "inf"}, "parameters"),
        ({"parameters": "9" * 400}, "parameters"),
        ({"parameters": "999999999T"}, "'999999999T' is too large"),
        ({"parameters": 10**18 + 1}, "too large"),
        ({"encodings": "zip"}, "^encodings: "),
        ({"layers": 2, "hidden": 100, "heads": 3}, "hidden is 100, no multiple of the 3 heads; head_dim says"),
        ({"parameters": None, "model": {"w": np.zeros(3)}}, "model is a dict; a path or an opened model was expected"),
    ],
)
def test_absurd_arguments_name_themselves(values: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueRefusedError, match=word):
        hardware_plan(**{"parameters": "7B", **values})


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"num_attention_heads": -1}, "num_attention_heads"),
        ({"num_attention_heads": [8]}, "num_attention_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_key_value_heads": True}, "num_key_value_heads"),
        ({"head_dim": 1.5}, "head_dim"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 3}, "hidden_size"),
        ({"layer_types": "full"}, "layer_types"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"layer_types": [1] * 80}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 80}, "sliding_window"),
        ({"use_sliding_window": "yes", "sliding_window": 5}, "use_sliding_window"),
        ({"model_type": 7}, "model_type"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim"),
        ({"num_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"num_experts": "8", "num_experts_per_tok": 2}, "num_experts"),
    ],
)
def test_absurd_configurations_name_the_key(tmp_path: Path, change: dict[str, Any], key: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA3_70B, **change}))
    with pytest.raises(ModelFileError, match=key) as caught:
        hardware_plan(parameters="7B", config=path)
    assert str(path) in str(caught.value)


BASES = [
    LLAMA3_70B, DEEPSEEK_V3, GEMMA2_9B, JAMBA, QWEN3_NEXT, {**MISTRAL_7B, "num_experts": 8, "num_experts_per_tok": 2},
    {**LLAMA3_70B, "linear_attn_config": {"full_attn_layers": [4], "num_heads": 2, "head_dim": 4}},
    {**JAMBA, "attn_layer_period": None, "attn_layer_indices": [1], "model_type": "bamba"},
    {**LLAMA3_70B, "attn_config": {"kv_n_heads": 4}, "layer_types": ["mamba"] * 80, "mamba_d_conv": 4,
     "mamba_d_state": 2, "mamba_n_heads": 2, "mamba_d_head": 3},
    {**LLAMA3_70B, "no_rope_layers": [1] * 80, "attention_chunk_size": 5, "num_kv_shared_layers": 3},
    {**LLAMA3_70B, "layer_types": ["conv"] * 80, "conv_L_cache": 3, "sliding_window_pattern": "LG"},
]  # fmt: skip
ODD = [None, True, -1, 0, 1, 2**70, 1e300, 0.5, "", "x" * 100, [], [[]], [{}], [-1], [1], {}, {"a": 1}, [None] * 100]


@pytest.mark.parametrize("base", BASES)
def test_any_value_of_any_key_is_used_or_refused(base: dict[str, Any]) -> None:
    for key in base:
        for value in ODD:
            try:
                plan = hardware_plan(parameters="7B", config={**base, key: value}, encodings="bf16")
            except (ModelFileError, ValueRefusedError):
                continue
            assert all(c.nbytes >= 0 for c in plan.cache)


GGUF_BASES = {
    "gemma3": {"attention__sliding_window": 8, "attention__sliding_window_pattern": [True, False], "context_length": 9},
    "deepseek2": {"attention__kv_lora_rank": 4, "attention__key_length_mla": 4, "rope__dimension_count": 2,
                  "attention__key_length": 6, "attention__indexer__key_length": 2, "nextn_predict_layers": 1},
    "jamba": {"ssm__conv_kernel": 4, "ssm__inner_size": 4, "ssm__state_size": 2, "ssm__group_count": 1,
              "attention__head_count_kv": [0, 2], "feed_forward_length": [1, 2]},
    "qwen3next": {"ssm__conv_kernel": 4, "ssm__inner_size": 4, "ssm__state_size": 2, "full_attention_interval": 2,
                  "attention__recurrent_layers": [True, False]},
    "rwkv7": {"wkv__head_size": 2, "token_shift_count": 2},
    "lfm2": {"shortconv__l_cache": 3, "attention__head_count_kv": [0, 2]},
    "kimi-linear": {"kda__head_dim": 2, "ssm__conv_kernel": 4, "attention__head_count_kv": [0, 1],
                    "attention__shared_kv_layers": 1, "attention__causal": True},
}  # fmt: skip


@pytest.mark.parametrize("arch", GGUF_BASES)
def test_any_value_of_any_gguf_key_is_used_or_refused(arch: str) -> None:
    base = {"block_count": 2, "embedding_length": 8, "attention__head_count": 2, **GGUF_BASES[arch]}
    assert gguf(arch, **base).layers == base["block_count"] - base.get("nextn_predict_layers", 0)
    for key in base:
        for value in ODD:
            try:
                shape = gguf(arch, **{**base, key: value})
            except ModelFileError:
                continue
            assert shape.nbytes(1000, 1, F16) >= 0


@pytest.mark.parametrize("text", ["", "[1]", "{", "nul", '{"a": ' * 5000, '"x"', "\xff"])
def test_a_config_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ModelFileError, match=r"config\.json"):
        hardware_plan(parameters="7B", config=path)


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"block_count": 0}, "llama.block_count"),
        ({"block_count": "x"}, "llama.block_count"),
        ({"attention__head_count": 0}, "llama.attention.head_count"),
        ({"attention__head_count_kv": [1]}, "llama.attention.head_count_kv"),
        ({"attention__head_count_kv": [1, -1]}, "llama.attention.head_count_kv"),
        ({"embedding_length": 0}, "llama.embedding_length"),
        ({"nextn_predict_layers": 2}, "llama.nextn_predict_layers"),
        ({"attention__sliding_window": 5, "attention__sliding_window_pattern": [True]}, "sliding_window_pattern"),
    ],
)
def test_absurd_gguf_keys_are_named(keys: dict[str, Any], word: str) -> None:
    good = {"block_count": 2, "embedding_length": 8, "attention__head_count": 2}
    with pytest.raises(ModelFileError, match=word):
        gguf("llama", **{**good, **keys})


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--layers", "80", "--hidden", "8192", "--heads", "64", "--kv-heads", "8"]
    assert main(["plan", "--parameters", "70B", *shape, "--context", "8192", "--device", "80GB,24GiB", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["cache"][0]["nbytes"] == 8192 * 320 * 1024
    assert document["parameters"] == 70 * 10**9
    [path] = samples.write(tmp_path, ["fracast.safetensors"])
    assert main(["plan", path, "--encodings", "as stored,q8_0"]) == 0
    out = capsys.readouterr().out
    assert "exact" in out
    assert "85 001" in out
    assert main(["plan", "--parameters", "70B", "--layers", "0"]) == 2
    assert main(["plan"]) == 2
    assert main(["plan", "--parameters", "7B", "--context", "4k"]) == 2
    assert main(["plan", str(tmp_path / "none.gguf")]) == 3
    (tmp_path / "config.json").write_text("{")
    assert main(["plan", path]) == 3
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 5
    assert all(line.startswith("apsi: ") for line in errors)
    for given, said in (
        (["--device", "0GB"], "apsi: --device: size '0GB'"), (["--encodings", ","], "apsi: --encodings is empty"),
        (["--kv-dtype", "zip"], "apsi: --kv-dtype 'zip'"), (["--shard", "0"], "apsi: --shard: size '0'"),
        (["--layers", "2", "--hidden", "100", "--heads", "3"], "apsi: --hidden is 100"),
    ):  # fmt: skip
        assert main(["plan", "--parameters", "7B", *given]) == 2
        assert capsys.readouterr().err.startswith(said)


def test_what_is_kept_and_what_is_of_an_apsim_is_said(tmp_path: Path) -> None:
    save_file({"ids": np.arange(6), "mask": np.ones(4, np.int8)}, tmp_path / "ids.safetensors")
    q8, fp8 = hardware_plan(tmp_path / "ids.safetensors", encodings=["q8_0", "fp8"]).weights
    assert (q8.nbytes, q8.note) == (6 * 8 + 4, "not as asked: 1 × I64, 1 × I8")
    assert fp8.note == "in an .apsim; not as asked: 1 × I64, 1 × I8"
    notes = {w.encoding: w.note for w in hardware_plan(parameters="7B", encodings=["fp8", "int4", "q8_0"]).weights}
    assert notes == {"fp8": "in an .apsim", "int4": "in an .apsim", "q8_0": ""}
    cache = hardware_plan(parameters="7B", layers=2, hidden=100, heads=3, head_dim=33, context=10).cache[0]
    assert cache.nbytes == 10 * 2 * 2 * 3 * 33 * 2


def test_a_closed_gguf_with_long_arrays_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    keys = [
        ("general.architecture", "STRING", "llama"), ("llama.block_count", "UINT32", 2),
        ("llama.attention.head_count", "UINT32", 2), ("llama.embedding_length", "UINT32", 8),
        ("llama.attention.head_count_kv", "ARRAY", ("INT32", [1] * 70_000)),
    ]  # fmt: skip
    path.write_bytes(Gguf().file(keys, [("t", [4], 0, struct.pack("<4f", 1, 2, 3, 4))]))
    with pytest.raises(ModelFileError, match="head_count_kv"):
        hardware_plan(path)
