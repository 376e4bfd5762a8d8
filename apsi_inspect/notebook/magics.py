"""``%load_ext apsi_inspect``: the magic ``%apsi_info``, in a line (one file) and in a cell (several, side by side).

A thin wrapper: splits the line, opens the file, returns the object. Errors of ours and of the operating system come as
one line without a traceback. `tests/test_magics.py` runs it in an `InteractiveShell`.
"""

# IPython's decorators have no types
# mypy: disable-error-code="no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import os
import re
import shlex
import sys
from contextlib import contextmanager

from IPython.core.completer import SimpleCompletion, context_matcher
from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from ..errors import ApsiError, visible
from ..listing import Row, check_sort
from ..model import ModelFile
from ..ops.open import open as open_model
from .side_by_side import SideBySide

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from IPython.core.completer import CompletionContext

# options of each magic, for completion; `tests/test_magics.py` compares them with the parsers
OPTIONS = {
    "info": ("--tensors", "--sort", "--metadata", "--tree", "--json", "--help"),
    "compare": ("--tensors", "--no-metadata", "--help"),
    "verify": ("--user-key", "--ask-key", "--key-env", "--key-file", "--full", "--help"),
    "convert": (
        "--dtype", "--tensor-type", "--block", "--shard", "--architecture", "--user-key", "--force", "--dry-run",
        "--help",
    ),
}  # fmt: skip
# options whose value is no path
_VALUES = ("--tensors", "--key-env", "--dtype", "--tensor-type", "--block", "--shard", "--architecture")
_ENDINGS = (".safetensors", ".gguf", ".apsim", ".index.json", ".pt", ".pth", ".pt2", ".onnx")
# what stands before a comment: not the # in a quote, after a backslash or inside a word
_BEFORE_COMMENT = re.compile(r"""((?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|[^\\'"])*?)(?:^|\s+)#""", re.DOTALL)
_COMMAND = re.compile(r"(?:^|.*[\s=])%{1,2}apsi_([a-z]+)(?:\s+(.*))?$", re.DOTALL)


@magics_class
class ApsiMagics(Magics):
    """The magics of apsi_inspect."""

    @magic_arguments()
    @argument("path", nargs="*", metavar="PATH", help="a model file, an index (*.index.json) or a folder")
    @argument("--tensors", metavar="GLOB", help="list only tensors whose name matches, e.g. 'blk.0.*'")
    @argument("--sort", metavar="COLUMN", help="order by a column: name, nbytes, numel, bpw …; -nbytes: descending")
    @argument("--metadata", action="store_true", help="open the metadata, with the chat template in full")
    @argument("--tree", action="store_true", help="open the tree of names, repeated blocks folded")
    @argument("--json", action="store_true", help="return the facts as a plain record")
    @line_cell_magic
    def apsi_info(self, line: str, cell: str | None = None) -> Any:
        """Show what is in a model file: tensors, encodings, metadata, units. Only the header is read.

        ``%apsi_info model.gguf`` shows one file and returns it: ``m = %apsi_info model.gguf``. A path with spaces
        stands in quotes; ``~`` and ``$variable`` are expanded. A semicolon at the end shows nothing.
        ``%%apsi_info`` takes one path per line and shows the files side by side.
        """
        words = split(line)
        if "--help" in words:
            return print(self.apsi_info.parser.format_help())
        args = self.apsi_info.parser.parse_args(words)
        paths = one_path(args.path)
        if cell is not None:
            shell: Any = self.shell
            paths += [unquote(shell.var_expand(x)) for x in map(str.strip, cell.splitlines()) if x and x[0] != "#"]
        if not paths:
            raise UsageError("which file? %apsi_info PATH")
        with one_line_errors():
            models = [open_model(os.path.expanduser(p)) for p in paths]
            return None if silenced(self.shell, line) else _result(models, args, cell is not None)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Errors of ours and of the operating system become IPython's `UsageError`, which shows without a traceback."""
    try:
        yield
    except ApsiError as exc:
        raise UsageError(str(exc)) from exc
    except OSError as exc:
        raise UsageError(f"{visible(str(exc.filename))}: {exc.strerror or exc}") from exc


def _result(models: list[ModelFile], args: Any, cell: bool) -> Any:
    if args.json:
        return _records(models, args.tensors, args.sort, cell)
    if len(models) > 1:
        return SideBySide(models, args.tensors)
    check_sort(args.sort)
    models[0].shown = {"tensors": args.tensors, "sort": args.sort, "metadata": args.metadata, "tree": args.tree}
    return models[0]


def _records(models: list[ModelFile], tensors: str | None, sort: str | None, several: bool) -> Any:
    from ..ops.info import info_of

    records = [info_of(m, tensors, sort) for m in models]
    for m in models:
        m.close()
    return records if several else records[0]


def silenced(shell: Any, line: str) -> bool:
    """Whether the line ends in a semicolon, and its value is not assigned."""
    if not _code(line).endswith(";"):
        return False
    cells = shell.history_manager.input_hist_parsed
    return not re.search(r"=\s*get_ipython\(\)\.run_line_magic\('apsi_", cells[-1] if cells else "")


def _code(line: str) -> str:
    """A line without the comment at its end."""
    before = _BEFORE_COMMENT.match(line)
    return (before[1] if before else line).strip()


def split(line: str) -> list[str]:
    """The words of a line, quotes, comment and last semicolon taken off; on Windows a backslash is part of a path."""
    words = shlex.shlex(_code(line).removesuffix(";"), posix=True, punctuation_chars=False)
    words.whitespace_split, words.commenters = True, ""
    if sys.platform == "win32":
        words.escape = ""
    try:
        out = list(words)
    except ValueError as exc:
        raise UsageError(f"{exc} in {visible(line, 120)}") from None
    if "--sort" in out[:-1]:  # argparse would take -nbytes for an option
        at = out.index("--sort")
        out[at : at + 2] = [f"--sort={out[at + 1]}"]
    return out


def one_path(words: list[str]) -> list[str]:
    """The words of a line as its one path; spaces need no quotes where such a file exists."""
    joined = " ".join(words)
    if len(words) > 1 and not os.path.exists(os.path.expanduser(joined)):
        raise UsageError("one PATH in a line: put a path with spaces in quotes; %%apsi_info takes one path per line")
    return [joined] if words else []


def unquote(text: str) -> str:
    """A path without the quotes around it."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


@context_matcher(identifier="apsi_info")
def complete(context: CompletionContext) -> dict[str, Any]:
    """Tab completion: options, columns after ``--sort``, types after ``--dtype``, else folders and model files.

    Nothing that IPython knows is offered.
    """
    found = _COMMAND.match(context.text_until_cursor)
    if not found or found[1] not in OPTIONS:
        return {"completions": []}
    words, word, quote = _typed(found[2] or "")
    if words and words[-1] == "--sort":
        wanted = [sign + f for sign in ("", "-") for f in Row._fields]
    elif word.startswith("-") and not quote:
        wanted = list(OPTIONS[found[1]])
    elif words and words[-1] == "--dtype":
        wanted = _types(words)
    elif words and words[-1] == "--key-file":
        wanted = _paths(word, quote, "")
    else:
        wanted = [] if words and words[-1] in _VALUES else _paths(word, quote)
    token = context.token  # the end of the word, which alone is replaced
    known = len(word) - len(token)
    texts = [w[known:] for w in wanted if w.startswith(word)] if word.endswith(token) else []
    # with nothing at all, IPython would ask its other matchers
    return {"completions": [SimpleCompletion(t) for t in texts or [token]], "suppress": True, "ordered": True}


def _typed(text: str) -> tuple[list[str], str, str]:
    """Finished words, the word being typed as it stands (without its opening quote), the quote that is open or ""."""
    words: list[str] = []
    word = quote = ""
    for c in text:
        if c == quote:
            quote = ""
        elif not quote and c in "'\"" and not word.endswith("\\"):
            quote = c
        elif not quote and c.isspace() and not word.endswith("\\"):
            words, word = ([*words, word] if word else words), ""
        else:
            word += c
    return words, word, quote


def _types(words: list[str]) -> list[str]:
    """The types that a container holds: of the path that was typed last, else of all."""
    from ..ops.targets import CONTAINERS, menu_of

    ending = os.path.splitext(words[-2].lower())[1] if len(words) > 1 else ""
    names = (
        [CONTAINERS[ending]] if ending in CONTAINERS and len(words) > 2 else list(dict.fromkeys(CONTAINERS.values()))
    )
    return list(dict.fromkeys(t.lower() for name in names for t in menu_of(name)))


def _paths(word: str, quoted: str, endings: str | tuple[str, ...] = _ENDINGS) -> list[str]:
    """Completions of a path, in the way it was typed; spaces and quotes get a backslash unless a quote is open.

    A name that holds the open quote cannot be written on, and is left out.
    """
    escaped = not quoted and sys.platform != "win32"
    plain = re.sub(r"\\(.)", r"\1", word) if escaped else word
    folder, start = os.path.split(plain)
    out = []
    try:
        with os.scandir(os.path.expanduser(folder) or ".") as entries:
            for e in entries:
                if e.name.startswith(start) and (start or e.name[0] != "."):
                    if e.is_dir():
                        out.append(os.path.join(folder, e.name) + "/")
                    elif e.name.lower().endswith(endings):
                        out.append(os.path.join(folder, e.name))
    except OSError:
        return []  # an unreadable folder has no completions
    if quoted:
        return sorted(p for p in out if quoted not in p and (quoted == "'" or "\\" not in p or sys.platform == "win32"))
    return sorted(re.sub(r"([\s'\"\\#;])", r"\\\1", p) if escaped else p for p in out)


def load_ipython_extension(ipython: Any) -> None:
    """``%load_ext apsi_inspect``: register the magics and their completion."""
    from ..ops.changes import ConversionReport
    from ..ops.comparison import Comparison
    from ..reports import Report
    from .magics_compare import CompareMagics
    from .magics_convert import ConvertMagics
    from .magics_verify import VerifyMagics

    ipython.register_magics(ApsiMagics, CompareMagics, ConvertMagics, VerifyMagics)
    if complete not in ipython.Completer.custom_matchers:
        ipython.Completer.custom_matchers.append(complete)
    if getattr(ipython, "kernel", None) is None:  # a terminal shows text in full, a notebook the HTML
        plain = ipython.display_formatter.formatters["text/plain"]
        for noun in (ModelFile, SideBySide, Comparison, ConversionReport, Report):
            plain.for_type(noun, lambda shown, printer, cycle: printer.text(str(shown)))
