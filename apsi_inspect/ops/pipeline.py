"""Pieces of many tensors, computed on all cores a little ahead of the writer that takes them in order.

Contract: `Pipeline.blob` gives a `Blob` whose pieces are made by worker threads; at most a few are in memory at a time.
Blobs are read in the order of `order` without a pause between tensors; any other order works, a little slower. Leaving
the context cancels what has not begun. `tests/test_convert.py` enforces the bound on memory.
"""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Any

from ..encodings.run import MAX_THREADS
from ..formats.safetensors_write import Blob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future, ThreadPoolExecutor
    from types import TracebackType
    from typing import Self

    Make = Callable[[int, int], Any]

AHEAD = 3  # pieces that are made before they are asked for, beside those in work


class Pipeline:
    """A context manager around the worker threads.

    Parameters
    ----------
    threads
        How many; by default one a core, at most 8. The bytes are the same for any number.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or min(os.cpu_count() or 1, MAX_THREADS)
        self._pool: ThreadPoolExecutor | None = None
        self._work: dict[str, tuple[Sequence[tuple[int, int]], Make]] = {}
        self._tasks: list[tuple[Make, int, int]] = []
        self._first: dict[str, int] = {}
        self._flight: deque[Future[Any]] = deque()
        self._given = self._taken = 0

    def blob(
        self, name: str, dtype: str, shape: tuple[int, ...], nbytes: int, cuts: Sequence[tuple[int, int]], make: Make
    ) -> Blob:
        """A blob whose piece of elements [a, b) is ``make(a, b)``, for every range of `cuts`."""
        self._work[name] = cuts, make
        return Blob(name, dtype, shape, nbytes, lambda: self._pieces(name))

    def __contains__(self, name: str) -> bool:
        return name in self._work

    def order(self, names: Sequence[str]) -> None:
        """Say in which order the blobs will be read."""
        self._reset(0)
        self._tasks, self._first = [], {}
        for name in names:
            cuts, make = self._work[name]
            self._first[name] = len(self._tasks)
            self._tasks += [(make, a, b) for a, b in cuts]

    def _reset(self, position: int) -> None:
        for future in self._flight:
            future.cancel()
        self._flight.clear()
        self._given = self._taken = position

    def _pieces(self, name: str) -> Iterator[Any]:
        first = self._first[name]
        if self._taken != first:
            self._reset(first)
        for _ in self._work[name][0]:
            self._submit()
            future = self._flight.popleft()
            self._taken += 1
            piece = future.result()
            self._submit()
            yield piece

    def _submit(self) -> None:
        if self._pool is None:
            from concurrent.futures import ThreadPoolExecutor

            self._pool = ThreadPoolExecutor(self.threads, "apsi-convert")
        while self._given < len(self._tasks) and len(self._flight) < self.threads + AHEAD:
            make, a, b = self._tasks[self._given]
            self._flight.append(self._pool.submit(make, a, b))
            self._given += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reset(0)
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
