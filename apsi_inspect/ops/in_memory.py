"""A parameter tree in memory as a `ModelFile`, so that a verb over models takes it too.

Contract: names are paths with dots, as `save_model` gives them; no array is copied that lies in order. What is in
memory stays in this process. `tests/test_compare.py` enforces this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ValueRefusedError
from ..model import Columns, ModelFile, Tensor, TensorInfo
from ..qtensor import QTensor
from ..source import BytesSource
from ..tree_write import flatten
from ..units_pint import is_quantity, unit_of
from .inputs import ArrayInput
from .leaves import identity, to_array

if TYPE_CHECKING:
    from ..source import ByteSource

_WIDER = {"int4": "int8", "int2": "int8", "uint4": "uint8", "uint2": "uint8"}


def model_of(params: Any, name: str) -> ModelFile:
    """The model of a tree of arrays, Quantities and QTensors; `name` stands for its path.

    Raises
    ------
    ValueRefusedError
        It holds something else, or no tensor.
    """
    flat = flatten(params, identity)
    made = [_tensor(n, leaf, flat.paths[n]) for n, leaf in flat.leaves.items()]
    if not made:
        raise ValueRefusedError(f"{name} has no tensor; a path, a model or a tree of arrays was expected")
    infos = [info for info, _ in made]
    encodings = list(dict.fromkeys(i.encoding for i in infos))
    starts = [0]
    for i in infos:
        starts.append(starts[-1] + len(i.shape))
    columns = Columns(
        [i.name for i in infos],
        encodings,
        [encodings.index(i.encoding) for i in infos],
        [n for i in infos for n in i.shape],
        starts,
        [0] * len(infos),
        [i.nbytes for i in infos],
    )
    return ModelFile(
        name,
        "in memory",
        columns,
        [BytesSource(b"", name)],
        units={i.name: i.unit for i in infos if i.unit is not None},
        qparams={i.name: i.qparams for i in infos if i.qparams is not None},
        views={i.name: source for i, source in made},
    )


def _tensor(name: str, leaf: Any, where: str) -> tuple[TensorInfo, ByteSource]:
    if isinstance(leaf, Tensor):
        raise ValueRefusedError(f"{where} is a tensor of a file; give the opened model instead of its tree")
    unit = None
    if is_quantity(leaf):
        unit, leaf = unit_of(leaf, where), leaf.magnitude
    if isinstance(leaf, QTensor):
        tensor = leaf.tensor(name)
        return tensor.info if unit is None else tensor.info._replace(unit=unit), tensor.source
    array = to_array(leaf, where, scalar=unit is not None)
    wider = _WIDER.get(array.dtype.name)  # ml_dtypes keeps them one a byte, as they are compared
    source = ArrayInput(name, array if wider is None else array.astype(wider))
    numel = source.cuts(1)[-1][1] if source.cuts(1) else 0
    raw = source.raw(0, numel)
    return TensorInfo(name, source.encoding, source.shape, 0, raw.nbytes, unit=unit), BytesSource(memoryview(raw), name)
