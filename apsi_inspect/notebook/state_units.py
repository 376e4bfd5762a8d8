"""The units of a model: which tensors carry one, what it means in SI, and its values in another unit.

No widget here. Nothing is written: another unit is for display, and the numbers are converted by
``value_SI = (value + offset) * scale``. `tests/test_state_views.py` compares with pint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ValueRefusedError, quote
from ..listing import natural_key
from ..parts import Column, Stack, Strip, Table, Text
from ..units import DIMENSIONS, Unit
from .render_tensors import code, shape_text
from .state_pages import Pages
from .state_tensor import number

if TYPE_CHECKING:
    from ..model import ModelFile
    from ..ops.stats import TensorStats
    from ..parts import Inline, Part

PAGE = 100
SHOWN = 8  # values


class UnitsState:
    """The tensors that carry a unit, one of them chosen.

    Attributes
    ----------
    names
        Their names in natural order.
    selected
        The chosen one; None: none.
    target
        Another unit to show its values in; None: its own.
    """

    def __init__(self, model: ModelFile) -> None:
        self.model = model
        self.names = sorted(model.units, key=natural_key)
        self.pages = Pages(PAGE, len(self.names))
        self.selected: str | None = None
        self.target: Unit | None = None

    @property
    def unit(self) -> Unit | None:
        """The chosen tensor's own unit."""
        return None if self.selected is None else self.model.units[self.selected]

    def page_names(self) -> list[str]:
        """The names of the page."""
        span = self.pages.span
        return self.names[span.start : span.stop]

    def select(self, name: str | None) -> None:
        """Choose a tensor; another unit stays where it fits.

        Raises
        ------
        ValueRefusedError
            It carries no unit.
        """
        if name is not None and name not in self.model.units:
            raise ValueRefusedError(f"tensor {quote(name)} carries no unit")
        self.selected = name
        unit = self.unit
        if self.target is not None and (unit is None or unit.dim != self.target.dim):
            self.target = None

    def show_in(self, symbol: str) -> None:
        """Show the values in another unit; "" for their own.

        Raises
        ------
        ValueRefusedError
            The unit is not known, or of another dimension.
        """
        text = symbol.strip()
        if not text or self.unit is None:
            self.target = None
            return
        from ..units_pint import unit_named

        target = unit_named(text)
        if target.dim != self.unit.dim:
            raise ValueRefusedError(f"{quote(text)} is {target.dimension}, the tensor's unit is {self.unit.dimension}")
        self.target = target

    def converted(self, value: float) -> float:
        """A value of the tensor's own unit in the one that is shown."""
        if self.unit is None or self.target is None:
            return value
        return convert(value, self.unit, self.target)

    def unit_parts(self) -> Part:
        """The chosen unit: symbol, dimension, conversion."""
        unit = self.unit
        if unit is None or self.selected is None:
            return Text("Choose a tensor in the list.", "muted")
        alone = [tuple(e if i == at else 0 for i, e in enumerate(unit.dim)) for at in range(len(unit.dim))]
        words = [
            f"{name} {Unit(dim).dimension}"
            for name, dim, exponent in zip(DIMENSIONS, alone, unit.dim, strict=True)
            if exponent != 0
        ]
        chips: list[tuple[str, Inline]] = [
            ("symbol", code(unit.symbol, 60) if unit.symbol else Text("none", "muted")),
            ("dimension", unit.dimension),
            ("made of", ", ".join(words) or "dimensionless"),
            ("to SI", formula(unit)),
        ]
        return Strip(code(self.selected), code(str(unit), 60), chips)

    def value_parts(self) -> Part:
        """The first values and the extremes, in the tensor's own unit and in the one chosen for display.

        Raises
        ------
        ApsiError
            The values cannot be read.
        """
        import numpy as np

        unit = self.unit
        if unit is None or self.selected is None:
            return Text("", "muted")
        tensor = self.model[self.selected]
        rows: list[list[Inline]] = []
        if tensor.numel and tensor.info.encoding.kind != "complex":
            stats: TensorStats = tensor.stats()
            ends = [("min", float(stats.min)), ("mean", stats.mean), ("max", float(stats.max))]
            rows += [self._row(label, value) for label, value in ends]
            index = tuple(slice(0, SHOWN) if i == tensor.ndim - 1 else 0 for i in range(tensor.ndim))
            first = np.ravel(np.asarray(tensor[index] if tensor.ndim else tensor.numpy()))
            place = "0, " * (tensor.ndim - 1)
            rows += [self._row(f"[{place}{i}]" if tensor.ndim else "value", float(v)) for i, v in enumerate(first)]
        heads = [Column("value of"), Column(str(unit), "right")]
        if self.target is not None:
            heads.append(Column(str(self.target), "right"))
        title = f"Values, the first of {shape_text(tensor.shape)}" if tensor.numel > 1 else "Value"
        note = "Nothing is written: another unit is for display." if self.target is not None else ""
        return Stack([Table(heads, rows, title), *([Text(note, "muted")] if note else [])])

    def _row(self, label: str, value: float) -> list[Inline]:
        shown: list[Inline] = [Text(label, "muted"), number(value)]
        return [*shown, number(self.converted(value))] if self.target is not None else shown


def convert(value: float, unit: Unit, target: Unit) -> float:
    """A value from one unit in another of the same dimension, by way of SI."""
    return (value + unit.offset) * unit.scale / target.scale - target.offset


def formula(unit: Unit) -> str:
    """``SI = (value + 273.15) × 1``, as short as it goes."""
    if unit.is_coherent:
        return "coherent SI, as it is"
    value = f"(value {'+' if unit.offset > 0 else '−'} {abs(unit.offset)!r})" if unit.offset else "value"
    return f"SI = {value}" + ("" if unit.scale == 1.0 else f" × {unit.scale!r}")
