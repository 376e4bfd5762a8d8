"""``%apsi_convert SRC DST``: `convert` in a line; returns the report. Errors come as one line without a traceback.

`tests/test_magics_convert.py` runs it in an `InteractiveShell`.
"""

# IPython's decorators have no types
# mypy: disable-error-code="no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import os

from IPython.core.magic import Magics, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from .magics import one_line_errors, silenced, split

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..ops.changes import ConversionReport


@magics_class
class ConvertMagics(Magics):
    """The magic of `convert`."""

    @magic_arguments()
    @argument("src", metavar="SRC", help="a model file, an index (*.index.json), a part of a split GGUF, a folder")
    @argument("dst", metavar="DST", help="ends in .safetensors, .gguf or .apsim")
    @argument("--dtype", metavar="TYPE", help="for float tensors: f32, f16, bf16, q8_0, q4_k, int4, fp8 …")
    @argument("--tensor-type", action="append", metavar="PATTERN=TYPE", dest="rules", help="an exception to --dtype")
    @argument("--block", metavar="N", help="for .apsim formats: elements of a block, or axis")
    @argument("--shard", metavar="SIZE", help="split into files of at most SIZE of data each, e.g. 4GB")
    @argument("--architecture", metavar="NAME", help="for .gguf: general.architecture, which runtimes need")
    @argument("--user-key", action="store_true", help="sign an .apsim DST and verify a signed SRC")
    @argument("--force", action="store_true", help="replace DST where it is there already")
    @argument("--dry-run", action="store_true", help="only say what would be done, with exact sizes")
    @line_magic
    def apsi_convert(self, line: str) -> ConversionReport | None:
        """Convert a model file; returns the report: ``r = %apsi_convert model.safetensors model.gguf --dtype q8_0``.

        Paths with spaces stand in quotes; ``~`` and ``$variable`` are expanded.
        """
        words = split(line)
        if "--help" in words:
            return print(self.apsi_convert.parser.format_help())
        args = self.apsi_convert.parser.parse_args(words)
        block = int(args.block) if args.block and args.block.isdecimal() else args.block
        with one_line_errors():
            report = _convert(args, block)
        return None if silenced(self.shell, line) else report


def _convert(args: Any, block: int | str | None) -> ConversionReport:
    from tqdm.auto import tqdm

    from ..ops.convert import convert

    bar: Any = tqdm(unit="B", unit_scale=True, leave=False, delay=0.5)

    def step(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    with bar:
        return convert(
            os.path.expanduser(args.src), os.path.expanduser(args.dst), args.dtype, args.shard,
            True if args.user_key else None, tensor_types=args.rules, block=block, architecture=args.architecture,
            force=args.force, dry_run=args.dry_run, progress=step,
        )  # fmt: skip
