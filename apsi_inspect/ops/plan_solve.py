"""The choice of one encoding per tensor: the least total error within a number of bytes (a multiple-choice knapsack).

Contract: a pure function of sizes and errors, the same answer every time. The answer fits, is never worse than any of
the candidates given with it (the uniform formats), and comes with a lower bound that no choice can beat, so that its
distance from the optimum is known; `exact` says that it is the optimum.

How: the choices of an item that are worth their bytes form a convex chain of steps; taking the best steps first gives
the price of a byte at which the relaxed problem is solved (Sinha and Zoltners 1979), and with it the bound. A choice
whose reduced cost exceeds the distance between the bound and the best known answer cannot be in a better one and is
left out (Dyer, Kayal and Walker 1984). What is left is solved by dynamic programming over the undominated (bytes,
error) states, pruned by the same bound; only where there would be too many states are those of the worst bound
dropped, and the answer is then no longer called exact. `tests/test_plan_solve.py` compares with all combinations.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import fsum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import ValueRefusedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_STATES, MIN_STATES = 20_000, 256
_STATES_IN_ALL = 8_000_000  # states kept over all items, to bound memory
_SLACK = 1e-12  # of what is added up: float64 sums in another order


class Item(NamedTuple):
    """The choices of one tensor: bytes (int64) and errors (float64) of each, of one length."""

    nbytes: NDArray[np.int64]
    errors: NDArray[np.float64]


class Solution(NamedTuple):
    """Which choice each item gets.

    Attributes
    ----------
    choices
        A position in each item's choices.
    nbytes, error
        Their sums.
    bound
        No choice that fits has a smaller error.
    exact
        Whether this is the optimum (up to rounding).
    """

    choices: tuple[int, ...]
    nbytes: int
    error: float
    bound: float
    exact: bool

    @property
    def gap(self) -> float:
        """How far above the optimum the error may be at most, as a share of it; 0 for an exact solution."""
        if self.exact or self.error <= self.bound:
            return 0.0
        return self.error / self.bound - 1 if self.bound > 0 else float("inf")


def solve(items: Sequence[Item], limit: int, candidates: Sequence[Sequence[int]] = ()) -> Solution:
    """The choices with the least total error of at most `limit` bytes.

    Parameters
    ----------
    items
        At least one choice each; errors are finite and not negative.
    limit
        Bytes in all.
    candidates
        Choices that the answer must not be worse than, where they fit.

    Raises
    ------
    ValueRefusedError
        Even the smallest choices take more than `limit`.
    """
    chains = [undominated(item) for item in items]
    least = sum(int(item.nbytes[chain[0]]) for item, chain in zip(items, chains, strict=True))
    if least > limit:
        raise ValueRefusedError(f"{limit} bytes are too few: the smallest choices take {least}")
    price, best = _relaxed(items, chains, limit)
    best = _filled(items, chains, best, limit)
    for candidate in candidates:
        if _size(items, candidate) <= limit and _key(items, candidate) < _key(items, best):
            best = list(candidate)
    costs = [item.errors + price * item.nbytes for item in items]
    lowest = [float(c[chain].min()) for c, chain in zip(costs, chains, strict=True)]
    bound = max(fsum([*lowest, -price * limit]), 0.0)
    error = _error(items, best)
    slack = _SLACK * (error + price * limit)
    exact = error - bound <= slack
    if not exact:
        room = error - bound + slack
        core = [
            chain[costs[i][chain] - lowest[i] <= room] if len(chain) > 1 else chain for i, chain in enumerate(chains)
        ]
        core = [c if len(c) else chain[:1] for c, chain in zip(core, chains, strict=True)]
        found, exact = _dynamic(items, core, costs, lowest, limit, price, error + slack)
        if found is not None and _key(items, found) < _key(items, best):
            best = found
    error = _error(items, best)
    return Solution(tuple(best), _size(items, best), error, error if exact else min(bound, error), exact)


def undominated(item: Item) -> NDArray[np.intp]:
    """The choices that no other one beats in bytes and error, from the smallest to the most exact."""
    order = np.lexsort((np.arange(len(item.nbytes)), item.errors, item.nbytes))
    errors = item.errors[order]
    before = np.minimum.accumulate(np.concatenate(([np.inf], errors[:-1])))
    return order[errors < before]


def convex(item: Item, chain: NDArray[np.intp]) -> list[int]:
    """The part of an undominated chain whose steps give less and less error per byte."""
    hull: list[int] = []
    for j in chain.tolist():
        while len(hull) > 1 and gain(item, hull[-2], hull[-1]) <= gain(item, hull[-1], j):
            hull.pop()
        hull.append(j)
    return hull


def gain(item: Item, small: int, large: int) -> float:
    """Error that a step from one choice to a larger one saves, per byte."""
    return float(item.errors[small] - item.errors[large]) / int(item.nbytes[large] - item.nbytes[small])


def totals(items: Sequence[Item], choices: Sequence[int]) -> tuple[int, float]:
    """Bytes and error of some choices."""
    return _size(items, choices), _error(items, choices)


def _size(items: Sequence[Item], choices: Sequence[int]) -> int:
    return sum(int(item.nbytes[j]) for item, j in zip(items, choices, strict=True))


def _error(items: Sequence[Item], choices: Sequence[int]) -> float:
    return fsum(float(item.errors[j]) for item, j in zip(items, choices, strict=True))


def _key(items: Sequence[Item], choices: Sequence[int]) -> tuple[float, int, tuple[int, ...]]:
    """What makes one answer better than another; never a tie between different answers."""
    return _error(items, choices), _size(items, choices), tuple(choices)


def _relaxed(items: Sequence[Item], chains: Sequence[NDArray[np.intp]], limit: int) -> tuple[float, list[int]]:
    """The price of a byte that solves the relaxed problem, and the choices that the best steps give while they fit."""
    hulls = [convex(item, chain) for item, chain in zip(items, chains, strict=True)]
    steps = [
        (-gain(item, a, b), i, k, int(item.nbytes[b] - item.nbytes[a]))
        for i, (item, hull) in enumerate(zip(items, hulls, strict=True))
        for k, (a, b) in enumerate(pairwise(hull))
    ]
    steps.sort()
    at = [0] * len(items)
    left = limit - sum(int(item.nbytes[hull[0]]) for item, hull in zip(items, hulls, strict=True))
    price, stopped = 0.0, False
    closed = [False] * len(items)
    for slope, i, k, size in steps:
        if size <= left and not closed[i]:
            at[i], left = k + 1, left - size
        else:
            closed[i] = True
            if not stopped:
                price, stopped = -slope, True
    return price, [hull[k] for hull, k in zip(hulls, at, strict=True)]


def _filled(items: Sequence[Item], chains: Sequence[NDArray[np.intp]], choices: list[int], limit: int) -> list[int]:
    """The same with what still fits put to use: the change of one item that saves most, as long as there is one."""
    left = limit - _size(items, choices)
    owner = np.repeat(np.arange(len(items)), [len(c) for c in chains])
    place = np.concatenate(chains)
    nbytes = np.concatenate([item.nbytes[c] for item, c in zip(items, chains, strict=True)])
    errors = np.concatenate([item.errors[c] for item, c in zip(items, chains, strict=True)])
    out = list(choices)
    size = np.array([item.nbytes[j] for item, j in zip(items, out, strict=True)], np.int64)
    error = np.array([item.errors[j] for item, j in zip(items, out, strict=True)], np.float64)
    for _ in range(len(place)):
        saved = np.where(nbytes - size[owner] <= left, error[owner] - errors, 0.0)
        best = int(np.argmax(saved))
        if saved[best] <= 0:
            break
        i = owner[best]
        left -= int(nbytes[best] - size[i])
        out[i], size[i], error[i] = int(place[best]), nbytes[best], errors[best]
    return out


def _dynamic(
    items: Sequence[Item],
    core: Sequence[NDArray[np.intp]],
    costs: Sequence[NDArray[np.float64]],
    lowest: Sequence[float],
    limit: int,
    price: float,
    ceiling: float,
) -> tuple[list[int] | None, bool]:
    """The best answer of the core, None where none costs at most `ceiling`; and whether no state was dropped."""
    order = sorted(range(len(items)), key=lambda i: (-int(items[i].nbytes[core[i]].max()), i))
    order = [i for i in order if len(core[i]) > 1]
    fixed = [i for i in range(len(items)) if len(core[i]) == 1]
    cap = max(min(MAX_STATES, _STATES_IN_ALL // max(len(order), 1)), MIN_STATES)
    size = np.array([sum(int(items[i].nbytes[core[i][0]]) for i in fixed)], np.int64)
    error = np.array([fsum(float(items[i].errors[core[i][0]]) for i in fixed)])
    rest_size = sum(int(items[i].nbytes[core[i]].min()) for i in order)
    rest_cost = fsum(lowest[i] for i in order)
    trail: list[tuple[NDArray[np.int32], NDArray[np.int16]]] = []
    whole = True
    for i in order:
        rest_size -= int(items[i].nbytes[core[i]].min())
        rest_cost -= lowest[i]
        k = len(core[i])
        sizes = (size[:, None] + items[i].nbytes[core[i]]).ravel()
        errors = (error[:, None] + items[i].errors[core[i]]).ravel()
        bounds = errors + price * (sizes - float(limit)) + rest_cost
        keep = np.flatnonzero((sizes + rest_size <= limit) & (bounds <= ceiling))
        keep = keep[_front(sizes[keep], errors[keep])]
        if not len(keep):
            return None, whole
        if len(keep) > cap:
            keep = np.sort(keep[np.argsort(bounds[keep], kind="stable")[:cap]])
            whole = False
        trail.append(((keep // k).astype(np.int32), (keep % k).astype(np.int16)))
        size, error = sizes[keep], errors[keep]
    best = int(np.lexsort((size, error))[0])
    choices = [int(c[0]) for c in core]
    for i, (parents, taken) in zip(reversed(order), reversed(trail), strict=True):
        choices[i] = int(core[i][taken[best]])
        best = int(parents[best])
    return choices, whole


def _front(sizes: NDArray[Any], errors: NDArray[Any]) -> NDArray[np.intp]:
    """The states that no other one beats in bytes and error."""
    order = np.lexsort((np.arange(len(sizes)), errors, sizes))
    ordered = errors[order]
    before = np.minimum.accumulate(np.concatenate(([np.inf], ordered[:-1])))
    return order[ordered < before]
