"""The kernel that counts unequal values against NumPy's definition of them, and buffers that sides do not share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apsi_inspect.kernels.pairs import SEGMENT, unequal
from apsi_inspect.kernels.warm import _others
from apsi_inspect.ops.inputs import SCRATCH
from apsi_inspect.ops.pairs import _KEPT, _unequal

Array = np.ndarray[Any, Any]
BITS = {np.float32: np.uint32, np.float64: np.uint64}


def special(dtype: type) -> Array:
    """Quiet and signalling NaN of both signs with several payloads, zeros, infinities, least and greatest numbers."""
    info = np.finfo(dtype)
    width, fraction = info.bits, info.nmant
    top = ((1 << (width - 1 - fraction)) - 1) << fraction  # an exponent of ones
    nans = [top | p for p in (1, 2, 1 << (fraction - 1), (1 << fraction) - 1)]
    patterns = [0, 1, top, top - 1, 1 << fraction, *nans]
    bits = np.array([p | sign << (width - 1) for p in patterns for sign in (0, 1)], BITS[dtype])
    return np.concatenate([bits.view(dtype), np.array([1, -1, 1.5, 2], dtype)])


def by_numpy(x: Array, y: Array) -> tuple[int, int]:
    equal = (x == y) | (np.isnan(x) & np.isnan(y))
    signs = (x == 0) & (y == 0) & (np.signbit(x) != np.signbit(y))
    return int((~equal).sum()), int(signs.sum())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_pair_of_special_values(dtype: type) -> None:
    values = special(dtype)
    for v in values:
        for w in values:
            x, y = np.array([v], dtype), np.array([w], dtype)
            assert _unequal(x, y) == by_numpy(x, y), (v, w)
    x, y = np.repeat(values, len(values)), np.tile(values, len(values))
    assert _unequal(x, y) == by_numpy(x, y)
    assert _unequal(x, x.copy()) == (0, 0)
    assert by_numpy(x, y)[1] == 2


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [0, 1, 7, 31, 33, 255, 1001, SEGMENT - 1, SEGMENT, SEGMENT + 1, 3 * SEGMENT + 5])
def test_any_length(dtype: type, n: int) -> None:
    rng = np.random.default_rng(n)
    values = special(dtype)
    x = values[rng.integers(len(values), size=n)]
    y = np.where(rng.random(n) < 0.5, x, values[rng.integers(len(values), size=n)])
    assert _unequal(x, y) == by_numpy(x, y)
    x, y = rng.standard_normal(n).astype(dtype), np.zeros(n, dtype)
    assert _unequal(x, y) == (n, 0)
    assert _unequal(-y, y) == (0, n)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_bits(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([np.float32, np.float64]))
    pattern = st.integers(0, int(np.iinfo(BITS[dtype]).max)) | st.sampled_from(
        special(dtype).view(BITS[dtype]).tolist()
    )
    pairs = data.draw(st.lists(st.tuples(pattern, pattern) | pattern.map(lambda p: (p, p)), max_size=70))
    x, y = (np.array([p[i] for p in pairs], BITS[dtype]).view(dtype) for i in (0, 1))
    assert _unequal(x, y) == by_numpy(x, y)


def test_arrays_as_they_come() -> None:
    """Read-only, misaligned and strided ones, of two widths, and integers."""
    x = special(np.float32)
    y = x[::-1].copy()
    expected = by_numpy(x, y)
    fixed = x.copy()
    fixed.flags.writeable = False
    odd = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32)
    spread = np.repeat(x, 2)[::2]
    assert not odd.flags.aligned
    assert not spread.flags.c_contiguous
    for given_x in (fixed, odd, spread):
        assert _unequal(given_x, y) == expected
        assert _unequal(y, given_x) == by_numpy(y, x)
    with np.errstate(invalid="ignore"):  # signalling NaN, made quiet
        wide = x.astype(np.float64)
        assert _unequal(wide, y) == by_numpy(wide, y)
    numbers = np.arange(9)
    assert _unequal(numbers, numbers[::-1].copy()) == (8, 0)
    assert _unequal(numbers, numbers.copy()) == (0, 0)
    assert _unequal(numbers, numbers.astype(np.float32)) == (0, 0)


def test_warm_compiles_what_is_called() -> None:
    for name, f, args in _others():
        if name == "pairs.unequal":
            f(*args)
    known = set(unequal.signatures)
    assert len(known) == 2
    for dtype in (np.float32, np.float64):
        _unequal(special(dtype), special(dtype))
    assert set(unequal.signatures) == known


def test_sides_are_read_into_buffers_of_their_own() -> None:
    found = []
    for which in range(3):
        _KEPT.use(which)
        buffer = SCRATCH.bytes("values", 64)
        buffer[:] = which
        found.append(buffer)
    assert [set(b.tolist()) for b in found] == [{0}, {1}, {2}]
