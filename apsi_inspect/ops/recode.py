"""From the bytes of one encoding to those of another, a range of elements at a time.

Contract: the bytes are those that encoding the whole tensor at once would give. Where the encoding does not change the
bytes are copied. Q8_0 and Q4_0 become .apsim's int8 and int4 exactly (`docs/apsim-format.md`, section 5). Values that a
target cannot hold are refused with the tensor's name, or counted where the format has an infinity for them.
`tests/test_convert.py` compares with the official libraries.
"""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING, Any

import numpy as np

from ..encodings import Encoding
from ..encodings.encode import encode
from ..encodings.encode_scaled import ScaledCodes, quantize_scaled
from ..encodings.run import aligned_empty, kernel, numpy_dtype
from ..encodings.scaled import CODE_DTYPE, PACKING
from ..errors import ValueRefusedError, quote
from .inputs import SCRATCH, FileInput
from .quantize import DEFAULT_BLOCK, WHOLE_AXIS, fp8, fp8_e5m2, int8

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from .inputs import Input
    from .shared import Shared

    Make = Callable[[int, int], Any]

EXACT = {"Q8_0": "int8", "Q4_0": "int4"}  # ggml block -> .apsim format of the same values, blocks of 32
_EXACT_BLOCK = 32
CACHEFUL = 1 << 16  # values that stay in a core's own cache between two kernels; whole blocks of every type
_WIDEN = {"F32": None, "F16": "floats:widen_f16", "BF16": "floats:widen_bf16"}
# Plain floats: unsigned view, and the bits that are all set in infinity (or in the only NaN)
_SPECIAL = {
    "F16": ("u2", 0x7C00, 0x7C00),
    "BF16": ("u2", 0x7F80, 0x7F80),
    "F8_E5M2": ("u1", 0x7C, 0x7C),
    "F8_E4M3": ("u1", 0x7F, 0x7F),
    "F8_E4M3FNUZ": ("u1", 0xFF, 0x80),
    "F8_E5M2FNUZ": ("u1", 0xFF, 0x80),
}
_NO_INFINITY = ("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2FNUZ")


def maker(source: Input, target: Encoding, shared: Shared) -> tuple[list[tuple[int, int]], Make]:
    """Cuts, and the function that makes the bytes of a range in a plain or block encoding."""
    if is_copy(source, target):
        return source.cuts(target.block_size), source.raw
    cuts = source.cuts(target.block_size)
    if target.kind not in ("float", "block"):
        return cuts, lambda a, b: _integers(source, target, a, b)
    if target.is_block and isinstance(source, FileInput) and source.direct in _WIDEN:
        return cuts, _block_maker(source, target, shared)
    return cuts, lambda a, b: _floats(source, target, a, b, shared)


def is_copy(source: Input, target: Encoding) -> bool:
    """Whether the bytes stay as they are."""
    return source.encoding == target or (source.encoding.name, target.name) == ("bf16", "BF16")


def _block_maker(source: FileInput, target: Encoding, shared: Shared) -> Make:
    """Plain floats of a file to blocks, a cacheful at a time through the kernels themselves: the usual case, fast."""
    spec = _WIDEN[source.direct]
    widen = kernel(spec) if spec else None
    count: Callable[..., Any] = kernel("encode_floats:count_nonfinite")
    into = kernel(str(target.encode))
    item, size, nbytes = source.encoding.block_bytes, target.block_size, target.block_bytes

    def make(a: int, b: int) -> NDArray[np.uint8]:
        raw = source.stored(a, b)
        raw.flags.writeable = False
        out = shared.buffer((b - a) // size * nbytes)
        for i in range(0, b - a, CACHEFUL):
            n = min(CACHEFUL, b - a - i)
            part = raw[i * item : (i + n) * item]
            if widen is None:
                values = part.view(np.float32)
            else:
                scratch = SCRATCH.bytes("cacheful", 4 * CACHEFUL).view(np.float32)
                widen(part, scratch, 0, n)
                values = scratch[:n]
                values.flags.writeable = False
            if count(values, 0, n):
                encode(target, source.read(a, b), threads=1, name=source.name)  # refuses, and says how many
            into(values, out[i // size * nbytes :], 0, n // size)
        _check_scales(target, out, source.name)
        return out

    return make


def _integers(source: Input, target: Encoding, a: int, b: int) -> NDArray[np.uint8]:
    """Into an integer type that holds every value of the source's."""
    values = source.read(a, b)
    dtype = numpy_dtype(target.dtype)
    if source.encoding.name == "U64" and values.size and int(values.max()) >> 63:
        raise ValueRefusedError(f"tensor {quote(source.name)}: {values.max()} does not fit {target.name}")
    return values.astype(dtype.newbyteorder("<")).view(np.uint8)


def _floats(source: Input, target: Encoding, a: int, b: int, shared: Shared) -> NDArray[np.uint8]:
    values = source.read(a, b)
    nbytes = target.nbytes(b - a)
    assert nbytes is not None  # ranges are whole blocks
    out = encode(target, values, out=shared.buffer(nbytes), threads=1, name=source.name)
    if target.is_block:
        _check_scales(target, out, source.name)
    elif target.name in _SPECIAL:
        _check_special(target.name, out, values, source.name, shared)
    return out


def _check_scales(target: Encoding, out: NDArray[np.uint8], name: str) -> None:
    """Refuse a block whose float16 scale overflowed: it would decode to infinities or NaN."""
    if target.name in ("MXFP4", "NVFP4"):
        return
    offset, size, count = target.swap[0]
    if size != 2:
        return
    blocks = out.reshape(-1, target.block_bytes)
    count = 1 if target.name == "IQ4_XS" else count  # its second word is no float
    for field in range(count):
        bad = int(np.count_nonzero((blocks[:, offset + 2 * field + 1] & 0x7C) == 0x7C))
        if bad:
            raise ValueRefusedError(
                f"tensor {quote(name)}: {bad} blocks of {target.name} have values too large for its float16 scale; "
                "nothing was written (keep this tensor in F32 with tensor_types)"
            )


def _check_special(encoding: str, out: NDArray[np.uint8], values: NDArray[Any], name: str, shared: Shared) -> None:
    view, mask, special = _SPECIAL[encoding]
    found = int(np.count_nonzero((out.view("<" + view) & mask) == special))
    if not found:
        return
    found -= int(np.count_nonzero(~np.isfinite(values)))
    if found > 0 and encoding in _NO_INFINITY:
        raise ValueRefusedError(
            f"tensor {quote(name)}: {found} values are too large for {encoding}, which has no infinity; "
            "nothing was written"
        )
    if found > 0:
        shared.overflowed(name, encoding, found)


def _block(fmt: str, block: int | str | None) -> int | None:
    """The length that `quantize` takes by default or by word."""
    if isinstance(block, int) and block >= 1:
        return block
    if block is None:
        return None if fmt in (int8, fp8, fp8_e5m2) else DEFAULT_BLOCK
    if block == WHOLE_AXIS:
        return None
    raise ValueRefusedError(f"block is {block!r:.40}; a number, None or 'axis' was expected")


class ScaledMaker:
    """Codes and scales of one tensor in an .apsim format, made separately from the same values.

    Parameters
    ----------
    fmt, block
        Format, and elements of a block along the last axis; as in `quantize`.
    """

    def __init__(self, source: Input, fmt: str, block: int | str | None) -> None:
        self.source, self.fmt = source, fmt
        self.exact = EXACT.get(source.encoding.name) == fmt
        self.same = source.encoding.name == fmt  # kept: the file's own codes and scales
        shape = source.shape
        self.row = shape[-1] if shape else 1
        self.block = _EXACT_BLOCK if self.exact else _block(fmt, block)
        step = self.row if self.block is None else min(self.block, max(self.row, 1))
        self.per_row = -(-self.row // step) if step else 0
        codes, nbytes = {"none": (1, 1), "nibble": (2, 1), "bits6": (4, 3)}[PACKING[fmt]]
        width = -(-self.row // codes) * nbytes
        self.code_shape = (*shape[:-1], width)
        self.scale_shape = (*shape[:-1], self.per_row)
        self.code_dtype = CODE_DTYPE[fmt]
        self.step = step

    @property
    def entry(self) -> dict[str, Any]:
        """The ``qtensors`` entry without the unit."""
        return {
            "format": self.fmt,
            "shape": list(self.source.shape),
            "axis": len(self.source.shape) - 1,
            "packing": PACKING[self.fmt],
            "scale_shape": list(self.scale_shape),
            **({"block": self.step} if self.per_row > 1 else {}),
        }

    def cuts(self) -> list[tuple[int, int]]:
        """Whole rows, as codes are packed by rows; a tensor of one long row is cut at its blocks."""
        one = len(self.source.shape) <= 1 or self.row == np.prod(self.source.shape)
        if one and self.block is not None:
            return self.source.cuts(lcm(self.step, 4))
        return self.source.cuts(self.row or 1)

    def codes(self, a: int, b: int) -> Any:
        """Packed codes of a range."""
        if not self.exact:
            codes = self._quantized(a, b).codes
            return codes.reshape(-1).view(np.uint8)
        blocks = np.frombuffer(self.source.raw(a, b), np.uint8).reshape(-1, self.source.encoding.block_bytes)
        if self.fmt == "int8":
            return np.ascontiguousarray(blocks[:, 2:])
        low, high = blocks[:, 2:] & 15, blocks[:, 2:] >> 4
        order = aligned_empty((len(blocks), 32), np.uint8)
        order[:, :16], order[:, 16:] = low ^ 8, high ^ 8  # code minus 8, as two's complement of four bits
        return order[:, 0::2] | (order[:, 1::2] << 4)

    def scales(self, a: int, b: int) -> Any:
        """Scales of a range."""
        if not self.exact:
            scale = self._quantized(a, b).scale
            assert scale is not None
            return scale.astype("<f4", copy=False).reshape(-1).view(np.uint8)
        blocks = np.frombuffer(self.source.raw(a, b), np.uint8).reshape(-1, self.source.encoding.block_bytes)
        return np.ascontiguousarray(blocks[:, :2]).view("<f2").astype("<f4").reshape(-1).view(np.uint8)

    def _quantized(self, a: int, b: int) -> ScaledCodes:
        values, name = self.source.read(a, b), self.source.name
        if (b - a) % self.row == 0:
            return quantize_scaled(values.reshape(-1, self.row), self.fmt, 1, self.block, name=name, threads=1)
        return quantize_scaled(values, self.fmt, 0, self.block, name=name, threads=1)
