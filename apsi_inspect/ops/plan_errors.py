"""The errors that `plan` weighs up: of every option of every tensor, from `quant_error` or a table of it.

Contract: the error of an option is the sum of (x - y)² over the tensor's values, or of w (x - y)² with an importance
matrix; 0 where the values do not change; infinite where the format cannot hold them. A tensor that the matrix does not
name counts with the mean weight of those that it names, so that both are of one unit. `tests/test_plan.py` compares
with NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import ValueRefusedError, quote

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from numpy.typing import NDArray

    from ..model import ModelFile
    from .error import ErrorTable
    from .imatrix import Imatrix
    from .plan_choices import Menu


class Errors(NamedTuple):
    """What is known of the options of one tensor, in their order.

    Attributes
    ----------
    errors
        What the plan adds up.
    squares
        Sums of (x - y)².
    signal
        Sum of x²; None where nothing was measured.
    """

    errors: NDArray[np.float64]
    squares: NDArray[np.float64]
    signal: float | None


class _Found(NamedTuple):
    mse: float
    weighted_mse: float
    sqnr_db: float


def errors_of(
    model: ModelFile,
    menus: Sequence[Menu],
    given: ErrorTable | None,
    weights: Imatrix | None,
    sample: int | None,
    executor: Executor | None,
    progress: bool | None,
) -> list[Errors]:
    """The errors of all options, measured where `given` does not have them."""
    scales = _scales(menus, weights)
    known: dict[tuple[str, str], _Found] = {} if given is None else _lookup(given, {m.name: m for m in menus})
    missing: dict[tuple[str, ...], list[str]] = {}
    for menu in menus:
        need = [o.encoding.name for o in menu.options if not o.lossless and menu.numel]
        weighted = weights is not None and menu.name in weights.weights
        lacking = tuple(n for n in need if not _has(known.get((menu.name, n.upper())), weighted))
        if lacking:
            missing.setdefault(lacking, []).append(menu.name)
    if missing:
        from .error import quant_error

        columns = _columns(menus, weights)
        for names, tensors in missing.items():
            table = quant_error(
                {name: model[name] for name in tensors}, [n.lower() for n in names], sample=sample, executor=executor,
                weights={n: columns[n] for n in tensors if n in columns}, container="apsim", progress=progress,
            )  # fmt: skip
            known |= _lookup(table, {m.name: m for m in menus})
    return [_errors(menu, known, scales.get(menu.name)) for menu in menus]


def _has(found: _Found | None, weighted: bool) -> bool:
    return found is not None and (not weighted or not isfinite(found.mse) or isfinite(found.weighted_mse))


def _scales(menus: Sequence[Menu], weights: Imatrix | None) -> dict[str, tuple[float, bool]]:
    """Tensor -> (its mean weight, whether that is its own); empty without weights."""
    if weights is None:
        return {}
    own: dict[str, float] = {}
    for m in menus:
        columns = weights.columns(m.name, m.shape)
        if columns is not None:
            own[m.name] = float(columns.mean(dtype=np.float64))
    if not own:
        raise ValueRefusedError(f"{quote(weights.path)} has no weights for any tensor of the model: of another model?")
    numel = sum(m.numel for m in menus if m.name in own)
    mean = sum(m.numel * own[m.name] for m in menus if m.name in own) / max(numel, 1)
    return {m.name: (own.get(m.name, mean), m.name in own) for m in menus}


def _columns(menus: Sequence[Menu], weights: Imatrix | None) -> dict[str, NDArray[np.float32]]:
    if weights is None:
        return {}
    found = {m.name: weights.columns(m.name, m.shape) for m in menus}
    return {name: w for name, w in found.items() if w is not None}


def _lookup(table: ErrorTable, menus: Mapping[str, Menu]) -> dict[tuple[str, str], _Found]:
    """(Tensor, format in capitals) -> what the table says."""
    frame: Any = table.frame
    other = {(r.name, r.format) for r in getattr(table, "rows", ()) if r.sums is None}  # stored otherwise there
    out = {}
    columns = ["name", "format", "numel", "mse", "weighted_mse", "sqnr_db"]
    for name, fmt, numel, mse, weighted, sqnr in frame[columns].itertuples(index=False, name=None):
        menu = menus.get(name)
        if menu is None or int(numel) != menu.numel:
            what = "is not in the model" if menu is None else f"has {menu.numel} elements, not {numel}"
            raise ValueRefusedError(f"the errors are of another model: tensor {quote(str(name))} {what}")
        if (name, fmt) not in other:
            out[name, str(fmt).upper()] = _Found(float(mse), float(weighted), float(sqnr))
    return out


def _errors(menu: Menu, known: Mapping[tuple[str, str], _Found], scale: tuple[float, bool] | None) -> Errors:
    errors, squares = np.zeros(len(menu.options)), np.zeros(len(menu.options))
    signal = None
    for i, option in enumerate(menu.options):
        if option.lossless or not menu.numel:
            continue
        found = known.get((menu.name, option.encoding.name.upper()))
        if found is None or not isfinite(found.mse):
            errors[i] = squares[i] = inf
            continue
        squares[i] = menu.numel * found.mse
        if scale is None:
            errors[i] = squares[i]
        else:
            mean, own = scale
            errors[i] = menu.numel * mean * (found.weighted_mse if own and mean else found.mse)
        if signal is None and isfinite(found.sqnr_db):
            signal = float(squares[i]) * 10 ** (found.sqnr_db / 10)
    return Errors(errors, squares, signal)
