"""A piece of work in a thread of its own, with progress and cancel, for the views of a notebook.

The work gets a function ``progress(done, total)`` that it calls now and then: it says how far it is, and raises
`Cancelled` where the user has had enough. What it returns or raises is kept; nothing is lost silently.
`tests/test_state_views.py` enforces the contract.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ..errors import ApsiError, brief, visible

if TYPE_CHECKING:
    from collections.abc import Callable

    Progress = Callable[[int, int], None]

_EVERY = 0.15  # seconds between two reports to the view


class Cancelled(Exception):  # noqa: N818  (an outcome, no error)
    """The user cancelled the work."""


class Job:
    """One piece of work at a time.

    Attributes
    ----------
    status
        ``"idle"``, ``"running"``, ``"done"``, ``"cancelled"`` or ``"failed"``.
    done, total
        How far it is, in whatever the work counts.
    result
        What it returned; None unless `status` is ``"done"``.
    message
        Why it failed.
    changed
        Called (from the work's thread) where any of these has changed.
    """

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self.status, self.done, self.total = "idle", 0, 0
        self.result: Any = None
        self.message = ""
        self.changed = changed
        self._stop, self._said, self._settled = False, 0.0, True
        self._future: Future[Any] | None = None

    @property
    def running(self) -> bool:
        """Whether it is at work."""
        return self.status == "running"

    @property
    def share(self) -> float:
        """How much is done, 0 to 1."""
        return min(self.done / self.total, 1.0) if self.total else 0.0

    def start(self, work: Callable[[Progress], Any]) -> None:
        """Begin; nothing happens where it is at work already."""
        if self.running:
            return
        self.status, self.done, self.total, self.result, self.message = "running", 0, 0, None, ""
        self._stop = self._settled = False
        self.changed()
        pool = ThreadPoolExecutor(1, "apsi-view")
        self._future = pool.submit(work, self._progress)
        self._future.add_done_callback(self._finish)
        pool.shutdown(wait=False)

    def cancel(self) -> None:
        """Stop at the next report of progress."""
        self._stop = True

    def wait(self, timeout: float | None = None) -> None:
        """Until it has ended and `changed` has returned; for programs and tests."""
        end = time.monotonic() + (3600 if timeout is None else timeout)
        while not self._settled and time.monotonic() < end:
            time.sleep(0.005)

    def _progress(self, done: int, total: int) -> None:
        if self._stop:
            raise Cancelled
        self.done, self.total = done, total
        now = time.monotonic()
        if now - self._said >= _EVERY:
            self._said = now
            self.changed()

    def _finish(self, future: Future[Any]) -> None:
        exc = future.exception()
        if exc is None:
            self.result, self.status = future.result(), "done"
        elif isinstance(exc, Cancelled):
            self.status = "cancelled"
        else:
            ours = isinstance(exc, ApsiError | OSError)
            self.message = visible(str(exc)) if ours else f"{type(exc).__name__}: {brief(exc, 300)}"
            self.status = "failed"
        self._future = None  # with it goes what the work held, a key for example
        try:
            self.changed()
        finally:
            self._settled = True
