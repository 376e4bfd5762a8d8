"""Units to and from pint, against arithmetic on the definitions of the SI and of the units."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pint
import pytest

from apsi_inspect.errors import ValueRefusedError
from apsi_inspect.units import Unit, valid_symbol
from apsi_inspect.units_pint import is_quantity, pint_units, unit_of

u = pint.get_application_registry()

KNOWN: dict[str, tuple[Any, float, float, str | None]] = {
    "m": ((1, 0, 0, 0, 0, 0, 0), 1.0, 0.0, "m"),
    "km": ((1, 0, 0, 0, 0, 0, 0), 1000.0, 0.0, "km"),
    "g": ((0, 1, 0, 0, 0, 0, 0), 0.001, 0.0, "g"),
    "µm": ((1, 0, 0, 0, 0, 0, 0), 1e-6, 0.0, "µm"),
    "J": ((2, 1, -2, 0, 0, 0, 0), 1.0, 0.0, "J"),
    "N*m": ((2, 1, -2, 0, 0, 0, 0), 1.0, 0.0, "m*N"),
    "kg*m**2/s**2": ((2, 1, -2, 0, 0, 0, 0), 1.0, 0.0, "kg*m**2/s**2"),
    "degC": ((0, 0, 0, 0, 1, 0, 0), 1.0, 273.15, "degC"),
    "degF": ((0, 0, 0, 0, 1, 0, 0), 5 / 9, 459.67, "degF"),
    "delta_degC": ((0, 0, 0, 0, 1, 0, 0), 1.0, 0.0, "delta_degC"),
    "W/m**2/K": ((0, 1, -3, 0, -1, 0, 0), 1.0, 0.0, "W/K/m**2"),
    "1/s": ((0, 0, -1, 0, 0, 0, 0), 1.0, 0.0, "s**-1"),
    "1/m/s": ((-1, 0, -1, 0, 0, 0, 0), 1.0, 0.0, "m**-1/s"),
    "m**0.5": (("1/2", 0, 0, 0, 0, 0, 0), 1.0, 0.0, "m**0.5"),
    "kg*m**2/s**2.5/A": ((2, 1, "-5/2", -1, 0, 0, 0), 1.0, 0.0, "kg*m**2/A/s**2.5"),
    "": ((0, 0, 0, 0, 0, 0, 0), 1.0, 0.0, None),
    "rad": ((0, 0, 0, 0, 0, 0, 0), 1.0, 0.0, "rad"),
    "deg": ((0, 0, 0, 0, 0, 0, 0), math.pi / 180, 0.0, "deg"),
    "percent": ((0, 0, 0, 0, 0, 0, 0), 0.01, 0.0, "percent"),
    "byte": ((0, 0, 0, 0, 0, 0, 0), 8.0, 0.0, "B"),
    "inch": ((1, 0, 0, 0, 0, 0, 0), 0.0254, 0.0, "in"),
    "liter": ((3, 0, 0, 0, 0, 0, 0), 0.001, 0.0, "l"),
    "hour": ((0, 0, 1, 0, 0, 0, 0), 3600.0, 0.0, "h"),
    "eV": ((2, 1, -2, 0, 0, 0, 0), 1.602176634e-19, 0.0, "eV"),
    "lm": ((0, 0, 0, 0, 0, 0, 1), 1.0, 0.0, "lm"),
    "J/K/mol": ((2, 1, -2, 0, -1, -1, 0), 1.0, 0.0, "J/K/mol"),
}


@pytest.mark.parametrize("text", KNOWN)
def test_known(text: str) -> None:
    q = u.Quantity(1.5, text)
    dim, scale, offset, symbol = KNOWN[text]
    unit = unit_of(q, "x")
    assert unit.dim == dim
    assert math.isclose(unit.scale, scale, rel_tol=2e-15)
    assert math.isclose(unit.offset, offset, rel_tol=1e-14)
    assert unit.symbol == symbol
    assert symbol is None or valid_symbol(symbol)
    assert unit.scale in (scale, math.pi / 180, 5 / 9)


@pytest.mark.parametrize("text", KNOWN)
def test_back(text: str) -> None:
    q = u.Quantity(1.5, text)
    units, warning = pint_units(unit_of(q, "x"))
    assert warning is None
    assert units == q.units


@pytest.mark.parametrize("text", [t for t in KNOWN if t != "delta_degC"])
def test_without_a_symbol(text: str) -> None:
    """The unit is rebuilt from dimension, scale and offset: the same value in SI."""
    q = u.Quantity(1.5, text)
    units, warning = pint_units(unit_of(q, "x")._replace(symbol=None))
    assert warning is None
    back = u.Quantity(1.5, units)
    base = q.to_base_units()
    assert math.isclose(back.to_base_units().magnitude, base.magnitude, rel_tol=1e-12)
    assert back.dimensionality == q.dimensionality
    again = unit_of(back, "x")
    assert again._replace(symbol=None) == unit_of(q, "x")._replace(symbol=None)


def test_third_powers() -> None:
    q = u.Quantity(1.0, u.km ** (1 / 3))
    unit = unit_of(q, "x")
    assert unit == Unit(("1/3", 0, 0, 0, 0, 0, 0), 10.0, 0.0, "km**1/3")
    assert pint_units(unit)[0] == q.units


@pytest.mark.parametrize(
    ("text", "why"),
    [("dBm", "offset"), ("dB", "offset"), ("pixel", "seven"), ("pixel/m", "seven"), ("m**1.0001", "fraction")],
)
def test_refused(text: str, why: str) -> None:
    with pytest.raises(ValueRefusedError, match=f"^layer: unit .*{why}"):
        unit_of(u.Quantity(1.0, text), "layer")


@pytest.mark.parametrize(
    "unit",
    [
        Unit((1, 0, 0, 0, 0, 0, 0), 1.0, 0.0, "kg"),
        Unit((1, 0, 0, 0, 0, 0, 0), 1.0, 0.0, "km"),
        Unit((0, 0, 0, 0, 1, 0, 0), 1.0, 0.0, "degC"),
        Unit((0, 0, 0, 0, 1, 0, 0), 1.0, 273.0, "degC"),
        Unit((1, 0, 0, 0, 0, 0, 0), 1.7, 0.0, "smoots"),
        Unit((1, 0, 0, 0, 0, 0, 0), 1.0, 0.0, "m**99999"),
        Unit((1, 0, 0, 0, 0, 0, 0), 1.0, 0.0, "km**999999"),
        Unit((1, 0, 0, 0, 0, 0, 0), 1.0, 0.0, "dB"),
        Unit((1, 0, 0, 0, 0, 0, 0), 1.0, 0.0, "__import__"),
        Unit((1, 0, 0, 0, 0, 0, 0), 1.0, 0.0, "*".join(["km"] * 40)),
        Unit((1, 0, 0, 0, 0, 0, 0), 1.0, 0.0, "m**1/0"),
    ],
)
def test_symbols_that_lie(unit: Unit) -> None:
    """The dimension vector wins, quickly, with a warning."""
    start = time.process_time()
    units, warning = pint_units(unit)
    assert time.process_time() - start < 2
    assert warning is not None
    assert "does not mean" in warning
    found = unit_of(u.Quantity(1.0, units), "x")
    assert (found.dim, found.scale, found.offset) == unit[:3]


def test_other_registries() -> None:
    mine = pint.UnitRegistry()
    mine.define("smoot = 1.7018 * meter")
    unit = unit_of(mine.Quantity(np.ones(2), "smoot"), "x")
    assert unit == Unit((1, 0, 0, 0, 0, 0, 0), 1.7018, 0.0, "smoot")
    assert pint_units(unit, mine)[0] == mine.smoot
    units, warning = pint_units(unit, pint.UnitRegistry())
    assert warning is not None
    assert unit_of(units._REGISTRY.Quantity(1.0, units), "x") == unit._replace(symbol=None)


def test_what_is_a_quantity() -> None:
    assert is_quantity(u.Quantity(1, "m"))
    assert is_quantity(pint.UnitRegistry().Quantity(np.ones(2), "m"))
    assert not is_quantity(np.ones(2))
    assert not is_quantity(u.m)
