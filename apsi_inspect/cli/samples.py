"""`apsi samples [FOLDER]`: write the sample files."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any


def add_parser(commands: Any) -> None:
    """Register the command."""
    p = commands.add_parser(
        "samples",
        help="write small sample models to try things on",
        description="Write small models into FOLDER: a real one (85 001 parameters), its int8 twin, generated ones.",
    )
    p.add_argument("folder", nargs="?", default="apsi-samples", metavar="FOLDER")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write them, and say where."""
    from ..samples import write

    try:
        paths = write(args.folder)
    except OSError as exc:
        print(f"apsi: {args.folder}: {exc.strerror}", file=sys.stderr)
        return 3
    print("\n".join(paths))
    return 0
