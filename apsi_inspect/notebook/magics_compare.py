"""``%apsi_compare A B``: `compare` in a line; returns the comparison. Errors come as one line without a traceback.

`tests/test_magics_compare.py` runs it in an `InteractiveShell`.
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
    from ..ops.comparison import Comparison


@magics_class
class CompareMagics(Magics):
    """The magic of `compare`."""

    @magic_arguments()
    @argument("a", metavar="A", help="the original: a model file, an index (*.index.json) or a folder")
    @argument("b", metavar="B", help="the other one")
    @argument("--tensors", metavar="GLOB", help="only tensors whose name, in A or B, matches")
    @argument("--no-metadata", action="store_true", dest="plain", help="do not show metadata that differs")
    @line_magic
    def apsi_compare(self, line: str) -> Comparison | None:
        """Compare the values of two models; returns the comparison: ``c = %apsi_compare model.safetensors model.gguf``.

        Paths with spaces stand in quotes; ``~`` and ``$variable`` are expanded. ``c.frame`` has a row per tensor.
        """
        from ..ops.compare import compare

        words = split(line)
        if "--help" in words:
            return print(self.apsi_compare.parser.format_help())
        args = self.apsi_compare.parser.parse_args(words)
        with one_line_errors():
            found = compare(*(os.path.expanduser(p) for p in (args.a, args.b)), tensors=args.tensors)
        found = found.without_metadata() if args.plain else found
        return None if silenced(self.shell, line) else found
