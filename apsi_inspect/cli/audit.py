"""`apsi audit SCRIPT|NOTEBOOK|DIR`: where code loads, saves and signs models, without running it."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any


def add_parser(commands: Any) -> None:
    """Register the command."""
    p = commands.add_parser(
        "audit",
        help="list where scripts and notebooks load, save, sign and check models (nothing is run)",
        description="List every use of apsi_inspect's loading, saving, signing and checking functions, of its magics "
        "and of the apsi command: file, cell and line, and the path where it is a literal. Nothing is imported or run. "
        "Exit code 0: all was read; 3: something could not be read.",
    )
    p.add_argument("path", metavar="SCRIPT|NOTEBOOK|DIR")
    p.add_argument("--json", action="store_true", help="one JSON document on stdout")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what was found."""
    from ..errors import ApsiError
    from ..notebook.audit import audit
    from .info import say

    try:
        report = audit(args.path)
    except (ApsiError, OSError) as exc:
        print(f"apsi: {say(args.path, exc)}", file=sys.stderr)
        return 3
    if args.json:
        import json

        print(json.dumps(report.to_dict(), ensure_ascii=False, indent=1, allow_nan=False))
    else:
        from ..parts import to_text
        from .terminal import colour, width

        print(to_text(report._parts(None), width=width(), color=colour(sys.stdout)))
    return 3 if report.unread else 0
