"""Integer codes with a scale and a zero point that a file keeps elsewhere: PyTorch's quantized tensors, ONNX's QDQ.

The value of a code q is ``(q - zero_point) * scale``, in float32. `tests/test_affine.py` compares with torch and onnx.
"""

from __future__ import annotations

from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Affine(NamedTuple):
    """How the codes of a tensor become values.

    Attributes
    ----------
    scale, zero_point
        A number, or the name of a tensor of the same model (`Tensor.affine` has the tensor itself). A zero point of
        None is 0.
    axis
        The axis that the scales run along; None: one for the whole tensor.
    block
        Elements that share a scale along `axis`; None: each place has its own.
    """

    scale: Any
    zero_point: Any = None
    axis: int | None = None
    block: int | None = None

    @property
    def companions(self) -> list[str]:
        """Names of the tensors that hold scales and zero points."""
        return [v for v in (self.scale, self.zero_point) if isinstance(v, str)]
