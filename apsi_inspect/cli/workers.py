"""`--workers N`: the same verb on N processes of this machine; `--scheduler ADDRESS`: on a dask cluster.

Contract: the result is the same. Ctrl-C reaches this process alone, which cancels what has not begun and ends its
processes at once; they write nothing. `tests/test_executor.py` runs the commands.
"""

from __future__ import annotations

from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from concurrent.futures import Executor


def add_worker_arguments(p: argparse.ArgumentParser) -> None:
    """Register the arguments."""
    group = p.add_mutually_exclusive_group()
    group.add_argument("--workers", type=int, metavar="N", help="spread the work over N processes")
    group.add_argument("--scheduler", metavar="ADDRESS", help="spread it over a dask cluster: tcp://HOST:8786")


@contextmanager
def executor_of(args: argparse.Namespace) -> Iterator[Executor | None]:
    """The executor that the arguments ask for.

    Raises
    ------
    ValueRefusedError
        Fewer than one process, or an address that is none.
    OSError
        There is no scheduler at the address.
    MissingPackageError
        `distributed` is not installed.
    """
    from ..errors import MissingPackageError, ValueRefusedError, visible

    if args.scheduler is not None:
        try:
            from distributed import Client
        except ImportError:
            raise MissingPackageError("distributed", "--scheduler", "distributed") from None
        try:
            opened = Client(args.scheduler)  # type: ignore[no-untyped-call, unused-ignore]
        except ValueError as exc:
            raise ValueRefusedError(f"--scheduler: {visible(str(exc))}; tcp://HOST:8786 was expected") from None
        with opened as client:
            yield client.get_executor(pure=False)
        return
    if args.workers is None:
        yield None
        return
    if args.workers < 1:
        raise ValueRefusedError(f"--workers: at least 1, got {args.workers}")
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import active_children, get_context

    pool = ProcessPoolExecutor(args.workers, get_context("spawn"), _leave_interrupts)
    try:
        yield pool
    except BaseException:
        for child in active_children():  # they hold nothing that would be lost
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _leave_interrupts() -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
