"""`apsi model plan PATH`: an encoding for each tensor, so that the model has a size and the least error.

0 planned, 2 usage (also: the size is out of reach, or a rule matches nothing), 3 unreadable or the plan could not be
saved, 130 interrupted. `tests/test_plan.py` runs it.
"""

from __future__ import annotations

import errno
import os
import sys

from ..errors import ApsiError, ValueRefusedError, visible

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from ..ops.plan_report import Plan


def add_parser(verbs: Any) -> None:
    """Register the verb."""
    p = verbs.add_parser(
        "plan",
        help="choose an encoding for each tensor: the least error for a size (reads all data)",
        description="Measure what the encodings do to each tensor, and choose one for each: the least total error for "
        "a size. The size of the data is exact. `apsi model convert --plan` carries out what --save has saved.",
    )
    p.add_argument("path", metavar="PATH")
    size = p.add_mutually_exclusive_group(required=True)
    size.add_argument("--target", metavar="SIZE", help="at most so much tensor data: 4.2GiB, 700MB, or bytes")
    size.add_argument("--bpw", type=float, metavar="N", help="at most so many bits per weight, e.g. 4.5")
    p.add_argument("--formats", metavar="A,B,…", help="what to choose from, e.g. q8_0,q6_k,q4_k")
    p.add_argument(
        "--keep", action="append", default=[], metavar="PATTERN[=TYPE]",
        help="an exception: tensors that match get TYPE, or stay as they are; the last one that matches counts",
    )  # fmt: skip
    p.add_argument("--imatrix", metavar="FILE", help="an importance matrix of llama.cpp, to weight the errors")
    p.add_argument("--container", metavar="NAME", help="gguf, apsim or safetensors (default: as PATH, else gguf)")
    p.add_argument("--sample", type=int, metavar="N", help="look at N values of each tensor only")
    p.add_argument("--save", metavar="FILE", help="write the plan as JSON")
    p.add_argument("--force", action="store_true", help="replace the file of --save where it is there already")
    p.add_argument("--all", action="store_true", help="show every tensor")
    p.add_argument("--llama-quantize", action="store_true", help="print the call of llama-quantize that does the same")
    p.add_argument("--json", action="store_true", help="one JSON document on stdout")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan, and show the plan."""
    from ..ops.plan import plan
    from ..ops.plan_llama import check
    from .info import say

    try:
        if args.save and not args.force and os.path.lexists(args.save):
            raise ValueRefusedError(f"{visible(args.save)} is there already; --force replaces it")
        if args.save and not os.path.isdir(os.path.dirname(args.save) or "."):  # said before hours of measuring
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), args.save)
        if args.llama_quantize:
            check(args.path, args.container or "gguf")
        found = plan(
            args.path, _size(args.target), bpw=args.bpw, formats=args.formats, keep=args.keep, weights=args.imatrix,
            container=args.container, sample=args.sample, progress=None if sys.stderr.isatty() else False,
        )  # fmt: skip
        command = ["llama-quantize", *found.to_llama_quantize()] if args.llama_quantize else None
        if args.save:
            found.save(args.save)
    except ValueRefusedError as exc:
        print(f"apsi: {exc}", file=sys.stderr)
        return 2
    except (ApsiError, OSError) as exc:
        name = getattr(exc, "filename", None)
        print(f"apsi: {say(str(name) if name is not None else args.path, exc)}", file=sys.stderr)
        return 3
    _show(found, command, args)
    return 0


def _size(text: str | None) -> str | int | None:
    """A target of digits alone is a number of bytes."""
    return int(text) if text is not None and text.isdecimal() and text.isascii() and len(text) < 20 else text


def _show(found: Plan, command: list[str] | None, args: argparse.Namespace) -> None:
    if args.json:
        import json

        document = found.to_dict() | ({} if command is None else {"llama_quantize": command})
        print(json.dumps(document, ensure_ascii=False, indent=1, allow_nan=False))
        return
    if command is not None:
        import shlex

        print(visible(shlex.join(command)))
        return
    from ..ops.plan_parts import SHOWN, plan_parts
    from ..parts import to_text
    from .terminal import colour, width

    print(to_text(plan_parts(found, None if args.all else SHOWN), width=width(), color=colour(sys.stdout)))
