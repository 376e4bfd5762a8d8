"""Sums over pairs against NumPy in float64: values, extremes, counts, merging, what is not finite, any cut."""

from __future__ import annotations

import pickle
from functools import reduce

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import apsi_inspect as ai
from apsi_inspect.kernels.error import GROUP, SEGMENT
from apsi_inspect.ops.error_sums import ErrorSums, pair_sums

RNG = np.random.default_rng(7)


def noisy(n: int, scale: float = 0.02, noise: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
    x = RNG.normal(0, scale, n).astype("f4")
    y = (x + RNG.normal(0, noise * scale, n)).astype("f4")
    y[RNG.random(n) < 0.1] = 0
    x[RNG.random(n) < 0.1] = 0
    return x, y


def check(s: ErrorSums, x: np.ndarray, y: np.ndarray) -> None:
    """Everything against the definition."""
    a, b = x.astype("f8"), y.astype("f8")
    e = a - b
    assert s.n == x.size
    for found, expected in (
        (s.squares, (e * e).sum()), (s.x_squares, (a * a).sum()), (s.y_squares, (b * b).sum()),
        (s.mse, (e * e).mean()), (s.rmse, np.sqrt((e * e).mean())),
        (s.rel_l2, np.linalg.norm(e) / np.linalg.norm(a)), (s.max_abs_error, np.abs(e).max()),
        (s.sqnr_db, 10 * np.log10((a * a).sum() / (e * e).sum())),
        (s.cosine, a @ b / np.linalg.norm(a) / np.linalg.norm(b)),
    ):  # fmt: skip
        assert found == pytest.approx(expected, rel=1e-6, abs=0)
    assert s.dot == pytest.approx(a @ b, rel=1e-6, abs=1e-6 * s.x_squares)
    assert abs(e[s.max_at]) == pytest.approx(np.abs(e).max(), rel=1e-7)
    assert s.zeroed == ((x != 0) & (y == 0)).sum()
    assert s.zeroed_share == s.zeroed / x.size


@pytest.mark.parametrize("n", [1, 31, GROUP, GROUP + 1, 5000, SEGMENT, SEGMENT + GROUP + 3, 3 * SEGMENT + 1])
def test_equals_numpy(n: int) -> None:
    x, y = noisy(n)
    x[n // 2] = 1
    check(pair_sums(x, y), x, y)


@pytest.mark.parametrize("scale", [1e-36, 1e-25, 1e-18, 1e-10, 1.0, 1e12, 1e18, 1e30, 1e36])
def test_any_magnitude(scale: float) -> None:
    x, y = noisy(3000, scale)
    check(pair_sums(x, y), x, y)
    mixed, rounded = noisy(3000, scale)
    mixed[:5], rounded[:5] = 1, 1
    check(pair_sums(mixed, rounded), mixed, rounded)


def test_an_error_that_float32_squares_would_lose() -> None:
    x = np.ones(GROUP * 4, "f4")
    y = x.copy()
    x[5], y[5] = 3e-30, 1e-30
    check(pair_sums(x, y), x, y)


def test_float64_keeps_its_precision() -> None:
    x = RNG.normal(0, 1, 1000)
    y = x + RNG.normal(0, 1e-12, 1000)
    s = pair_sums(x, y)
    assert s.squares == pytest.approx(((x - y) ** 2).sum(), rel=1e-9)
    z = x.astype("f4")
    assert pair_sums(x, z).squares == pytest.approx(((x - z) ** 2).sum(), rel=1e-9)


def test_without_error() -> None:
    x, _ = noisy(1000)
    s = pair_sums(x, x.copy())
    assert (s.mse, s.rel_l2, s.max_abs_error, s.sqnr_db, s.cosine, s.zeroed) == (0, 0, 0, np.inf, 1, 0)


def test_nothing_and_zeros() -> None:
    empty = np.empty(0, "f4")
    s = pair_sums(empty, empty)
    assert s == ErrorSums()
    assert all(np.isnan(v) for v in (s.mse, s.rmse, s.rel_l2, s.max_abs_error, s.sqnr_db, s.cosine, s.zeroed_share))
    zero, one = np.zeros(300, "f4"), np.ones(300, "f4")
    s = pair_sums(zero, zero)
    assert (s.mse, s.sqnr_db, s.cosine, s.rel_l2) == (0, np.inf, 1, 0)
    s = pair_sums(zero, one)
    assert (s.mse, s.sqnr_db, s.rel_l2, s.zeroed) == (1, -np.inf, np.inf, 0)
    assert np.isnan(s.cosine)
    assert pair_sums(one, zero).zeroed == 300


@pytest.mark.parametrize("at", [0, 3, 700, 999])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_what_is_not_finite_is_counted_and_left_out(at: int, dtype: str) -> None:
    x, y = noisy(1000)
    x[:50] += 1
    x, y = x.astype(dtype), y.astype(dtype)
    odd = [(np.nan, 1), (1, np.nan), (np.inf, 1), (1, -np.inf), (np.inf, -np.inf), (np.nan, np.inf)]
    same = [(np.nan, np.nan), (np.inf, np.inf), (-np.inf, -np.inf)]
    for a, b in odd:
        p, q = x.copy(), y.copy()
        p[at], q[at] = a, b
        s = pair_sums(p, q)
        assert (s.n, s.nonfinite) == (999, 1)
        expected = (np.delete(x, at).astype("f8") - np.delete(y, at)) ** 2
        assert s.squares == pytest.approx(expected.sum(), rel=1e-6)
        assert s.max_at != at
    for a, b in same:
        p, q = x.copy(), y.copy()
        p[at], q[at] = a, b
        s = pair_sums(p, q)
        assert (s.n, s.nonfinite) == (1000, 0)
        assert s.squares == pytest.approx(((np.delete(x, at).astype("f8") - np.delete(y, at)) ** 2).sum(), rel=1e-6)


def test_parts_add_up_bit_for_bit() -> None:
    x, y = noisy(4 * SEGMENT + 77)
    w = RNG.random(96).astype("f4")
    whole = pair_sums(x, y, weights=w)
    for step in (SEGMENT, 3 * SEGMENT):
        parts = [pair_sums(x[i : i + step], y[i : i + step], i, w) for i in range(0, x.size, step)]
        if step == SEGMENT:
            assert reduce(ErrorSums.__add__, parts, ErrorSums()) == whole
        total = reduce(ErrorSums.__add__, pickle.loads(pickle.dumps(parts)))
        assert (total.max_at, total.n, total.zeroed) == (whole.max_at, whole.n, whole.zeroed)
        assert total.squares == pytest.approx(whole.squares, rel=1e-12)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=400), st.data())
def test_any_values(values: list[float], data: st.DataObject) -> None:
    x = np.array(values, "f4")
    y = np.array([data.draw(st.sampled_from([v, v / 2, 0.0, 1.0])) for v in values], "f4")
    s = pair_sums(x, y)
    e = x.astype("f8") - y
    assert s.squares == pytest.approx((e * e).sum(), rel=1e-6)
    assert s.x_squares == pytest.approx((x.astype("f8") ** 2).sum(), rel=1e-6)
    assert s.max_abs == pytest.approx(np.abs(e).max(), rel=1e-6)
    assert s.zeroed == ((x != 0) & (y == 0)).sum()


def test_the_first_of_equal_errors_is_named() -> None:
    x = np.zeros(2 * SEGMENT, "f4")
    y = x.copy()
    y[[GROUP + 3, GROUP + 9, SEGMENT + 5]] = 2
    assert pair_sums(x, y).max_at == GROUP + 3
    assert pair_sums(x, y, start=1000).max_at == GROUP + 1003


def test_weights_repeat_over_columns() -> None:
    x, y = noisy(7 * 96)
    w = RNG.random(96).astype("f4")
    s = pair_sums(x, y, weights=w)
    full = np.tile(w.astype("f8"), 7)
    expected = (full * (x.astype("f8") - y) ** 2).sum() / full.sum()
    assert s.weighted_mse == pytest.approx(expected, rel=1e-9)
    assert np.isnan(pair_sums(x, y).weighted_mse)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (np.zeros(3, "f4"), np.zeros(4, "f4")),
        (np.zeros((2, 2), "f4"), np.zeros((2, 2), "f4")),
        (np.zeros(3, "i4"), np.zeros(3, "f4")),
        (np.zeros(3, ml_dtypes.bfloat16), np.zeros(3, "f4")),
    ],
)
def test_what_is_no_pair_is_refused(x: np.ndarray, y: np.ndarray) -> None:
    with pytest.raises(ai.ValueRefusedError, match="pairs are two 1-D"):
        pair_sums(x, y)
