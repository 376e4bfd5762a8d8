"""`Encoding`: how the values of a tensor become bytes. Plain data; the loops are in `kernels`.

A plain dtype is a block format whose block is one element (F32: 1 element, 4 bytes), so that sizes, bits per weight,
decoding, encoding and every menu come from one table. `tests/test_encodings.py` compares the table with the
`safetensors`, `gguf`, `ml_dtypes` and ggml libraries.
"""

from __future__ import annotations

from typing import NamedTuple


class Encoding(NamedTuple):
    """One way to store values.

    Attributes
    ----------
    name
        The name in the registry, as the containers write it (``"F32"``, ``"Q4_K"``, ``"F8_E4M3"``).
    block_size
        Elements in a block; 1 for plain dtypes of whole bytes.
    block_bytes
        Bytes of a block.
    dtype
        NumPy or ml_dtypes name of the dtype in which the values come; ``"float32"`` for block formats.
    kind
        ``"float"``, ``"int"``, ``"uint"``, ``"bool"``, ``"complex"``, ``"block"`` (ggml blocks: along the last axis)
        or ``"scaled"`` (codes whose scales stand in another tensor).
    decode, encode
        ``"module:function"`` below `apsi_inspect.kernels`; None where the bytes are the values themselves.
    swap
        The fields of a block that a big-endian file stores in the other byte order: (offset, item size, count).
    """

    name: str
    block_size: int
    block_bytes: int
    dtype: str
    kind: str
    decode: str | None = None
    encode: str | None = None
    swap: tuple[tuple[int, int, int], ...] = ()

    @property
    def bpw(self) -> float:
        """Bits per weight."""
        return 8 * self.block_bytes / self.block_size

    @property
    def is_block(self) -> bool:
        """True for the ggml block formats, whose blocks run along the last axis and never span rows."""
        return self.kind == "block"

    @property
    def is_packed(self) -> bool:
        """True for plain values that share bytes, of which the last byte may be padded (ONNX)."""
        return self.block_size > 1 and self.kind not in ("block", "scaled")

    def nbytes(self, numel: int) -> int | None:
        """Bytes of `numel` elements, or None where they do not fill whole blocks."""
        blocks, rest = divmod(numel, self.block_size)
        return None if rest else blocks * self.block_bytes
