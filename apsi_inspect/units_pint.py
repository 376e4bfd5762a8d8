"""Units to and from pint, which is imported on use (`docs/apsim-format.md`, section 4).

Contract: numbers are never rescaled. What seven SI exponents, a scale and an offset cannot say is refused. A symbol
from a file never reaches pint's expression parser: its factors are looked up one by one. The dimension vector wins over
the symbol. `tests/test_units_pint.py` enforces this.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
from fractions import Fraction
from typing import Any

from .errors import ValueRefusedError, quote
from .units import BASE_UNITS, MAX_DENOMINATOR, Unit, valid_symbol

_ROOTS = {"meter": 0, "gram": 1, "second": 2, "ampere": 3, "kelvin": 4, "mole": 5, "candela": 6}
_PLAIN_ROOTS = ("radian", "bit", "count")  # pint's own dimensionless roots
_SHORT = {
    "degree_Celsius": "degC",
    "degree_Fahrenheit": "degF",
    "delta_degree_Celsius": "delta_degC",
    "delta_degree_Fahrenheit": "delta_degF",
    "percent": "percent",
}
_FACTOR = re.compile(r"([*/]?)([^*/]+)(?:\*\*([+-]?(?:[0-9]+/[0-9]+|[0-9.]+)))?")
_NAMELESS = "apsi_unit_"
_CLOSE = 1e-9


def is_quantity(value: object) -> bool:
    """True for a pint Quantity; pint is not imported for the answer."""
    pint = sys.modules.get("pint")
    return pint is not None and isinstance(value, pint.Quantity)


def unit_of(quantity: Any, where: str) -> Unit:
    """The unit of a pint Quantity.

    Raises
    ------
    ValueRefusedError
        A logarithmic unit, a dimension outside the SI, or an exponent that is no simple fraction.
    """
    units, registry = quantity.units, quantity._REGISTRY
    shown = f"{where}: unit {quote(str(units))}"
    scale, offset = 1.0, 0.0
    if not quantity._is_multiplicative:
        converters = [registry._units[name].converter for name in units._units]
        if len(converters) != 1 or set(units._units.values()) != {1} or converters[0].is_logarithmic:
            raise ValueRefusedError(f"{shown} is neither proportional to an SI unit nor a plain offset from one")
        factor, roots = float(converters[0].scale), registry.get_root_units(units)[1]
        offset = _tidy(converters[0].offset / factor)
    else:
        raw, roots = registry.get_root_units(units)
        factor = float(raw)
    dim = [Fraction(0)] * 7
    for name, exponent in roots._units.items():
        if name in _PLAIN_ROOTS:
            continue
        if name not in _ROOTS:
            raise ValueRefusedError(f"{shown} has a dimension outside the seven of the SI ({quote(name)})")
        dim[_ROOTS[name]] = _fraction(exponent, shown)
    scale = _tidy(factor * 10.0 ** float(-3 * dim[_ROOTS["gram"]]))
    if not (math.isfinite(scale) and scale and math.isfinite(offset)):
        raise ValueRefusedError(f"{shown} has a scale beyond float64")
    vector = tuple(int(d) if d.denominator == 1 else f"{d.numerator}/{d.denominator}" for d in dim)
    return Unit(vector, scale, offset, _symbol(units, registry))


def _fraction(exponent: Any, shown: str) -> Fraction:
    value = Fraction(exponent).limit_denominator(MAX_DENOMINATOR)
    if abs(value - Fraction(exponent)) > _CLOSE:
        raise ValueRefusedError(f"{shown} has an exponent that is no fraction of denominator up to {MAX_DENOMINATOR}")
    return value


def _tidy(x: float) -> float:
    """Without the rounding noise of a chain of products: 0.001 for 0.0010000000000000002."""
    short = float(f"{x:.12g}")
    return short if abs(short - x) <= 2 * math.ulp(x) else float(x)


def _symbol(units: Any, registry: Any) -> str | None:
    """pint's short compact form within the grammar (``kg*m**2/s**2``); None where there is none."""
    above: list[tuple[str, Fraction]] = []
    below: list[tuple[str, Fraction]] = []
    for name, exponent in sorted(units._units.items()):
        if name.startswith(_NAMELESS):
            return None
        short = _SHORT.get(name) or registry.get_symbol(name)
        if not re.fullmatch(r"[^\W\d]\w*", short):
            short = name
        power = Fraction(exponent).limit_denominator(MAX_DENOMINATOR)
        (above if power > 0 else below).append((short, power))
    if not above and below:
        above.append(below.pop(0))
    text = "*".join(n + _power(p) for n, p in above) + "".join(f"/{n}{_power(-p)}" for n, p in below)
    return text if valid_symbol(text) and _lookup(text, registry) == units else None


def _power(p: Fraction) -> str:
    if p == 1:
        return ""
    decimal = f"{float(p):g}"
    return f"**{decimal if Fraction(decimal) == p else p}"


def _lookup(symbol: str, registry: Any) -> Any:
    """The pint unit of a symbol that keeps to the grammar; None where a name is unknown."""
    units = registry.dimensionless
    for sign, name, power in _FACTOR.findall("*" + symbol):
        found = registry.parse_units(name) if name in registry else None
        if found is None:
            return None
        exponent = Fraction(power or 1) * (-1 if sign == "/" else 1)
        units = units * found ** (int(exponent) if exponent.denominator == 1 else float(exponent))
    return units


def unit_named(symbol: str, registry: Any = None) -> Unit:
    """The unit that a symbol means to pint (``"mmHg"``, ``"kg*m**2/s**2"``, ``"degC"``).

    Parameters
    ----------
    registry
        pint's application registry by default.

    Raises
    ------
    ValueRefusedError
        The symbol breaks the grammar of `units.valid_symbol`, a name in it is unknown, or it is no unit of the SI's
        seven dimensions.
    """
    if registry is None:
        import pint

        registry = pint.get_application_registry()  # type: ignore[no-untyped-call]
    if not valid_symbol(symbol):
        raise ValueRefusedError(f"{quote(symbol)} is no unit: write names with * / and **, such as kg*m**2/s**2")
    units = _lookup(symbol, registry)
    if units is None:
        raise ValueRefusedError(f"{quote(symbol)} is no unit that pint knows")
    return unit_of(registry.Quantity(1.0, units), "show in")._replace(symbol=symbol)


def pint_units(unit: Unit, registry: Any = None) -> tuple[Any, str | None]:
    """The pint unit that stands for `unit`, and a warning where its symbol could not be used.

    Parameters
    ----------
    registry
        pint's application registry by default.
    """
    if registry is None:
        import pint

        registry = pint.get_application_registry()  # type: ignore[no-untyped-call]
    warning = None
    if unit.symbol is not None:
        units = _agreeing(unit, registry)
        if units is not None:
            return units, None
        plain = unit._replace(symbol=None)
        warning = f"unit symbol {quote(unit.symbol)} does not mean {plain} here; the latter is used"
    return (_base(unit, registry) if unit.is_coherent else _nameless(unit, registry)), warning


def _agreeing(unit: Unit, registry: Any) -> Any:
    """What the symbol means in this registry, where that is what the file says; else None."""
    try:
        units = _lookup(str(unit.symbol), registry)
        if units is None:
            return None
        found = unit_of(registry.Quantity(1.0, units), "")
    except Exception:  # noqa: BLE001  (a hostile symbol may break pint in many ways; the unit is used then)
        return None
    same = found.dim == unit.dim and all(
        math.isclose(a, b, rel_tol=_CLOSE, abs_tol=0.0) or a == b
        for a, b in ((found.scale, unit.scale), (found.offset, unit.offset))
    )
    return units if same else None


def _base(unit: Unit, registry: Any) -> Any:
    units = registry.dimensionless
    for name, exponent in zip(BASE_UNITS, unit.dim, strict=True):
        if exponent != 0:
            power = Fraction(exponent)
            units = units * registry.Unit(name) ** (int(power) if power.denominator == 1 else float(power))
    return units


def _nameless(unit: Unit, registry: Any) -> Any:
    """A unit that has no usable symbol, defined in the registry under a name made from its scale and dimension."""
    plain = unit._replace(symbol=None)
    name = _NAMELESS + hashlib.sha256(repr(plain).encode()).hexdigest()[:12]
    if name not in registry:
        pairs = [(n, float(Fraction(e))) for n, e in zip(BASE_UNITS, unit.dim, strict=True) if e != 0]
        powers = " * ".join(f"{n} ** {e!r}" for n, e in pairs)
        text = f"{name} = {unit.scale!r}" + (f" * {powers}" if powers else "")
        registry.define(text + (f"; offset: {unit.offset * unit.scale!r}" if unit.offset else ""))
    return registry.Unit(name)
