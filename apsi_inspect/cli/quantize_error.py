"""`apsi model quantize-error PATH`: what storing the tensors in other formats would change."""

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
        "quantize-error",
        help="what quantizing would cost, format by format (reads all data, writes nothing)",
        description="Quantize the tensors of a model in memory, piece by piece, and show the error of each format.",
    )
    p.add_argument("path", metavar="PATH")
    p.add_argument("--formats", metavar="F,F", help="as --dtype of convert takes them: q8_0,q4_k,mxfp4,f16,int4 …")
    p.add_argument("--tensors", metavar="GLOB", help="only tensors whose name matches")
    p.add_argument("--sample", metavar="N", type=int, help="measure only about N elements of each tensor")
    p.add_argument("--sort", metavar="COLUMN", help="list every row by a column: mse, sqnr_db …; -mse descends")
    p.add_argument("--json", action="store_true", help="one JSON document on stdout")
    add_worker_arguments(p)
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print totals and the worst tensors."""
    from ..errors import ApsiError, ValueRefusedError
    from ..ops.error import quant_error
    from ..ops.error_table import COLUMNS
    from .info import say

    sort = args.sort
    try:
        if sort is not None and sort.lstrip("-") not in COLUMNS:
            raise ValueRefusedError(f"--sort: no column {sort.lstrip('-')!r}; there are {', '.join(COLUMNS)}")
        formats = None if args.formats is None else [f.strip() for f in args.formats.split(",") if f.strip()]
        progress = None if sys.stderr.isatty() else False
        with executor_of(args) as executor:
            table = quant_error(args.path, formats, args.tensors, args.sample, executor=executor, progress=progress)
    except ValueRefusedError as exc:
        print(f"apsi: {exc}", file=sys.stderr)
        return 2
    except (ApsiError, OSError) as exc:
        print(f"apsi: {say(args.path, exc)}", file=sys.stderr)
        return 3
    if args.json:
        import json

        from ..ops.info import SCHEMA_VERSION

        document = {"schema_version": SCHEMA_VERSION, "file": args.path, **table.to_dict()}
        print(json.dumps(document, ensure_ascii=False, indent=1, allow_nan=False))
        return 0
    from ..notebook.render_error import error_parts
    from ..parts import to_text
    from .terminal import colour, width

    room = width()
    print(to_text(error_parts(table, sort, room), width=room, color=colour(sys.stdout)))
    return 0
