"""`apsi model scan PATH…`: what files would run when they are loaded elsewhere."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any


def add_parser(verbs: Any) -> None:
    """Register the verb."""
    p = verbs.add_parser(
        "scan",
        help="is a file safe to load? names every import of a pickle, templates, code",
        description="Say what files would run when they are loaded with Python, torch or an inference engine. Nothing "
        "of them is run. PATH is a file of any format, an index, or a folder. Exit code 0: all are safe; 1: one is "
        "unsafe, or could not be judged; 3: one could not be opened.",
    )
    p.add_argument("paths", nargs="+", metavar="PATH")
    p.add_argument("--json", action="store_true", help="one JSON document on stdout (a list for several PATHs)")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a report for each file."""
    from ..errors import ApsiError
    from ..ops.scan import scan
    from ..parts import to_text
    from .documents import show, unreadable
    from .info import say
    from .terminal import colour, width

    documents: list[Any] = []
    code = 0
    for path in args.paths:
        try:
            report = scan(path)
        except (ApsiError, OSError) as exc:
            sys.stdout.flush()
            print(f"apsi: {say(path, exc)}", file=sys.stderr)
            if args.json:
                documents.append(unreadable(path, say(path, exc)))
            code = 3
            continue
        code = code or (0 if report.ok else 1)
        if not args.json:
            text = to_text(report._parts(), width=width(), color=colour(sys.stdout))
            print(text if not documents else "\n" + text)
        documents.append(report.to_dict())
    if args.json:
        show(documents, args.paths)
    return code
