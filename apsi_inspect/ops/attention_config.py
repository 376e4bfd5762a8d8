"""The shape of a model's cache from its `config.json`, as transformers reads it (or from arguments of the same names).

What a configuration leaves to its class (the period of sliding windows, Gemma 3's heads) is a table here; the source is
`configuration_*.py` of transformers. `tests/test_hardware.py` has the arithmetic.
"""

from __future__ import annotations

from .attention import (
    MAX_LAYERS,
    MLA_NOTE,
    NO_CACHE,
    AttentionShape,
    Keys,
    Layer,
    both,
    encoder,
    grouped,
    heads_layer,
    kind_of,
    latent_layer,
    ssm_layer,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
HIDDEN = ("hidden_size", "n_embd", "d_model")
HEAD_DIM = ("head_dim", "kv_channels")
CONTEXT = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")
_NESTED = ("text_config", "llm_config", "language_config")  # of models that see or hear
# argument -> key
ARGUMENTS = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "kv_lora_rank": "kv_lora_rank",
    "rope_dim": "qk_rope_head_dim", "sliding_window": "sliding_window",
}  # fmt: skip
# model type -> what its class fills in where config.json is silent
_GEMMA3 = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 4096},
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "qwen2": {"use_sliding_window": False, "max_window_layers": 28},
    "qwen2_moe": {"use_sliding_window": False, "max_window_layers": 28},
    "qwen3": {"use_sliding_window": False, "max_window_layers": 28},
    "qwen3_moe": {"use_sliding_window": False},
    "jamba": {
        "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
    },
    "mamba": {"state_size": 16, "conv_kernel": 4, "expand": 2},
    "mamba2": {"state_size": 128, "conv_kernel": 4, "expand": 2, "n_groups": 8},
    "qwen3_next": {
        "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    },
}  # fmt: skip
# model type -> period: all but the last of so many layers slide
_PERIOD = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2, "exaone4": 4, "llama4_text": 4}
_WORDS = {
    "full_attention": "full", "attention": "full", "full": "full", "global": "full", "*": "full",
    "sliding_attention": "sliding", "local": "sliding", "L": "sliding", "G": "full",
    "chunked_attention": "chunked", "linear_attention": "linear", "conv": "conv",
    "mamba": "mamba", "mamba2": "mamba", "M": "mamba", "hybrid": "side by side",
    "mlp": "none", "moe": "none", "-": "none", "E": "none",
}  # fmt: skip
_ENCODERS = {
    "albert", "bert", "camembert", "clip", "deberta", "deberta-v2", "distilbert", "electra", "mpnet", "modernbert",
    "nomic_bert", "roberta", "siglip", "vit", "wav2vec2", "xlm-roberta",
}  # fmt: skip
_MAMBA = {"mamba", "mamba2", "falcon_mamba"}


def inner(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that describes the language model."""
    if any(config.get(k) is not None for k in LAYERS):
        return config
    nested = next((config[k] for k in _NESTED if isinstance(config.get(k), dict)), None)
    if nested is None:
        return config
    return {"model_type": config.get("model_type"), **nested}


def from_config(config: Mapping[str, Any], file: str | None) -> AttentionShape:
    """Read the shape.

    Parameters
    ----------
    file
        Name of the file; None: `config` was made of arguments, and errors name these.

    Raises
    ------
    ModelFileError, ValueRefusedError
        A key (argument) that is needed is missing, of another type, or out of bounds; the message names it.
    """
    config = inner(config)
    model_type = config.get("model_type")
    if model_type is not None and not isinstance(model_type, str):
        raise Keys(config, file).fail("model_type", f"is {model_type!r:.40}; a word was expected")
    said = {**_DEFAULTS.get(model_type or "", {}), **{k: v for k, v in config.items() if v is not None}}
    if config.get("sliding_window", 0) is None:  # null turns it off, also where the class has a default
        said.pop("sliding_window", None)
    keys = Keys(said, file, {key: name for name, key in ARGUMENTS.items()} if file is None else None)
    count = keys.whole(*LAYERS, most=MAX_LAYERS)
    hidden = keys.whole(*HIDDEN, default=0, least=0) or None
    context = keys.whole(*CONTEXT, default=0, least=0) or None
    if model_type in _ENCODERS and not keys.flag("is_decoder", False):
        return encoder(count, file or "arguments", hidden, context)
    notes: list[str] = []
    words = _words(keys, model_type or "", count, notes)
    makers = _Makers(keys, model_type or "", hidden, notes)
    shared = keys.whole("num_kv_shared_layers", default=0, least=0)
    layers = [makers.layer(w) if i < count - shared else NO_CACHE for i, w in enumerate(words)]
    groups = grouped(layers)
    attends = any(layer.per_token for layer in layers)
    heads = keys.whole(*HEADS, default=1) if attends and not keys.has("kv_lora_rank") else None
    name = kind_of(groups, heads, [makers.kv_heads()] if heads else [])
    return AttentionShape(name, groups, file or "arguments", hidden, context, tuple(notes))


def _words(keys: Keys, model_type: str, count: int, notes: list[str]) -> list[str]:
    """What each layer is, by the first rule that the configuration has."""
    if model_type in _MAMBA:
        return ["mamba"] * count
    linear = keys.values.get("linear_attn_config")
    if isinstance(linear, dict) and isinstance(linear.get("full_attn_layers"), list):  # Kimi Linear counts from 1
        full = Keys(linear, keys.file).numbers("full_attn_layers")
        return ["full" if i + 1 in full else "kda" for i in range(count)]
    listed = keys.first("layer_types", "layers_block_type", "hybrid_override_pattern")
    if listed is not None:
        value = keys.values[listed]
        items = list(value) if listed == "hybrid_override_pattern" and isinstance(value, str) else keys.listed(listed)
        if len(items) < count:
            raise keys.fail(listed, f"has {len(items)} items; {count} were expected, one a layer")
        return [_word(keys, listed, item, notes) for item in items[:count]]
    if keys.has("attn_layer_period"):
        period, offset = keys.whole("attn_layer_period"), keys.whole("attn_layer_offset", default=0, least=0)
        return ["full" if i % period == offset else "mamba" for i in range(count)]
    if keys.has("attn_layer_indices"):
        indices = keys.numbers("attn_layer_indices")
        return ["full" if i in indices else "mamba" for i in range(count)]
    if keys.has("full_attention_interval"):
        interval = keys.whole("full_attention_interval")
        return ["linear" if (i + 1) % interval else "full" for i in range(count)]
    if keys.has("mamba_d_ssm"):  # Falcon-H1: both in every layer
        return ["side by side"] * count
    return _sliding_words(keys, model_type, count)


def _word(keys: Keys, key: str, item: Any, notes: list[str]) -> str:
    if not isinstance(item, str):
        raise keys.fail(key, f"has an item {item!r:.40}; words were expected")
    if item not in _WORDS:
        note = f"layers of the unknown type {item[:40]!r} are counted as full attention: an upper bound"
        if note not in notes:
            notes.append(note)
    return _WORDS.get(item, "full")


def _sliding_words(keys: Keys, model_type: str, count: int) -> list[str]:
    if keys.has("no_rope_layers") and keys.has("attention_chunk_size"):  # Llama 4
        return ["chunked" if rope else "full" for rope in keys.listed("no_rope_layers", count)]
    if model_type == "llama4_text" and keys.has("attention_chunk_size"):
        return ["chunked" if (i + 1) % 4 else "full" for i in range(count)]
    if not keys.has("sliding_window") or not keys.flag("use_sliding_window", True):
        return ["full"] * count
    pattern = keys.values.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern:
        return [_WORDS.get(pattern[i % len(pattern)], "full") for i in range(count)]
    if pattern is not None or model_type in _PERIOD:
        period = keys.whole("sliding_window_pattern", default=_PERIOD.get(model_type))
        return ["sliding" if (i + 1) % period else "full" for i in range(count)]
    if keys.has("max_window_layers"):
        first = keys.whole("max_window_layers", least=0)
        return ["sliding" if i >= first else "full" for i in range(count)]
    return ["sliding"] * count


class _Makers:
    """Layers of one configuration, by their word."""

    def __init__(self, keys: Keys, model_type: str, hidden: int | None, notes: list[str]) -> None:
        self.keys, self.model_type, self.hidden, self.notes = keys, model_type, hidden, notes
        self._made: dict[str, Layer] = {}

    def layer(self, word: str) -> Layer:
        if word not in self._made:
            self._made[word] = getattr(self, "_" + word.replace(" ", "_"))()
        return self._made[word]

    def kv_heads(self) -> int:
        keys = self.keys
        heads = keys.whole(*HEADS)
        if keys.values.get("multi_query") is True and not keys.values.get("new_decoder_architecture"):
            return 1
        nested = keys.values.get("attn_config")  # DBRX, MPT
        if isinstance(nested, dict) and nested.get("kv_n_heads") is not None:
            return Keys(nested, keys.file).whole("kv_n_heads")
        return keys.whole(*KV_HEADS, default=heads)

    def _none(self) -> Layer:
        return NO_CACHE

    def _full(self, kind: str = "full", window: int | None = None) -> Layer:
        keys = self.keys
        if keys.has("kv_lora_rank"):
            if MLA_NOTE not in self.notes:
                self.notes.append(MLA_NOTE)
                if keys.has("index_head_dim"):
                    self.notes.append("the keys of the sparse-attention indexer (index_head_dim) are not counted")
            return latent_layer(keys.whole("kv_lora_rank"), keys.whole("qk_rope_head_dim", least=0))
        kv_heads = self.kv_heads()
        head_dim = keys.first(*HEAD_DIM)
        if head_dim is not None:
            size = keys.whole(head_dim)
        else:
            size, rest = divmod(keys.whole(*HIDDEN), keys.whole(*HEADS))
            if rest:  # also where it is less
                what = f"is {keys.whole(*HIDDEN)}, no multiple of the {keys.whole(*HEADS)} heads"
                raise keys.fail(keys.first(*HIDDEN) or HIDDEN[0], f"{what}; head_dim says their length")
        return heads_layer(kv_heads, size, keys.whole("v_head_dim", default=size), kind, window)

    def _sliding(self) -> Layer:
        return self._full("sliding", self.keys.whole("sliding_window"))

    def _chunked(self) -> Layer:
        return self._full("chunked", self.keys.whole("attention_chunk_size"))

    def _side_by_side(self) -> Layer:
        return both(self._full(), self._mamba())

    def _conv(self) -> Layer:
        hidden, last = self.keys.whole(*HIDDEN), self.keys.whole("conv_L_cache") - 1
        return Layer("recurrent", 0, None, hidden * last, f"{hidden} × {last} convolution")

    def _linear(self) -> Layer:
        """Gated delta net (Qwen3-Next)."""
        keys = self.keys
        key, value = keys.whole("linear_key_head_dim"), keys.whole("linear_value_head_dim")
        groups, heads = keys.whole("linear_num_key_heads"), keys.whole("linear_num_value_heads")
        return ssm_layer(keys.whole("linear_conv_kernel_dim"), heads * value, groups, key)

    def _kda(self) -> Layer:
        """Kimi delta attention."""
        keys = Keys(self.keys.values["linear_attn_config"], self.keys.file)
        heads, size = keys.whole("num_heads"), keys.whole("head_dim")
        last = keys.whole("short_conv_kernel_size", default=4) - 1
        words = f"3 × {last} × {heads} × {size} convolution + {heads} × {size} × {size} state"
        return Layer("recurrent", 0, None, 3 * last * heads * size + heads * size * size, words)

    def _mamba(self) -> Layer:
        keys = self.keys
        conv = keys.whole("mamba_d_conv", "conv_kernel", "conv_kernel_size")
        state = keys.whole("mamba_d_state", "ssm_state_size", "state_size")
        first = self.model_type in ("mamba", "falcon_mamba", "jamba")  # Mamba-1 has no groups
        groups = 0 if first else keys.whole("mamba_n_groups", "n_groups", default=1)
        return ssm_layer(conv, self._inner(), groups, state)

    def _inner(self) -> int:
        """Width inside a Mamba layer: said, or heads × their size, or the model's width expanded."""
        keys = self.keys
        if keys.has("mamba_d_ssm"):
            return keys.whole("mamba_d_ssm")
        for heads, size in (("mamba_n_heads", "mamba_d_head"), ("mamba_num_heads", "mamba_head_dim")):
            if keys.has(heads) and keys.has(size) and isinstance(keys.values[size], int):
                return keys.whole(heads) * keys.whole(size)
        if self.model_type in _MAMBA and keys.has("intermediate_size"):
            return keys.whole("intermediate_size")
        return keys.whole("mamba_expand", "expand", default=2) * keys.whole(*HIDDEN)
