"""The shape of a model's cache from the keys of a GGUF file, as llama.cpp reads them.

Defaults that llama.cpp knows by architecture (the period of sliding windows, which layers are recurrent) are tables
here; their source is `load_arch_hparams` in `src/models/*.cpp`. `tests/test_hardware.py` has the arithmetic.
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

# architecture -> period of its pattern: all but the last of so many layers slide (the first, where it stands below)
_PERIOD = {
    "afmoe": 4, "cohere2": 4, "cohere2moe": 4, "exaone4": 4, "exaone-moe": 4, "gemma-embedding": 6, "gemma2": 2,
    "gemma3": 6, "gemma3n": 5, "gpt-oss": 2, "llama4": 4, "modern-bert": 3, "olmo2": 4, "plamo3": 8, "smallthinker": 4,
}  # fmt: skip
_DENSE_FIRST = {"cohere2moe", "modern-bert", "smallthinker"}
_WINDOW = {"gemma2": 4096, "exaone-moe": 128, "smallthinker": 4096, "llama4": 8192}
_RECURRENT = {"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"}
_INTERVAL = {"qwen3next", "qwen35", "qwen35moe"}  # every fourth layer has attention, the others a gated delta net
_SIDE_BY_SIDE = {"falcon-h1"}
_OWN_CACHE = {"gemma3n": 20}  # later layers use the caches of these
_NOT_SLIDING = "llama.cpp does not use the sliding window of this architecture: counted in full"
_SWA_NOTE = "llama.cpp keeps its micro-batch (512 tokens by default) in addition to each sliding window"


def from_gguf(metadata: Mapping[str, Any], arch: str, file: str) -> AttentionShape:
    """Read the shape.

    Raises
    ------
    ModelFileError
        A key that is needed is missing, of another type, or out of bounds; the message names it.
    """
    prefix = arch + "."
    own = {k.removeprefix(prefix): _plain(metadata, k) for k in metadata if k.startswith(prefix)}
    keys = Keys(own, file, prefix=prefix)
    count = keys.whole("block_count", most=MAX_LAYERS) - keys.whole("nextn_predict_layers", default=0, least=0)
    if count < 1:
        raise keys.fail("nextn_predict_layers", "leaves no layer of block_count")
    hidden = keys.whole("embedding_length", default=0, least=0) or None
    context = keys.whole("context_length", default=0, least=0) or None
    if not keys.flag("attention.causal", True):
        return encoder(count, f"GGUF keys {prefix}*", hidden, context)
    notes: list[str] = []
    states = _recurrent(keys, arch, count)
    heads = 1 if arch in _RECURRENT else max(keys.per_layer("attention.head_count", count) or [0])
    if arch not in _RECURRENT and not heads:
        raise keys.fail("attention.head_count", "is missing; the cache cannot be worked out without it")
    given = keys.per_layer("attention.head_count_kv", count)
    kv_heads = [0] * count if arch in _RECURRENT else given or [heads] * count
    layers = _layers(keys, arch, kv_heads, heads, hidden, states, notes)
    groups = grouped(layers)
    if any(g.kind == "sliding" for g in groups):
        notes.append(_SWA_NOTE)
    name = kind_of(groups, heads, [n for n, s in zip(kv_heads, layers, strict=True) if s.per_token])
    return AttentionShape(name, groups, f"GGUF keys {prefix}*", hidden, context, tuple(notes))


def _plain(metadata: Mapping[str, Any], key: str) -> Any:
    value = metadata[key]
    short = hasattr(value, "__len__") and not isinstance(value, (str, bytes, dict)) and len(value) <= MAX_LAYERS
    return list(value[:]) if short else value


def _layers(
    keys: Keys, arch: str, kv_heads: list[int], heads: int, hidden: int | None, states: list[Layer | None],
    notes: list[str],
) -> list[Layer]:  # fmt: skip
    count = len(kv_heads)
    attends = [bool(n) and (s is None or arch in _SIDE_BY_SIDE) for n, s in zip(kv_heads, states, strict=True)]
    slides, window = _sliding(keys, arch, count, notes)
    shared = keys.whole("attention.shared_kv_layers", default=max(count - _OWN_CACHE.get(arch, count), 0), least=0)
    latent = _latent(keys, notes)
    sizes = _sizes(keys, heads, hidden) if any(attends) and latent is None else {}
    out = []
    for i, n in enumerate(kv_heads):
        layer = NO_CACHE
        if attends[i] and i < count - shared:
            kind = "full" if not slides[i] else "chunked" if arch == "llama4" else "sliding"
            layer = latent or heads_layer(n, *sizes[slides[i]], kind, window if slides[i] else None)
        state = states[i]
        out.append(layer if state is None else both(layer, state) if layer.per_token else state)
    return out


def _sizes(keys: Keys, heads: int, hidden: int | None) -> dict[bool, tuple[int, int]]:
    """Length of a head's key and value, in layers that do not slide and in those that do."""
    usual = (hidden or 0) // heads
    if not usual and not (keys.has("attention.key_length") and keys.has("attention.value_length")):
        raise keys.fail("embedding_length", "is missing; the cache cannot be worked out without it")
    key = keys.whole("attention.key_length", default=usual)
    value = keys.whole("attention.value_length", default=usual)
    swa = keys.whole("attention.key_length_swa", default=key), keys.whole("attention.value_length_swa", default=value)
    return {False: (key, value), True: swa}


def _latent(keys: Keys, notes: list[str]) -> Layer | None:
    if not keys.has("attention.kv_lora_rank"):
        return None
    if not keys.has("attention.key_length_mla"):
        notes.append("an older conversion, without key_length_mla: llama.cpp caches full keys and values")
        return None
    rank = keys.whole("attention.kv_lora_rank")
    rope = keys.whole("rope.dimension_count", default=keys.whole("attention.key_length", default=rank) - rank, least=0)
    notes.append(MLA_NOTE)
    if keys.has("attention.indexer.key_length"):
        notes.append("the keys of the sparse-attention indexer are not counted")
    return latent_layer(rank, rope)


def _sliding(keys: Keys, arch: str, count: int, notes: list[str]) -> tuple[list[bool], int | None]:
    """Which layers slide, and over how many tokens."""
    size = keys.whole("attention.sliding_window", default=_WINDOW.get(arch, 0), least=0)
    if arch == "llama4" and size:
        size = _WINDOW[arch]  # llama.cpp sets it so, whatever the key says
    pattern = keys.values.get("attention.sliding_window_pattern")
    if not size or (arch not in _PERIOD and pattern is None):
        if size:
            notes.append(_NOT_SLIDING)
        return [False] * count, None
    if isinstance(pattern, list):
        return [bool(v) for v in keys.listed("attention.sliding_window_pattern", count)], size
    period = keys.whole("attention.sliding_window_pattern", default=_PERIOD.get(arch), least=0)
    if period == 0:
        return [True] * count, size
    dense = 0 if arch in _DENSE_FIRST else period - 1
    return [i % period != dense for i in range(count)], size


def _recurrent(keys: Keys, arch: str, count: int) -> list[Layer | None]:
    """The state of each layer that has one."""
    layer = _state(keys, arch)
    if layer is None:
        return [None] * count
    if arch in _RECURRENT or arch in _SIDE_BY_SIDE:
        return [layer] * count
    if keys.has("attention.recurrent_layers"):
        return [layer if v else None for v in keys.listed("attention.recurrent_layers", count)]
    if arch in _INTERVAL:
        interval = keys.whole("full_attention_interval", default=4)
        return [layer if (i + 1) % interval else None for i in range(count)]
    kv = keys.per_layer("attention.head_count_kv", count) or [1] * count
    forward = keys.per_layer("feed_forward_length", count) if arch.startswith("nemotron_h") else None
    return [layer if not n and not (forward and forward[i]) else None for i, n in enumerate(kv)]


def _state(keys: Keys, arch: str) -> Layer | None:
    if keys.has("wkv.head_size"):  # RWKV
        hidden, size = keys.whole("embedding_length"), keys.whole("wkv.head_size")
        shift = keys.whole("token_shift_count", default=2)
        return Layer("recurrent", 0, None, hidden * (size + shift), f"{hidden} × ({size} state + {shift} token shift)")
    if keys.has("shortconv.l_cache"):  # LFM2
        hidden, last = keys.whole("embedding_length"), keys.whole("shortconv.l_cache") - 1
        return Layer("recurrent", 0, None, hidden * last, f"{hidden} × {last} convolution")
    if keys.has("kda.head_dim"):  # Kimi Linear
        size, heads = keys.whole("kda.head_dim"), max(keys.per_layer("attention.head_count", 1) or [1])
        last = keys.whole("ssm.conv_kernel", default=4) - 1
        words = f"3 × {last} × {heads} × {size} convolution + {heads} × {size} × {size} state"
        return Layer("recurrent", 0, None, 3 * last * heads * size + heads * size * size, words)
    if not keys.has("ssm.state_size") and arch not in _RECURRENT:
        return None
    conv, inner = keys.whole("ssm.conv_kernel"), keys.whole("ssm.inner_size")
    return ssm_layer(conv, inner, keys.whole("ssm.group_count", default=0, least=0), keys.whole("ssm.state_size"))
