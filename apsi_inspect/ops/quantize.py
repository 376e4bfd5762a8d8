"""`quantize` and `quantize_model`: arrays to `QTensor`s, by the rules of .apsim (`docs/apsim.md`, section 5).

Contract: codes and scales are those of the specification, bit for bit; units and ties are kept; what is not finite is
refused, named and counted. `axis` is the axis that the values of one scale run **along**: for a matrix of shape
(out, in) ``axis=-1`` gives one scale a row, which PyTorch calls per-channel with axis 0. `tests/test_quantize.py`
enforces this.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ..encodings.encode_scaled import quantize_scaled
from ..encodings.scaled import PACKING
from ..errors import ValueRefusedError
from ..model import ModelFile, Tensor
from ..qtensor import QTensor
from ..tree import from_skeleton
from ..tree_write import flatten
from ..units_pint import is_quantity, unit_of
from .leaves import identity, to_array

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from ..units import Unit

# The formats by bare name, as in `quantize_model(params, int8)`; strings work too.
int8, int4, fp8, fp8_e5m2 = "int8", "int4", "fp8", "fp8_e5m2"
fp6, fp6_e3m2, fp4, bf16 = "fp6", "fp6_e3m2", "fp4", "bf16"

DEFAULT_BLOCK = 32  # of the formats below 8 bits
WHOLE_AXIS = "axis"


def quantize(x: Any, fmt: str, axis: int | None = -1, block: int | str | None = None) -> QTensor:
    """Quantize one tensor.

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
        Values that are not finite (bf16 takes them), no such format or axis.
    """
    return _quantize(x, fmt, axis, block, None)


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
        As `quantize`, with the tensor's name.
    """
    _check_format(fmt)
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
    return from_skeleton(flat.skeleton, done.__getitem__)


def _globs(given: str | Iterable[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _check_format(fmt: str) -> None:
    if fmt not in PACKING:
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
    return (np.asarray(x) if isinstance(x, (list, tuple, int, float)) else to_array(x, "x")), unit


def _quantize(x: Any, fmt: str, axis: int | None, block: int | str | None, name: str | None) -> QTensor:
    _check_format(fmt)
    array, unit = _values(x)
    if fmt == bf16 or not array.ndim:
        axis = block = None
    elif axis is None:
        if isinstance(block, int):
            raise ValueRefusedError(f"a block of {block} needs an axis to run along")
        block = None
    elif block is None:
        block = None if fmt in (int8, fp8, fp8_e5m2) else DEFAULT_BLOCK
    elif block == WHOLE_AXIS:
        block = None
    elif isinstance(block, str):
        raise ValueRefusedError(f"block is {block!r:.40}; a number, None or 'axis' was expected")
    found = quantize_scaled(array, fmt, axis, block, name=name)
    q = QTensor(fmt, found.codes, found.scale, array.shape, axis, block, unit)
    q._remember(x.magnitude if is_quantity(x) else x)
    return q
