"""`apsi run [--allow-read[=PATHS]] [--allow-write[=PATHS]] SCRIPT|NOTEBOOK`: a program under `permissions`.

The script is run as Python itself would run it, a notebook cell by cell in IPython, stopping at the first error. What
this package may load and save there is what the flags say: without them, nothing. Any other code in the script is not
restricted: it is no sandbox. `tests/test_run.py` runs it as a process.
"""

from __future__ import annotations

import os
import sys

from ..errors import ValueRefusedError, visible

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

FLAGS = ("--allow-read", "--allow-write", "--allow-fs")
EVERYTHING = "*"


def add_parser(commands: Any) -> None:
    """Register the command."""
    p = commands.add_parser(
        "run",
        help="run a script or notebook that may load and save only what flags allow",
        description="Run SCRIPT (with its arguments) or NOTEBOOK. The functions of apsi_inspect may load only what "
        "--allow-read names and save only what --allow-write names, else they raise PermissionError. PATHS are files, "
        "folders (with all below) or URLs, separated by commas; a flag without PATHS allows everything. This guards "
        "apsi_inspect's own functions; it is no sandbox for other code.",
    )
    for flag, what in zip(FLAGS, ("loading", "saving", "loading and saving"), strict=True):
        p.add_argument(flag, metavar="PATHS", action="append", default=[], help=f"allow {what} (of these: =a,b)")
    p.add_argument("script", metavar="SCRIPT|NOTEBOOK")
    p.add_argument("arguments", nargs="...", metavar="ARG", help="sys.argv[1:] of the script")
    p.set_defaults(run=run)


def written_out(argv: list[str]) -> list[str]:
    """A bare flag gets its value: ``--allow-read`` before the script means everything, and takes no word after it."""
    out = argv[:1]
    for i, word in enumerate(argv[1:], 1):
        if not word.startswith("-"):
            return [*out, "--", *argv[i:]]
        out.append(f"{word}={EVERYTHING}" if word in FLAGS else word)
    return out


def run(args: argparse.Namespace) -> int:
    """Run it; the exit code is the script's own, 1 after an uncaught error."""
    from ..permit import permissions

    try:
        if not os.path.isfile(args.script):
            raise ValueRefusedError(f"{visible(args.script)}: no such script or notebook")
        read, write, both = (_allowed(flag, getattr(args, flag[2:].replace("-", "_"))) for flag in FLAGS)
        limits = permissions(read=read, write=write, fs=both)
        cells = _cells(args.script) if args.script.endswith(".ipynb") else None
    except ValueRefusedError as exc:
        print(f"apsi: {exc}", file=sys.stderr)
        return 2
    sys.argv = [args.script, *args.arguments]
    sys.path.insert(0, os.path.dirname(os.path.realpath(args.script)))
    with limits:
        return _run_script(args.script) if cells is None else _run_cells(args.script, cells)


def _allowed(flag: str, given: list[str]) -> bool | list[str]:
    paths = [path for value in given for path in value.split(",")]
    if "" in paths:
        raise ValueRefusedError(f"{flag}= without a path: leave out the = to allow everything, or the flag for nothing")
    return True if EVERYTHING in paths else paths


def _run_script(path: str) -> int:
    import runpy
    import traceback

    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as exc:
        if exc.code is None or isinstance(exc.code, int):
            return exc.code or 0
        print(exc.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        raise
    except BaseException as exc:  # noqa: BLE001 the script's own, shown as Python shows it
        own = exc.__traceback__
        while own is not None and os.path.realpath(own.tb_frame.f_code.co_filename) != os.path.realpath(path):
            own = own.tb_next
        traceback.print_exception(exc.with_traceback(own or exc.__traceback__))
        return 1
    return 0


def _cells(path: str) -> list[str]:
    """Sources of the code cells, in order."""
    from ..notebook.audit import notebook_cells

    return [source for _, source in notebook_cells(path)]


def _run_cells(path: str, cells: list[str]) -> int:
    from IPython.core.interactiveshell import InteractiveShell

    shell: Any = InteractiveShell.instance()
    shell.user_ns["__file__"] = path
    for number, source in enumerate(cells, 1):
        result = shell.run_cell(source, store_history=True)
        if not result.success:
            error = result.error_before_exec or result.error_in_exec
            if isinstance(error, SystemExit):
                return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
            if isinstance(error, KeyboardInterrupt):
                raise error
            print(f"apsi: {visible(path)}: cell {number} failed; the ones after it were not run", file=sys.stderr)
            return 1
    return 0
