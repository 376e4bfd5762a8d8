"""Several model files next to each other, from their headers: what they are, and which tensors and keys differ.

Values are not read: equal here means equal name, encoding and shape. `tests/test_render.py` enforces the counts.
"""

from __future__ import annotations

import os

from ..display import Displayable
from ..listing import Row, brief, human_count, human_size, natural_key, rows, totals
from ..parts import Badge, Column, Details, Stack, Strip, Table, Text
from .render import format_text
from .render_tensors import code, shape_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from ..model import ModelFile
    from ..parts import Inline, Part

SHOWN = 100
IN_DETAIL = 6  # files; of more only the overview is shown
_MISSING = "–"


class SideBySide(Displayable):
    """Opened models in the order they were given; a sequence of `ModelFile` that shows how they differ."""

    def __init__(self, models: Sequence[ModelFile], tensors: str | None = None) -> None:
        self.models = tuple(models)
        self._built = side_by_side(self.models, tensors)

    def _parts(self) -> Stack:
        return self._built

    def __len__(self) -> int:
        return len(self.models)

    def __getitem__(self, i: int) -> ModelFile:
        return self.models[i]

    def __iter__(self) -> Iterator[ModelFile]:
        return iter(self.models)

    def __repr__(self) -> str:
        return "<SideBySide of " + ", ".join(map(repr, self.models)) + ">"


def side_by_side(models: Sequence[ModelFile], tensors: str | None = None) -> Stack:
    """Parts of a comparison; `tensors` compares only names that match a glob."""
    listed = [{r.name: r for r in rows(m, tensors)} for m in models]
    parts: list[Part] = [Strip(f"{len(models)} model files", "headers compared, values not read")]
    parts.append(_overview(models, listed))
    if 2 <= len(models) <= IN_DETAIL:
        parts += _difference("Tensors", listed, _tensor)
        parts += _difference("Metadata", [m.metadata for m in models], lambda v: brief(v, 80))
    return Stack(parts)


def _overview(models: Sequence[ModelFile], listed: Sequence[Mapping[str, Row]]) -> Table:
    body: list[list[Inline]] = []
    for letter, model, chosen in zip(_letters(len(models)), models, listed, strict=True):
        sums = totals(model, list(chosen.values()))
        body.append(
            [
                Text(letter, "strong"),
                code(os.path.basename(model.path), 60),
                format_text(model),
                code(model.architecture, 30) if model.architecture else "",
                human_count(sums.parameters),
                f"{sums.bpw:.2f}",
                human_size(model.file_size),
                str(sums.tensors),
                code(", ".join(s.label for s in sums.by_encoding[:6]), 60),
            ]
        )
    labels = ("", "file", "format", "architecture", "parameters", "bpw", "size", "tensors", "encodings")
    right = ("parameters", "bpw", "size", "tensors")
    return Table([Column(x, "right" if x in right else "left", x == "file") for x in labels], body)


def _letters(n: int) -> list[str]:
    return [chr(ord("A") + i) if n <= 26 else str(i + 1) for i in range(n)]


def _tensor(row: Row) -> str:
    return f"{row.encoding} {shape_text(row.shape)}" + (f" {row.unit}" if row.unit else "")


def _difference(what: str, sides: Sequence[Mapping[str, Any]], text: Any) -> list[Part]:
    """A sentence on how many names differ, and a table of them."""
    names = {name: None for side in sides for name in side}
    if not names:
        return []
    everywhere = [n for n in names if all(n in side for side in sides)]
    differ = [n for n in everywhere if len({_key(side[n]) for side in sides}) > 1]
    partly = sorted(names.keys() - set(everywhere), key=natural_key)
    noun = "names" if what == "Tensors" else "keys"
    if not differ and not partly:
        return [Badge("note", f"{what}: all {len(names)} {noun} are in every file and equal")]
    title = (
        f"{what}: {len(everywhere)} {noun} in every file, {len(differ)} with a difference; {len(partly)} only in some"
    )
    wanted = [*sorted(differ, key=natural_key), *partly]
    body: list[list[Inline]] = [
        [code(n, 100), *(code(text(side[n]), 90) if n in side else _MISSING for side in sides)] for n in wanted[:SHOWN]
    ]
    columns = [Column("name", elastic=True), *(Column(x, elastic=True) for x in _letters(len(sides)))]
    more = f"{len(wanted) - SHOWN} more not shown" if len(wanted) > SHOWN else ""
    return [Details(title, Table(columns, body, more=more), open=len(wanted) <= 40)]


def _key(value: Any) -> Any:
    """What makes two entries equal: of a tensor its encoding, shape and unit, of a metadata value all of it."""
    if isinstance(value, Row):
        return value.encoding, value.shape, value.unit
    return repr(value.tolist()) if hasattr(value, "tolist") else repr(value)
