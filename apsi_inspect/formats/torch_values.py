"""What the calls in a PyTorch pickle stand for: a tensor's description, a plain value, or nothing that we can read.

Contract: `describe` takes a node and gives a `Strided`, `Inline`, `Parts` or `Absent` tensor, or None where the node is
no tensor. Nothing is believed: every number is checked for its type here, and against its storage where the file is
known (`torch_place.py`). Facts: `docs/formats.md`, 4.3. `tests/test_torch.py` and `tests/test_pickle_attacks.py`.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ..errors import quote
from .base import MAX_NDIM
from .pickle_globals import DTYPES, storage_of
from .pickle_nodes import Call, Dict, Global, Persistent
from .torch_plain import as_text, is_int, is_number, numpy_dtype, raw_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class TensorError(ValueError):
    """A tensor whose description makes no sense."""


class Storage(NamedTuple):
    """A storage that a persistent id names: `numel` elements of `encoding`.

    `part` is (first element, how many) where it is a part of the storage of that key (old files).
    """

    key: str
    encoding: str
    numel: int
    location: str
    part: tuple[int, int] | None = None


class Strided(NamedTuple):
    """A tensor over a storage; `start` and `strides` count elements. `quantizer`: scale, zero point, axis."""

    storage: Storage
    encoding: str
    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...]
    conj: bool = False
    neg: bool = False
    quantizer: tuple[Any, Any, int | None] | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class Inline(NamedTuple):
    """A NumPy array whose bytes stand in the pickle itself."""

    encoding: str
    shape: tuple[int, ...]
    data: bytes
    big: bool


class Parts(NamedTuple):
    """A sparse or nested tensor: its dense parts by name, and what it is in words."""

    parts: tuple[tuple[str, Any], ...]
    text: str


class Absent(NamedTuple):
    """A tensor without bytes in the file, or of a kind that is not read."""

    text: str


Description = Strided | Inline | Parts | Absent
_NUMPY_CALLS = ("numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric")


def storage(node: Any) -> Storage:
    """The storage of a persistent id.

    Raises
    ------
    TensorError
        It is no storage.
    """
    pid = node.pid if isinstance(node, Persistent) else None
    if not (isinstance(pid, tuple) and 5 <= len(pid) <= 6 and pid[0] in ("storage", b"storage")):
        raise TensorError("has no storage where one was expected")
    kind, key, location, numel = pid[1], as_text(pid[2]), as_text(pid[3]), pid[4]
    encoding = storage_of(kind.module, kind.name) if isinstance(kind, Global) else None
    if encoding is None:
        what = kind.path if isinstance(kind, Global) else type(kind).__name__
        raise TensorError(f"has a storage of type {quote(what)}, which is none of PyTorch's")
    if key is None or not is_int(numel):
        raise TensorError("has a storage without a key or a number of elements")
    if len(pid) < 6 or pid[5] is None:
        return Storage(key, encoding, numel, location or "")
    view = pid[5]
    if not (isinstance(view, tuple) and len(view) == 3 and as_text(view[0]) and is_int(view[1]) and is_int(view[2])):
        raise TensorError("has a storage that is a part of another, but does not say which")
    return Storage(key, encoding, numel, location or "", (view[1], view[2]))


def _ints(value: Any, what: str) -> tuple[int, ...]:
    """A tuple of sizes or strides."""
    if isinstance(value, Call) and value.path == "torch.Size" and value.args:
        value = value.args[0]
    if not isinstance(value, (tuple, list)) or len(value) > MAX_NDIM or not all(is_int(v) for v in value):
        raise TensorError(f"has {what} that are no list of at most {MAX_NDIM} numbers from 0 on")
    return tuple(value)


def describe(node: Any) -> Description | None:
    """The tensor that a node stands for; None where it is none.

    Raises
    ------
    TensorError
        It is a tensor, but its description makes no sense.
    """
    for _ in range(8):  # a Parameter of a subclass of a tensor …
        if not isinstance(node, Call):
            return None
        module, name = (node.func.module, node.func.name) if isinstance(node.func, Global) else ("", "")
        inner = _inside(module, name, node.args)
        if inner is None:
            break
        node = inner
    if module == "torch._utils" and name in _REBUILD:
        minimum, build = _REBUILD[name]
        if len(node.args) < minimum:
            raise TensorError(f"{name} with {len(node.args)} arguments, {minimum} were expected")
        return build(*node.args)  # type: ignore[no-any-return]
    if module in _NUMPY_CALLS and name in ("_reconstruct", "_frombuffer"):
        return _ndarray(node)
    return None


def _inside(module: str, name: str, args: tuple[Any, ...]) -> Any:
    """The tensor that a wrapper holds: Parameter, tensor subclass."""
    wraps = module == "torch._utils" and name in (
        "_rebuild_parameter",
        "_rebuild_parameter_with_state",
        "_rebuild_device_tensor_from_numpy",
        "_rebuild_device_tensor_from_cpu_tensor",
    )
    if (wraps or (module == "torch.nn.parameter" and name in ("Parameter", "Buffer"))) and args:
        return args[0]
    if module == "torch._tensor" and name in ("_rebuild_from_type", "_rebuild_from_type_v2") and len(args) >= 3:
        inner = args[2]
        return Call(args[0], inner) if isinstance(inner, tuple) else None
    return None


def _strided(store: Any, start: Any, size: Any, stride: Any, encoding: str | None = None) -> Strided:
    where = storage(store)
    if not is_int(start):
        raise TensorError("has a storage offset that is no number from 0 on")
    shape, strides = _ints(size, "sizes"), _ints(stride, "strides (a negative one?)")
    if len(shape) != len(strides):
        raise TensorError(f"has {len(shape)} sizes and {len(strides)} strides")
    return Strided(where, where.encoding if encoding is None else encoding, shape, start, strides)


def _v2(store: Any, start: Any, size: Any, stride: Any, *rest: Any) -> Strided:
    return _flags(_strided(store, start, size, stride), rest[2] if len(rest) > 2 else None)


def _v3(store: Any, start: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *rest: Any) -> Description:
    encoding = _dtype(dtype)
    if encoding is None:
        return Absent(f"tensor of {dtype.path if isinstance(dtype, Global) else 'no dtype'}, which is not read")
    found = _flags(_strided(store, start, size, stride, encoding), rest[0] if rest else None)
    return _unpacked_f4(found) if encoding == "F4" else found


def _unpacked_f4(t: Strided) -> Description:
    """torch counts pairs of 4-bit floats; we count elements, along the last axis."""
    if not t.shape or not row_major(t.shape, t.strides):
        return t._replace(encoding="U8")
    strides = (*(2 * s for s in t.strides[:-1]), 1)
    return t._replace(shape=(*t.shape[:-1], 2 * t.shape[-1]), strides=strides, start=2 * t.start)


def row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements lie in order, one after the other (axes of length 1 do not count)."""
    expected = 1
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and stride != expected:
            return prod(shape) == 0
        expected *= n
    return True


def _flags(t: Strided, metadata: Any) -> Strided:
    if not isinstance(metadata, Dict):
        return t
    return t._replace(conj=metadata.get("conj") is True, neg=metadata.get("neg") is True)


def _dtype(node: Any) -> str | None:
    return DTYPES.get(node.name) if isinstance(node, Global) and node.module == "torch" else None


def _quantized(store: Any, start: Any, size: Any, stride: Any, quantizer: Any, *rest: Any) -> Description:
    found = _strided(store, start, size, stride)
    kind = store.pid[1].name
    if kind in ("QUInt4x2Storage", "QUInt2x4Storage"):
        return Absent(f"tensor quantized with several values a byte ({kind}), which is not read")
    if not isinstance(quantizer, tuple) or not quantizer or not isinstance(quantizer[0], Global):
        raise TensorError("is quantized, but does not say how")
    scheme, args = quantizer[0].name, quantizer[1:]
    numbers = len(args) >= 2 and is_number(args[0]) and isinstance(args[1], int) and args[1].bit_length() < 64
    if scheme.startswith("per_tensor") and numbers:
        return found._replace(quantizer=(float(args[0]), args[1], None))
    if scheme.startswith("per_channel") and len(args) >= 3 and is_int(args[2]) and args[2] < len(found.shape):
        return found._replace(quantizer=(args[0], args[1], args[2]))
    if scheme.startswith(("per_tensor", "per_channel")):
        what = "scale and zero point" if scheme.startswith("per_tensor") else "scales, zero points and axis"
        raise TensorError(f"is quantized ({quote(scheme)}), but its {what} are missing or absurd")
    raise TensorError(f"is quantized in a way that is not known: {quote(scheme)}")


def _sparse(layout: Any, data: Any, *rest: Any) -> Description:
    word = layout.args[0] if isinstance(layout, Call) and layout.args else getattr(layout, "name", "")
    word = word.removeprefix("torch.") if isinstance(word, str) else "sparse"
    names = ("indices", "values") if word == "sparse_coo" else ("compressed_indices", "plain_indices", "values")
    if not isinstance(data, tuple) or len(data) <= len(names):
        raise TensorError(f"is {word}, but its parts are not there")
    shape = " × ".join(map(str, _ints(data[len(names)], "sizes")))
    return Parts(tuple(zip(names, data, strict=False)), f"{word} tensor {shape}; its parts are listed")


def _nested(buffer: Any, sizes: Any, strides: Any, offsets: Any, *rest: Any) -> Description:
    parts = (("buffer", buffer), ("sizes", sizes), ("strides", strides), ("offsets", offsets))
    return Parts(parts, "nested tensor; its parts are listed")


def _meta(dtype: Any, size: Any, stride: Any, *rest: Any) -> Description:
    name = dtype.name if isinstance(dtype, Global) else "?"
    return Absent(f"{name} tensor {' × '.join(map(str, _ints(size, 'sizes')))} on the meta device: no data")


def _wrapper(kind: Any, dtype: Any, size: Any, *rest: Any) -> Description:
    name = kind.path if isinstance(kind, Global) else "?"
    return Absent(f"tensor subclass {name} {' × '.join(map(str, _ints(size, 'sizes')))} without a storage")


_REBUILD: dict[str, tuple[int, Any]] = {
    "_rebuild_tensor": (4, _v2),
    "_rebuild_tensor_v2": (4, _v2),
    "_rebuild_tensor_v3": (7, _v3),
    "_rebuild_qtensor": (5, _quantized),
    "_rebuild_sparse_tensor": (2, _sparse),
    "_rebuild_sparse_csr_tensor": (2, _sparse),
    "_rebuild_nested_tensor": (4, _nested),
    "_rebuild_meta_tensor_no_storage": (3, _meta),
    "_rebuild_wrapper_subclass": (3, _wrapper),
}


def _ndarray(node: Call) -> Description | None:
    """A NumPy array: protocol 2 to 4 (`_reconstruct` and state) or 5 (`_frombuffer`)."""
    if isinstance(node.func, Global) and node.func.name == "_frombuffer":
        if len(node.args) < 4:
            return None
        data, dtype, size, order = node.args[:4]
        fortran: Any = order == "F"
    else:
        if not isinstance(node.state, tuple) or len(node.state) < 5:
            return Absent("NumPy array without its state")
        _, size, dtype, fortran, data = node.state[:5]
    kind, shape = numpy_dtype(dtype), _ints(size, "sizes")
    raw = None if kind is None else raw_bytes(data)
    if kind is None or raw is None:
        return Absent("NumPy array of objects or of a dtype that is not read")
    if fortran and len(shape) > 1:
        raw = _row_by_row(raw, shape)
    return Inline(kind[0], shape, raw, kind[1])


def _row_by_row(raw: bytes, shape: tuple[int, ...]) -> bytes:
    """Column-major values in row-major order; bytes that do not fit the shape as they are (refused where placed)."""
    numel = prod(shape)
    if not numel or not raw or len(raw) % numel or len(raw) // numel not in (1, 2, 4, 8, 16):
        return raw
    import numpy as np

    return np.frombuffer(raw, f"V{len(raw) // numel}").reshape(shape, order="F").tobytes("C")
