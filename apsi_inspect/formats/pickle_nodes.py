"""What a pickle is read into: inert nodes that stand for what Python would import or call.

Plain values stay plain (None, bool, int, float, str, bytes, tuple, list). Nodes may share and contain each other.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class PickleError(ValueError):
    """A pickle that cannot be followed; `offset` is where."""

    def __init__(self, reason: str, offset: int) -> None:
        self.reason, self.offset = reason, offset
        super().__init__(f"{reason} (byte {offset} of the pickle)")


class Global:
    """A name that Python would import: ``module.name``. `computed`: the pickle makes the name up while it runs."""

    __slots__ = ("computed", "module", "name")

    def __init__(self, module: str, name: str, computed: bool = False) -> None:
        self.module, self.name, self.computed = module, name, computed

    @property
    def path(self) -> str:
        """``"torch._utils._rebuild_tensor_v2"``."""
        return f"{self.module}.{self.name}"


class Call:
    """A call that Python would make, with what is done to its result: state (BUILD), items and appended values."""

    __slots__ = ("appended", "args", "func", "items", "kwargs", "raw", "state")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: Any = None) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.state: Any = None
        self.raw: bytes | None = None  # what it stands for, where that is bytes and has been made
        self.items: list[tuple[Any, Any]] = []
        self.appended: list[Any] = []

    @property
    def path(self) -> str:
        """Dotted name of what is called; "" where that is itself the result of a call."""
        return self.func.path if isinstance(self.func, Global) else ""


class Dict:
    """A dict as the pairs that were set, in order (hostile keys are not hashed); `state` as set by BUILD."""

    __slots__ = ("pairs", "state")

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []
        self.state: Any = None

    def get(self, key: str) -> Any:
        """Value of a text key: the last that was set; None where there is none."""
        return next((v for k, v in reversed(self.pairs) if isinstance(k, str) and k == key), None)


class Persistent:
    """A persistent id: PyTorch's reference to a storage."""

    __slots__ = ("pid",)

    def __init__(self, pid: Any) -> None:
        self.pid = pid
