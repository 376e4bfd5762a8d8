r"""A plan as the arguments of `llama-quantize`: ``--tensor-type PATTERN=TYPE`` for every matrix.

The pattern is a regular expression that is searched for in the name, written in small letters; the first that matches
counts, in older versions the last (`tools/quantize/quantize.cpp`, `src/llama-quant.cpp`). Therefore every pattern here
is anchored, no two of different types match one name, and each matrix is named, so that neither the order nor the
mixture of the type at the end matters. Matrices of a type are said together: ``^blk\.(0|3)\.(attn_k|attn_v)\.weight$``

Contract: the arguments give every matrix the type of the plan, or it is refused. What `llama-quantize` never quantizes
(norms, expert gates and the like) it leaves as it is. `tests/test_plan.py` applies the patterns as it does.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..encodings import ENCODINGS
from ..errors import ValueRefusedError, quote

if TYPE_CHECKING:
    from .plan_report import Plan, PlanRow

_NUMBERED = re.compile(r"([^0-9]*\.)([0-9]+)(\..*)", re.DOTALL)
_TYPES = (
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "TQ1_0",
    "TQ2_0",
)


def check(path: str, container: str) -> None:
    """Refuse what llama-quantize does not take; known before anything is measured."""
    if container != "gguf" or not path.lower().endswith(".gguf"):
        raise ValueRefusedError(
            "llama-quantize takes a GGUF model to GGUF; this plan is for another container or model"
        )


def arguments(plan: Plan, target: str = "planned.gguf") -> list[str]:
    """All arguments after the program's name: options, the model, `target`, the type.

    Raises
    ------
    ValueRefusedError
        The plan is not for GGUF, or a name cannot be written as a pattern.
    """
    check(plan.path, plan.container)
    rows = [r for r in plan.rows if len(r.shape) > 1 and ENCODINGS[r.chosen].kind in ("float", "block")]
    patterns = _patterns(rows)
    _check(rows, patterns)
    out = ["--allow-requantize"] if any(ENCODINGS[r.source].is_block and r.source != r.chosen for r in rows) else []
    for pattern, name in patterns:
        out += ["--tensor-type", f"{pattern}={name.lower()}"]
    return [*out, plan.path, target, _main(rows)]


def _main(rows: list[PlanRow]) -> str:
    """The type at the end; it has to be one of blocks, else no pattern counts."""
    sizes: dict[str, int] = {}
    for r in rows:
        if r.chosen in _TYPES:
            sizes[r.chosen] = sizes.get(r.chosen, 0) + r.numel
    return max(sizes, key=sizes.__getitem__, default="Q8_0")


def _patterns(rows: list[PlanRow]) -> list[tuple[str, str]]:
    """(Pattern, type), those of a type and the same blocks in one."""
    blocks: dict[tuple[str, str], dict[str, list[str]]] = {}
    single: dict[str, list[str]] = {}
    for r in rows:
        found = _NUMBERED.fullmatch(r.name)
        if found is None:
            single.setdefault(r.chosen, []).append(r.name)
        else:
            blocks.setdefault((found[1], found[3]), {}).setdefault(r.chosen, []).append(found[2])
    joined: dict[tuple[str, str, str], list[str]] = {}
    for (before, after), types in blocks.items():
        for name, numbers in types.items():
            which = "[0-9]+" if len(types) == 1 else _any_of(numbers)
            joined.setdefault((before, which, name), []).append(after)
    out = [(f"^{_any_of([_escape(n) for n in names])}$", name) for name, names in single.items()]
    out += [(f"^{_escape(b)}{which}{_tails(tails)}$", name) for (b, which, name), tails in joined.items()]
    return out


def _tails(tails: list[str]) -> str:
    """Endings of names, what they all end in said once."""
    ending = ".weight" if all(t.endswith(".weight") and len(t) > 8 for t in tails) else ""
    middles = [_escape(t.removeprefix(".").removesuffix(ending)) for t in tails]
    return rf"\.{_any_of(middles)}{_escape(ending)}"


def _any_of(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else f"({'|'.join(texts)})"


def _escape(name: str) -> str:
    """A name as a pattern; what an argument cannot say becomes a dot, which matches any character."""
    out = []
    for c in name:
        if not c.isascii() or not c.isprintable():
            raise ValueRefusedError(f"llama-quantize cannot be told of tensor {quote(name)}")
        plain = c.islower() or c.isdigit() or c in "_-/:,"
        out.append(c if plain else "." if c.isupper() or c in "= " else "\\" + c)
    return "".join(out)


def _check(rows: list[PlanRow], patterns: list[tuple[str, str]]) -> None:
    """Every row's name is matched by patterns of its own type alone."""
    compiled = [(re.compile(p), name) for p, name in patterns]
    for r in rows:
        if {name for p, name in compiled if p.search(r.name)} != {r.chosen}:
            raise ValueRefusedError(f"llama-quantize cannot be told of tensor {quote(r.name)}: others have a like name")
