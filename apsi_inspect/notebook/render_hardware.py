"""Parts and frame of a `HardwarePlan`: what a notebook, `print` and `apsi plan` show. `tests/test_hardware.py`."""

from __future__ import annotations

from ..listing import human_count, human_size
from ..parts import Column, Details, Stack, Strip, Table, Text
from .render_tensors import code, grouped, more_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from ..ops.hardware_report import HardwarePlan, Need
    from ..parts import Inline, Part

COLUMNS = (
    "encoding", "bpw", "weights_bytes", "exact", "files", "context", "batch", "cache_bytes", "total_bytes",
    "device_bytes", "devices",
)  # fmt: skip
_ROWS = 60


def hardware_frame(plan: HardwarePlan) -> pd.DataFrame:
    """A row per encoding, context and device; the training case has no weights of its own."""
    import pandas as pd

    weights = {w.encoding: w for w in plan.weights}
    caches = {c.context: c for c in plan.cache}
    rows = []
    for n in plan.needs:
        w, c = weights.get(n.encoding), caches.get(n.context or 0)
        rows.append(
            (
                n.encoding, w.bpw if w else float("nan"), w.nbytes if w else 0, bool(w and w.exact),
                w.files if w else 0, n.context or 0, c.batch if c else 0,
                c.nbytes if c else 0, n.nbytes, n.device, n.devices,
            )
        )  # fmt: skip
    return pd.DataFrame(rows, columns=list(COLUMNS))


def hardware_parts(plan: HardwarePlan) -> Stack:
    """The tables, each number with its formula, and what was assumed."""
    parts: list[Part] = [_head(plan), _weights(plan)]
    if plan.cache:
        parts.append(_cache(plan))
    if plan.training:
        parts.append(_training(plan))
    parts.append(_devices(plan))
    lines: list[list[Inline]] = [[a] for a in plan.assumptions]
    parts.append(Details("Assumptions", Table([Column("", elastic=True)], lines), open=True))
    return Stack(parts)


def _head(plan: HardwarePlan) -> Strip:
    chips: list[tuple[str, Inline]] = [("parameters", f"{human_count(plan.parameters)} ({grouped(plan.parameters)})")]
    if plan.active_parameters is not None:
        chips.append(("active", human_count(plan.active_parameters)))
    if plan.attention is not None:
        chips.append(("attention", plan.attention.kind))
        chips.append(("layers", str(plan.attention.layers)))
    return Strip(code(plan.name, 80), "hardware plan", chips)


def _size(nbytes: int | None) -> str:
    return "—" if nbytes is None else human_size(nbytes)


def _round(nbytes: int) -> str:
    """As people say sizes of devices: ``80 GB``, ``24 GiB`` where these are whole."""
    for unit, step in (("GB", 10**9), ("GiB", 2**30)):
        if nbytes % step == 0:
            return f"{nbytes // step} {unit}"
    return human_size(nbytes)


def _weights(plan: HardwarePlan) -> Table:
    rows: list[list[Inline]] = [
        [
            code(w.encoding),
            "—" if w.nbytes is None else f"{w.bpw:.3f}",
            _size(w.nbytes),
            "—" if w.nbytes is None else str(w.files),
            "exact" if w.exact else "estimate",
            "; ".join(filter(None, (w.formula, w.note))),
        ]
        for w in plan.weights[:_ROWS]
    ]
    heads = [Column("encoding"), Column("bits per weight", "right"), Column("weights", "right")]
    heads += [Column("files", "right"), Column(""), Column("how", elastic=True)]
    caption = f"Weights (files of at most {_round(plan.shard)})"
    return Table(heads, rows, caption, more_text(len(plan.weights), _ROWS, "encodings"))


def _cache(plan: HardwarePlan) -> Table:
    rows: list[list[Inline]] = [
        [grouped(c.context), str(c.batch), human_size(c.nbytes), grouped(c.nbytes), c.formula]
        for c in plan.cache[:_ROWS]
    ]
    heads = [Column("context", "right"), Column("batch", "right"), Column("cache", "right"), Column("bytes", "right")]
    heads.append(Column("how", elastic=True))
    return Table(heads, rows, f"KV cache in {plan.kv_dtype}", more_text(len(plan.cache), _ROWS, "contexts"))


def _training(plan: HardwarePlan) -> Table:
    rows: list[list[Inline]] = [
        [t.what, f"{t.per_parameter:g}", human_size(t.nbytes), f"{plan.parameters} × {t.per_parameter:g}"]
        for t in plan.training
    ]
    each, total = sum(t.per_parameter for t in plan.training), sum(t.nbytes for t in plan.training)
    rows.append([Text("together", "strong"), f"{each:g}", human_size(total), f"{plan.parameters} × {each:g}"])
    for n in plan.needs:
        if n.encoding.startswith("training:"):
            rows.append([f"devices of {_round(n.device)}", "", str(n.devices), ""])
    heads = [
        Column("part"),
        Column("bytes a parameter", "right"),
        Column("memory", "right"),
        Column("how", elastic=True),
    ]
    return Table(heads, rows, "Training (an estimate, without activations)")


def _devices(plan: HardwarePlan) -> Table:
    """Encodings by contexts: the memory, and the number of devices of each size."""
    sizes = list(dict.fromkeys(n.device for n in plan.needs))
    cells: dict[str, dict[int | None, list[Need]]] = {}
    for n in plan.needs:
        if not n.encoding.startswith("training:"):
            cells.setdefault(n.encoding, {}).setdefault(n.context, []).append(n)
    contexts = list(dict.fromkeys(c for row in cells.values() for c in row))
    rows: list[list[Inline]] = [
        [code(encoding), *(_need(row[c]) for c in contexts)] for encoding, row in list(cells.items())[:_ROWS]
    ]
    heads = [Column("weights")]
    heads += [Column("without cache" if c is None else f"{grouped(c)} tokens", "right") for c in contexts]
    caption = f"Memory, and devices of {' / '.join(map(_round, sizes))} (an estimate)"
    return Table(heads, rows, caption, more_text(len(cells), _ROWS, "encodings"))


def _need(needs: Sequence[Need]) -> str:
    return f"{human_size(needs[0].nbytes)}: {' / '.join(str(n.devices) for n in needs)}"
