"""Section 4 of the specification: forms of a unit, the grammar of a symbol, text."""

from __future__ import annotations

import time
from typing import Any

import pytest

from apsi_inspect.units import Unit, UnitError, parse_unit, valid_symbol

ZERO = [0, 0, 0, 0, 0, 0, 0]


def test_vector() -> None:
    assert parse_unit([2, 1, -2, 0, 0, 0, 0], "J") == Unit((2, 1, -2, 0, 0, 0, 0), 1.0, 0.0, "J")
    assert parse_unit([2, 1, "-5/2", -1, 0, 0, 0]).dim == (2, 1, "-5/2", -1, 0, 0, 0)
    assert parse_unit(ZERO).is_coherent


def test_object() -> None:
    unit = parse_unit({"dim": [0, 0, 0, 0, 1, 0, 0], "scale": "1.0", "offset": "273.15"}, "degC")
    assert unit == Unit((0, 0, 0, 0, 1, 0, 0), 1.0, 273.15, "degC")
    assert not unit.is_coherent
    assert parse_unit({"dim": [1, *ZERO[1:]], "scale": "1000.0", "offset": "0.0"}).scale == 1000.0
    assert parse_unit({"dim": ZERO, "scale": "-1e-300", "offset": "-0.0"}).scale == -1e-300


@pytest.mark.parametrize(
    "value",
    [
        None, 1, "m", [], [0] * 6, [0] * 8, [1.0, 0, 0, 0, 0, 0, 0], [True, 0, 0, 0, 0, 0, 0], [None, *ZERO[1:]],
        ["2/4", *ZERO[1:]], ["4/2", *ZERO[1:]], ["1/1", *ZERO[1:]], ["0/3", *ZERO[1:]], ["1/0", *ZERO[1:]],
        ["1/1001", *ZERO[1:]], ["+1/2", *ZERO[1:]], ["1/-2", *ZERO[1:]], [" 1/2", *ZERO[1:]], ["1/2\n", *ZERO[1:]],
        ["01/2", *ZERO[1:]], ["\u0661/2", *ZERO[1:]], ["0.5", *ZERO[1:]], [[1], *ZERO[1:]], [10**30, *ZERO[1:]],
        {}, {"dim": ZERO}, {"dim": ZERO, "scale": "1.0"}, {"dim": ZERO, "scale": 1.0, "offset": "0.0"},
        {"dim": ZERO, "scale": "0.0", "offset": "0.0"}, {"dim": ZERO, "scale": "-0.0", "offset": "0.0"},
        {"dim": ZERO, "scale": "nan", "offset": "0.0"}, {"dim": ZERO, "scale": "Infinity", "offset": "0.0"},
        {"dim": ZERO, "scale": "1e999", "offset": "0.0"}, {"dim": ZERO, "scale": "1e-999", "offset": "0.0"},
        {"dim": ZERO, "scale": "1.0", "offset": "1e999"}, {"dim": ZERO, "scale": "1_0.0", "offset": "0.0"},
        {"dim": ZERO, "scale": " 1.0", "offset": "0.0"}, {"dim": ZERO, "scale": "0x1p3", "offset": "0.0"},
        {"dim": ZERO, "scale": "1.", "offset": "0.0"}, {"dim": ZERO, "scale": "+1.0", "offset": "0.0"},
        {"dim": ZERO, "scale": "1.0", "offset": "0.0", "more": 1}, {"dim": "0000000", "scale": "1.0", "offset": "0.0"},
    ],
    ids=repr,
)  # fmt: skip
def test_refused(value: Any) -> None:
    with pytest.raises(UnitError):
        parse_unit(value)


@pytest.mark.parametrize(
    "symbol",
    ["m", "km", "kg*m**2/s**2", "degC", "m**-1", "m**0.5", "V**1/2", "rad", "percent", "µm", "Ω", "%", "m*m", "m**-5/2",
     "delta_degC", "1/s", "x" * 128],
)  # fmt: skip
def test_good_symbols(symbol: str) -> None:
    assert valid_symbol(symbol)


@pytest.mark.parametrize(
    "symbol",
    ["", "m**9**9**9", "m^2", "m**", "m//s", "*m", "m*", "(m)", "m m", "m**1234567", "m;import", "m\n", "m.real", "9",
     "m+m", "x" * 129, "m**2.", "m**--2", "__import__('os')", "\u202em", None, 3, ["m"]],
    ids=ascii,
)  # fmt: skip
def test_bad_symbols(symbol: Any) -> None:
    assert not valid_symbol(symbol)


def test_no_pattern_is_slow() -> None:
    start = time.process_time()
    texts = ["m*" * 64, "m**1" * 32, "a" * 127 + "!", "m**1/1" * 20, "1" * 128, "%" * 128, "9" * 10**6, "m" * 10**6]
    for text in texts:
        valid_symbol(text)
    for text in ("1" * 10**6, "-" * 10**6, "1/" * 10**5, "1e" * 20):
        for value in ([text, *ZERO[1:]], {"dim": ZERO, "scale": text, "offset": "0.0"}):
            with pytest.raises(UnitError):
                parse_unit(value)
    assert time.process_time() - start < 1


def test_text() -> None:
    assert str(Unit((1, 0, -1, 0, 0, 0, 0), symbol="m/s")) == "m/s"
    assert Unit((2, 1, -2, 0, 0, 0, 0)).dimension == "m²·kg·s⁻²"
    assert Unit((0, 0, "1/2", 0, 0, 0, 0)).dimension == "s¹ᐟ²"
    assert str(Unit((0,) * 7)) == "1"
    assert str(Unit((1, 0, 0, 0, 0, 0, 0), 1000.0)) == "1000.0 m"
    assert "273.15" in str(Unit((0, 0, 0, 0, 1, 0, 0), 1.0, 273.15))
