"""`hardware_plan`: the memory that a model needs, and how many devices of which size hold it.

Contract: every number comes with its formula; what is not exact is called an estimate; what was assumed is listed. From
headers and `config.json` alone: no value is read, nothing is written. `tests/test_hardware.py` works the numbers out
from published configurations.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from math import ceil, isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ModelFileError, ValueRefusedError
from ..formats.base import is_remote, open_beside
from ..listing import human_count
from ..model import ModelFile
from .attention import AttentionShape
from .attention_config import ARGUMENTS, from_config
from .attention_gguf import from_gguf
from .hardware_report import Cache, HardwarePlan, Need
from .hardware_weights import (
    DEFAULT,
    STORED,
    Training,
    Weights,
    as_stored,
    bits_of,
    check_words,
    count_of,
    estimated,
    experts,
    of_model,
    parse_count,
    routed_from,
    routed_of,
    training_rows,
)
from .open import as_path, source_of
from .open import open as open_model
from .save import parse_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..source import ByteSource

_CONFIG_LIMIT = 1 << 24
_NO_SHAPE = (
    "the KV cache is not counted: there is neither a config.json nor GGUF keys; give config=, or layers=, heads=, "
    "kv_heads=, head_dim="
)


def hardware_plan(
    model: ModelFile | str | os.PathLike[str] | None = None,
    *,
    parameters: str | int | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    kv_lora_rank: int | None = None,
    rope_dim: int | None = None,
    sliding_window: int | None = None,
    encodings: str | Iterable[str] | None = None,
    context: int | Iterable[int] = (4096, 32768, 131072),
    batch: int = 1,
    kv_dtype: str = "f16",
    device_memory: str | int | Iterable[str | int] = "80GB",
    overhead: float = 0.1,
    shard: str | int = "4GB",
    training: str | None = None,
) -> HardwarePlan:
    """The memory and the devices that a model needs, each number with its formula.

    Parameters
    ----------
    model
        An opened model or a path: weights are then exact. None: `parameters` says how many there are.
    parameters
        ``"70B"``, ``"1.8T"`` or a number; the weights are then estimates.
    config
        A ``config.json`` (its path or URL, or its content as a dict); by default the keys of a GGUF file, else the
        config.json beside the model.
    layers, hidden, heads, kv_heads, head_dim, kv_lora_rank, rope_dim, sliding_window
        The shape, where no file says it, or instead of what `config` says. `kv_lora_rank` and `rope_dim`: latent
        attention (MLA). `sliding_window`: of all layers.
    encodings
        Of the weights, in words as `convert` takes them; ``"as stored"`` is the file as it is.
    context
        Tokens of a sequence, prompt and answer together; one number or several.
    batch
        Sequences at a time.
    kv_dtype
        Encoding of the cache.
    device_memory
        Of one device: ``"80GB"`` (10^9), ``"24GiB"`` (2^30), bytes, or several.
    overhead
        Share of each device that is kept free for activations, the runtime and fragmentation.
    shard
        The largest file.
    training
        ``"adamw"``, ``"adamw-8bit"``, ``"lion"``, ``"sgd"``, ``"sgd-momentum"``: also the memory of training.

    Returns
    -------
    HardwarePlan

    Raises
    ------
    ValueRefusedError
        An argument is absurd or missing.
    ModelFileError, OSError
        The model or its configuration cannot be used; the message names the key.
    """
    shape = dict(zip(ARGUMENTS, (layers, hidden, heads, kv_heads, head_dim, kv_lora_rank, rope_dim, sliding_window),
                     strict=True))  # fmt: skip
    asked = _Asked(
        None if parameters is None else parse_count(parameters),
        {ARGUMENTS[k]: whole(v, k) for k, v in shape.items() if v is not None},
        config,
        _words(encodings),
        tuple(sorted({whole(c, "context") for c in _several(context)})),
        whole(batch, "batch"),
        kv_dtype,
        tuple(_size(d, "device_memory") for d in _several(device_memory)),
        _share(overhead),
        _size(shard, "shard"),
        training,
    )
    bits_of(kv_dtype)
    if training is not None:
        training_rows(training, 1)
    if model is None:
        return _plan(None, asked)
    if parameters is not None:
        raise ValueRefusedError("model and parameters: give one of them")
    if isinstance(model, ModelFile):
        return _plan(model, asked)
    with open_model(as_path(model)) as opened:
        return _plan(opened, asked)


class _Asked(NamedTuple):
    parameters: int | None
    shape: dict[str, int]
    config: str | os.PathLike[str] | Mapping[str, Any] | None
    words: tuple[str, ...] | None
    contexts: tuple[int, ...]
    batch: int
    kv_dtype: str
    devices: tuple[int, ...]
    overhead: float
    shard: int
    training: str | None


def whole(value: Any, what: str) -> int:
    """A whole number above 0."""
    import operator

    try:
        if not isinstance(value, bool) and 0 < operator.index(value) <= 1 << 50:
            return operator.index(value)
    except TypeError:
        pass
    raise ValueRefusedError(f"{what} is {value!r:.40}; a whole number above 0 was expected")


def _several(value: Any) -> list[Any]:
    items = [value] if isinstance(value, (str, int)) or not isinstance(value, Iterable) else list(value)
    if not items:
        raise ValueRefusedError("context and device_memory: at least one of each is needed")
    return items


def _size(value: Any, what: str) -> int:
    try:
        size = parse_size(value)
    except (ValueRefusedError, OverflowError) as exc:
        raise ValueRefusedError(f"{what}: {exc}") from None
    if not size or size > 1 << 60:
        raise ValueRefusedError(f"{what} is {value!r:.40}; a size like '80GB' was expected")
    return size


def _share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value) or not 0 <= value < 1:
        raise ValueRefusedError(f"overhead is {value!r:.40}; a share from 0 to below 1 was expected")
    return float(value)


def _words(encodings: str | Iterable[str] | None) -> tuple[str, ...] | None:
    if encodings is None:
        return None
    words = (encodings,) if isinstance(encodings, str) else tuple(encodings)
    if not words:
        raise ValueRefusedError("encodings is empty; at least one was expected")
    check_words(words)
    return words


def _plan(model: ModelFile | None, asked: _Asked) -> HardwarePlan:
    config, file = _config(model, asked)
    shape = _shape(model, config, file)
    count = asked.parameters if model is None else count_of(model)
    if count is None:
        raise ValueRefusedError("give a model, or parameters= (like '70B')")
    weights = _weights(model, count, shape.hidden if shape else None, asked)
    bits = bits_of(asked.kv_dtype)
    cache = () if shape is None else tuple(
        Cache(c, asked.batch, shape.nbytes(c, asked.batch, bits), shape.formula(c, asked.batch, bits))
        for c in asked.contexts
    )  # fmt: skip
    parts = () if asked.training is None else training_rows(asked.training, count)
    active, sentence = _active(model, count, config, file)
    name = model.path if model is not None else f"{human_count(count)} parameters"
    return HardwarePlan(
        name, count, active, model is not None, weights, cache, parts, _needs(weights, cache, parts, asked), shape,
        asked.overhead, asked.kv_dtype, asked.shard, tuple(_assumptions(model, shape, asked, sentence)),
    )  # fmt: skip


def _config(model: ModelFile | None, asked: _Asked) -> tuple[Mapping[str, Any] | None, str | None]:
    """The configuration with what the arguments say instead, and the name of its file."""
    given, file = asked.config, None
    found: Mapping[str, Any] | None = None
    if isinstance(given, Mapping):
        found, file = given, "config"
    elif given is not None:
        file = os.fsdecode(os.fspath(given))
        found = _read(source_of(file))
    elif model is not None and not asked.shape:
        beside = None if f"{model.architecture}.block_count" in model.metadata else _beside(model)
        if beside is not None:
            found, file = _read(beside), beside.name
    if asked.shape:
        from .attention_config import inner

        found = {**(inner(found) if found is not None else {}), **asked.shape}
    return found, file


def _beside(model: ModelFile) -> ByteSource | None:
    """The config.json in the folder of a model, or at its URL."""
    first = model.sources[0] if model.sources else None
    if first is None or not (is_remote(first) or os.path.isfile(first.name)):
        return None
    try:
        return open_beside(first, "config.json")
    except FileNotFoundError:
        return None


def _read(source: ByteSource) -> dict[str, Any]:
    """A JSON object from a file, which is then closed."""
    name = source.name
    try:
        if source.size > _CONFIG_LIMIT:
            raise ModelFileError(name, f"has {source.size} bytes; a config.json has fewer than {_CONFIG_LIMIT}")
        value = json.loads(bytes(source.read_at(0, source.size)))
    except (ValueError, RecursionError) as exc:
        raise ModelFileError(name, f"is no JSON document: {exc}") from None
    finally:
        source.close()
    if not isinstance(value, dict):
        raise ModelFileError(name, f"is a JSON {type(value).__name__}; an object was expected")
    return value


def _shape(model: ModelFile | None, config: Mapping[str, Any] | None, file: str | None) -> AttentionShape | None:
    if config is not None:
        return from_config(config, file)
    if model is None or f"{model.architecture}.block_count" not in model.metadata:
        return None
    return from_gguf(model.metadata, str(model.architecture), model.path)


def _weights(model: ModelFile | None, count: int, hidden: int | None, asked: _Asked) -> tuple[Weights, ...]:
    if model is None:
        words = asked.words or DEFAULT
        if STORED in words:
            raise ValueRefusedError(f"encodings: {STORED!r} needs a model")
        return tuple(estimated(count, word, hidden, asked.shard) for word in words)
    words = asked.words or (STORED, *DEFAULT)
    return tuple(as_stored(model) if word == STORED else of_model(model, word, asked.shard) for word in words)


def _needs(
    weights: Sequence[Weights], cache: Sequence[Cache], parts: Sequence[Training], asked: _Asked
) -> tuple[Need, ...]:
    cases: list[tuple[str, int | None, int]] = []
    for w in weights:
        if w.nbytes is not None:
            cases += [(w.encoding, c.context, w.nbytes + c.nbytes) for c in cache] or [(w.encoding, None, w.nbytes)]
    if parts:
        cases.append((f"training: {asked.training}", None, sum(t.nbytes for t in parts)))
    return tuple(
        Need(encoding, context, nbytes, device, max(1, ceil(nbytes / (device * (1 - asked.overhead)))))
        for encoding, context, nbytes in cases
        for device in asked.devices
    )


def _active(
    model: ModelFile | None, count: int, config: Mapping[str, Any] | None, file: str | None
) -> tuple[int | None, str]:
    """Parameters that a token uses, and how they were counted."""
    metadata = model.metadata if model is not None else {}
    arch = model.architecture if model is not None else None
    number, used = experts(config, metadata, arch, file or (model.path if model is not None else "config"))
    if not number:
        return None, ""
    routed, formula = routed_of(model) if model is not None else 0, "tensors of routed experts"
    if not routed and config is not None and model is None:
        routed, formula = routed_from(config, file)
    if not 0 < routed <= count:
        return None, ""
    active = count - routed + routed * used // number
    share = f"{used} of {number} experts are used for a token"
    word = "exact" if model is not None else "an estimate"
    return active, f"active parameters: {count} − {routed} ({formula}) × (1 − {used} / {number}); {share} ({word})"


def _assumptions(model: ModelFile | None, shape: AttentionShape | None, asked: _Asked, active: str) -> Iterable[str]:
    free = f"{asked.overhead:.0%} of each device is kept free for activations, the runtime and fragmentation"
    yield f"devices = ceil(bytes / (memory of one × {1 - asked.overhead:g})): {free} (an estimate)"
    yield "weights and cache divide evenly over devices (an estimate); GB is 10^9 bytes, GiB 2^30"
    if model is None:
        yield "weights are estimates: every parameter in the encoding named, headers not counted"
    if shape is None:
        yield _NO_SHAPE
    else:
        yield f"cache: {shape.kind}, from {shape.source}; elements in {asked.kv_dtype}, recurrent states in float32"
        yield from shape.notes
        if shape.context_length is not None and max(asked.contexts) > shape.context_length:
            yield f"the model was made for contexts up to {shape.context_length} tokens"
    if asked.training is not None:
        yield "training in mixed precision (ZeRO, Rajbhandari et al. 2020); activations are not counted: a lower bound"
    if active:
        yield active
