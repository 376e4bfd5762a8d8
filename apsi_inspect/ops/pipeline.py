"""Pieces of many tensors, computed on all cores a little ahead of the writer that takes them in order.

Contract: `Pipeline.blob` gives a `Blob` whose pieces are made by worker threads, or by the workers of an executor where
there is one and a job says how (`ops.convert_tasks`); at most a few are in memory at a time. Blobs are read in the
order of `order` without a pause between tensors; any other order works, a little slower. Leaving the context cancels
what has not begun. `tests/test_convert.py` enforces the bound on memory, `tests/test_executor.py` the equal bytes.
"""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from ..encodings.run import MAX_THREADS
from ..formats.safetensors_write import Blob
from .convert_tasks import run_job
from .tasks import result_of, submit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Executor, Future, ThreadPoolExecutor
    from types import TracebackType
    from typing import Self

    from .convert_tasks import Job
    from .shared import Shared

    Make = Callable[[int, int], Any]

AHEAD = 3  # pieces that are made before they are asked for, beside those in work
AHEAD_BYTES = 128 << 20  # of pieces that the workers of an executor make before they are asked for
JOB = 1 << 21  # elements of a task for such a worker


class _Task(NamedTuple):
    """Pieces that are made together: several by a worker of an executor, one by a thread."""

    make: Make
    ranges: Sequence[tuple[int, int]]
    job: Job | None
    nbytes: int


class Pipeline:
    """A context manager around the worker threads.

    Parameters
    ----------
    threads
        How many; by default one a core, at most 8. The bytes are the same for any number.
    executor
        What has a job is done by its workers instead.
    shared
        Is told what they found.
    """

    def __init__(
        self, threads: int | None = None, executor: Executor | None = None, shared: Shared | None = None
    ) -> None:
        self.threads = threads or min(os.cpu_count() or 1, MAX_THREADS)
        self.executor, self._shared = executor, shared
        self._pool: ThreadPoolExecutor | None = None
        self._work: dict[str, list[_Task]] = {}
        self._tasks: list[_Task] = []
        self._first: dict[str, int] = {}
        self._flight: deque[tuple[_Task, Future[Any]]] = deque()
        self._given = self._taken = self._ahead = 0

    def blob(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        nbytes: int,
        cuts: Sequence[tuple[int, int]],
        make: Make,
        job: Job | None = None,
    ) -> Blob:
        """A blob whose piece of elements [a, b) is ``make(a, b)``, for every range of `cuts`."""
        total = cuts[-1][1] if cuts else 1
        groups = [[c] for c in cuts] if job is None or self.executor is None else _groups(cuts)
        self._work[name] = [_Task(make, g, job, nbytes * (g[-1][1] - g[0][0]) // total) for g in groups]
        return Blob(name, dtype, shape, nbytes, lambda: self._pieces(name))

    def __contains__(self, name: str) -> bool:
        return name in self._work

    def order(self, names: Sequence[str]) -> None:
        """Say in which order the blobs will be read."""
        self._reset(0)
        self._tasks, self._first = [], {}
        for name in names:
            self._first[name] = len(self._tasks)
            self._tasks += self._work[name]

    def _reset(self, position: int) -> None:
        for _, future in self._flight:
            future.cancel()
        self._flight.clear()
        self._given = self._taken = position
        self._ahead = 0

    def _pieces(self, name: str) -> Iterator[Any]:
        first = self._first[name]
        if self._taken != first:
            self._reset(first)
        for _ in self._work[name]:
            self._submit()
            task, future = self._flight.popleft()
            self._taken += 1
            self._ahead -= task.nbytes
            made = result_of(future)
            self._submit()
            if task.job is None or self.executor is None:
                yield made
            else:
                pieces, counts = made
                if self._shared is not None:
                    for count in counts:
                        self._shared.overflowed(*count)
                yield from pieces

    def _room(self) -> bool:
        if self.executor is None:
            return len(self._flight) < self.threads + AHEAD
        return not self._flight or self._ahead + self._tasks[self._given].nbytes <= AHEAD_BYTES

    def _submit(self) -> None:
        while self._given < len(self._tasks) and self._room():
            task = self._tasks[self._given]
            self._flight.append((task, self._start(task)))
            self._ahead += task.nbytes
            self._given += 1

    def _start(self, task: _Task) -> Future[Any]:
        if task.job is not None and self.executor is not None:
            return submit(self.executor, run_job, task.job, task.ranges)
        if self._pool is None:
            from concurrent.futures import ThreadPoolExecutor

            self._pool = ThreadPoolExecutor(self.threads, "apsi-convert")
        return self._pool.submit(task.make, *task.ranges[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reset(0)
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def _groups(cuts: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Ranges that follow each other, in groups of at most about `JOB` elements."""
    groups: list[list[tuple[int, int]]] = []
    for a, b in cuts:
        if groups and b - groups[-1][0][0] <= JOB:
            groups[-1].append((a, b))
        else:
            groups.append([(a, b)])
    return groups
