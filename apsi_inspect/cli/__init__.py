"""The `apsi` command: `apsi model info PATH…`, built with argparse from the same parts as the notebook's HTML.

One document on stdout, messages on stderr. Exit codes: 0 good, 1 a check failed, 2 usage, 3 unreadable or not a model
file, 130 interrupted. A closed pipe (``| head``) is no error. `tests/test_cli.py` runs it as a process.
"""

from __future__ import annotations

import argparse
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_UNREADABLE, EXIT_INTERRUPTED = 3, 130


def _parser() -> argparse.ArgumentParser:
    from .. import __version__

    parser = argparse.ArgumentParser(
        prog="apsi", description="Open, look at, verify, measure, quantize, convert and sign model weight files."
    )
    parser.add_argument("--version", action="version", version=f"apsi_inspect {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    model = commands.add_parser("model", help="look at a model file", description="Work with model files.")
    verbs = model.add_subparsers(dest="verb", metavar="VERB", required=True)
    from . import info, key, samples, stats, verify, warm

    info.add_parser(verbs)
    stats.add_parser(verbs)
    verify.add_parser(verbs)
    key.add_parser(commands)
    samples.add_parser(commands)
    warm.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `apsi` and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal of another encoding shows ? rather than failing
            stream.reconfigure(errors="replace")
    try:
        args = _parser().parse_args(argv)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of our output has gone; keep the interpreter's own flush at exit from failing too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("apsi: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
