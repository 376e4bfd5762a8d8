"""The methods of nouns that call upward, one-line delegations that import on use.

The one module that may import from higher layers (inside its functions): `m.table`, `m.explore()`, `t.stats()` and the
rich representations. `tests/test_layers.py` knows the exemption.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from concurrent.futures import Executor
    from typing import Any

    import numpy as np
    import pandas as pd

    from .notebook.widgets_explore import Explorer
    from .ops.stats import TensorStats
    from .reports import Report
    from .table import TensorTable


class Displayable:
    """Text and HTML of a noun, from the same parts."""

    __slots__ = ()

    def _parts(self) -> Any:
        raise NotImplementedError

    def __str__(self) -> str:
        from .parts import to_text

        return to_text(self._parts())

    def _repr_html_(self) -> str:
        from .parts import to_html

        return to_html(self._parts())


class ModelDisplay(Displayable):
    """What a `ModelFile` shows, and the verbs that take it."""

    __slots__ = ()

    def _parts(self) -> Any:
        from .notebook.render import model_parts

        return model_parts(self, **self.shown)  # type: ignore[arg-type, attr-defined]

    def __repr__(self) -> str:
        from .listing import one_line

        return one_line(self)  # type: ignore[arg-type]

    @property
    def table(self) -> TensorTable:
        """The tensor table (pandas-backed)."""
        from .table import TensorTable

        return TensorTable.of(self)  # type: ignore[arg-type]

    def explore(self) -> Explorer:
        """The model as a widget: tensors, metadata, units, quantization error and signature in linked views."""
        from .notebook.widgets_explore import explorer

        return explorer(self)  # type: ignore[arg-type]

    def verify(
        self, key: bool | bytes | str | None = None, full: bool = False, *, executor: Executor | None = None
    ) -> Report:
        """Check digests and signature over the files that this model holds open; see `apsi_inspect.verify`."""
        from .ops.verify import verify_opened

        return verify_opened(self, key, full, executor=executor)  # type: ignore[arg-type]


class TensorDisplay(Displayable):
    """What a `Tensor` shows, and the verbs that take it."""

    __slots__ = ()

    def _parts(self) -> Any:
        from .notebook.render import tensor_parts

        return tensor_parts(self)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        from .ops.read import tensor_repr

        return tensor_repr(self)  # type: ignore[arg-type]

    def numpy(self, out: np.ndarray[Any, Any] | None = None) -> np.ndarray[Any, Any]:
        """The values as an array: a read-only view where the bytes are the values, else decoded (into `out`)."""
        from .ops.read import read_tensor

        return read_tensor(self, out)  # type: ignore[arg-type]

    def __getitem__(self, key: Any) -> np.ndarray[Any, Any]:
        from .ops.read import read_part

        return read_part(self, key)  # type: ignore[arg-type]

    def stats(self) -> TensorStats:
        """Statistics of the values in one pass."""
        from .ops.read import tensor_stats

        return tensor_stats(self)  # type: ignore[arg-type]


class QTensorDisplay(Displayable):
    """What a `QTensor` shows."""

    __slots__ = ()

    def _parts(self) -> Any:
        from .notebook.render_tensors import qtensor_parts

        return qtensor_parts(self)  # type: ignore[arg-type]


class TableDisplay(Displayable):
    """What a `TensorTable` shows."""

    __slots__ = ()

    def _parts(self) -> Any:
        from .notebook.render import table_parts

        return table_parts(self)  # type: ignore[arg-type]


class HardwareDisplay(Displayable):
    """What a `HardwarePlan` shows."""

    __slots__ = ()

    def _parts(self) -> Any:
        from .notebook.render_hardware import hardware_parts

        return hardware_parts(self)  # type: ignore[arg-type]

    @property
    def frame(self) -> pd.DataFrame:
        """A row per encoding, context and device: bytes of weights and cache, files, devices (a pandas DataFrame)."""
        from .notebook.render_hardware import hardware_frame

        return hardware_frame(self)  # type: ignore[arg-type]


class ErrorDisplay(Displayable):
    """What an `ErrorTable` shows."""

    __slots__ = ()

    def _parts(self) -> Any:
        from .notebook.render_error import WIDTH, error_parts

        return error_parts(self, width=WIDTH)  # type: ignore[arg-type]
