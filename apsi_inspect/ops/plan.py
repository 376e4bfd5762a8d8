"""`plan`: the encoding of each tensor that gives the least total error within a size.

Contract: the size of the data is predicted to the byte; the total error is never above that of one format for all
that fits the same size, and the smallest possible wherever that can be proven (else the plan says how far it may be
from it); the same model and target give the same plan; a rule that matches nothing is an error. The error is the sum of
(x - y)² over all values of all tensors, or of w (x - y)² with an importance matrix. `tests/test_plan.py` enforces this.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import isfinite
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ModelFileError, ValueRefusedError, quote, visible
from ..listing import human_size
from ..model import ModelFile
from . import plan_choices
from .imatrix import Imatrix, weights_of
from .open import as_path
from .open import open as open_model
from .plan_choices import Menu
from .plan_errors import Errors, errors_of
from .plan_report import Plan, PlanRow, Uniform
from .plan_solve import Item, gain, solve, totals, undominated
from .save import parse_size

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from .error import ErrorTable
    from .plan_choices import Keep

__all__ = ["Plan", "plan"]

_NAMED = 5  # tensors that a message names
_MAX_BPW = 1024  # beyond any encoding; a target in bytes has its own end


def plan(
    model: ModelFile | str | os.PathLike[str],
    target: str | int | None = None,
    *,
    bpw: float | None = None,
    formats: Sequence[str] | str | None = None,
    keep: Keep | None = None,
    weights: Imatrix | str | os.PathLike[str] | None = None,
    errors: ErrorTable | None = None,
    container: str | None = None,
    sample: int | None = None,
    executor: Executor | None = None,
    progress: bool | None = None,
) -> Plan:
    """Choose an encoding for each tensor: the least total error within a size.

    Parameters
    ----------
    model
        An opened model, or what `open` takes.
    target
        At most so many bytes of tensor data: ``"4.2 GiB"`` (2^30), ``"4GB"`` (10^9) or a number.
    bpw
        Instead: at most so many bits per weight, on average over all elements of all tensors.
    formats
        What to choose from, ``["q8_0", "q6_k", "q4_k"]``. By default for GGUF q8_0, q6_k, q5_k, q4_k, q3_k and q2_k
        (and q5_1, q5_0, q4_1, q4_0 where some rows are no multiple of 256), for .apsim int8, fp8, fp6, int4 and fp4. A
        tensor that is quantized already may stay as it is.
    keep
        Exceptions: ``{"output.weight": "q6_k", "token_embd*": None}``, a glob and its encoding, None leaves it as it
        is; or ``["output.weight=q6_k", "token_embd*"]``. The last one that matches counts.
    weights
        An importance matrix of llama.cpp, or its path: errors of a column count as much as its input. A tensor without
        weights counts with the mean of the others.
    errors
        What `quant_error` has measured for this model already; the rest is measured now.
    container
        ``"gguf"``, ``"apsim"`` or ``"safetensors"``; by default .apsim for .apsim, GGUF for others.
    sample
        Look at so many values of each tensor only (`quant_error`): faster, and the errors are estimates.
    executor
        Where to measure; by default threads here.
    progress
        True, False, or None: a bar where it takes long.

    Returns
    -------
    Plan
        For `convert`'s ``plan=``.

    Raises
    ------
    ValueRefusedError
        The target is below the smallest size (the message has the range), a rule matches no tensor, or an argument
        means nothing. A target above the largest size is none: every tensor gets its most exact encoding, and the plan
        says so (`Plan.reached`).
    OSError, ModelFileError
        A file cannot be read.
    """
    if not isinstance(model, ModelFile):
        with open_model(as_path(model)) as opened:
            return plan(
                opened, target, bpw=bpw, formats=formats, keep=keep, weights=weights, errors=errors,
                container=container, sample=sample, executor=executor, progress=progress,
            )  # fmt: skip
    incomplete = next((f for f in model.findings if f.code == "incomplete"), None)
    if incomplete is not None:
        raise ModelFileError(model.path, incomplete.message, hint="all parts are needed to plan for it")
    if errors is not None and not hasattr(errors, "frame"):
        raise ValueRefusedError(f"errors is {type(errors).__name__}; what quant_error returns was expected")
    into = plan_choices.container_for(model, container)
    words = plan_choices.default_formats(model, into) if formats is None else formats
    parsed = plan_choices.parse_formats(words, into)
    rules = plan_choices.parse_keep(keep, into)
    matrix = None if weights is None else weights_of(weights)
    menus = plan_choices.menus(model, into, parsed, rules, plan_choices.written(model))
    if not menus:
        raise ValueRefusedError(f"{visible(model.path)} has no tensors to plan for")
    limit = _limit(target, bpw, menus)
    _reach(limit, [min(o.nbytes for o in m.options) for m in menus], [_most(m) for m in menus])  # before measuring
    found = errors_of(model, menus, errors, matrix, sample, executor, progress)
    sampled = sample if errors is None else errors.sampled
    items, uses = _items(menus, found)
    smallest, largest = _range(items)
    _reach(limit, [smallest], [largest])  # some formats cannot hold some values
    uniform = {w: _uniform(w, menus, uses) for w in parsed}
    solution = solve(items, min(limit, largest), [u for u in uniform.values() if u is not None])
    return Plan(
        model.path,
        into,
        limit,
        smallest,
        largest,
        tuple(parsed),
        tuple(str(r) for r in rules),
        None if matrix is None else matrix.path,
        sampled,
        tuple(_row(*given) for given in zip(menus, found, items, uses, solution.choices, strict=True)),
        tuple(_compared(w, items, u, limit) for w, u in uniform.items() if u is not None),
        solution.bound,
        solution.exact,
    )


def _limit(target: str | int | None, bpw: float | None, menus: Sequence[Menu]) -> int:
    if (target is None) == (bpw is None):
        raise ValueRefusedError("give either a target, like '4.2 GiB', or bpw, like 4.5")
    if bpw is None:
        limit = parse_size(target)
        assert limit is not None
        return limit
    if isinstance(bpw, bool) or not _is_real(bpw) or not 0 < bpw <= _MAX_BPW:
        raise ValueRefusedError(f"bpw is {bpw!r:.40}; bits per weight above 0, like 4.5 (at most 1024), were expected")
    return int(float(bpw) * sum(m.numel for m in menus) / 8)


def _is_real(value: Any) -> bool:
    """Whether it is a number, NumPy's included."""
    return isinstance(value, Real)


def _reach(limit: int, smallest: Sequence[int], largest: Sequence[int]) -> None:
    """Refuse a target below what is possible, where that is known already."""
    low, high = sum(smallest), sum(largest)
    if limit < low:
        what = f"{limit} bytes are below the smallest possible size: {low} to {high} bytes"
        raise ValueRefusedError(f"{what} ({human_size(low)} to {human_size(high)}) with these formats and rules")


def _most(menu: Menu) -> int:
    """Bytes beyond which a tensor gains nothing: of the smallest option without loss, else of the largest."""
    exact = [o.nbytes for o in menu.options if o.lossless]
    return min(exact) if exact else max(o.nbytes for o in menu.options)


def _range(items: Sequence[Item]) -> tuple[int, int]:
    """Bytes of the smallest choices, and of those that are the most exact."""
    chains = [undominated(item) for item in items]
    ends = [(int(i.nbytes[c[0]]), int(i.nbytes[c[-1]])) for i, c in zip(items, chains, strict=True)]
    return sum(e[0] for e in ends), sum(e[1] for e in ends)


def _items(menus: Sequence[Menu], found: Sequence[Errors]) -> tuple[list[Item], list[list[int]]]:
    """What there is to choose from, without the options that cannot hold the values; and their places in the menus."""
    items, uses = [], []
    places = [[i for i in range(len(m.options)) if isfinite(e.errors[i])] for m, e in zip(menus, found, strict=True)]
    none = [m.name for m, use in zip(menus, places, strict=True) if not use]
    if none:
        names = ", ".join(map(quote, none[:_NAMED])) + (f" and {len(none) - _NAMED} more" if none[_NAMED:] else "")
        what = f"tensor {names}" if len(none) == 1 else f"{len(none)} tensors, {names}"
        their, them = ("its", "it") if len(none) == 1 else ("their", "them")
        raise ValueRefusedError(
            f"{what}: no format here can hold {their} values (NaN or infinity?); name {them} in keep"
        )
    for menu, e, use in zip(menus, found, places, strict=True):
        items.append(Item(np.array([menu.options[i].nbytes for i in use], np.int64), e.errors[use]))
        uses.append(use)
    return items, uses


def _uniform(word: str, menus: Sequence[Menu], uses: Sequence[list[int]]) -> list[int] | None:
    """The choices of one format for all; None where a tensor cannot have it."""
    at = [m.uniform.get(word, 0) for m in menus]
    if any(i not in use for i, use in zip(at, uses, strict=True)):
        return None
    return [use.index(i) for i, use in zip(at, uses, strict=True)]


def _compared(word: str, items: Sequence[Item], choices: Sequence[int], limit: int) -> Uniform:
    nbytes, error = totals(items, choices)
    return Uniform(word, nbytes, error, nbytes <= limit)


def _row(menu: Menu, e: Errors, item: Item, use: list[int], choice: int) -> PlanRow:
    option = menu.options[use[choice]]
    chain = undominated(item).tolist()
    at = chain.index(choice) if choice in chain else 0
    return PlanRow(
        menu.name,
        menu.shape,
        menu.source.name,
        option.encoding.name,
        float(item.errors[choice]),
        float(e.squares[use[choice]]),
        e.signal,
        option.nbytes,
        gain(item, chain[at - 1], chain[at]) if at else None,
        len(use),
        menu.reason,
    )
