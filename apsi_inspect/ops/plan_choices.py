"""What `plan` chooses from: the encodings that each tensor can have in a container, with their bytes.

Contract: an option is what `convert` would make of the tensor (`targets.choose`), and its `nbytes` are those of the
tensor's data in the file that `convert` writes. Every uniform conversion (one format for all) is a choice of options.
Headers alone are read. `tests/test_plan.py` compares with files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ..encodings import ENCODINGS
from ..errors import ValueRefusedError, quote
from ..formats.gguf_write import Spec
from .inputs import input_of
from .targets import CONTAINERS, Choice, choose, menu_of, parse_dtype

if TYPE_CHECKING:
    from ..encodings import Encoding
    from ..model import ModelFile
    from .inputs import Input

    Keep = Mapping[str, str | None] | Sequence[str]

SUPER_BLOCKS = ("q8_0", "q6_k", "q5_k", "q4_k", "q3_k", "q2_k")
BLOCKS_OF_32 = ("q5_1", "q5_0", "q4_1", "q4_0")  # where rows are no multiple of 256, which the others need
SCALED = ("int8", "fp8", "fp6", "int4", "fp4")
_LARGE = 256
_EXACT = ("kept", "exact", "expanded")


class Option(NamedTuple):
    """One encoding that a tensor can have.

    Attributes
    ----------
    nbytes
        Stored bytes of its data.
    lossless
        The values do not change.
    """

    encoding: Encoding
    nbytes: int
    lossless: bool


class Menu(NamedTuple):
    """The options of one tensor.

    Attributes
    ----------
    source
        Its encoding in the model.
    uniform
        Format -> position of the option that `convert` gives the tensor for it.
    reason
        Why there is no choice, or which formats do not fit and what stands for them; "" where all fit.
    """

    name: str
    shape: tuple[int, ...]
    source: Encoding
    options: tuple[Option, ...]
    uniform: Mapping[str, int]
    reason: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class Rule(NamedTuple):
    """A glob of `keep`, and its encoding (None: as it is)."""

    pattern: str
    encoding: Encoding | None

    def __str__(self) -> str:
        return self.pattern if self.encoding is None else f"{self.pattern}={self.encoding.name.lower()}"


def container_for(model: ModelFile, container: str | None) -> str:
    """The container to plan for: as asked; else .apsim for an .apsim model, GGUF for all others."""
    if container is None:
        return "apsim" if model.format == "apsim" else "gguf"
    if container not in CONTAINERS.values():
        raise ValueRefusedError(f"container {container!r:.40} is none of {', '.join(CONTAINERS.values())}")
    return container


def default_formats(model: ModelFile, container: str) -> tuple[str, ...]:
    """The formats to choose from where none are named."""
    if container == "apsim":
        return SCALED
    if container != "gguf":
        menu = ", ".join(name.lower() for name in menu_of(container))
        raise ValueRefusedError(f"formats are needed for {container}, some of: {menu}")
    infos = (model.info(i) for i in range(len(model)))
    uneven = any(i.encoding.kind in ("float", "block") and len(i.shape) > 1 and i.shape[-1] % _LARGE for i in infos)
    return SUPER_BLOCKS + (BLOCKS_OF_32 if uneven else ())


def parse_formats(formats: Sequence[str], container: str) -> dict[str, Encoding]:
    """Words -> encodings, each encoding once."""
    if isinstance(formats, str):
        formats = [w for w in re.split(r"[\s,]+", formats) if w]
    elif not isinstance(formats, Iterable):
        raise ValueRefusedError(f"formats is {type(formats).__name__}; words like ['q8_0', 'q4_k'] were expected")
    out: dict[str, Encoding] = {}
    for word in formats:
        encoding = parse_dtype(word, container)
        if encoding not in out.values():
            out[encoding.name.lower()] = encoding
    if not out:
        raise ValueRefusedError("formats is empty; name at least one, like 'q4_k'")
    return out


def parse_keep(keep: Keep | None, container: str) -> list[Rule]:
    """Rules from ``{"output.weight": "q6_k", "token_embd*": None}`` or ``["output.weight=q6_k", "token_embd*"]``."""
    pairs: list[tuple[str, str | None]] = []
    if isinstance(keep, Mapping):
        pairs = list(keep.items())
    elif isinstance(keep, str):
        raise ValueRefusedError(f"keep is the text {keep!r:.60}; a list or a dict of rules was expected")
    elif keep is not None and not isinstance(keep, Iterable):
        raise ValueRefusedError(f"keep is {type(keep).__name__}; a list or a dict of rules was expected")
    else:
        for text in keep or ():
            if not isinstance(text, str):
                raise ValueRefusedError(f"keep has {text!r:.60}; a rule is a text like 'output.weight=q6_k'")
            pattern, _, word = text.rpartition("=") if "=" in text else (text, "", "")
            if not pattern or ("=" in text and not word):
                raise ValueRefusedError(f"{text!r:.80} is neither PATTERN=TYPE nor PATTERN, like 'output.weight=q6_k'")
            pairs.append((pattern, word or None))
    strange = next((pattern for pattern, _ in pairs if not isinstance(pattern, str)), None)
    if strange is not None:
        raise ValueRefusedError(f"keep has the key {strange!r:.60}; a pattern of names was expected")
    return [Rule(pattern, None if word is None else parse_dtype(word, container)) for pattern, word in pairs]


def menus(
    model: ModelFile, container: str, formats: Mapping[str, Encoding], rules: Sequence[Rule], tensors: Sequence[str]
) -> list[Menu]:
    """The options of every tensor that `convert` writes.

    Raises
    ------
    ValueRefusedError
        A rule matches no tensor, or asks for what does not fit; or the container cannot hold a tensor.
    """
    ruled: dict[str, Rule] = {}
    for rule in rules:
        hit = [n for n in tensors if fnmatchcase(n, rule.pattern)]
        if not hit:
            raise ValueRefusedError(f"keep rule {quote(rule.pattern)} matches no tensor name")
        ruled |= dict.fromkeys(hit, rule)
    return [_menu(input_of(model[n]), model[n].nbytes, container, formats, ruled.get(n)) for n in tensors]


def written(model: ModelFile) -> list[str]:
    """The names that `convert` writes: all but the scales and zero points that become part of another tensor."""
    aside = {name for affine in model.affine.values() for name in affine.companions}
    return [n for n in model.columns.names if n not in aside]


def _menu(source: Input, nbytes: int, container: str, formats: Mapping[str, Encoding], rule: Rule | None) -> Menu:
    def picked(asked: Encoding | None, by_rule: bool = False) -> Choice:
        return choose(source.name, source.encoding, source.shape, container, asked, by_rule)

    def option(choice: Choice) -> Option:
        stored = stored_bytes(source, nbytes, choice.encoding)
        return Option(choice.encoding, stored, choice.action in _EXACT)

    if rule is not None:
        only = option(picked(rule.encoding, rule.encoding is not None))
        reason = f"rule {rule.pattern}: " + ("as it is" if rule.encoding is None else rule.encoding.name)
        return Menu(source.name, source.shape, source.encoding, (only,), dict.fromkeys(formats, 0), reason)
    kept = picked(None)
    found: dict[str, Option] = {}
    uniform: dict[str, str] = {}
    unfit: dict[tuple[str, str], list[str]] = {}
    for word, asked in formats.items():
        choice = picked(asked)
        name = choice.encoding.name
        found.setdefault(name, option(choice))
        uniform[word] = name
        if choice.reason and choice.encoding != asked:
            instead = "as it is" if choice.encoding == kept.encoding else name
            unfit.setdefault((_plain(choice.reason, asked), instead), []).append(word)
    if source.encoding.kind in ("block", "scaled") and kept.encoding.name not in found:
        found[kept.encoding.name] = option(kept)  # it has its errors already, and would only get more
    places = {name: i for i, name in enumerate(found)}
    reason = _reason(source, len(found), unfit)
    at = {word: places[name] for word, name in uniform.items()}
    return Menu(source.name, source.shape, source.encoding, tuple(found.values()), at, reason)


def _plain(reason: str, asked: Encoding) -> str:
    """A reason without the format's name, to be said once for several formats."""
    return reason.removesuffix(f" of {asked.name}")


def _reason(source: Input, count: int, unfit: Mapping[tuple[str, str], list[str]]) -> str:
    if not unfit:
        return "not a float" if source.encoding.kind in ("int", "uint", "bool", "complex") else ""
    if count == 1:
        return next(iter(unfit))[0]
    return "; ".join(f"{', '.join(words)}: {why}, {instead} instead" for (why, instead), words in unfit.items())


def stored_bytes(source: Input, nbytes: int, encoding: Encoding) -> int:
    """Bytes of a tensor's data in an encoding, its scales included, as `convert` writes them.

    Parameters
    ----------
    nbytes
        Stored bytes in the model.
    """
    if encoding.kind != "scaled":
        return Spec(source.name, encoding, source.shape).nbytes
    if source.encoding.name == encoding.name:
        return nbytes
    from .recode import ScaledMaker

    maker = ScaledMaker(source, encoding.name, None)
    return prod(maker.code_shape) * ENCODINGS[maker.code_dtype].block_bytes + 4 * prod(maker.scale_shape)
