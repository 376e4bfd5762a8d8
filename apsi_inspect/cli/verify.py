"""`apsi model verify PATH…`: digests and signatures, with an exit code.

0 good (or nothing to check), 1 damaged, unsigned or another key, 2 usage, 3 unreadable or incomplete.
"""

from __future__ import annotations

import os
import sys

from ..errors import ApsiError, ValueRefusedError, visible
from ..remote_url import masked
from .documents import show, unreadable
from .info import say
from .workers import add_worker_arguments, executor_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from concurrent.futures import Executor
    from typing import Any

    from ..reports import Report


def add_parser(verbs: Any) -> None:
    """Register the verb."""
    p = verbs.add_parser(
        "verify",
        help="check digests and signatures",
        description="Check that the bytes of model files are what their digests say and, with a key, who signed them. "
        "Exit code 0: good, or nothing to check; 1: damaged, unsigned or signed with another key; 3: unreadable or "
        "incomplete. Digests without a key show damage, not authorship.",
    )
    p.add_argument("paths", nargs="+", metavar="PATH")
    add_key_arguments(p)
    p.add_argument("--full", action="store_true", help="also take the digest of the whole data in one stream")
    p.add_argument("--json", action="store_true", help="one JSON document on stdout (a list for several PATHs)")
    add_worker_arguments(p)
    p.set_defaults(run=run)


def add_key_arguments(p: argparse.ArgumentParser) -> None:
    """The ways to give a key; at most one of them."""
    group = p.add_argument_group("key (at most one)").add_mutually_exclusive_group()
    group.add_argument("--key", metavar="SECRET", help="a shared secret; others can see it in the list of processes")
    group.add_argument("--key-env", metavar="VARIABLE", help="a shared secret in an environment variable")
    group.add_argument("--ask-key", action="store_true", help="ask for a shared secret")
    group.add_argument("--key-file", metavar="FILE", help="a key of bytes: the content of a file, at least 16 bytes")
    group.add_argument("--user-key", action="store_true", help="the per-user key of this machine (see apsi key)")


def key_of(args: argparse.Namespace) -> bool | bytes | str | None:
    """The key that the arguments give.

    Raises
    ------
    ValueRefusedError, OSError
        It cannot be had.
    """
    if args.key is not None:
        return str(args.key)
    if args.key_env is not None:
        secret = os.environ.get(args.key_env)
        if not secret:
            raise ValueRefusedError(f"the key is empty: environment variable {visible(args.key_env)} is not set")
        return secret
    if args.ask_key:
        import getpass

        if not sys.stdin.isatty():
            raise ValueRefusedError("--ask-key needs a terminal; use --key-env or --key-file")
        try:
            return getpass.getpass("Secret: ")
        except EOFError:
            raise ValueRefusedError("no secret was given") from None
    if args.key_file is not None:
        from ..integrity.signing import key_of_file

        return key_of_file(args.key_file)
    return True if args.user_key else None


def run(args: argparse.Namespace) -> int:
    """Check each file; the worst outcome decides."""
    try:
        key = key_of(args)
    except OSError as exc:
        print(f"apsi: {visible(args.key_file)}: {exc.strerror}", file=sys.stderr)
        return 2
    except ValueRefusedError as exc:
        print(f"apsi: {exc}", file=sys.stderr)
        return 2
    try:
        with executor_of(args) as executor:
            return _run(args, key, executor)
    except (ApsiError, OSError) as exc:
        print(f"apsi: {exc}", file=sys.stderr)
        return 2 if isinstance(exc, ValueRefusedError) else 3


def _run(args: argparse.Namespace, key: bool | bytes | str | None, executor: Executor | None) -> int:
    code = 0
    documents: list[Any] = []
    for path in args.paths:
        try:
            report = _check(path, key, args.full, executor)
        except ValueRefusedError as exc:  # the key cannot be used
            print(f"apsi: {exc}", file=sys.stderr)
            return 2
        except (ApsiError, OSError) as exc:
            sys.stdout.flush()
            print(f"apsi: {say(path, exc)}", file=sys.stderr)
            if args.json:
                documents.append(unreadable(path, say(path, exc)))
            code = 3
            continue
        code = max(code, 3 if report.status == "incomplete" else 0 if report.ok else 1)
        documents.append(report.to_dict())
        if not args.json:
            _show(report, first=len(documents) == 1)
    if args.json:
        show(documents, args.paths)
    return code


def _check(path: str, key: bool | bytes | str | None, full: bool, executor: Executor | None) -> Report:
    from ..ops.verify import verify

    if not sys.stderr.isatty():
        return verify(path, key, full, executor=executor)
    from tqdm import tqdm

    bar: Any = tqdm(unit="B", unit_scale=True, file=sys.stderr, leave=False, desc=visible(masked(path), 40), delay=0.5)

    def step(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    with bar:
        progress: Callable[[int, int], None] = step
        return verify(path, key, full, executor=executor, progress=progress)


def _show(report: Report, first: bool) -> None:
    from ..parts import to_text
    from .terminal import colour, width

    text = to_text(report._parts(), width=width(), color=colour(sys.stdout))
    print(text if first else "\n" + text)
