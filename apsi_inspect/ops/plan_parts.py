"""What a plan shows: its size and error, one format for all beside it, the tensors, and what did not fit.

The same parts give text and HTML. `tests/test_plan.py` looks at both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..listing import human_size
from ..parts import Badge, Column, Details, Stack, Strip, Table, Text
from .plan_report import decibels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..parts import Inline, Part
    from .plan_report import Plan, PlanRow

SHOWN = 60


def plan_parts(plan: Plan, shown: int | None = SHOWN) -> Stack:
    """The parts of a plan; at most `shown` tensors (None: all)."""
    chosen = [r for r in plan.rows if r.options > 1]  # the others stand below, many in a line
    rows = list(plan.rows) if shown is None else chosen[:shown]
    more = f"{len(chosen) - len(rows)} more in .frame and --json" if len(rows) < len(chosen) else ""
    parts: list[Part] = [_head(plan), *_notes(plan), _encodings(plan), _uniform(plan)]
    parts.append(Details("Tensors", _tensors(rows, plan.error, more), open=len(rows) <= 20))
    if plan.fallbacks:
        parts.append(Details("Without a choice, or with other formats instead", _fallbacks(plan)))
    return Stack(parts)


def _head(plan: Plan) -> Strip:
    chips: list[tuple[str, Inline]] = [
        ("tensors", str(len(plan.rows))),
        ("data", f"{human_size(plan.nbytes)} ({plan.nbytes} bytes)"),
        ("bits per weight", f"{plan.bpw:.4f}"),
        ("target", _target(plan)),
        ("possible", f"{human_size(plan.smallest)} to {human_size(plan.largest)}"),
        ("weighted error" if plan.weights else "squared error", number(plan.error)),
        ("SQNR", decibels(plan.sqnr_db)),
    ]
    if plan.weights:
        chips.append(("weights", Text(plan.weights, "code")))
    return Strip(Text(plan.path, "code"), f"plan for {plan.container}", chips)


def _target(plan: Plan) -> str:
    left = f"{plan.target - plan.nbytes} bytes are left" if plan.reached else "not reached"
    return f"{human_size(plan.target)} ({left})"


def _notes(plan: Plan) -> list[Part]:
    if not plan.reached:
        why = "every tensor has its most exact encoding of these formats, and no larger one lessens the error"
        out: list[Part] = [Badge("warning", f"the target is not reached: {why}")]
    elif plan.optimal:
        out = [Badge("note", "no choice of these formats within the target has a smaller error")]
    else:
        gap = plan.error / plan.bound - 1 if plan.bound else float("inf")
        out = [Badge("note", f"the error is at most {gap:.2%} above the smallest possible")]
    if plan.sampled is not None:
        out.append(Badge("note", f"errors are estimates from {plan.sampled} values of each tensor"))
    return out


def _encodings(plan: Plan) -> Table:
    groups: dict[str, list[PlanRow]] = {}
    for r in plan.rows:
        groups.setdefault(r.chosen, []).append(r)
    rows: list[list[Inline]] = [
        [
            Text(name, "code"),
            str(len(found)),
            human_size(sum(r.nbytes for r in found)),
            _share(sum(r.nbytes for r in found), plan.nbytes),
            _share(sum(r.error for r in found), plan.error),
        ]
        for name, found in sorted(groups.items(), key=lambda g: -sum(r.nbytes for r in g[1]))
    ]
    heads = ["encoding", "tensors", "bytes", "of the bytes", "of the error"]
    return Table(_columns(heads), rows, "Chosen")


def _uniform(plan: Plan) -> Table:
    rows: list[list[Inline]] = [[Text("this plan", "strong"), human_size(plan.nbytes), number(plan.error), "", ""]]
    rows += [
        [
            Text(u.format, "code"),
            human_size(u.nbytes),
            number(u.error),
            f"{number(u.error / plan.error)} ×" if plan.error else "",
            "" if u.fits else "above the target",
        ]
        for u in sorted(plan.uniform, key=lambda u: (-u.nbytes, u.error))
    ]
    return Table(_columns(["one format for all", "bytes", "error", "of the plan's", ""]), rows, "Compared with")


def _tensors(rows: Sequence[PlanRow], total: float, more: str) -> Table:
    cells: list[list[Inline]] = [
        [
            Text(r.name, "code"),
            Text(r.source, "code"),
            Text(r.chosen, "code"),
            number(r.error),
            _share(r.error, total),
            human_size(r.nbytes),
            "" if r.marginal_gain is None else number(r.marginal_gain),
        ]
        for r in rows
    ]
    heads = [Column("tensor", elastic=True), Column("from"), Column("chosen"), Column("error", "right")]
    heads += [Column("share", "right"), Column("bytes", "right"), Column("gain per byte", "right")]
    return Table(heads, cells, more=more)


def _fallbacks(plan: Plan) -> Table:
    groups: dict[str, list[PlanRow]] = {}
    for r in plan.fallbacks:
        groups.setdefault(r.reason, []).append(r)
    items = list(groups.items())
    cells: list[list[Inline]] = [
        [
            Text(found[0].name if len(found) == 1 else f"{found[0].name} …", "code"),
            str(len(found)),
            Text(", ".join(dict.fromkeys(r.chosen for r in found)), "code"),
            reason,
        ]
        for reason, found in items[:SHOWN]
    ]
    heads = [Column("which", elastic=True), Column("tensors", "right"), Column("chosen"), Column("why", elastic=True)]
    return Table(heads, cells, more=f"{len(items) - SHOWN} more kinds" if len(items) > SHOWN else "")


def _columns(labels: Sequence[str]) -> list[Column]:
    return [Column(label, "right" if i else "left") for i, label in enumerate(labels)]


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


def number(value: float) -> str:
    """A sum of errors: four digits."""
    return "0" if not value else f"{value:.4g}"
