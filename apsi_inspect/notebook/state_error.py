"""The quantization lab: formats and tensors to try, a run with progress and cancel, picks per tensor, and a plan.

No widget here. A run measures tensor after tensor with `quant_error`, so that it can be cancelled between two of them;
what was measured until then stays. The plan is `ops.plan`'s: picks are its rules, the measured errors are reused.
`tests/test_state_error.py` enforces the contract.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ValueRefusedError, quote
from ..listing import glob, human_size, natural_key
from ..ops.error import FORMATS, parse_format, quant_error
from ..ops.error_table import ErrorTable
from ..parts import Badge, Column, Line, Stack, Strip, Table, Text
from .render_tensors import code, grouped, plural
from .state_job import Job
from .state_pages import Pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..model import ModelFile
    from ..ops.error_table import ErrorRow
    from ..ops.plan import Plan
    from ..parts import Inline, Part
    from .state_job import Progress

PAGE = 100
SAMPLES: dict[str, int | None] = {
    "64 Ki values of each tensor": 1 << 16,
    "1 Mi values of each tensor": 1 << 20,
    "all values": None,
}
BY_NAME, WORST = "name", "worst first"
ORDERS = (BY_NAME, WORST)


class QuantErrorState:
    """What is tried, what came out, and what was picked.

    Attributes
    ----------
    formats
        Words as `quant_error` takes them.
    tensors
        Part of a name, or a glob; "" for all.
    sample
        How many values of each tensor are measured; None: all.
    job, plan_job
        The run, and the planning.
    table
        What has been measured; None before. After a cancelled run: the tensors until then.
    picks
        Tensor name -> the format it is to be stored in.
    plan
        The last plan that was made.
    """

    def __init__(self, model: ModelFile) -> None:
        self.model = model
        self.formats: list[str] = list(FORMATS)
        self.tensors = ""
        self.sample: int | None = 1 << 16
        self.job, self.plan_job = Job(), Job()
        self.table: ErrorTable | None = None
        self.order = BY_NAME
        self.selected: str | None = None
        self.picks: dict[str, str] = {}
        self.plan: Plan | None = None
        self.pages = Pages(PAGE)
        self._by_name: dict[str, list[ErrorRow]] = {}
        self._names: list[str] = []
        self._asked = 0

    def set_formats(self, words: Sequence[str]) -> None:
        """Which formats to try.

        Raises
        ------
        ValueRefusedError
            None, or one that is not known.
        """
        if not words:
            raise ValueRefusedError("choose at least one format")
        self.formats = list(dict.fromkeys(parse_format(word.strip()).word for word in words))

    def names(self) -> list[str]:
        """The tensors that a run would measure, in natural order.

        Raises
        ------
        ValueRefusedError
            No tensor matches.
        """
        aside = {name for affine in self.model.affine.values() for name in affine.companions}
        pattern = self.tensors.strip()
        if any(c in pattern for c in "*?["):
            match = glob(pattern)
            found = [n for n in self.model if match(n)]
        else:
            found = [n for n in self.model if pattern.lower() in n.lower()]
        found = sorted((n for n in found if n not in aside), key=natural_key)
        if not found:
            raise ValueRefusedError(f"no tensor matches {quote(pattern)}")
        return found

    def run(self) -> None:
        """Start measuring; see `job`.

        Raises
        ------
        ValueRefusedError
            No tensor matches.
        """
        names, formats, sample = self.names(), list(self.formats), self.sample
        container = "gguf" if self.model.format == "gguf" else "apsim"
        self.table, self._by_name, self._names, self.selected = None, {}, [], None
        self._asked = len(names)
        self.pages.resize(0)

        def work(progress: Progress) -> ErrorTable:
            sizes = [self.model[n].nbytes for n in names]
            rows: list[ErrorRow] = []
            try:
                for i, name in enumerate(names):
                    progress(sum(sizes[:i]), sum(sizes))
                    found = quant_error(self.model[name], formats, sample=sample, container=container, progress=False)
                    rows += found.rows
                progress(sum(sizes), sum(sizes))
            finally:
                table = self._keep(rows, formats, sample)
            return table

        self.job.start(work)

    def _keep(self, rows: list[ErrorRow], formats: list[str], sample: int | None) -> ErrorTable:
        table = ErrorTable(rows, self.model.path, formats, sample)
        for row in rows:
            self._by_name.setdefault(row.name, []).append(row)
        self.table = table if rows else None
        self.set_order(self.order)
        return table

    def set_order(self, order: str) -> None:
        """By name, or the tensors with the least signal to noise first.

        Raises
        ------
        ValueRefusedError
            Not one of `ORDERS`.
        """
        if order not in ORDERS:
            raise ValueRefusedError(f"cannot order by {quote(order)}; known: {', '.join(ORDERS)}")
        self.order = order
        self._names = list(self._by_name) if order == BY_NAME else sorted(self._by_name, key=self._worst)
        self.pages.resize(len(self._names))

    def _worst(self, name: str) -> float:
        found = [r.sums.sqnr_db for r in self._by_name[name] if r.sums is not None and r.good]
        return min(found, default=float("inf"))

    def page_lines(self) -> list[tuple[str, list[str]]]:
        """Of the page: name, and the cells of its line (name, signal to noise per format, pick)."""
        span = self.pages.span
        out = []
        for name in self._names[span.start : span.stop]:
            cells = [decibels(r) for r in self._by_name[name]]
            out.append((name, [name, *cells, f"→ {self.picks[name]}" if name in self.picks else ""]))
        return out

    def select(self, name: str | None) -> None:
        """Choose one of the measured tensors.

        Raises
        ------
        ValueRefusedError
            It was not measured.
        """
        if name is not None and name not in self._by_name:
            raise ValueRefusedError(f"tensor {quote(name)} was not measured")
        self.selected = name

    def options(self) -> list[str]:
        """The formats that the chosen tensor can be stored in."""
        rows = self._by_name.get(self.selected or "", [])
        return [r.format for r in rows if r.good]

    def pick(self, word: str | None) -> None:
        """Store the chosen tensor in this format; None: leave it to the plan.

        Raises
        ------
        ValueRefusedError
            It cannot be stored in it.
        """
        if self.selected is None:
            return
        if word is None:
            self.picks.pop(self.selected, None)
            return
        if word not in self.options():
            raise ValueRefusedError(f"tensor {quote(self.selected)} has no figures for {quote(word)}")
        self.picks[self.selected] = word

    def middle_bpw(self) -> float:
        """A size to start planning with: half way between the smallest and the largest of the formats."""
        sizes = [r["bpw"] for r in self.table.total_records()] if self.table is not None else []
        return round((min(sizes) + max(sizes)) / 2, 2) if sizes else 4.5

    def make_plan(self, bpw: float) -> None:
        """Start planning: the picks as they are, the least error for all others within so many bits per weight.

        Raises
        ------
        ValueRefusedError
            Nothing has been measured, or no format fits the container.
        """
        from ..ops import plan as ops
        from ..ops.plan_choices import container_for

        if self.table is None:
            raise ValueRefusedError("measure first: the plan is made from the errors")
        errors, into = self.table, container_for(self.model, None)
        formats = [f for f in errors.formats if parse_format(f, into).container == into]
        if not formats:
            raise ValueRefusedError(f"none of {', '.join(errors.formats)} is a format of {into}")
        keep = dict(self.picks)

        def work(progress: Progress) -> Plan:
            self.plan = None
            self.plan = ops.plan(
                self.model, bpw=bpw, formats=formats, keep=keep, errors=errors, sample=errors.sampled, progress=False
            )
            return self.plan

        self.plan_job.start(work)

    def save_plan(self, path: str) -> str:
        """Write the plan as JSON, for ``ai.convert(…, plan=…)``; the path.

        Raises
        ------
        ValueRefusedError
            There is no plan, or no path.
        OSError
            It cannot be written.
        """
        if self.plan is None:
            raise ValueRefusedError("make a plan first")
        if not path.strip():
            raise ValueRefusedError("name the file first")
        return self.plan.save(path.strip())

    def totals_parts(self) -> Part:
        """A row per format, over everything that was measured."""
        if self.table is None:
            return Text("Nothing has been measured yet.", "muted")
        names = len(self._by_name)
        notes: list[Part] = []
        if names < self._asked:
            notes.append(Badge("incomplete", f"{self.job.status}: {names} of {self._asked} tensors were measured"))
        if self.table.sampled is not None:
            notes.append(Badge("note", f"estimates from about {grouped(self.table.sampled)} values of each tensor"))
        rows: list[list[Inline]] = []
        for r in self.table.total_records():
            figures = _figures(r) if r["tensors"] else [""] * 4
            rows.append(
                [code(r["format"]), f"{r['bpw']:.2f}", human_size(r["nbytes"]), *figures, Text(r["note"], "muted")]
            )
        heads = [Column("format"), *(Column(c, "right") for c in ("bpw", "size", *_HEADS)), Column("", elastic=True)]
        return Stack([Table(heads, rows, f"All {plural(names, 'tensor')}"), *notes])

    def tensor_parts(self) -> Part:
        """The chosen tensor in each format."""
        if self.selected is None:
            return Text("Choose a tensor in the list.", "muted")
        rows: list[list[Inline]] = []
        notes: list[Part] = []
        for r in self._by_name[self.selected]:
            bpw = f"{8 * r.nbytes / r.numel:.2f}" if r.numel else ""
            figures = _figures(_values(r)) if r.good else [""] * 4
            mark = "← picked" if self.picks.get(self.selected) == r.format else ""
            rows.append([code(r.format), bpw, human_size(r.nbytes), *figures, Text(mark, "strong")])
            notes += [Line([code(r.format), Text(r.note, "muted")])] if r.note else []
        heads = [Column("format"), *(Column(c, "right") for c in ("bpw", "size", *_HEADS)), Column("")]
        return Stack([Table(heads, rows, self.selected), *notes])

    def plan_parts(self) -> Part:
        """The plan in a line, or why there is none."""
        if self.plan_job.status == "failed":
            return Badge("error", self.plan_job.message)
        if self.plan is None:
            return Text(f"{plural(len(self.picks), 'pick')}, no plan yet.", "muted")
        counts: dict[str, int] = {}
        for row in self.plan.rows:
            counts[row.chosen] = counts.get(row.chosen, 0) + 1
        chosen = ", ".join(f"{n} × {word}" for word, n in sorted(counts.items(), key=lambda c: -c[1]))
        chips: list[tuple[str, Inline]] = [
            ("size", human_size(self.plan.nbytes)),
            ("bits per weight", f"{self.plan.bpw:.2f}"),
            ("signal to noise", f"{self.plan.sqnr_db:.1f} dB"),
            ("encodings", chosen),
            ("picks kept", str(len(self.plan.rules))),
        ]
        return Strip(f"Plan for {self.plan.container}", "", chips)


_HEADS = ("RMSE", "rel. L2", "SQNR dB", "max error")


def _values(row: ErrorRow) -> dict[str, Any]:
    s = row.sums
    assert s is not None
    return {"rmse": s.rmse, "rel_l2": s.rel_l2, "sqnr_db": s.sqnr_db, "max_abs_error": s.max_abs_error}


def _figures(r: dict[str, Any]) -> list[Inline]:
    return [f"{r['rmse']:.3g}", f"{r['rel_l2']:.3g}", f"{r['sqnr_db']:.1f}", f"{r['max_abs_error']:.3g}"]


def decibels(row: ErrorRow) -> str:
    """Signal to quantization noise of a tensor in a format; – where there is no figure."""
    return f"{row.sums.sqnr_db:.1f}" if row.sums is not None and row.good else "–"
