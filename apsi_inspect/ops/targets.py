"""Which encoding a tensor gets in a container: the rules of `save_gguf` and `convert`, from the header alone.

Contract: `choose` never loses values silently: a change that the user did not ask for comes with its reason. It knows
nothing of the values, so that a dry run gives the exact size. `docs/convert.md` has the rules as a table;
`tests/test_convert.py` runs every encoding into every container.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ..encodings import ENCODINGS, Encoding
from ..encodings.encode import can_encode
from ..encodings.scaled import PACKING
from ..errors import ValueRefusedError, quote
from ..formats.gguf_write import TYPE_IDS
from ..formats.safetensors import DTYPES
from .recode import EXACT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CONTAINERS = {".gguf": "gguf", ".safetensors": "safetensors", ".apsim": "apsim"}
# What GGUF has no type for -> the narrowest that holds every value
_WIDER = {"BOOL": "I8", "U8": "I16", "U16": "I32", "U32": "I64", "U64": "I64"}
_SMALL = {"I4": "I8", "U4": "I8", "I2": "I8", "U2": "I8", "C32": "C64"}  # what no container of ours has a type for
_NUMPY_NAMES = {e.dtype: e.name for e in ENCODINGS.values() if e.kind == "float"} | {"half": "F16", "float": "F32"}


class Choice(NamedTuple):
    """The encoding of a tensor in the target.

    Attributes
    ----------
    action
        ``"kept"`` (the same bytes), ``"exact"`` (other bytes, the same values), ``"expanded"`` (to a wider type that
        the container has) or ``"re-encoded"``.
    reason
        Why it is not what was asked for; "" where it is.
    """

    encoding: Encoding
    action: str
    reason: str = ""


class Rule(NamedTuple):
    """``PATTERN=TYPE``: tensors whose name matches the glob get the encoding."""

    pattern: str
    encoding: Encoding


def container_of(path: str) -> str:
    """The container that the ending of a path names."""
    for ending, name in CONTAINERS.items():
        if path.lower().endswith(ending):
            return name
    raise ValueRefusedError(f"{quote(path)}: the ending says what to write: {', '.join(CONTAINERS)}")


def parse_dtype(word: str, container: str) -> Encoding:
    """An encoding by the container's word in any case (``"q4_k"``), or NumPy's (``"float16"``).

    Raises
    ------
    ValueRefusedError
        Not known, not in that container, or one that cannot be made here.
    """
    if not isinstance(word, str):
        raise ValueRefusedError(f"dtype {word!r:.40} is not a word like 'f16' or 'q8_0'")
    scaled = word.lower() if word.lower() in PACKING else None
    name = scaled if scaled and container == "apsim" else _NUMPY_NAMES.get(word.lower(), word.upper())
    if name == "bf16":
        name = "BF16"
    menu = menu_of(container)
    if name not in menu:
        near = word.upper().rsplit("_", 1)[0]
        hint = f"; {word} is a mixture: take {near.lower()}, and tensor_types for the others" if near in menu else ""
        raise ValueRefusedError(
            f"dtype {quote(word)} cannot be written to {container}; it takes {', '.join(m.lower() for m in menu)}{hint}"
        )
    return ENCODINGS[name]


def menu_of(container: str) -> list[str]:
    """Names of the encodings that floats can be written in."""
    if container == "gguf":
        names: Iterable[str] = TYPE_IDS
    else:
        names = DTYPES
    plain = [n for n in names if ENCODINGS[n].kind in ("float", "block") and can_encode(ENCODINGS[n])]
    return [*plain, *(f for f in PACKING if f != "bf16")] if container == "apsim" else plain


def parse_rules(rules: Sequence[str | tuple[str, str]] | dict[str, str] | None, container: str) -> list[Rule]:
    """Per-tensor rules from ``"PATTERN=TYPE"``, pairs or a dict."""
    out = []
    for rule in rules.items() if isinstance(rules, dict) else rules or ():
        pattern, word = rule.rpartition("=")[::2] if isinstance(rule, str) else rule
        if not pattern or not word:
            raise ValueRefusedError(f"{rule!r:.80} is not PATTERN=TYPE, like 'blk.*.attn_v.weight=q6_k'")
        out.append(Rule(pattern, parse_dtype(word, container)))
    return out


def assign(names: Sequence[str], rules: Sequence[Rule]) -> dict[str, Encoding]:
    """Tensor name -> encoding of the last rule that matches; a rule that matches nothing is refused."""
    out: dict[str, Encoding] = {}
    for rule in rules:
        hit = [n for n in names if fnmatchcase(n, rule.pattern)]
        if not hit:
            raise ValueRefusedError(f"tensor type rule {quote(rule.pattern)} matches no tensor name")
        out |= dict.fromkeys(hit, rule.encoding)
    return out


def choose(
    name: str,
    encoding: Encoding,
    shape: tuple[int, ...],
    container: str,
    asked: Encoding | None,
    by_rule: bool = False,
) -> Choice:
    """The encoding of a tensor in a container.

    Parameters
    ----------
    asked
        What the user wants floats in; None: as they are, as far as the container can.
    by_rule
        A rule names this very tensor: what does not fit is then refused.
    """
    if encoding.kind in ("int", "uint", "bool", "complex"):
        return _not_float(name, encoding, container)
    kept = _kept(encoding, container)
    if asked is None:
        return kept
    fit, reason = _fit(asked, encoding, shape, container, by_rule)
    if reason and by_rule:
        raise ValueRefusedError(f"tensor {quote(name)}: {asked.name} was asked for, but {reason}")
    if fit is None:
        return kept._replace(reason=reason)
    if fit == encoding:
        return Choice(fit, "kept", reason)
    if EXACT.get(encoding.name) == fit.name and kept.encoding == fit:
        return Choice(fit, "exact", reason)
    return Choice(fit, "expanded" if _holds(fit, encoding) else "re-encoded", reason)


def _not_float(name: str, encoding: Encoding, container: str) -> Choice:
    if encoding.name in (TYPE_IDS if container == "gguf" else DTYPES):
        return Choice(encoding, "kept")
    wider = _SMALL.get(encoding.name) or (_WIDER.get(encoding.name) if container == "gguf" else None)
    if wider is None or (wider == "C64" and container == "gguf"):
        raise ValueRefusedError(f"tensor {quote(name)}: {container} cannot hold {encoding.name}")
    word = "GGUF" if container == "gguf" else container
    return Choice(ENCODINGS[wider], "expanded", f"{word} has no {encoding.name}")


def _kept(encoding: Encoding, container: str) -> Choice:
    """As it is, or else the nearest that holds all its values."""
    if encoding.name == "bf16":
        return Choice(encoding, "kept") if container == "apsim" else Choice(ENCODINGS["BF16"], "kept")
    if container == "gguf":
        has = encoding.name in TYPE_IDS
    else:
        has = encoding.name in DTYPES or (container == "apsim" and encoding.kind == "scaled")
    if has:
        return Choice(encoding, "kept")
    if container == "apsim" and encoding.name in EXACT:
        return Choice(ENCODINGS[EXACT[encoding.name]], "exact")
    return Choice(ENCODINGS["F32"], "expanded", f"{container} has no {encoding.name}")


def _fit(
    asked: Encoding, encoding: Encoding, shape: tuple[int, ...], container: str, by_rule: bool
) -> tuple[Encoding | None, str]:
    """What is possible of what was asked; None: leave it as it is."""
    row = shape[-1] if shape else 1
    if asked.kind == "scaled":
        if len(shape) < 2:
            return None, f"it is {len(shape)}-D; only matrices are quantized"
        return asked, ""
    if container == "gguf" and len(shape) < 2 and asked.name != "F64":
        wanted = asked.is_block or (asked.name in ("F16", "BF16") and not by_rule)
        if wanted:
            return ENCODINGS["F32"], f"it is {len(shape)}-D; runtimes need those in F32"
    if asked.is_block and row % asked.block_size:
        return ENCODINGS["F16"], f"rows of {row} are no multiple of the {asked.block_size} of {asked.name}"
    if asked.block_size > 1 and not asked.is_block and prod(shape) % asked.block_size:
        return ENCODINGS["F16"], f"{prod(shape)} elements do not fill whole bytes of {asked.name}"
    return asked, ""


def _holds(wide: Encoding, narrow: Encoding) -> bool:
    """Whether every value of one float encoding is a value of another."""
    if narrow.kind in ("block", "scaled"):
        return wide.name in ("F32", "F64")
    ranks = {"F64": 4, "F32": 3, "F16": 2, "BF16": 2}
    inside = {("F16", n) for n in ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2")}
    inside |= {("BF16", n) for _, n in inside} | {("BF16", "F8_E8M0")}
    return ranks.get(wide.name, 0) > ranks.get(narrow.name, 1) >= 1 and (
        ranks.get(wide.name, 0) > 2 or (wide.name, narrow.name) in inside
    )
