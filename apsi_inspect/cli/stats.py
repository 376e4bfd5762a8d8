"""`apsi model stats PATH`: statistics of the values of the tensors."""

from __future__ import annotations

import sys

from .workers import add_worker_arguments, executor_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any


def add_parser(verbs: Any) -> None:
    """Register the verb."""
    p = verbs.add_parser(
        "stats",
        help="statistics of the values: range, mean, spread, NaN, Inf, zeros (reads all data)",
        description="Read the values of a model's tensors, of any encoding, and show their statistics.",
    )
    p.add_argument("path", metavar="PATH")
    p.add_argument("--json", action="store_true", help="one JSON document on stdout")
    p.add_argument("--tensors", metavar="GLOB", help="only tensors whose name matches")
    p.add_argument(
        "--sort", metavar="COLUMN", default="name", help="order by a column: name, std, sparsity …; -std descends"
    )
    add_worker_arguments(p)
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a row per tensor."""
    from ..errors import ApsiError, ValueRefusedError
    from ..ops.survey import COLUMNS, stats
    from ..remote_url import masked
    from .info import say

    try:
        with executor_of(args) as executor:
            table = stats(args.path, args.tensors, executor=executor, progress=None if sys.stderr.isatty() else False)
        table = table.sort(args.sort.lstrip("-"), descending=args.sort.startswith("-"))
    except ValueRefusedError as exc:
        print(f"apsi: {exc}", file=sys.stderr)
        return 2
    except (ApsiError, OSError) as exc:
        print(f"apsi: {say(args.path, exc)}", file=sys.stderr)
        return 3
    columns = ["name", "encoding", "numel", *COLUMNS]
    if args.json:
        print(_json(masked(args.path), columns, list(table.frame[columns].itertuples(index=False, name=None))))
        return 0
    from ..notebook.render_stats import fitting_table
    from ..parts import to_text
    from .terminal import colour, width

    room = width()
    print(to_text(fitting_table(table.frame, columns, room), width=room, color=colour(sys.stdout)))
    return 0


def _json(path: str, columns: list[str], rows: list[tuple[Any, ...]]) -> str:
    import json

    from ..ops.info import SCHEMA_VERSION, plain

    tensors = [{c: plain(v.item() if hasattr(v, "item") else v) for c, v in zip(columns, r, strict=True)} for r in rows]
    document = {"schema_version": SCHEMA_VERSION, "file": path, "tensors": tensors}
    return json.dumps(document, ensure_ascii=False, indent=1, allow_nan=False)
