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
from collections.abc import Mapping

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from ..display import Displayable
from ..errors import ApsiError, visible
from ..listing import Row
from ..model import ModelFile, Tensor
from ..ops.open import open as open_model
from .render import model_parts
from .side_by_side import SideBySide

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from ..parts import Stack

OPTIONS = ("--tensors", "--sort", "--metadata", "--tree", "--json")
_ENDINGS = (".safetensors", ".gguf", ".apsim", ".index.json")
_COMMAND = re.compile(r"(?:^|.*[\s=])%{1,2}apsi_info(?:\s+(.*))?$", re.DOTALL)


class ModelView(Displayable, Mapping[str, Tensor]):
    """A `ModelFile` shown with the options of the magic: the same Mapping; `.model` is the file itself."""

    def __init__(self, model: ModelFile, parts: Stack) -> None:
        self.model, self._built = model, parts

    def _parts(self) -> Stack:
        return self._built

    def __repr__(self) -> str:
        return repr(self.model)

    def __getitem__(self, name: str) -> Tensor:
        return self.model[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.model)

    def __len__(self) -> int:
        return len(self.model)

    def __getattr__(self, name: str) -> Any:  # everything else (metadata, units, table, …) is the model's
        if name.startswith("_") or name == "model":
            raise AttributeError(name)
        return getattr(self.model, name)


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
        stands in quotes; ``~`` and ``$variable`` are expanded. ``%%apsi_info`` takes one path per line and shows the
        files side by side.
        """
        args = self.apsi_info.parser.parse_args(split(line))
        paths = one_path(args.path)
        if cell is not None:
            shell: Any = self.shell
            paths += [unquote(shell.var_expand(x)) for x in map(str.strip, cell.splitlines()) if x and x[0] != "#"]
        if not paths:
            raise UsageError("which file? %apsi_info PATH")
        try:
            models = [open_model(os.path.expanduser(p)) for p in paths]
            if args.json:
                return _records(models, args.tensors, args.sort, several=cell is not None)
            if cell is not None and len(models) > 1:
                return SideBySide(models, args.tensors)
            return _shown(models[0], args.tensors, args.sort, args.metadata, args.tree)
        except ApsiError as exc:
            raise UsageError(str(exc)) from exc
        except OSError as exc:
            raise UsageError(f"{visible(str(exc.filename))}: {exc.strerror or exc}") from exc


def _shown(
    model: ModelFile, tensors: str | None, sort: str | None, metadata: bool, tree: bool
) -> ModelFile | ModelView:
    if tensors is None and sort is None and not metadata and not tree:
        return model
    return ModelView(model, model_parts(model, tensors, sort, metadata, tree))


def _records(models: list[ModelFile], tensors: str | None, sort: str | None, several: bool) -> Any:
    from ..ops.info import info_of

    records = [info_of(m, tensors, sort) for m in models]
    for m in models:
        m.close()
    return records if several else records[0]


def split(line: str) -> list[str]:
    """The words of a line, quotes taken off; on Windows a backslash is part of a path."""
    words = shlex.shlex(line, posix=True, punctuation_chars=False)
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


def complete(shell: object, event: Any) -> list[str]:
    """Tab completion: options, columns after ``--sort``, else folders and model files."""
    found = _COMMAND.match(event.text_until_cursor)
    words, word, quoted = _typed((found[1] or "") if found else "")
    if words and words[-1] == "--sort":
        return [c for sign in ("", "-") for c in (sign + f for f in Row._fields) if c.startswith(word)]
    if word.startswith("-") and not quoted:
        return [o for o in OPTIONS if o.startswith(word)]
    if words and words[-1] == "--tensors":
        return []
    known = len(word) - len(event.symbol)  # IPython replaces only the end of the word, its `symbol`
    return [p[known:] for p in _paths(word, quoted)] if known >= 0 else []


def _typed(text: str) -> tuple[list[str], str, bool]:
    """Finished words, the word being typed as it stands (without its opening quote), whether a quote is open."""
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
    return words, word, bool(quote)


def _paths(word: str, quoted: bool) -> list[str]:
    """Completions of a path, in the way it was typed; spaces and quotes get a backslash unless a quote is open."""
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
                    elif e.name.lower().endswith(_ENDINGS):
                        out.append(os.path.join(folder, e.name))
    except OSError:
        return []  # an unreadable folder has no completions
    return sorted(re.sub(r"([\s'\"\\])", r"\\\1", p) if escaped else p for p in out)


def load_ipython_extension(ipython: Any) -> None:
    """``%load_ext apsi_inspect``: register the magics and their completion."""
    from ..ops.changes import ConversionReport
    from .magics_convert import ConvertMagics

    ipython.register_magics(ApsiMagics, ConvertMagics)
    ipython.set_hook("complete_command", complete, re_key=_COMMAND.pattern)
    if getattr(ipython, "kernel", None) is None:  # a terminal shows text in full, a notebook the HTML
        plain = ipython.display_formatter.formatters["text/plain"]
        for noun in (ModelFile, ModelView, SideBySide, ConversionReport):
            plain.for_type(noun, lambda shown, printer, cycle: printer.text(str(shown)))
