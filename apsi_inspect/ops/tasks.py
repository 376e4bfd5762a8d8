"""Work in pieces that other processes, or other machines, can do: pure functions over picklable descriptions.

Contract: `run_tasks` gives the results in the order of the tasks, whatever the executor, with a bounded number of tasks
in flight; after an error, Ctrl-C or an early end those that have not begun are cancelled. `TensorSpec` says where the
bytes of a tensor are (`SourceSpec`: of a file); `tensor_of` makes the tensor again in any process that can reach the
file, reading no header where the bytes lie in the file as they are. A file that changed meanwhile is an error, never a
mixture. `tests/test_tasks.py` enforces this, `tests/test_distributed.py` on a cluster.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import BrokenExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ApsiError, ModelFileError, ValueRefusedError, quote
from ..formats.relaid import Relaid
from ..model import Tensor, TensorInfo
from ..remote_url import masked
from ..source import FileSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Executor, Future

    from ..model import ModelFile
    from ..source import ByteSource

WINDOW = 64  # tasks in flight
_SOURCES = 8  # files that a process keeps mapped (of a URL: some of its blocks) between tasks
_MODELS = 4  # models that it keeps, of those whose tensors are found by their headers


def run_tasks(
    function: Callable[..., Any], tasks: Iterable[tuple[Any, ...]], executor: Executor | None = None, *,
    window: int = WINDOW,
) -> Iterator[Any]:  # fmt: skip
    """The results of ``function(*task)`` for every task, in order.

    Parameters
    ----------
    function
        With an executor of processes: picklable, so defined at the top of a module.
    tasks
        Tuples of arguments; taken one by one, as there is room in the window.
    executor
        Any `concurrent.futures.Executor`; that of a dask cluster is ``Client(…).get_executor()``. None: here, one
        after the other.
    window
        At most so many tasks are in flight, their results waiting for their turn included.

    Raises
    ------
    ApsiError
        A worker process ended in the middle of a task (`BrokenExecutor`).
    """
    if executor is None:
        for task in tasks:
            yield function(*task)
        return
    flight: deque[Future[Any]] = deque()
    try:
        for task in tasks:
            flight.append(submit(executor, function, *task))
            if len(flight) >= window:
                yield result_of(flight.popleft())
        while flight:
            yield result_of(flight.popleft())
    finally:
        for future in flight:
            future.cancel()


def submit(executor: Executor, function: Callable[..., Any], *task: Any) -> Future[Any]:
    """Hand one task to an executor; see `run_tasks` for the errors."""
    try:
        return executor.submit(function, *task)
    except BrokenExecutor as exc:
        raise _broken(exc) from exc


def result_of(future: Future[Any]) -> Any:
    """Wait for a result; see `run_tasks` for the errors."""
    try:
        return future.result()
    except BrokenExecutor as exc:
        raise _broken(exc) from exc
    except BaseException:
        future.cancel()
        raise


def _broken(exc: BrokenExecutor) -> ApsiError:
    return ApsiError(
        f"a worker process ended in the middle of its work (killed, or out of memory?): {exc}; run it again with a new "
        "executor (a dask cluster tries a task again by itself)"
    )


class SourceSpec(NamedTuple):
    """A file that another process can open.

    Attributes
    ----------
    path
        Absolute path, or URL.
    stamp
        What tells the file from another one of its name (`FileSource.stamp`).
    options
        Of a URL: what opens it (`storage_options`), as pairs; they can hold secrets, and go to the workers.
    """

    path: str
    stamp: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...] = ()

    def __repr__(self) -> str:
        return f"SourceSpec({quote(masked(self.path))})"


class TensorSpec(NamedTuple):
    """A tensor that another process can read.

    Attributes
    ----------
    source
        The file its bytes are in.
    info
        What the header says of it; scales and zero points in other tensors are specs too.
    byte_order
        ``"little"`` or ``"big"``.
    by_name
        Its bytes do not lie in the file one after the other (`formats.relaid`): the worker opens the model anew, by
        `source`, and takes the tensor of that name.
    """

    source: SourceSpec
    info: TensorInfo
    byte_order: str = "little"
    by_name: bool = False


def source_spec(source: ByteSource) -> SourceSpec:
    """The spec of an opened file.

    Raises
    ------
    ValueRefusedError
        It is no file but bytes in memory, which no other process can reach.
    """
    stamp, url = getattr(source, "stamp", None), getattr(source, "url", None)
    if stamp is None or (url is not None and isinstance(source, FileSource)):  # or in a temporary file without a name
        raise ValueRefusedError(
            f"{quote(source.name)} is in memory, where no other process reads it; save it, or leave out the executor"
        )
    if url is not None:
        return SourceSpec(url, tuple(stamp), tuple(sorted((getattr(source, "storage_options", None) or {}).items())))
    return SourceSpec(getattr(source, "place", source.name), tuple(stamp))


def source_of(spec: SourceSpec) -> ByteSource:
    """The file of a spec, kept open (without a descriptor) for the next task.

    Raises
    ------
    OSError
        It is missing or unreadable here.
    ModelFileError
        It has changed since the spec was made.
    """
    source = _source(_Key(spec))
    if "://" not in spec.path:
        st = os.stat(spec.path)
        _check_stamp(spec, (st.st_size, st.st_mtime_ns))
    return source


class _Key:
    """A spec as the key of a cache: options may hold values that cannot be hashed."""

    __slots__ = ("key", "spec")

    def __init__(self, spec: SourceSpec) -> None:
        self.spec, self.key = spec, (spec.path, spec.stamp, repr(spec.options))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.key == self.key


@lru_cache(_SOURCES)
def _source(key: _Key) -> ByteSource:
    # What falls out of the cache is not closed, as another thread may be reading: it goes with its last user.
    return _open(key.spec)


def _open(spec: SourceSpec) -> ByteSource:
    source: ByteSource
    if "://" in spec.path:
        from ..remote import RemoteSource

        source = RemoteSource(spec.path, dict(spec.options))
        source.settle()
    else:
        source = FileSource(spec.path, keep_open=False)
    _check_stamp(spec, tuple(source.stamp))
    return source


def _check_stamp(spec: SourceSpec, found: tuple[Any, ...]) -> None:
    if found != spec.stamp:
        raise ModelFileError(masked(spec.path), "has changed since this work began", hint="open it and begin again")


@lru_cache(_MODELS)
def _model(key: _Key) -> ModelFile:
    from .open import open_source

    return open_source(_open(key.spec))


def spec_of(tensor: Tensor) -> TensorSpec:
    """The spec of a tensor.

    Raises
    ------
    ValueRefusedError
        Its bytes are in memory.
    """
    info, affine = tensor.info, tensor.info.affine
    if affine is not None:
        scale, zero = (spec_of(v) if isinstance(v, Tensor) else v for v in affine[:2])
        info = info._replace(affine=affine._replace(scale=scale, zero_point=zero))
    if not isinstance(tensor.source, Relaid):
        return TensorSpec(source_spec(tensor.source), info, tensor.byte_order)
    return TensorSpec(_base_of(tensor.source), info, tensor.byte_order, True)


def _base_of(source: ByteSource) -> SourceSpec:
    """The file below a source that lays bytes out anew."""
    base = getattr(source, "base", None)
    if base is not None:
        return _base_of(base) if isinstance(base, Relaid) else source_spec(base)
    with FileSource(source.name) as file:  # bytes that were read with the header: they have a name only
        return source_spec(file)


def tensor_of(spec: TensorSpec) -> Tensor:
    """The tensor of a spec; see `source_of` for the errors."""
    if spec.by_name:
        return _by_name(spec)
    info, affine = spec.info, spec.info.affine
    if affine is not None:
        scale, zero = (tensor_of(v) if isinstance(v, TensorSpec) else v for v in affine[:2])
        info = info._replace(affine=affine._replace(scale=scale, zero_point=zero))
    return Tensor(info, source_of(spec.source), spec.byte_order)


def _by_name(spec: TensorSpec) -> Tensor:
    source_of(spec.source)  # checks that it is still the same file
    tensor = _model(_Key(spec.source))[spec.info.name]
    if tensor.info[:5] != spec.info[:5]:
        raise ModelFileError(
            masked(spec.source.path), "opens differently than where this work began", f"tensor {quote(spec.info.name)}",
            "use the same version of this package everywhere",
        )  # fmt: skip
    return tensor
