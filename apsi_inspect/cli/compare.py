"""`apsi model compare A B`: what became of the tensors of A in B.

0 identical, or nothing but rounding; 1 something is changed, missing or of another shape (with --metadata: or a key
differs); 2 usage; 3 unreadable; 130 interrupted.
"""

from __future__ import annotations

import os
import sys

from .workers import add_worker_arguments, executor_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

_THREADS = 8


def add_parser(verbs: Any) -> None:
    """Register the verb."""
    p = verbs.add_parser(
        "compare",
        help="compare the values of two models: identical, rounded, changed, missing",
        description="Compare the tensors of B with those of A, of any format and encoding, and show the error of each. "
        "Names are matched as they are, by the maps of the gguf package (GGUF with Hugging Face names, permuted rows "
        "of q and k included), and without a prefix that only one model has. Exit code 0: identical, or nothing but "
        "what rounding to the coarser encoding explains; 1: a tensor is changed, missing or of another shape; "
        "3: unreadable.",
    )
    p.add_argument("a", metavar="A", help="the original: a model file, an index (*.index.json) or a folder")
    p.add_argument("b", metavar="B", help="the other one")
    p.add_argument("--tensors", metavar="GLOB", help="only tensors whose name, in A or B, matches")
    group = p.add_mutually_exclusive_group()
    group.add_argument(
        "--metadata", action="store_true", dest="strict", help="metadata that differs counts too (exit code 1)"
    )
    group.add_argument("--no-metadata", action="store_true", dest="plain", help="do not show metadata that differs")
    p.add_argument("--threads", type=int, metavar="N", help="default: one a core, at most 8")
    add_worker_arguments(p)
    p.add_argument("--json", action="store_true", help="one JSON document on stdout")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare, and print what was found."""
    from concurrent.futures import ThreadPoolExecutor

    from ..errors import ApsiError, ValueRefusedError, visible
    from ..ops.compare import compare

    count = min(os.cpu_count() or 1, _THREADS) if args.threads is None else args.threads
    if count < 1:
        print("apsi: --threads: at least 1", file=sys.stderr)
        return 2
    try:
        with ThreadPoolExecutor(count) as threads, executor_of(args) as workers:
            executor = threads if workers is None else workers
            progress = None if sys.stderr.isatty() else False
            found = compare(args.a, args.b, tensors=args.tensors, executor=executor, progress=progress)
    except ValueRefusedError as exc:
        print(f"apsi: {exc}", file=sys.stderr)
        return 2
    except (ApsiError, OSError) as exc:
        text = str(exc)
        if isinstance(exc, OSError) and exc.strerror and not isinstance(exc, ApsiError):
            text = f"{visible(str(exc.filename))}: {exc.strerror}" if exc.filename is not None else exc.strerror
        print(f"apsi: {text}", file=sys.stderr)
        return 3
    _show(found.without_metadata() if args.plain else found, args.json)
    return 0 if found.same and not (args.strict and found.metadata) else 1


def _show(found: Any, as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps(found.to_dict(), ensure_ascii=False, indent=1, allow_nan=False))
        return
    from ..parts import to_text
    from .terminal import colour, width

    print(to_text(found._parts(), width=width(), color=colour(sys.stdout)))
