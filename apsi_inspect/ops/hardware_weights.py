"""What the weights of a model take in each encoding, and what training adds: the arithmetic behind `hardware_plan`.

Contract: for a file, the sizes are those of a dry run of `convert` (so its fallbacks count), to the byte; for a number
of parameters they are estimates, and say so. `tests/test_hardware.py` enforces both.
"""

from __future__ import annotations

import os
import re
import tempfile
from math import ceil, prod
from typing import NamedTuple

from ..encodings import ENCODINGS
from ..encodings.scaled import PACKING
from ..errors import ValueRefusedError, quote
from ..listing import packing, parameters, plural, rows
from .attention import Keys
from .attention_config import HIDDEN, LAYERS, inner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from ..encodings import Encoding
    from ..model import ModelFile

DEFAULT = ("bf16", "fp8", "q8_0", "q6_k", "q4_k", "int4")
STORED = "as stored"
_UNITS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_MOST = 10**18
_ROW = 4096  # elements of a row where the width of the model is not known
_EXPERT = re.compile(r"\.experts(\.|$)|_exps(\.|$)")
_STEP = ("moe_layer_freq", "decoder_sparse_step", "expert_layer_period", "interleave_moe_layer_step")
_COUNT = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_USED = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_topk")


class Weights(NamedTuple):
    """The weights in one encoding.

    Attributes
    ----------
    nbytes
        In memory; None where the model cannot be stored so (`note` says why).
    bpw
        Bits per weight.
    files, file_bytes
        Shards of at most the size asked for, and the bytes of all with headers (None for an estimate).
    exact
        False for an estimate.
    formula
        How it was worked out.
    note
        What `convert` would do otherwise than asked, or why it cannot.
    """

    encoding: str
    nbytes: int | None
    bpw: float
    files: int
    file_bytes: int | None
    exact: bool
    formula: str
    note: str = ""


# optimizer -> ((what, bytes a parameter), …) in mixed precision; `Training` adds weights and gradients
OPTIMIZERS: dict[str, tuple[tuple[str, float], ...]] = {
    "adamw": (("float32 copy of the weights", 4), ("first moment, float32", 4), ("second moment, float32", 4)),
    "adamw-8bit": (("float32 copy of the weights", 4), ("first moment, 8 bits", 1), ("second moment, 8 bits", 1)),
    "lion": (("float32 copy of the weights", 4), ("momentum, float32", 4)),
    "sgd-momentum": (("float32 copy of the weights", 4), ("momentum, float32", 4)),
    "sgd": (("float32 copy of the weights", 4),),
}


class Training(NamedTuple):
    """One part of the memory of training; `nbytes` = parameters × `per_parameter`."""

    what: str
    per_parameter: float
    nbytes: int


def training_rows(optimizer: str, count: int) -> tuple[Training, ...]:
    """Mixed-precision training (Rajbhandari et al. 2020, ZeRO, section 3.1: 16 bytes a parameter with Adam).

    Raises
    ------
    ValueRefusedError
        The optimizer is not known.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueRefusedError(f"training {optimizer!r:.40} is not one of {', '.join(OPTIMIZERS)}")
    parts = (("weights, bfloat16", 2), ("gradients, bfloat16", 2), *OPTIMIZERS[optimizer])
    return tuple(Training(what, each, int(each * count)) for what, each in parts)


def encoding_of(word: str) -> tuple[str, Encoding]:
    """The container (GGUF where it has the encoding, else .apsim) and the encoding of a word."""
    from .targets import menu_of, parse_dtype

    try:
        return "gguf", parse_dtype(word, "gguf")
    except ValueRefusedError:
        if str(word).lower() in PACKING or str(word).upper() in menu_of("apsim"):
            return "apsim", parse_dtype(word, "apsim")
        raise


def of_model(model: ModelFile, word: str, limit: int) -> Weights:
    """Exact: what a dry run of `convert` gives."""
    from .convert_plan import Options, plan

    container, encoding = encoding_of(word)
    path = os.path.join(tempfile.gettempdir(), f"apsi-plan.{container}")  # nothing is written
    options = Options(
        path=path, container=container, asked=encoding, rules=None, limit=limit, block=None, architecture=None,
        alignment=None, by=None, durable=False, threads=None, force=True,
    )  # fmt: skip
    try:
        report = plan(model, options).report
    except ValueRefusedError as exc:
        return Weights(word, None, 0.0, 0, None, True, "", str(exc))
    nbytes = sum(t.nbytes for t in report.tensors)
    elements = sum(prod(t.shape) for t in report.tensors)
    files = len(report.files) - (container != "gguf" and len(report.files) > 1)  # without the index
    others: dict[str, int] = {}
    for t in report.tensors:
        if t.reason or t.after != encoding.name:  # an integer tensor has no reason
            others[t.after] = others.get(t.after, 0) + 1
    note = "not as asked: " * bool(others) + ", ".join(f"{n} × {e}" for e, n in others.items())
    note = "; ".join(filter(None, (_of_apsim(container), note)))
    bits = 8 * nbytes / elements if elements else 0.0
    text = f"sum over {plural(len(report.tensors), 'tensor')} of blocks × bytes of a block"
    return Weights(word, nbytes, bits, files, report.size_after, True, text, note)


def _of_apsim(container: str) -> str:
    """Said where the encoding is not one of GGUF, which is what others are in."""
    return "in an .apsim" if container == "apsim" else ""


def as_stored(model: ModelFile) -> Weights:
    """The file as it is."""
    nbytes = sum(int(n) for n in model.columns.sizes)
    count = count_of(model)
    bits = 8 * nbytes / count if count else 0.0
    return Weights(STORED, nbytes, bits, len(model.files), model.file_size, True, "sum of the tensors' bytes")


def estimated(count: int, word: str, hidden: int | None, limit: int) -> Weights:
    """Parameters × bits per weight / 8, as if every tensor took the encoding."""
    container, encoding = encoding_of(word)
    bits, text = encoding.bpw, f"{encoding.bpw:g}"
    if encoding.kind == "scaled" and encoding.name != "bf16":
        length = (hidden or _ROW) if encoding.bpw >= 8 else 32
        bits, text = encoding.bpw + 32 / length, f"({encoding.bpw:g} + 32 / {length})"
    nbytes = ceil(count * bits / 8)
    formula = f"{count} parameters × {text} bits / 8"
    return Weights(word, nbytes, bits, ceil(nbytes / limit), None, False, formula, _of_apsim(container))


def count_of(model: ModelFile) -> int:
    """Logical parameters."""
    from ..listing import totals

    return totals(model).parameters


def routed_of(model: ModelFile) -> int:
    """Logical parameters of the routed experts, by the names of their tensors."""
    listed, factors = rows(model, sort="file"), packing(model)
    return sum(parameters(r, factors) for r in listed if _EXPERT.search(r.name) and "shared_expert" not in r.name)


def experts(
    config: Mapping[str, Any] | None, metadata: Mapping[str, Any], arch: str | None, file: str
) -> tuple[int, int]:
    """How many experts there are and how many a token uses; (0, 0) where the keys do not say."""
    keys = (
        Keys(inner(config), file)
        if config is not None
        else Keys(
            {"num_experts": metadata.get(f"{arch}.expert_count"), "moe_k": metadata.get(f"{arch}.expert_used_count")},
            file, {"num_experts": f"{arch}.expert_count", "moe_k": f"{arch}.expert_used_count"},
        )
    )  # fmt: skip
    if hasattr(keys.values.get("moe_k"), "__len__"):  # another number in each layer
        return 0, 0
    count, used = keys.whole(*_COUNT, default=0, least=0), keys.whole(*_USED, default=0, least=0)
    if not count or not used:
        return 0, 0
    if used > count:
        raise keys.fail(keys.first(*_USED) or "", f"is {used}, more than the {count} experts there are")
    return count, used


def routed_from(config: Mapping[str, Any], file: str | None) -> tuple[int, str]:
    """Parameters of the routed experts by the configuration, and the formula; an estimate."""
    config = inner(config)
    keys = Keys(config, file)
    count, layers = keys.whole(*_COUNT, default=0, least=0), keys.whole(*LAYERS)
    wide = keys.whole("moe_intermediate_size", "intermediate_size", default=0, least=0)
    hidden = keys.whole(*HIDDEN, default=0, least=0)
    step = keys.whole(*_STEP, default=1)
    dense = keys.whole("first_k_dense_replace", default=0, least=0)
    sparse = max(layers - dense, 0) // step
    return sparse * count * 3 * hidden * wide, f"{sparse} layers × {count} experts × 3 × {hidden} × {wide}"


def parse_count(value: Any) -> int:
    """``"70B"`` (10^9), ``"1.8T"``, ``"350M"`` or a number, of parameters."""
    given = value
    if isinstance(value, str):
        found = re.fullmatch(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([kKmMbBgGtT]?)\s*", value)
        if found:
            value = round(float(found[1]) * _UNITS[found[2].upper()])
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueRefusedError(f"parameters {given!r:.40}: a number above 0 like '70B' was expected")
    if value > _MOST:
        raise ValueRefusedError(f"parameters {given!r:.40} is too large; at most 1000000T (10^18) were expected")
    return value


def check_words(words: Sequence[str]) -> None:
    """Refuse what is no encoding before any work."""
    for word in words:
        if word != STORED:
            try:
                encoding_of(word)
            except ValueRefusedError as exc:
                raise ValueRefusedError(f"encodings: {exc}") from None


def bits_of(word: str) -> float:
    """Bits of an element of a cache.

    Raises
    ------
    ValueRefusedError
        No float or block encoding of that name.
    """
    from .targets import _NUMPY_NAMES

    if isinstance(word, str):
        name = {"fp8": "F8_E4M3"}.get(word.lower()) or _NUMPY_NAMES.get(word.lower(), word.upper())
        encoding = ENCODINGS.get(name)
        if encoding is not None and encoding.kind in ("float", "block"):
            return encoding.bpw
    raise ValueRefusedError(f"kv_dtype {quote(str(word))} is not like 'f16', 'bf16', 'fp8' or 'q8_0'")
