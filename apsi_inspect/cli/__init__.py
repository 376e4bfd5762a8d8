"""The `apsi` command: `apsi model info PATH…`, built with argparse from the same parts as the notebook's HTML.

One document on stdout, messages on stderr. Exit codes: 0 good, 1 a check failed, 2 usage, 3 unreadable or not a model
file, 130 interrupted. A closed pipe (``| head``) is no error. `tests/test_cli.py` runs it as a process.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

from .terminal import width

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

EXIT_UNREADABLE, EXIT_INTERRUPTED = 3, 130


# modules of `apsi model VERB` and of `apsi COMMAND`, in the order of the help
VERBS = ("info", "stats", "quantize-error", "verify", "scan", "convert", "compare", "plan")
COMMANDS = ("hardware", "run", "audit", "key", "samples", "warm")


def _formatter(prog: str) -> argparse.HelpFormatter:
    """With a width given: argparse's own look at the terminal imports shutil and three compressors."""
    return argparse.HelpFormatter(prog, width=(width() or 100) - 2)


class _Parser(argparse.ArgumentParser):
    """argparse's own, and that of every command below, with `_formatter`."""

    def __init__(self, prog: str | None = None, description: str | None = None, **options: Any) -> None:
        super().__init__(prog, description=description, formatter_class=_formatter, **options)


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the command that `argv` begins with; of all commands where it begins with none (help, mistakes)."""
    from .. import __version__

    verbs: Sequence[str] = argv[1:2] if argv[:1] == ["model"] and argv[1:2] and argv[1] in VERBS else VERBS
    names = () if verbs is not VERBS else COMMANDS

    parser = _Parser(
        prog="apsi", description="Open, look at, verify, measure, quantize, convert and sign model weight files."
    )
    parser.add_argument("--version", action="version", version=f"apsi_inspect {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, prog="apsi")
    model = commands.add_parser("model", help="look at a model file", description="Work with model files.")
    below = model.add_subparsers(dest="verb", metavar="VERB", required=True, prog="apsi model")
    for group, modules in ((below, verbs), (commands, names)):
        for module in modules:
            import_module(f".{module.replace('-', '_')}", __name__).add_parser(group)
    return parser


def _joined(argv: list[str]) -> list[str]:
    """``--sort -nbytes`` as ``--sort=-nbytes``: argparse would take the column for an option."""
    out: list[str] = []
    for word in argv:
        if out and out[-1] == "--sort" and word.startswith("-") and not word.startswith("--"):
            out[-1] = f"--sort={word}"
        else:
            out.append(word)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run `apsi` and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal of another encoding shows ? rather than failing
            stream.reconfigure(errors="replace")
    try:
        argv = _joined(sys.argv[1:] if argv is None else list(argv))
        if argv[:1] == ["run"]:
            from .run import written_out

            argv = written_out(argv)
        args = _parser(argv).parse_args(argv)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of our output has gone; keep the interpreter's own flush at exit from failing too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as exc:
        if exc.filename is not None:
            raise
        # Files have their own messages, nearer to them: this is the output, on a full disk.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"apsi: the output: {exc.strerror or exc}", file=sys.stderr)
        return EXIT_UNREADABLE
    except KeyboardInterrupt:
        print("apsi: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
