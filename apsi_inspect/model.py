"""The frozen nouns: `ModelFile` (a Mapping name -> `Tensor`), `Columns`, `TensorInfo`, `Finding`.

Everything is parsed and checked on the way in, by the format's reader; after that nothing needs checking.
A model of 100 000 tensors is a few columns; a `Tensor` is made when it is asked for. Nothing here imports NumPy:
values are decoded by `encodings.values` on first use. `tests/test_model.py` enforces the contract.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from . import display
from .encodings import Encoding
from .errors import TensorNotFoundError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType
    from typing import Any, Self

    import numpy as np
    import numpy.typing as npt

    from .encodings.affine import Affine
    from .encodings.scaled import QParams
    from .ops.stats import TensorStats
    from .source import ByteSource
    from .tree import record
    from .units import Unit


class Finding(NamedTuple):
    """Something that opening or checking a file noticed.

    Attributes
    ----------
    severity
        ``"note"``, ``"warning"`` or ``"error"``.
    code
        A short fixed word for programs, e.g. ``"wrong-extension"``.
    message
        One sentence for people.
    """

    severity: str
    code: str
    message: str


class TensorInfo(NamedTuple):
    """What the header says of one tensor.

    Attributes
    ----------
    offset
        Absolute position of its bytes in its file.
    nbytes
        Its stored bytes; for a quantized .apsim tensor, codes and scales together.
    file
        Index into `ModelFile.files`.
    affine
        Scale and zero point of integer codes, where the file gives them; the values are then float32.
    """

    name: str
    encoding: Encoding
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    file: int = 0
    unit: Unit | None = None
    qparams: QParams | None = None
    affine: Affine | None = None


class Columns(NamedTuple):
    """The tensor table of one or more files, a column each; sequences are lists or NumPy arrays.

    Attributes
    ----------
    names
        Tensor names in file order.
    encodings
        The encodings that occur.
    codes
        Index into `encodings`, per tensor.
    dims, starts
        Dimensions of all shapes, one after the other (row-major), and where each shape starts (one more at the end).
    offsets, sizes
        Absolute byte position and stored bytes.
    files
        Index of the file, per tensor; None when there is one file.
    """

    names: Sequence[str]
    encodings: Sequence[Encoding]
    codes: Sequence[int]
    dims: Sequence[int]
    starts: Sequence[int]
    offsets: Sequence[int]
    sizes: Sequence[int]
    files: Sequence[int] | None = None

    def shape(self, i: int) -> tuple[int, ...]:
        """Shape of tensor `i`."""
        return tuple(map(int, self.dims[self.starts[i] : self.starts[i + 1]]))


class Tensor(display.TensorDisplay):
    """One tensor of a model file: its description, and its values when asked.

    ``np.asarray(tensor)`` gives the values (a read-only view where the bytes allow it), ``tensor[2:4]`` a part of them.
    """

    __slots__ = ("byte_order", "info", "kept_stats", "source")

    def __init__(self, info: TensorInfo, source: ByteSource, byte_order: str = "little") -> None:
        self.info, self.source, self.byte_order = info, source, byte_order
        self.kept_stats: TensorStats | None = None

    @property
    def name(self) -> str:
        """Name in the file."""
        return self.info.name

    @property
    def encoding(self) -> str:
        """The container's word for how values are stored: ``"F32"``, ``"Q4_K"``, ``"F8_E4M3"``, ``"int4"``."""
        return self.info.encoding.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Row-major shape in elements."""
        return self.info.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.info.shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.info.shape)

    size = numel

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.info.nbytes

    @property
    def bpw(self) -> float:
        """Stored bits per weight; 0.0 for an empty tensor."""
        return 8 * self.info.nbytes / self.numel if self.numel else 0.0

    @property
    def offset(self) -> int:
        """Absolute position of its bytes in its file."""
        return self.info.offset

    @property
    def unit(self) -> Unit | None:
        """Physical unit, where the file gives one."""
        return self.info.unit

    @property
    def qparams(self) -> QParams | None:
        """Scales of a quantized .apsim tensor."""
        return self.info.qparams

    @property
    def affine(self) -> Affine | None:
        """Scale and zero point of integer codes (PyTorch's quantized tensors, ONNX's QDQ)."""
        return self.info.affine

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy (or ml_dtypes) dtype in which the values come."""
        from .encodings.values import numpy_dtype

        return numpy_dtype("float32" if self.info.affine else self.info.encoding.dtype)

    def raw(self) -> memoryview:
        """The stored bytes (of a quantized .apsim tensor: its codes) as a read-only view."""
        scales = self.info.qparams.scale_nbytes if self.info.qparams else 0
        return self.source.view(self.info.offset, self.info.nbytes - scales)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        import numpy as np

        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __len__(self) -> int:
        if not self.info.shape:
            raise TypeError("a 0-dimensional tensor has no length")
        return self.info.shape[0]


class ModelFile(display.ModelDisplay, Mapping[str, Tensor]):
    """An opened model: a Mapping from tensor names to `Tensor`, with the file's metadata.

    Made by `apsi_inspect.open`. Use it as a context manager, or `close` it; arrays that were taken from it stay valid.

    Attributes
    ----------
    path
        What was opened.
    format
        ``"safetensors"``, ``"gguf"``, ``"apsim"``, …
    metadata
        Mapping of the file's own key-value pairs; long GGUF arrays are decoded when they are read.
    findings
        What opening noticed.
    files
        Names of the files: one, or the shards.
    facts
        Facts of the container (version, alignment, writer, digests present, …) under fixed keys.
    """

    def __init__(
        self,
        path: str,
        format: str,
        columns: Columns,
        sources: Sequence[ByteSource],
        *,
        metadata: Mapping[str, Any] | None = None,
        findings: Sequence[Finding] = (),
        facts: Mapping[str, Any] | None = None,
        index: Mapping[str, int] | None = None,
        units: Mapping[str, Unit] | None = None,
        qparams: Mapping[str, QParams] | None = None,
        skeleton: Any = None,
        byte_order: str = "little",
        views: Mapping[str, ByteSource] | None = None,
        affine: Mapping[str, Affine] | None = None,
    ) -> None:
        self.path, self.format, self.columns = path, format, columns
        self.sources, self.byte_order = tuple(sources), byte_order
        self.metadata: Mapping[str, Any] = {} if metadata is None else metadata
        self.findings = tuple(findings)
        self.facts: Mapping[str, Any] = {} if facts is None else facts
        self.units: Mapping[str, Unit] = units or {}
        self.qparams: Mapping[str, QParams] = qparams or {}
        self.skeleton = skeleton
        # tensors whose bytes do not stand in a file one after the other: the source that lays them out
        self.views: Mapping[str, ByteSource] = views or {}
        self.affine: Mapping[str, Affine] = affine or {}
        self._index = index
        self.shown: Mapping[str, Any] = {}  # options of the view: what `model_parts` takes

    @property
    def files(self) -> list[str]:
        """Names of the files that hold the tensors."""
        return [s.name for s in self.sources]

    @property
    def file_size(self) -> int:
        """Bytes of all files together."""
        return sum(s.size for s in self.sources)

    @property
    def architecture(self) -> str | None:
        """The model's architecture, where the metadata names it."""
        value = self.metadata.get("general.architecture", self.metadata.get("architecture"))
        return value if isinstance(value, str) else None

    @property
    def index(self) -> Mapping[str, int]:
        """Position of each name in the columns."""
        if self._index is None:
            self._index = dict(zip(self.columns.names, range(len(self.columns.names)), strict=True))
        return self._index

    def info(self, i: int) -> TensorInfo:
        """Description of the tensor at position `i` of the columns."""
        c = self.columns
        name = c.names[i]
        return TensorInfo(
            name,
            c.encodings[c.codes[i]],
            c.shape(i),
            int(c.offsets[i]),
            int(c.sizes[i]),
            int(c.files[i]) if c.files is not None else 0,
            self.units.get(name),
            self.qparams.get(name),
            self.affine.get(name),
        )

    def __getitem__(self, name: str) -> Tensor:
        i = self.index.get(name)
        if i is None:
            import difflib

            near = difflib.get_close_matches(str(name), list(self.columns.names[:20_000]), 3)
            raise TensorNotFoundError(name, self.path, near)
        info = self.info(i)
        if info.affine is not None:  # names of tensors become the tensors
            scale, zero = ((self[v] if isinstance(v, str) else v) for v in info.affine[:2])
            info = info._replace(affine=info.affine._replace(scale=scale, zero_point=zero))
        return Tensor(info, self.views.get(info.name) or self.sources[info.file], self.byte_order)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns.names)

    def __len__(self) -> int:
        return len(self.columns.names)

    def __contains__(self, name: object) -> bool:
        return name in self.index

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def tree(self) -> record | list[Any] | tuple[Any, ...]:
        """The parameter tree, with `Tensor` leaves: from the file's own `tree`, else from the dotted names."""
        from .tree import from_names, from_skeleton, record

        tensors: dict[str, Tensor] = {}

        def leaf(name: str) -> Tensor:  # a tied tensor comes back as one object
            return tensors[name] if name in tensors else tensors.setdefault(name, self[name])

        if self.skeleton is not None:
            built: record | list[Any] | tuple[Any, ...] = from_skeleton(self.skeleton, leaf)
            return built
        return from_names(self.columns.names, leaf) or record((name, leaf(name)) for name in self.columns.names)

    def close(self) -> None:
        """Release the files; arrays that were taken from the model stay valid."""
        for source in self.sources:
            source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
