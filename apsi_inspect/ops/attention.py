"""`AttentionShape`: what a model keeps of each token while it generates, and the bytes of it.

Contract: layers that cache alike are one `CacheGroup`, which says how many elements it keeps for a token, for how many
tokens at most, and how many whatever the context. The formulas are arithmetic over these and are said in words.
Sources: llama.cpp (`llama-hparams.cpp`: `n_embd_k_gqa`, `n_embd_r`, `n_embd_s`; `llama-kv-cache.cpp`: with latent
attention there is no V), the configurations of transformers, and DeepSeek-V2 (arXiv 2405.04434, table 1).
`tests/test_hardware.py` compares with figures worked out from published configurations.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import ModelFileError, ValueRefusedError, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

MAX_LAYERS = 1 << 16
_MAX = 1 << 40
STATE_BYTES = 4  # runtimes keep recurrent states in float32

MLA_NOTE = "the latent is kept once for all heads (vLLM, SGLang, llama.cpp); transformers keeps full keys and values"


class CacheGroup(NamedTuple):
    """Layers that cache alike.

    Attributes
    ----------
    kind
        ``"full"``, ``"sliding"``, ``"chunked"``, ``"latent"`` (MLA), ``"recurrent"`` or ``"none"`` (no cache
        of its own).
    layers
        How many.
    per_token
        Elements that one layer keeps of one token.
    window
        Tokens that it keeps at most; None: all.
    state
        Elements that one layer keeps of one sequence whatever its length (float32).
    formula
        What `per_token` and `state` are made of, in words.
    """

    kind: str
    layers: int
    per_token: int
    window: int | None
    state: int
    formula: str

    def nbytes(self, tokens: int, bits: float) -> int:
        """Bytes for one sequence of so many tokens, `bits` for an element of the cache."""
        kept = tokens if self.window is None else min(tokens, self.window)
        return self.layers * (-(-int(kept * self.per_token * bits) // 8) + self.state * STATE_BYTES)

    def words(self, tokens: int, bits: float) -> str:
        """The arithmetic of `nbytes`."""
        kept = f"{tokens} tokens" if self.window is None else f"min({tokens}, {self.window}) tokens"
        terms = [f"{kept} × ({self.formula}) × {bits / 8:g} bytes"] if self.per_token else []
        if self.state:
            terms.append(f"{self.state} × {STATE_BYTES} bytes" if terms else f"({self.formula}) × {STATE_BYTES} bytes")
        return f"{self.layers} layers × {' + '.join(terms) if len(terms) == 1 else '(' + ' + '.join(terms) + ')'}"


class AttentionShape(NamedTuple):
    """The cache of a model.

    Attributes
    ----------
    kind
        For people: ``"GQA"``, ``"MLA"``, ``"GQA, sliding window of 4096"``, ``"hybrid: …"``.
    groups
        Its layers by what they cache.
    source
        Where the shape was read.
    hidden
        Width of the model; None where it is not said.
    context_length
        What the model was made for, in tokens; None where it is not said.
    notes
        What was assumed.
    """

    kind: str
    groups: tuple[CacheGroup, ...]
    source: str
    hidden: int | None = None
    context_length: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        """Of all kinds."""
        return sum(g.layers for g in self.groups)

    def nbytes(self, tokens: int, batch: int, bits: float) -> int:
        """Bytes of the cache for `batch` sequences of `tokens` each."""
        return batch * sum(g.nbytes(tokens, bits) for g in self.groups)

    def formula(self, tokens: int, batch: int, bits: float) -> str:
        """The arithmetic of `nbytes`."""
        terms = " + ".join(g.words(tokens, bits) for g in self.groups if g.per_token or g.state) or "0"
        return terms if batch == 1 else f"{batch} sequences × ({terms})"


class Layer(NamedTuple):
    """One layer, before equal ones are put together."""

    kind: str
    per_token: int = 0
    window: int | None = None
    state: int = 0
    formula: str = ""


NO_CACHE = Layer("none", formula="nothing")


def grouped(layers: Iterable[Layer]) -> tuple[CacheGroup, ...]:
    """Equal layers together, in the order in which they first appear."""
    counts: dict[Layer, int] = {}
    for layer in layers:
        counts[layer] = counts.get(layer, 0) + 1
    return tuple(CacheGroup(g.kind, n, *g[1:]) for g, n in counts.items())


def heads_layer(kv_heads: int, key: int, value: int, kind: str = "full", window: int | None = None) -> Layer:
    """A layer that keeps the keys and values of its heads."""
    words = f"2 × {kv_heads} KV heads × {key}" if key == value else f"{kv_heads} KV heads × ({key} + {value})"
    return Layer(kind, kv_heads * (key + value), window, 0, words)


def latent_layer(rank: int, rope: int) -> Layer:
    """Multi-head latent attention: all that is kept is the latent and the rotary key, shared by all heads."""
    return Layer("latent", rank + rope, None, 0, f"{rank} latent + {rope} rotary")


def ssm_layer(conv: int, inner: int, groups: int, state: int) -> Layer:
    """A state-space (Mamba) or gated delta-net layer: the last columns of its convolution, and its state."""
    wide = inner + 2 * groups * state
    across = f"({inner} + 2 × {groups} × {state})" if groups else str(inner)
    words = f"{max(conv - 1, 0)} × {across} convolution + {state} × {inner} state"
    return Layer("recurrent", 0, None, max(conv - 1, 0) * wide + state * inner, words)


def both(attention: Layer, recurrent: Layer) -> Layer:
    """A layer with attention and a state side by side (Falcon-H1)."""
    return Layer(attention.kind, attention.per_token, attention.window, recurrent.state, attention.formula)


def encoder(layers: int, source: str, hidden: int | None, context: int | None) -> AttentionShape:
    """A model that reads its whole input at once keeps nothing of it."""
    note = "an encoder: it reads its whole input at once and keeps no KV cache"
    return AttentionShape("encoder, no KV cache", grouped([NO_CACHE] * layers), source, hidden, context, (note,))


def kind_of(groups: tuple[CacheGroup, ...], heads: int | None, kv_heads: Iterable[int]) -> str:
    """The name of a shape; `kv_heads` of its layers with attention."""
    counts = {n for n in kv_heads if n}
    several = len(counts) > 1
    base = "GQA" if several or heads is None or not counts else _base(heads, max(counts))
    words = {
        "full": base,
        "sliding": "sliding window",
        "chunked": "chunked attention",
        "latent": "MLA",
        "recurrent": "recurrent",
        "none": "without cache",
    }
    kinds = [g.kind for g in groups]
    if set(kinds) <= {"sliding"} or set(kinds) <= {"chunked"}:
        return f"{base}, {words[kinds[0]]} of {groups[0].window}" if groups else base
    if len(set(kinds)) == 1:
        both_too = kinds[0] != "recurrent" and any(g.state for g in groups)
        return words[kinds[0]] + (" with a recurrent state" if both_too else "")
    parts = []
    for g in groups:
        window = f" of {g.window}" if g.window is not None else ""
        parts.append(f"{g.layers} × {words[g.kind]}{window}")
    more = f" ({base})" if "full" not in kinds and "latent" not in kinds and counts else ""
    return "hybrid: " + ", ".join(parts) + more


def _base(heads: int, kv_heads: int) -> str:
    return "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"


class Keys:
    """Whole numbers and lists out of a mapping from a file, each checked; an error names the key.

    Parameters
    ----------
    values
        The mapping.
    file
        Its name, for errors; None: the arguments of a call, whose errors are `ValueRefusedError`.
    names
        Keys as the user knows them, where they are others.
    prefix
        What stands before each key in the file.
    """

    def __init__(
        self, values: Mapping[str, Any], file: str | None, names: Mapping[str, str] | None = None, prefix: str = ""
    ) -> None:
        self.values, self.file, self.names, self.prefix = values, file, names or {}, prefix

    def fail(self, key: str, reason: str) -> ModelFileError | ValueRefusedError:
        """The error for a key."""
        said = self.prefix + self.names.get(key, key)
        if self.file is None:
            return ValueRefusedError(f"{said} {reason}")
        return ModelFileError(self.file, reason, where=f"key {quote(said)}")

    def has(self, key: str) -> bool:
        """Whether it is there and not null."""
        return self.values.get(key) is not None

    def first(self, *keys: str) -> str | None:
        """The first of some keys that is there."""
        return next((k for k in keys if self.has(k)), None)

    def whole(self, *keys: str, default: int | None = None, least: int = 1, most: int = _MAX) -> int:
        """A whole number under the first of some keys that is there, else the default, else an error."""
        key = self.first(*keys)
        if key is None:
            if default is None:
                more = len(keys) > 1 and self.file is not None
                others = f" (nor is there {', '.join(keys[1:])})" if more else ""
                raise self.fail(keys[0], "is missing; the cache cannot be worked out without it" + others)
            return default
        return self.check(key, self.values[key], least, most)

    def check(self, key: str, value: Any, least: int, most: int = _MAX) -> int:
        """One value as a whole number in its bounds."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.fail(key, f"is {value!r:.40}; a whole number from {least} to {most} was expected")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, f"is {value!r:.40}; true or false was expected")
        return value

    def per_layer(self, key: str, layers: int, least: int = 0) -> list[int] | None:
        """A whole number per layer, from an array or from one number; None where the key is missing."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, (int, float)):
            return [self.check(key, value, least)] * layers
        return [self.check(key, int(v) if isinstance(v, bool) else v, least) for v in self.listed(key, layers)]

    def numbers(self, key: str) -> set[int]:
        """The whole numbers of a list."""
        return {self.check(key, v, 0) for v in self.listed(key)}

    def listed(self, key: str, count: int | None = None) -> list[Any]:
        """A list, of so many items at least."""
        value = self.values[key]
        if isinstance(value, (str, bytes, dict)) or not hasattr(value, "__len__"):
            raise self.fail(key, f"is {value!r:.40}; a list was expected")
        if len(value) > MAX_LAYERS or (count is not None and len(value) < count):
            need = "" if count is None else f"; {count} were expected, one a layer"
            raise self.fail(key, f"has {len(value)} items{need}")
        return list(value[:count])
