"""Physical units as .apsim stores them (`docs/apsim-format.md`, 4): a dimension vector, scale, offset and symbol.

``value_SI = (value + offset) * scale``. Nothing here needs a unit library; conversion to and from pint is in the
functions that import it on use. `tests/test_units.py` enforces the grammar and the forms.
"""

from __future__ import annotations

import re
from math import gcd, isfinite
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# length, mass, time, electric current, temperature, amount of substance, luminous intensity
BASE_UNITS = ("m", "kg", "s", "A", "K", "mol", "cd")
DIMENSIONS = ("length", "mass", "time", "current", "temperature", "amount", "luminous intensity")
MAX_DENOMINATOR = 1000
# compiled on first use: most files have no units
_FRACTION = r"-?[1-9][0-9]{0,5}/[1-9][0-9]{0,3}"
_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"
_NAME = r"[^\W\d]\w*|[%°µμΩÅ][\w]*"
_EXPONENT = r"(?=.{1,6}(?:[*/]|\Z))[+-]?(?:[0-9]+/[0-9]+|[0-9]+(?:\.[0-9]+)?)"
_SYMBOL = rf"(?:1|(?:{_NAME})(?:\*\*(?:{_EXPONENT}))?)(?:[*/](?:{_NAME})(?:\*\*(?:{_EXPONENT}))?)*"
_SUPERSCRIPT = str.maketrans("0123456789-/.", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻ᐟ·")


class UnitError(ValueError):
    """A unit that breaks the rules; the reader adds the file's name."""


class Unit(NamedTuple):
    """A physical unit.

    Attributes
    ----------
    dim
        Seven exponents in the order of `BASE_UNITS`; an int, or ``"p/q"`` in lowest terms.
    scale, offset
        ``value_SI = (value + offset) * scale``.
    symbol
        What to show (``"km"``, ``"degC"``); None where the file gives none or breaks the grammar.
    """

    dim: tuple[int | str, ...]
    scale: float = 1.0
    offset: float = 0.0
    symbol: str | None = None

    @property
    def is_coherent(self) -> bool:
        """True for coherent SI: no scale, no offset."""
        return self.scale == 1.0 and self.offset == 0.0

    @property
    def dimension(self) -> str:
        """The dimension in base units, e.g. ``"kg·m²·s⁻²"``; ``"1"`` for a dimensionless one."""
        parts = [
            base + ("" if exponent == 1 else str(exponent).translate(_SUPERSCRIPT))
            for base, exponent in zip(BASE_UNITS, self.dim, strict=True)
            if exponent != 0
        ]
        return "·".join(parts) or "1"

    def __str__(self) -> str:
        if self.symbol:
            return self.symbol
        text = self.dimension
        if self.offset:
            text = f"({text} offset {self.offset!r})"
        return text if self.scale == 1.0 else f"{self.scale!r} {text}"


def _exponent(value: Any) -> int | str:
    if type(value) is int and abs(value) <= 1_000_000:
        return value
    if isinstance(value, str) and re.fullmatch(_FRACTION, value):
        p, q = map(int, value.split("/"))
        if 1 < q <= MAX_DENOMINATOR and gcd(p, q) == 1:
            return value
    raise UnitError(f"exponent {str(value)[:30]!r} is neither an integer nor 'p/q' in lowest terms")


def _vector(value: Any) -> tuple[int | str, ...]:
    if not isinstance(value, list) or len(value) != len(BASE_UNITS):
        raise UnitError("a dimension vector has seven exponents")
    return tuple(map(_exponent, value))


def _float(value: Any, what: str) -> float:
    if not isinstance(value, str) or len(value) > 40 or not re.fullmatch(_NUMBER, value):
        raise UnitError(f"{what} is not a JSON number in a string")
    number = float(value)
    if not isfinite(number):
        raise UnitError(f"{what} is not finite")
    return number


def parse_unit(value: Any, symbol: str | None = None) -> Unit:
    """The unit of an entry of `units` (or of `unit` in `qtensors`).

    Raises
    ------
    UnitError
        Neither a dimension vector nor ``{"dim": …, "scale": …, "offset": …}``.
    """
    if isinstance(value, list):
        return Unit(_vector(value), symbol=symbol)
    if not isinstance(value, dict) or value.keys() != {"dim", "scale", "offset"}:
        raise UnitError("a unit is a dimension vector, or an object of dim, scale and offset")
    scale, offset = _float(value["scale"], "scale"), _float(value["offset"], "offset")
    if scale == 0.0:
        raise UnitError("scale is 0")
    return Unit(_vector(value["dim"]), scale, offset, symbol)


def valid_symbol(symbol: Any) -> bool:
    """True where a symbol keeps to the grammar ``factor (('*'|'/') factor)*``: safe to show and to hand to pint."""
    return isinstance(symbol, str) and 0 < len(symbol) <= 128 and re.fullmatch(_SYMBOL, symbol) is not None
