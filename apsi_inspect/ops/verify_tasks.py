"""The digests of `verify` in tasks: of a few chunks of a file each, or of a whole file where it has no chunks.

Contract: a worker reads the ranges it is given and returns digests; what they should be is compared here. All files'
tasks are one sequence, so that workers do not wait between files. `tests/test_executor.py` enforces this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..integrity import check
from ..integrity.digests import CHUNK
from .tasks import SourceSpec, run_tasks, source_of, source_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Executor
    from typing import Any

    from ..integrity.check import Claims
    from ..source import ByteSource

GROUP = 4  # chunks of a task: 32 MiB


def digests(spec: SourceSpec, table: bytes | None, start: int, size: int, first: int, last: int) -> list[str]:
    """In a worker: of chunks [first, last); of table and data in one stream where there is a table."""
    source = source_of(spec)
    if table is not None:
        return [check.stream_digest(source, table, start, size)]
    return [check.chunk_digest(source, start, size, i) for i in range(first, last)]


class Elsewhere:
    """The digests of files, taken by the workers of an executor; asked for in the order of the files."""

    def __init__(
        self, files: list[tuple[ByteSource, Claims]], full: bool, executor: Executor, step: Callable[[int], None]
    ) -> None:
        self._step, self._full = step, full
        self._results = run_tasks(
            digests, (t for source, claims in files for t in _tasks(source, claims, full)), executor
        )

    def bad_chunks(self, source: ByteSource, claims: Claims) -> list[int]:
        """The chunks that do not have their digest."""
        assert claims.chunks is not None
        found: list[str] = []
        for first, last in _groups(claims):
            found += next(self._results)
            self._step(min(last * CHUNK, claims.size) - first * CHUNK)
        bad = [i for i, (a, b) in enumerate(zip(found, claims.chunks, strict=True)) if a != b]
        if bad and self._full:  # nobody will ask for the stream
            self.stream_holds(source, claims)
        return bad

    def stream_holds(self, source: ByteSource, claims: Claims) -> bool:
        """Whether the digest of table and data in one stream fits."""
        (found,) = next(self._results)
        self._step(claims.size)
        return bool(found == claims.meta["sha256"])


def _groups(claims: Claims) -> list[tuple[int, int]]:
    count = len(claims.chunks or ())
    return [(i, min(i + GROUP, count)) for i in range(0, count, GROUP)]


def _tasks(source: ByteSource, claims: Claims, full: bool) -> Iterator[tuple[Any, ...]]:
    spec = source_spec(source)
    for first, last in _groups(claims):
        yield spec, None, claims.start, claims.size, first, last
    if full or claims.chunks is None:
        yield spec, claims.table, claims.start, claims.size, 0, 0
