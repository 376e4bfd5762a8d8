"""`quantize` and `quantize_model`: arrays to `QTensor`s, by the rules of .apsim (`docs/apsim-format.md`, section 5).

Contract: codes and scales are those of the specification, bit for bit; units and ties are kept; what is not finite is
refused, named and counted. `axis` is the axis that the values of one scale run **along**: for a matrix of shape
(out, in) ``axis=-1`` gives one scale a row, which PyTorch calls per-channel with axis 0. `tests/test_quantize.py`
enforces this.
"""

from __future__ import annotations

import os
import weakref
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ..encodings.encode_scaled import quantize_scaled
from ..encodings.scaled import PACKING, whole_number
from ..errors import ValueRefusedError, brief, quote
from ..model import ModelFile, Tensor
from ..qtensor import QTensor
from ..tree import from_skeleton
from ..tree_write import flatten
from ..units_pint import is_quantity, unit_of
from .leaves import identity, to_array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from ..units import Unit

# The formats by bare name, as in `quantize_model(params, int8)`; strings work too.
int8, int4, fp8, fp8_e5m2 = "int8", "int4", "fp8", "fp8_e5m2"
fp6, fp6_e3m2, fp4, bf16 = "fp6", "fp6_e3m2", "fp4", "bf16"

DEFAULT_BLOCK = 32  # of the formats below 8 bits
WHOLE_AXIS = "axis"


def quantize(x: Any, fmt: str, axis: int | None = -1, block: int | str | None = None) -> QTensor:
    """Quantize one tensor.

    `axis` is the direction in which values that share a scale lie, not the one that has many scales. A weight matrix of
    shape (out, in) with ``axis=-1`` gets one scale a row, i.e. one for each output. PyTorch calls the same thing
    per-channel with ``axis=0`` (its `ch_axis`): there the axis is the one along which the scales differ.

    Parameters
    ----------
    x
        An array (NumPy, torch, jax), a pint Quantity, a Tensor of an opened file, or nested lists of numbers.
    fmt
        ``"int8"``, ``"int4"``, ``"fp8"``, ``"fp8_e5m2"``, ``"fp6"``, ``"fp6_e3m2"``, ``"fp4"`` or ``"bf16"``.
    axis
        The axis that a scale's values run along; ``-1``: scales for every row. None: one scale for the whole tensor.
    block
        How many values along `axis` share a scale. None: 32 for the 4- and 6-bit formats, the whole axis for int8 and
        fp8. ``"axis"``: the whole axis.

    Raises
    ------
    ValueRefusedError
        Values that are not finite (bf16 takes them) or no real numbers; no such format, axis or block.
    """
    return _quantize(x, fmt, axis, block, x.name if isinstance(x, Tensor) else None)


def quantize_model(
    params: Any,
    fmt: str,
    axis: int | None = -1,
    block: int | str | None = None,
    *,
    include: str | Iterable[str] = "*",
    exclude: str | Iterable[str] = (),
    min_ndim: int = 2,
) -> Any:
    """Quantize the floating tensors of a tree; everything else stays as it is.

    `axis` is the direction in which values that share a scale lie: for weights of shape (out, in) the default ``-1``
    means one scale for each output, which PyTorch calls per-channel with ``axis=0`` (see `quantize`).

    Parameters
    ----------
    params
        A tree as `save_model` takes it, or an opened model.
    fmt, axis, block
        As in `quantize`.
    include, exclude
        Globs over the dotted names, e.g. ``exclude="embed*"``.
    min_ndim
        Tensors of fewer dimensions (biases, norms) stay.

    Returns
    -------
    record, list or tuple
        A tree of the same shape with QTensors; tied tensors stay one object.

    Raises
    ------
    ValueRefusedError
        As `quantize`, with the tensor's name; `include` chooses nothing; `params` is a path.
    """
    _check_format(fmt)
    if isinstance(params, (str, os.PathLike)):
        raise ValueRefusedError(
            f"{quote(os.fspath(params))} is a path: open or load the file first, and pass its model"
        )
    if isinstance(params, ModelFile):
        params = params.tree()
    flat = flatten(params, identity)
    wanted, unwanted = _globs(include), _globs(exclude)

    def chosen(name: str) -> bool:
        return any(fnmatchcase(name, g) for g in wanted) and not any(fnmatchcase(name, g) for g in unwanted)

    done: dict[str, Any] = {}
    for name, leaf in flat.leaves.items():
        small = isinstance(leaf, QTensor) or not chosen(name) or not _is_floating(leaf, flat.paths[name], min_ndim)
        done[name] = leaf if small else _quantize(leaf, fmt, axis, block, name)
    if include != "*" and not any(isinstance(leaf, QTensor) and chosen(name) for name, leaf in done.items()):
        raise ValueRefusedError(
            f"include={brief(wanted)} chooses no floating tensor of {min_ndim} or more dimensions;"
            f" the tensors are {brief(', '.join(done))}"
        )
    return from_skeleton(flat.skeleton, done.__getitem__)


def _globs(given: str | Iterable[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _check_format(fmt: str) -> None:
    if not isinstance(fmt, str) or fmt not in PACKING:
        raise ValueRefusedError(f"unknown format {fmt!r:.40}; known: {', '.join(PACKING)}")


def _is_floating(leaf: Any, where: str, min_ndim: int) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.ndim >= min_ndim and leaf.info.encoding.kind in ("float", "block")
    array = to_array(leaf.magnitude if is_quantity(leaf) else leaf, where, scalar=is_quantity(leaf))
    return array.ndim >= min_ndim and "float" in array.dtype.name


def _values(x: Any) -> tuple[NDArray[Any], Unit | None]:
    import numpy as np

    if isinstance(x, Tensor):
        return x.numpy(), x.unit
    if isinstance(x, QTensor):
        return np.asarray(x), x.unit
    unit = None
    if is_quantity(x):
        unit, x = unit_of(x, "the quantity"), x.magnitude
    if isinstance(x, (list, tuple, int, float, complex)):
        try:
            return np.asarray(x), unit
        except (TypeError, ValueError) as e:
            raise ValueRefusedError(f"the list makes no array: {e}") from e
    if not hasattr(x, "shape"):
        hint = "; open or load the file first" if isinstance(x, (str, os.PathLike)) else ""
        raise ValueRefusedError(f"{type(x).__name__} is no array, Tensor, Quantity or list of numbers{hint}")
    return to_array(x, "x"), unit


def _recall(x: Any) -> Callable[[], NDArray[Any] | None] | None:
    """Gives the values of `x` again as long as something else keeps them: the user an array, a model its file."""
    keeper = x.source if isinstance(x, Tensor) else x.magnitude if is_quantity(x) else x
    try:
        ref = weakref.ref(keeper)
    except TypeError:  # a list, a number
        return None
    place = (x.info, x.byte_order) if isinstance(x, Tensor) else None

    def recall() -> NDArray[Any] | None:
        found = ref()
        if found is None:
            return None
        return _values(found if place is None else Tensor(place[0], found, place[1]))[0]

    return recall


def _blocks(fmt: str, ndim: int, axis: int | None, block: int | str | None) -> tuple[int | None, int | None]:
    """Axis and block, with the defaults of the format."""
    axis = None if axis is None else whole_number(axis, "axis")
    whole = isinstance(block, str) and block == WHOLE_AXIS
    if isinstance(block, str) and not whole:
        raise ValueRefusedError(f"block is {block!r:.40}; a number, None or 'axis' was expected")
    size = None if block is None or whole else whole_number(block, "block")
    if size is not None and axis is None:
        raise ValueRefusedError(f"a block of {size} needs an axis to run along")
    if fmt == bf16 or not ndim:
        return None, None
    if block is None and axis is not None and fmt not in (int8, fp8, fp8_e5m2):
        size = DEFAULT_BLOCK
    return axis, size


def _quantize(x: Any, fmt: str, axis: int | None, block: int | str | None, name: str | None) -> QTensor:
    _check_format(fmt)
    array, unit = _values(x)
    axis, size = _blocks(fmt, array.ndim, axis, block)
    found = quantize_scaled(array, fmt, axis, size, name=name)
    q = QTensor(fmt, found.codes, found.scale, array.shape, axis, size, unit)
    q._source = _recall(x)
    return q
