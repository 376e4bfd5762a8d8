"""What `quant_error` measures: the tensors of a model or a tree, or one tensor or array, with their weights.

Contract: names are unique and in order; the scales and zero points of other tensors are not among them; what is no
tensor is refused by name. `tests/test_error.py` enforces this.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import ModelFileError, ValueRefusedError, quote
from ..listing import glob
from ..model import ModelFile, Tensor
from .gguf import to_input
from .leaves import identity

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from .inputs import Input


class Subject(NamedTuple):
    """A tensor that is to be measured."""

    source: Input
    tensor: Tensor | None
    nbytes: int
    weights: NDArray[np.float32] | None


def subjects_of(x: Any, pattern: str | None, weights: Mapping[str, ArrayLike]) -> tuple[list[Subject], str]:
    """The tensors, by name and in order, and what they are of."""
    title, leaves = "", {}
    if isinstance(x, ModelFile):
        incomplete = next((f for f in x.findings if f.code == "incomplete"), None)
        if incomplete is not None:
            raise ModelFileError(x.path, incomplete.message, hint="all parts are needed to measure it")
        aside = {name for affine in x.affine.values() for name in affine.companions}
        title, leaves = x.path, {name: x[name] for name in x.columns.names if name not in aside}
    elif isinstance(x, Tensor):
        title, leaves = x.name, {x.name: x}
    elif isinstance(x, (list, tuple)) and x and all(map(_is_number, x)):
        raise ValueRefusedError(f"a {type(x).__name__} of numbers is no tensor; give numpy.array(…) of it")
    elif isinstance(x, (Mapping, list, tuple)):
        from ..tree_write import flatten

        flat = flatten(x, identity)
        title, leaves = "parameters", dict(flat.leaves)
    else:
        title, leaves = "array", {"array": x}
    if pattern is not None:
        match = glob(pattern)
        leaves = {name: leaf for name, leaf in leaves.items() if match(name)}
        if not leaves:
            raise ValueRefusedError(f"no tensor matches {quote(pattern)}")
    unknown = [name for name in weights if name not in leaves] if pattern is None else []
    if unknown:
        raise ValueRefusedError(f"weights are given for {quote(unknown[0])}, which is no tensor here")
    return [_subject(name, leaf, weights.get(name)) for name, leaf in leaves.items()], title


def _is_number(x: Any) -> bool:
    """Whether it is a number or a nested sequence of numbers."""
    if isinstance(x, (list, tuple)):
        return bool(x) and all(map(_is_number, x))
    return isinstance(x, (int, float, complex))


def _subject(name: str, leaf: Any, weights: ArrayLike | None) -> Subject:
    source, _, nbytes = to_input(name, leaf, name)
    given = None
    if weights is not None:
        given = np.ascontiguousarray(weights, np.float32).reshape(-1)
        shape = source.shape or (1,)
        if given.size not in (shape[-1], prod(shape[:-2]) * shape[-1]) or not (given >= 0).all():
            raise ValueRefusedError(
                f"tensor {quote(name)}: weights are one number from 0 on for each of its {shape[-1]} columns"
                f" (or for those of each matrix), got {given.size}"
            )
        given.flags.writeable = False
    return Subject(source, leaf if isinstance(leaf, Tensor) else None, nbytes, given)
