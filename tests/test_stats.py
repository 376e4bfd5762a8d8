"""Statistics against NumPy in float64, `naive.stats`, and themselves however the stream is cut and threaded."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apsi_inspect.errors import ValueRefusedError
from apsi_inspect.kernels.stats import GROUP, SEGMENT
from apsi_inspect.ops.stats import TensorStats, compute_stats

from . import naive

Array = np.ndarray[Any, Any]
Q = [0, 0.001, 0.01, 0.25, 0.5, 0.75, 0.99, 0.999, 1]


def agree(found: TensorStats, x: Array, smallest_normal: float = 2.0**-126) -> None:
    """Counts and extremes exactly, moments to 1e-6 of the spread and quantiles to 1/128."""
    with np.errstate(invalid="ignore"):  # signalling NaN among all the bit patterns
        y = x.astype(np.float64).reshape(-1)
    finite = y[np.isfinite(y)]
    assert found.count == y.size
    assert (found.nan, found.posinf, found.neginf) == (np.isnan(y).sum(), np.isposinf(y).sum(), np.isneginf(y).sum())
    assert found.zeros == (y == 0).sum()
    assert found.subnormals == ((finite != 0) & (np.abs(finite) < smallest_normal)).sum()
    if not finite.size:
        assert all(math.isnan(v) for v in (found.min, found.max, found.mean, found.std, *found.quantiles(Q)))
        return
    assert (found.min, found.max) == (finite.min(), finite.max())
    std = finite.std()
    assert found.mean == pytest.approx(finite.mean(), rel=1e-6, abs=1e-9 * std)
    assert found.std == pytest.approx(std, rel=1e-6, abs=1e-12 * abs(finite).max())
    expected = np.quantile(finite, Q, method="lower")
    for got, want in zip(found.quantiles(Q), expected, strict=True):
        assert got == pytest.approx(want, rel=1 / 128, abs=2.0**-133)


SAMPLES: dict[str, Array] = {}


def _samples() -> None:
    rng = np.random.default_rng(7)
    n = 2 * SEGMENT + 3 * GROUP + 11
    normal = rng.standard_normal(n).astype(np.float32)
    SAMPLES["normal"] = normal
    SAMPLES["heavy"] = (normal * rng.choice([1e-42, 1e-30, 1e-3, 1, 1e4, 1e30], n)).astype(np.float32)
    SAMPLES["far from zero"] = (1e4 + 1e-3 * normal).astype(np.float32)
    SAMPLES["one outlier first"] = normal.copy()
    SAMPLES["one outlier first"][0] = 1e20
    SAMPLES["sparse"] = normal * (rng.random(n) < 0.1)
    SAMPLES["minus zero"] = np.full(300, -0.0, np.float32)
    SAMPLES["constant"] = np.full(SEGMENT, 0.1, np.float32)
    SAMPLES["huge"] = np.array([3.4e38, -3.4e38] * 500, np.float32)
    SAMPLES["subnormal"] = np.array([1e-45, -1e-40, 1e-38, 1.2e-38, 0, -0.0] * 100, np.float32)
    mixed = normal.copy()
    mixed[[0, 5, GROUP, SEGMENT, n - 1]] = np.nan
    mixed[[7, SEGMENT + 7, n - 2]] = np.inf
    mixed[[8, n - 3]] = -np.inf
    SAMPLES["not finite"] = mixed
    SAMPLES["all nan"] = np.full(GROUP + 3, np.nan, np.float32)
    SAMPLES["infinite first"] = np.array([np.inf, 1, 2], np.float32)
    SAMPLES["one"] = np.array([-2.5], np.float32)
    SAMPLES["none"] = np.zeros((0, 4), np.float32)
    SAMPLES["any bits"] = rng.integers(0, 2**32, SEGMENT + 5, np.uint32).view(np.float32)


_samples()


@pytest.mark.parametrize("name", SAMPLES)
def test_float32(name: str) -> None:
    x = SAMPLES[name]
    agree(compute_stats(x), x)


@pytest.mark.parametrize("name", ["heavy", "subnormal", "infinite first", "all nan", "one", "minus zero"])
def test_naive_twin(name: str) -> None:
    x = SAMPLES[name][:5000]
    found = compute_stats(x)
    for key, value in naive.stats(x, 2.0**-126).items():
        assert getattr(found, key) == pytest.approx(value, rel=1e-12, nan_ok=True), key


@pytest.mark.parametrize("name", ["heavy", "not finite", "far from zero"])
def test_bits_do_not_depend_on_cut_or_threads(name: str) -> None:
    x = SAMPLES[name]
    whole = compute_stats(x, threads=1)
    rng = np.random.default_rng(1)
    for threads in (1, 2, 5):
        edges = np.sort(rng.integers(0, x.size, 9))
        cut = compute_stats(iter(np.split(x, edges)), threads=threads)
        assert (cut.mean, cut.std) == (whole.mean, whole.std)
        assert cut == whole
        assert cut.quantiles(Q) == whole.quantiles(Q)


def test_a_buffer_may_be_reused() -> None:
    x = SAMPLES["heavy"]
    buffer = np.empty(1000, np.float32)

    def stream() -> Any:
        for i in range(0, x.size // 1000 * 1000, 1000):
            buffer[:] = x[i : i + 1000]
            yield buffer

    assert compute_stats(stream()) == compute_stats(x[: x.size // 1000 * 1000])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32), max_size=40), st.integers(1, 5))
def test_any_values(values: list[float], piece: int) -> None:
    x = np.array(values, np.float32)
    found = compute_stats(x[i : i + piece] for i in range(0, len(x), piece))
    expected = naive.stats(x, 2.0**-126)
    for key in ("count", "min", "max", "nan", "posinf", "neginf", "zeros", "subnormals"):
        assert getattr(found, key) == pytest.approx(expected[key], rel=0, abs=0, nan_ok=True), key
    largest = max((abs(v) for v in values if math.isfinite(v)), default=0)
    assert found.mean == pytest.approx(expected["mean"], rel=1e-9, abs=1e-12 * largest, nan_ok=True)
    assert found.std == pytest.approx(expected["std"], rel=1e-6, abs=1e-12 * largest, nan_ok=True)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint64, np.bool_])
def test_integers(dtype: Any) -> None:
    rng = np.random.default_rng(3)
    info = np.iinfo(np.uint8) if dtype is np.bool_ else np.iinfo(dtype)
    x = rng.integers(info.min, info.max, SEGMENT + 100, dtype=np.uint8 if dtype is np.bool_ else dtype, endpoint=True)
    x[:1000] = 0
    x = x.astype(dtype)
    found = compute_stats(x)
    agree(found, x)
    assert (found.min, found.max) == (int(x.min()), int(x.max()))
    assert isinstance(found.min, int)


def test_float64() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal(SEGMENT + 100) * rng.choice([1e-310, 1, 1e30], SEGMENT + 100)
    x[:5] = [np.nan, np.inf, -np.inf, 0, -0.0]
    agree(compute_stats(x), x, float(np.finfo(np.float64).smallest_normal))
    wide = compute_stats(np.array([1e300, -1e300, 1e-300]))
    assert (wide.min, wide.max, wide.zeros) == (-1e300, 1e300, 0)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_small_floats_know_their_own_subnormals(dtype: Any) -> None:
    """Given as they are, or widened with the dtype's name: the same, and the subnormals are the dtype's."""
    itemsize = np.dtype(dtype).itemsize
    x = np.arange(1 << (8 * itemsize), dtype=f"u{itemsize}").view(dtype)
    smallest = float(ml_dtypes.finfo(dtype).smallest_normal)
    found = compute_stats(x)
    agree(found, x, smallest)
    assert compute_stats(x.astype(np.float32), dtype=np.dtype(dtype).name) == found


def test_histogram_for_drawing() -> None:
    x = SAMPLES["normal"]
    found = compute_stats(x)
    counts, edges = found.histogram(40)
    expected, expected_edges = np.histogram(x, 40)
    np.testing.assert_allclose(edges, expected_edges, atol=1e-6)
    assert counts.sum() == pytest.approx(x.size)
    np.testing.assert_allclose(counts, expected, atol=0.002 * x.size)
    counts, edges = compute_stats(SAMPLES["constant"]).histogram(4)
    assert counts.sum() == SEGMENT
    counts, edges = compute_stats(SAMPLES["all nan"]).histogram(4)
    assert counts.sum() == 0
    counts, _ = compute_stats(np.array([0.0, 1.0, 1.0], np.float32)).histogram(2)
    assert counts.tolist() == [1, 2]


def test_sparsity_and_refusals() -> None:
    found = compute_stats(np.array([0, 1, -0.0, 2], np.float32))
    assert (found.sparsity, found.finite) == (0.5, 4)
    assert compute_stats(np.zeros(0, np.float32)).sparsity == 0
    with pytest.raises(ValueRefusedError, match="quantiles are between 0 and 1"):
        found.quantiles([1.5])
    with pytest.raises(ValueRefusedError, match="complex"):
        compute_stats(np.zeros(3, np.complex64))
    with pytest.raises(ValueRefusedError, match="a stream of float32 contains int32"):
        compute_stats([np.zeros(3, np.float32), np.zeros(3, np.int32)])
