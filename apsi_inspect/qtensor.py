"""`QTensor`: a quantized tensor in memory, exactly as .apsim stores one (`docs/apsim-format.md`, section 5).

Contract: codes, scales and format are kept as they are, never decoded on the way through a file; ``value = code × scale
of its block`` in float32. Nothing is copied where it is made from arrays of the right kind. `tests/test_quantize.py`
enforces this.
"""

from __future__ import annotations

from math import isfinite, isnan, log10, prod
from typing import TYPE_CHECKING, Any

from .display import QTensorDisplay
from .encodings import ENCODINGS
from .encodings.scaled import CODE_DTYPE, PACKING, QParams, whole_number
from .errors import ApsiError, ValueRefusedError, visible
from .model import Tensor, TensorInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import DTypeLike, NDArray

    from .units import Unit

_ERROR_UP_TO = 1 << 22  # elements: above, a repr does not compute the error
_CODE_DTYPE = {"int4": "int4", "fp4": "float4_e2m1fn", "fp6": "float6_e2m3fn", "fp6_e3m2": "float6_e3m2fn"}


class QTensor(QTensorDisplay):
    """A quantized tensor: codes, scales, and what they mean.

    ``np.asarray(q)`` gives the float32 values, ``q[2:4]`` a part of them, `dequantize` the values with their unit.

    Parameters
    ----------
    format
        ``"int8"``, ``"int4"``, ``"fp8"``, ``"fp8_e5m2"``, ``"fp6"``, ``"fp6_e3m2"``, ``"fp4"`` or ``"bf16"``.
    packed
        The codes as a file holds them: int8, float8 and bfloat16 one a number, the others packed into bytes by rows.
    scale
        The float32 scales; None for bf16.
    shape
        Logical shape.
    axis
        The axis that a block runs along (``axis=1`` of a matrix without `block`: one scale a row); None: one scale.
    block
        Elements of a block along `axis`; None: the whole axis.
    unit
        Physical unit of the values.

    Raises
    ------
    ValueRefusedError
        The arrays do not belong together.
    """

    __slots__ = ("__weakref__", "_source", "axis", "block", "format", "packed", "scale", "shape", "unit")

    def __init__(
        self,
        format: str,
        packed: NDArray[Any],
        scale: NDArray[np.float32] | None,
        shape: tuple[int, ...],
        axis: int | None = None,
        block: int | None = None,
        unit: Unit | None = None,
    ) -> None:
        if not isinstance(format, str) or format not in PACKING:
            raise ValueRefusedError(f"unknown format {format!r:.40}; known: {', '.join(PACKING)}")
        self.format, self.unit = str(format), unit
        self.shape = tuple(whole_number(n, "a dimension") for n in shape)
        self.axis, self.block = self._blocks(axis, block)
        self.packed, self.scale = packed, scale
        self._source: Callable[[], NDArray[Any] | None] | None = None  # the values this was made from, while they live
        self._check()

    def _blocks(self, axis: int | None, block: int | None) -> tuple[int | None, int | None]:
        """Axis counted from the front, block None where it is the whole axis."""
        axis = None if axis is None else whole_number(axis, "axis")
        block = None if block is None else whole_number(block, "block")
        if block is not None and block < 1:
            raise ValueRefusedError(f"a block has at least one element, not {block}")
        if axis is None or self.format == "bf16":
            return None, None
        if not -len(self.shape) <= axis < len(self.shape):
            raise ValueRefusedError(f"no axis {axis} in shape {self.shape}")
        axis %= len(self.shape)
        return axis, None if block is None or block >= self.shape[axis] else block

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.format, self.packed, self.scale, self.shape, self.axis, self.block, self.unit)

    def _check(self) -> None:
        import numpy as np

        from .encodings.values import numpy_dtype

        dtype = numpy_dtype(ENCODINGS[CODE_DTYPE[self.format]].dtype)
        shape = packed_shape(self.shape, self.packing)
        if self.packed.dtype != dtype or self.packed.shape != shape:
            raise ValueRefusedError(
                f"{self.format} codes of {self.shape} are {dtype} {shape}, not {self.packed.dtype} {self.packed.shape}"
            )
        expected = self.scale_shape
        found = None if self.scale is None else self.scale.shape
        if found != expected or (self.scale is not None and self.scale.dtype != np.float32):
            raise ValueRefusedError(f"{self.format} scales are float32 {expected}, not {found}")

    @property
    def packing(self) -> str:
        """``"none"``, ``"nibble"`` or ``"bits6"``."""
        return PACKING[self.format]

    @property
    def scale_shape(self) -> tuple[int, ...] | None:
        """Shape of the scales: ``()`` for one, None for bf16."""
        if self.format == "bf16":
            return None
        if self.axis is None:
            return ()
        whole = self.shape[self.axis]
        count = min(whole, 1) if self.block is None else -(-whole // self.block)
        return (*self.shape[: self.axis], count, *self.shape[self.axis + 1 :])

    @property
    def codes(self) -> NDArray[Any]:
        """The codes as numbers of the logical shape: int8, int4, or a small float of ml_dtypes."""
        import numpy as np

        from .encodings.values import numpy_dtype

        if self.packing == "none":
            return self.packed
        n, rows = (self.shape[-1], prod(self.shape[:-1])) if self.shape else (1, 1)
        raw = np.ascontiguousarray(self.packed).reshape(rows, self.packed.shape[-1]).astype(np.uint32)
        if self.packing == "nibble":
            parts = np.stack([raw & 15, raw >> 4], -1)
        else:
            a, b, c = raw[:, 0::3], raw[:, 1::3], raw[:, 2::3]
            word = a | b << 8 | c << 16
            parts = np.stack([word >> s & 63 for s in (0, 6, 12, 18)], -1)
        codes = parts.astype(np.uint8).reshape(rows, parts.shape[1] * parts.shape[2])[:, :n].reshape(self.shape)
        if self.format == "int4":
            return ((codes ^ 8).astype(np.int8) - np.int8(8)).astype(np.int8)
        return codes.view(numpy_dtype(_CODE_DTYPE[self.format]))

    @property
    def nbytes(self) -> int:
        """Stored bytes, scales included."""
        return int(self.packed.nbytes + (0 if self.scale is None else self.scale.nbytes))

    @property
    def bpw(self) -> float:
        """Stored bits per weight, scales included; 0.0 for an empty tensor."""
        return 8 * self.nbytes / self.size if self.size else 0.0

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32, in which the values come."""
        import numpy as np

        return np.dtype(np.float32)

    def tensor(self, name: str = "") -> Tensor:
        """The same as a `Tensor`: for statistics, slicing and views."""
        source = _Parts(self.packed, self.scale)
        at, nbytes = source.codes, source.size - source.codes
        params = QParams(self.axis, self.block, self.scale_shape, at, nbytes, self.packing)
        info = TensorInfo(name, ENCODINGS[self.format], self.shape, 0, source.size, unit=self.unit, qparams=params)
        return Tensor(info, source)

    def dequantize(self) -> Any:
        """The values: a new float32 array, or a pint Quantity of one where there is a unit."""
        values = self.tensor().numpy()
        if self.unit is None:
            return values
        from .units_pint import pint_units

        units, _ = pint_units(self.unit)
        return units._REGISTRY.Quantity(values, units)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        import numpy as np

        if copy is False:
            raise ValueError("the values of a quantized tensor are computed: a copy is needed")
        return np.asarray(self.tensor().numpy(), dtype=dtype)

    def __getitem__(self, key: Any) -> NDArray[Any]:
        return self.tensor()[key]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-dimensional tensor has no length")
        return self.shape[0]

    def sqnr_db(self, source: Any) -> float:
        """Signal-to-quantization-noise ratio against the values it was made from, in dB.

        inf where they are equal, NaN where some are not finite.

        Raises
        ------
        ValueRefusedError
            `source` is no array, or of another shape.
        """
        import numpy as np

        try:
            x = np.asarray(getattr(source, "magnitude", source), np.float64)
        except (TypeError, ValueError, RuntimeError) as e:
            raise ValueRefusedError(f"the source cannot be read as an array of numbers: {e}") from e
        if x.shape != self.shape:
            raise ValueRefusedError(f"the source has shape {x.shape}, the quantized tensor {self.shape}")
        with np.errstate(over="ignore", invalid="ignore"):
            noise = float(np.sum((x - self.tensor().numpy()) ** 2))
            signal = float(np.sum(x**2))
        if not isfinite(noise) or not isfinite(signal):
            return float("nan")
        return float("inf") if not noise else 10 * log10(signal / noise) if signal else float("-inf")

    def _error(self) -> str:
        """``20.2 dB``; empty where the source is gone, large or not finite."""
        if self._source is None or not 0 < self.size <= _ERROR_UP_TO:
            return ""
        try:
            source = self._source()
            error = float("nan") if source is None else self.sqnr_db(source)
        except ApsiError:  # its file was closed, or its array was given another shape
            return ""
        return "" if isnan(error) else f"{error:.1f} dB"

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.shape)) or "scalar"
        along = "" if self.axis is None else f", axis {self.axis}" + (f" block {self.block}" if self.block else "")
        unit = f" [{visible(str(self.unit))}]" if self.unit is not None else ""
        error = self._error()
        return f"<QTensor {self.format}: {shape}{along}, {self.bpw:.3g} bpw{unit}{error and ', ' + error}>"


class _Parts:
    """Codes and scales as one source of bytes, which stands in no file."""

    name = ""

    def __init__(self, packed: NDArray[Any], scale: NDArray[np.float32] | None) -> None:
        import numpy as np

        self._codes = np.ascontiguousarray(packed).reshape(-1).view(np.uint8)
        self._scale = None if scale is None else np.ascontiguousarray(scale, "<f4").reshape(-1).view(np.uint8)
        self.codes = self._codes.size
        self.size = self.codes + (0 if self._scale is None else self._scale.size)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Read-only view of a range, which never spans codes and scales."""
        part, start = self._codes, offset
        if offset >= self.codes and self._scale is not None:
            part, start = self._scale, offset - self.codes
        return part[start : start + nbytes].data.toreadonly()

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Copy of a range."""
        return bytes(self.view(offset, nbytes))

    def close(self) -> None:
        """Nothing to release."""


def packed_shape(shape: tuple[int, ...], packing: str) -> tuple[int, ...]:
    """Shape of the codes in a file."""
    if packing == "none":
        return shape
    *outer, last = shape or (1,)
    return (*outer, -(-last // 2) if packing == "nibble" else 3 * -(-last // 4))
