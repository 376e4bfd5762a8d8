"""`apsi model convert SRC DST`: a model file into another container or other encodings.

0 written (or planned), 1 the source is damaged, unsigned or of another key, 2 usage, 3 unreadable or the write failed
(also: the target is there and --force was not given), 130 interrupted: then nothing is left behind.
"""

from __future__ import annotations

import sys

from ..errors import ApsiError, ValueRefusedError, VerificationError, visible
from .verify import add_key_arguments, key_of
from .workers import add_worker_arguments, executor_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from concurrent.futures import Executor
    from typing import Any

    from ..ops.changes import ConversionReport


def add_parser(verbs: Any) -> None:
    """Register the verb."""
    p = verbs.add_parser(
        "convert",
        help="convert between .safetensors, .gguf and .apsim, and to other encodings",
        description="Convert SRC to DST; the ending of DST says the container. Tensors keep their encoding where DST "
        "has it, else they are expanded; --dtype and --tensor-type re-encode. What is not simply kept is reported. "
        "DST appears when it is complete.",
    )
    p.add_argument("src", metavar="SRC", help="a model file, an index (*.index.json), a part of a split GGUF, a folder")
    p.add_argument("dst", metavar="DST", help="ends in .safetensors, .gguf or .apsim")
    p.add_argument("--dtype", metavar="TYPE", help="for float tensors: f32, f16, bf16, q8_0, q4_k, int4, fp8, …")
    p.add_argument(
        "--tensor-type", action="append", default=[], metavar="PATTERN=TYPE", dest="rules",
        help="an exception to --dtype, e.g. 'blk.*.attn_v.weight=q6_k'; the last one that matches counts",
    )  # fmt: skip
    p.add_argument("--plan", metavar="FILE", help="instead of both: the encodings that `apsi model plan --save` chose")
    p.add_argument(
        "--block", type=lambda s: int(s) if s.isdecimal() else s, metavar="N",
        help="for .apsim formats: elements of a block, or 'axis': a row (default: a row for 8 bits, else 32)",
    )  # fmt: skip
    p.add_argument(
        "--exclude", action="append", default=[], metavar="PATTERN",
        help="leave out the tensors whose name matches, e.g. '*.position_ids'; can be given several times",
    )  # fmt: skip
    p.add_argument("--shard", metavar="SIZE", help="split into files of at most SIZE of data each, e.g. 4GB")
    p.add_argument("--architecture", metavar="NAME", help="for .gguf: general.architecture, which runtimes need")
    p.add_argument("--alignment", type=int, metavar="N", help="for .gguf: of the tensors' data (default 32)")
    p.add_argument("--force", action="store_true", help="replace DST where it is there already")
    p.add_argument("--dry-run", action="store_true", help="only say what would be done, with exact sizes")
    p.add_argument("--threads", type=int, metavar="N", help="default: one a core, at most 8")
    add_worker_arguments(p)
    p.add_argument("--json", action="store_true", help="one JSON document on stdout")
    add_key_arguments(p)
    p.add_argument("--source-key", metavar="SECRET", help="of SRC, where it is another than the one that signs DST")
    p.add_argument("--source-key-file", metavar="FILE", help="the same, as the content of a file")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert, and print the report."""
    try:
        if args.source_key is not None and args.source_key_file is not None:
            raise ValueRefusedError("--source-key and --source-key-file: give one of them")
        with executor_of(args) as executor, _prepared(args, executor) as conversion:
            return _write(conversion, args)
    except VerificationError as exc:
        return _fail(exc, 1)
    except ValueRefusedError as exc:
        return _fail(exc, 2)
    except (ApsiError, OSError) as exc:
        return _fail(exc, 3)


def _prepared(args: argparse.Namespace, executor: Executor | None) -> Any:
    from ..ops.convert import prepared

    return prepared(
        args.src, args.dst, args.dtype, args.shard, key_of(args), source_key=_source_key(args),
        tensor_types=args.rules, plan=args.plan, exclude=args.exclude, block=args.block, architecture=args.architecture,
        alignment=args.alignment, force=args.force, threads=args.threads, executor=executor,
    )  # fmt: skip


def _write(conversion: Any, args: argparse.Namespace) -> int:
    if args.dry_run:
        _show(conversion.report, args.json)
        return 0
    try:
        report = _with_progress(conversion, args.dst)
    except ValueRefusedError as exc:  # of the values, not of the arguments
        return _fail(exc, 3)
    _show(report, args.json)
    return 0


def _with_progress(conversion: Any, name: str) -> ConversionReport:
    from tqdm import tqdm

    quiet = not sys.stderr.isatty()
    bar: Any = tqdm(
        total=conversion.report.size_after, unit="B", unit_scale=True, file=sys.stderr, leave=False,
        desc=visible(name, 40), delay=0.5, disable=quiet,
    )  # fmt: skip

    def step(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    with bar:
        report: ConversionReport = conversion.write(None if quiet else step)
    return report


def _source_key(args: argparse.Namespace) -> bytes | str | None:
    if args.source_key_file is not None:
        from ..integrity.signing import key_of_file

        return key_of_file(args.source_key_file)
    return None if args.source_key is None else str(args.source_key)


def _fail(exc: ApsiError | OSError, code: int) -> int:
    sys.stdout.flush()
    text = str(exc)
    if isinstance(exc, OSError) and exc.strerror and not isinstance(exc, ApsiError):
        text = f"{visible(str(exc.filename))}: {exc.strerror}" if exc.filename is not None else exc.strerror
    print(f"apsi: {text}", file=sys.stderr)
    return code


def _show(report: ConversionReport, as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps(report.to_dict(), ensure_ascii=False, indent=1))
        return
    from ..parts import to_text
    from .terminal import colour, width

    print(to_text(report._parts(), width=width(), color=colour(sys.stdout)))
