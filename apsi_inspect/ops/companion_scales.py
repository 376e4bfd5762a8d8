"""Codes whose scales stand in a tensor beside them, by the name alone: `X.qweight` with `X.scale`, and the like.

Contract: `logical` gives such a tensor with its values (code times scale, symmetric) where codes are of 8 bits and the
shape of the scales says without doubt what they belong to; any other tensor as it is. `tests/test_compare.py` compares
with NumPy.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from ..encodings.affine import Affine
from ..model import Tensor

if TYPE_CHECKING:
    from ..model import ModelFile

CODES = ".qweight"
# ending of the codes -> ending of the scales
_SCALES = {CODES: ".scale", ".weight": ".weight_scale"}
_ENCODINGS = ("I8", "F8_E4M3", "F8_E5M2")


def logical(model: ModelFile, name: str) -> Tensor:
    """The tensor, its values decoded with the scales beside it."""
    tensor = model[name]
    if tensor.affine is not None or tensor.encoding not in _ENCODINGS:
        return tensor
    for ending, scales in _SCALES.items():
        beside = name.removesuffix(ending) + scales
        if name.endswith(ending) and beside in model:
            affine = _affine(tensor, model[beside])
            return tensor if affine is None else Tensor(tensor.info._replace(affine=affine), tensor.source)
    return tensor


def _affine(codes: Tensor, scale: Tensor) -> Affine | None:
    """One scale, one a row, or one for each of equal parts of a row."""
    if scale.info.encoding.kind != "float" or not codes.shape:
        return None
    if scale.numel == 1:
        return Affine(scale)
    rows, row = codes.shape[0], prod(codes.shape[1:])
    if scale.numel == rows and scale.shape[0] == rows:
        return Affine(scale, axis=0)
    if codes.ndim == scale.ndim == 2 and scale.shape[0] == rows and row % scale.shape[1] == 0:
        return Affine(scale, axis=1, block=row // scale.shape[1])
    return None
