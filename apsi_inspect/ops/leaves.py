"""What a leaf of a parameter tree is, and the bytes it is stored as: arrays of any library, pint, Tensor, QTensor.

Contract: every bit is kept (NaN payloads, −0.0); only byte order and memory order are made the file's. Arrays are never
copied as a whole: what is not stored as it lies in memory goes out in pieces. torch, jax and pint are not imported.
What a file cannot hold is refused, naming the place. `tests/test_save_load.py` enforces this.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ..encodings.scaled import CODE_DTYPE
from ..encodings.values import numpy_dtype
from ..errors import ValueRefusedError
from ..formats.apsim_write import Item
from ..formats.safetensors import DTYPES
from ..formats.safetensors_write import Blob
from ..model import Tensor
from ..qtensor import QTensor, packed_shape
from ..units_pint import is_quantity, unit_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from ..units import Unit

PIECE = 4 << 20  # bytes that are copied at a time
_NAMES = {e.dtype: name for name, e in DTYPES.items()}  # NumPy's (or ml_dtypes') name -> safetensors' word


def identity(leaf: Any) -> object:
    """What tied leaves share: the object, or for torch (whose state dicts make new objects) the same memory."""
    if _is_torch(leaf) and leaf.layout == _torch().strided and leaf.device.type != "meta" and leaf.numel():
        return ("torch", str(leaf.device), leaf.data_ptr(), leaf.dtype, tuple(leaf.shape), leaf.stride())
    return id(leaf)


def _torch() -> Any:
    return sys.modules["torch"]


def _is_torch(leaf: Any) -> bool:
    return "torch" in sys.modules and isinstance(leaf, _torch().Tensor)


def to_item(name: str, leaf: Any, where: str) -> Item:
    """The stored form of a leaf.

    Raises
    ------
    ValueRefusedError
        It is no tensor, or of a dtype or unit that a file cannot hold; the message begins with `where`.
    """
    if isinstance(leaf, QTensor):
        return _from_qtensor(name, leaf, leaf.unit)
    if isinstance(leaf, Tensor):
        return _from_tensor(name, leaf, where)
    unit = None
    if is_quantity(leaf):
        unit, leaf = unit_of(leaf, where), leaf.magnitude
        if isinstance(leaf, QTensor):
            return _from_qtensor(name, leaf, unit)
    return Item(array_blob(name, to_array(leaf, where, scalar=unit is not None), where), unit=unit)


def to_array(leaf: Any, where: str, scalar: bool = False) -> NDArray[Any]:
    """A NumPy array over the same memory; refuses what is no array."""
    import numpy as np

    if _is_torch(leaf):
        return _from_torch(leaf, where)
    if isinstance(leaf, np.ma.MaskedArray):
        raise ValueRefusedError(f"{where}: a masked array would lose its mask; fill it first")
    if isinstance(leaf, (np.ndarray, np.generic)) or (scalar and type(leaf) in (int, float, complex, bool)):
        return np.asarray(leaf)
    module = type(leaf).__module__.partition(".")[0]
    if module != "pandas" and all(hasattr(leaf, a) for a in ("__array__", "shape", "dtype")):
        return np.asarray(leaf)
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}".removeprefix("builtins.")
    raise ValueRefusedError(f"{where}: {kind} is neither an array nor a plain value (None, bool, int, float, str)")


def _from_torch(leaf: Any, where: str) -> NDArray[Any]:
    import numpy as np

    torch = _torch()
    t = leaf.detach()
    if t.layout != torch.strided or t.is_quantized or t.device.type == "meta":
        layout = str(t.layout).removeprefix("torch.")
        kind = "quantized" if t.is_quantized else "meta" if t.device.type == "meta" else layout
        raise ValueRefusedError(f"{where}: a {kind} torch tensor cannot be stored; make it dense first")
    t = t.cpu().resolve_conj().resolve_neg()
    name = str(t.dtype).removeprefix("torch.")
    if name == "float4_e2m1fn_x2":
        raise ValueRefusedError(f"{where}: torch dtype {name} is packed; store its bytes with .view(torch.uint8)")
    try:
        wanted = numpy_dtype(name)
    except (AttributeError, TypeError):
        raise ValueRefusedError(f"{where}: torch dtype {name} has no counterpart in a file") from None
    if wanted.kind in "biufc" and wanted.isbuiltin == 1:
        values: NDArray[Any] = t.numpy()
        return values
    carrier = {1: torch.uint8, 2: torch.int16}[wanted.itemsize]
    raw: NDArray[Any] = t.view(carrier).numpy()
    return raw.view(np.dtype(wanted))


def array_blob(name: str, array: NDArray[Any], where: str) -> Blob:
    """An array as the bytes of a file."""
    word = _NAMES.get(array.dtype.name)
    if word is None or array.dtype.fields is not None:
        raise ValueRefusedError(f"{where}: dtype {array.dtype} has no counterpart in a file ({', '.join(_NAMES)})")
    encoding = DTYPES[word]
    nbytes = encoding.nbytes(array.size)
    if nbytes is None:
        raise ValueRefusedError(f"{where}: {array.size} elements of {word} do not fill whole bytes")
    if encoding.block_size != 1:
        return Blob(name, word, array.shape, nbytes, lambda: _packed(array, encoding.block_size))
    return Blob(name, word, array.shape, nbytes, lambda: pieces(array))


def pieces(array: NDArray[Any]) -> Iterator[NDArray[np.uint8]]:
    """The little-endian row-major bytes of an array, as views where they lie so in memory, else copies of a few MiB."""
    import numpy as np

    if not array.size:
        return
    little = array.dtype.newbyteorder("<") if array.dtype.byteorder == ">" or sys.byteorder == "big" else array.dtype
    if array.flags.c_contiguous and little == array.dtype:
        yield array.reshape(-1).view(np.uint8)
    elif array.nbytes <= PIECE or not array.ndim:
        copy: NDArray[Any] = np.ascontiguousarray(array, little)
        yield copy.reshape(-1).view(np.uint8)
    else:
        step = PIECE * len(array) // array.nbytes
        parts = (array[i : i + step] for i in range(0, len(array), step)) if step else iter(array)
        for part in parts:
            yield from pieces(part)


def _packed(array: NDArray[Any], per: int) -> Iterator[NDArray[np.uint8]]:
    """Codes of 4 or 6 bits from one a byte to a little-endian stream of bits."""
    import numpy as np

    flat = array.reshape(-1).view(np.uint8)
    for i in range(0, flat.size, PIECE):  # a multiple of 4
        c = flat[i : i + PIECE].reshape(-1, per)
        if per == 2:
            yield (c[:, 0] & 15 | c[:, 1] << 4).astype(np.uint8)
        else:
            word = sum(((c[:, k].astype(np.uint32) & 63) << 6 * k for k in range(4)), np.uint32(0))
            yield np.ascontiguousarray(word.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3]).reshape(-1)


def _from_qtensor(name: str, q: QTensor, unit: Unit | None) -> Item:
    codes = Blob(name, CODE_DTYPE[q.format], q.packed.shape, q.packed.nbytes, lambda: pieces(q.packed))
    scales = None
    if q.scale is not None:
        scale = q.scale
        scales = Blob(f"{name}__qscale", "F32", scale.shape, scale.nbytes, lambda: pieces(scale))
    return Item(codes, scales, _entry(q.format, q.shape, q.axis, q.packing, q.scale_shape, q.block), unit)


def _entry(
    format: str,
    shape: tuple[int, ...],
    axis: int | None,
    packing: str,
    scale_shape: tuple[int, ...] | None,
    block: int | None,
) -> dict[str, Any]:
    return {
        "format": format,
        "shape": list(shape),
        "axis": axis,
        "packing": packing,
        "scale_shape": None if scale_shape is None else list(scale_shape),
        "block": block,
    }


def _from_tensor(name: str, t: Tensor, where: str) -> Item:
    """A tensor of an opened file: its bytes go over as they are."""
    q, encoding = t.qparams, t.info.encoding
    if q is not None:
        raw = t.raw()
        codes = Blob(name, CODE_DTYPE[encoding.name], packed_shape(t.shape, q.packing), len(raw), lambda: [t.raw()])
        scales = None
        if q.scale_shape is not None:
            offset, nbytes = q.scale_offset, q.scale_nbytes
            scales = Blob(f"{name}__qscale", "F32", q.scale_shape, nbytes, lambda: [t.source.view(offset, nbytes)])
        return Item(codes, scales, _entry(encoding.name, t.shape, q.axis, q.packing, q.scale_shape, q.block), t.unit)
    if encoding.name not in DTYPES:
        raise ValueRefusedError(
            f"{where}: encoding {encoding.name} has no counterpart in this format; convert it, or store its values"
        )
    if t.byte_order != "little" and encoding.swap:
        return Item(array_blob(name, t.numpy(), where), unit=t.unit)
    return Item(Blob(name, encoding.name, t.shape, t.nbytes, lambda: [t.raw()]), unit=t.unit)
