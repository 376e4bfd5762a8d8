"""The optimiser behind `plan`, compared with all combinations of small cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apsi_inspect.errors import ValueRefusedError
from apsi_inspect.ops import plan_solve
from apsi_inspect.ops.plan_solve import Item, Solution, gain, solve, undominated


def item(*choices: tuple[int, float]) -> Item:
    return Item(np.array([c[0] for c in choices], np.int64), np.array([c[1] for c in choices], np.float64))


def size(items: list[Item], choices: tuple[int, ...]) -> int:
    return sum(int(i.nbytes[j]) for i, j in zip(items, choices, strict=True))


def error(items: list[Item], choices: tuple[int, ...]) -> float:
    return sum(float(i.errors[j]) for i, j in zip(items, choices, strict=True))


def optimum(items: list[Item], limit: int) -> float:
    """The least error of all combinations that fit."""
    every = itertools.product(*(range(len(i.nbytes)) for i in items))
    return min(error(items, c) for c in every if size(items, c) <= limit)


def check(items: list[Item], limit: int, found: Solution) -> None:
    assert found.nbytes == size(items, found.choices) <= limit
    assert found.error == pytest.approx(error(items, found.choices), rel=1e-12, abs=0)
    assert 0 <= found.bound <= found.error


CHOICE = st.tuples(st.integers(1, 60), st.floats(0, 1e6, allow_subnormal=False))
ITEMS = st.lists(st.lists(CHOICE, min_size=1, max_size=5), min_size=1, max_size=5)


@given(ITEMS, st.floats(0, 1))
def test_the_optimum_of_small_cases(choices: list[list[tuple[int, float]]], share: float) -> None:
    items = [item(*c) for c in choices]
    low, high = (sum(int(f(i.nbytes)) for i in items) for f in (np.min, np.max))
    limit = low + int(share * (high - low))
    found = solve(items, limit)
    check(items, limit, found)
    best = optimum(items, limit)
    assert found.exact
    assert found.error <= best * (1 + 1e-9) + 1e-9 * sum(float(i.errors.max()) for i in items)


@given(ITEMS, st.floats(0, 1), st.data())
def test_with_few_states_the_gap_is_told_and_no_candidate_is_better(
    choices: list[list[tuple[int, float]]], share: float, data: st.DataObject
) -> None:
    items = [item(*c) for c in choices]
    candidates = [tuple(data.draw(st.integers(0, len(i.nbytes) - 1)) for i in items) for _ in range(3)]
    low, high = (sum(int(f(i.nbytes)) for i in items) for f in (np.min, np.max))
    limit = low + int(share * (high - low))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_solve, "MAX_STATES", 1)
        patch.setattr(plan_solve, "MIN_STATES", 1)
        found = solve(items, limit, candidates)
    check(items, limit, found)
    best = optimum(items, limit)
    assert found.bound <= best * (1 + 1e-9) + 1e-9 * sum(float(i.errors.max()) for i in items)
    for candidate in candidates:
        assert size(items, candidate) > limit or found.error <= error(items, candidate) * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_cases_like_models_are_within_one_percent_of_all_combinations(seed: int) -> None:
    rng = np.random.default_rng(seed)
    bpw = np.sort(rng.choice([2.625, 3.4375, 4.5, 5.5, 6.5625, 8.5], 4, replace=False))[::-1]
    numel = rng.integers(1, 40, 7) * 4096
    items = [
        Item((n * bpw / 8).astype(np.int64), n * rng.lognormal() * 4.0**-bpw * rng.uniform(0.7, 1.3, 4)) for n in numel
    ]
    low, high = (sum(int(f(i.nbytes)) for i in items) for f in (np.min, np.max))
    limit = int(rng.integers(low, high))
    found = solve(items, limit, [[j] * 7 for j in range(4)])
    check(items, limit, found)
    assert found.error <= 1.01 * optimum(items, limit)
    assert found.exact
    assert found.error <= optimum(items, limit) * (1 + 1e-9)


@pytest.mark.parametrize("count", [300, 1200])
def test_large_cases_are_within_one_percent_of_the_bound(count: int) -> None:
    rng = np.random.default_rng(count)
    bpw = np.array([8.5, 6.5625, 5.5, 4.5, 3.4375, 2.625])
    shapes = rng.integers(40, 8000, 20) * 256
    items = []
    for i in range(count):
        n = int(shapes[i % 20])
        items.append(Item((n * bpw / 8).astype(np.int64), n * rng.lognormal() * 4.0**-bpw * rng.uniform(0.9, 1.1, 6)))
    uniform = [[j] * count for j in range(6)]
    for j in range(1, 6):
        limit = size(items, tuple(uniform[j]))
        found = solve(items, limit, uniform)
        check(items, limit, found)
        assert found.error <= error(items, tuple(uniform[j]))
        assert found.gap < 0.001
        assert found == solve(items, limit, uniform)


def test_ties_have_one_answer() -> None:
    twins = [item((10, 4.0), (20, 1.0))] * 4
    found = solve(twins, 60)
    assert (found.nbytes, found.error, found.exact) == (60, 10.0, True)
    assert found.choices == solve(twins, 60).choices
    assert solve([item((8, 1.0), (8, 1.0), (9, 1.0))], 10).choices == (0,)  # the smallest, the first


def test_a_gap_that_the_convex_steps_alone_would_leave() -> None:
    # per byte the step of the first is best, but then nothing else fits
    items = [item((0, 10.0), (6, 3.0)), item((0, 9.0), (5, 4.0)), item((0, 9.0), (5, 4.0))]
    found = solve(items, 10)
    assert found.choices == (0, 1, 1)
    assert found.error == 18.0


def test_undominated_and_gain() -> None:
    i = item((8, 1.0), (4, 3.0), (5, 3.0), (6, 5.0), (12, 1.0), (16, 0.0))
    assert undominated(i).tolist() == [1, 0, 5]
    assert gain(i, 1, 0) == 0.5


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueRefusedError, match="9 bytes are too few: the smallest choices take 10"):
        solve([item((10, 1.0), (20, 0.0))], 9)


@given(st.integers(1, 10**15), st.integers(0, 10**15))
def test_sizes_beyond_32_bits(first: int, second: int) -> None:
    items = [item((first, 1.0), (first + second + 1, 0.0))]
    assert solve(items, first).nbytes == first
    assert solve(items, first + second + 1).error == 0
