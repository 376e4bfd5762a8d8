"""`apsi key show-id | path`: the per-user signing key; the key itself is never printed."""

from __future__ import annotations

import sys

from ..errors import ValueRefusedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any


def add_parser(commands: Any) -> None:
    """Register the command."""
    p = commands.add_parser(
        "key",
        help="the per-user signing key: where it is, and its public id",
        description="The per-user key signs with sign=True. It is made on first use, readable by its owner only, and "
        "never printed.",
    )
    actions = p.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("path", help="where the key is kept").set_defaults(run=run)
    actions.add_parser("show-id", help="its public id, as files signed with it show it").set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the path, or the id; 3 where there is no usable key."""
    from ..integrity import signing

    try:
        print(signing.user_key_path() if args.action == "path" else signing.user_key_id())
    except (ValueRefusedError, OSError) as exc:
        print(f"apsi: {exc}", file=sys.stderr)
        return 3
    return 0
