"""What code does with models, read and not run: the calls, magics and commands that `audit` lists.

Contract: nothing is imported or run; names are followed through imports and plain assignments. `tests/test_audit.py`
enforces this.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
from typing import NamedTuple

from ..errors import ModelFileError, brief


class Does(NamedTuple):
    """What a public function does with its path arguments, as (position, name)."""

    kind: str  # load, save, convert, check
    reads: tuple[tuple[int, str], ...] = ()
    writes: tuple[tuple[int, str], ...] = ()


_FIRST, _MODEL = ((0, "path"),), ((0, "model"),)
FUNCTIONS: dict[str, Does] = {
    **dict.fromkeys(("open", "load_model", "load_gguf", "load_safetensors", "torch_load", "onnx_model"),
                    Does("load", _FIRST)),
    **dict.fromkeys(("model_info", "gguf_info", "safetensors_info", "stats", "plan", "hardware_plan", "metadata_widget",
                     "units_widget", "quant_error_widget"),
                    Does("load", _MODEL)),
    "quant_error": Does("load", ((0, "model_or_tensor"),)),
    "compare": Does("load", ((0, "a"), (1, "b"))),
    "verify": Does("check", _FIRST),
    "scan": Does("check", _FIRST),
    **dict.fromkeys(("save_model", "save_gguf", "save_safetensors"), Does("save", (), _FIRST)),
    "convert": Does("convert", ((0, "src"),), ((1, "dst"),)),
    "report": Does("save", _MODEL, ((1, "path"),)),
    "signature_widget": Does("check", _FIRST),
}  # fmt: skip
MAGICS = {"apsi_info": "load", "apsi_verify": "check", "apsi_compare": "load", "apsi_convert": "convert"}
_PACKAGE = "apsi_inspect"


class Use(NamedTuple):
    """One place that uses the package.

    Attributes
    ----------
    file, cell, line
        Where; `cell` counts the code cells of a notebook from 1 and is None in a script.
    name
        The function, magic or command.
    kind
        ``"load"``, ``"save"``, ``"convert"``, ``"check"``, ``"sign"`` (saving with a signature), ``"shell"`` (the apsi
        command), ``"dynamic"`` (cannot be followed).
    reads, writes
        The path arguments that are literals.
    code
        The call as it stands there, shortened.
    """

    file: str
    cell: int | None
    line: int
    name: str
    kind: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    code: str


def as_python(source: str) -> str:
    """A cell with its magics and ``!`` lines as the calls that IPython makes of them."""
    from IPython.core.inputtransformer2 import TransformerManager

    try:
        return TransformerManager().transform_cell(source)  # type: ignore[no-untyped-call]
    except (SyntaxError, RecursionError):  # the parser says what is wrong with it
        return source


class Names:
    """What names of a script stand for: the package itself, its functions."""

    def __init__(self) -> None:
        self.packages: set[str] = set()
        self.functions: dict[str, str] = {}

    def learn(self, node: ast.AST) -> None:
        """From an import statement."""
        if isinstance(node, ast.Import):
            for a in node.names:
                if a.name.split(".")[0] == _PACKAGE:
                    self.packages.add((a.asname or a.name).split(".")[0])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == _PACKAGE and not node.level:
            for a in node.names:
                known = FUNCTIONS if a.name == "*" else {a.name: None} if a.name in FUNCTIONS else {}
                self.functions.update({(a.asname or n): n for n in known})
                if not known and a.name.islower():  # a module: from apsi_inspect.ops import load
                    self.packages.add(a.asname or a.name)
        elif isinstance(node, ast.Assign) and self.is_package(node.value):  # x = ai
            self.packages.update(t.id for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.Assign) and (name := self.function(node.value)):  # load = ai.load_model
            self.functions.update({t.id: name for t in node.targets if isinstance(t, ast.Name)})

    def function(self, node: ast.AST) -> str | None:
        """The public function that an expression names, or None."""
        if isinstance(node, ast.Name):
            return self.functions.get(node.id)
        if isinstance(node, ast.Attribute):
            base: ast.AST = node.value
            while isinstance(base, ast.Attribute):
                base = base.value
            if isinstance(base, ast.Name) and base.id in self.packages and node.attr in FUNCTIONS:
                return node.attr
        return None

    def is_package(self, node: ast.AST) -> bool:
        """Whether an expression is the package itself."""
        return isinstance(node, ast.Name) and node.id in self.packages


def uses_in(path: str, cell: int | None, source: str, names: Names) -> list[Use]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:
        where = None if cell is None else f"cell {cell}"
        raise ModelFileError(path, f"is no Python: {brief(exc)}", where=where) from None
    placed = [n for n in ast.walk(tree) if isinstance(n, ast.expr | ast.stmt)]
    nodes = sorted(placed, key=lambda n: (n.lineno, n.col_offset))
    for node in nodes:
        names.learn(node)
    # expressions that are a part of another one: the function of a call, the `ai.ops` of `ai.ops.x`
    inner = {id(n.func) for n in nodes if isinstance(n, ast.Call)}
    inner |= {id(n.value) for n in nodes if isinstance(n, ast.Attribute)}
    found = []
    for node in nodes:
        if isinstance(node, ast.Call):
            found += _inside(path, cell, node, names)
            use = _call(node, names)
        elif isinstance(node, ast.Attribute) and node.attr == "__dict__" and names.is_package(node.value):
            use = ("__dict__", "dynamic", (), ())
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in inner:
            name = names.function(node)
            use = None if name is None else (name, FUNCTIONS[name].kind, (), ())
        else:
            continue
        if use is not None:
            code = brief(" ".join((ast.get_source_segment(source, node) or "").split()), 120)
            found.append(Use(path, cell, node.lineno, *use, code))
    return found


def _inside(path: str, cell: int | None, node: ast.Call, names: Names) -> list[Use]:
    """What a magic runs: Python (%time, %%capture, …), or a shell (%%bash, %sx, …)."""
    function = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    texts = [_literal(a) or "" for a in node.args]
    if function == "magic" and texts:  # of old: the name and the line in one text
        function, texts = "run_line_magic", [*texts[0].lstrip("%").partition(" ")[::2]]
    if function not in ("run_line_magic", "run_cell_magic") or not texts:
        return []
    code = " ".join(texts[-1].split("\n"))[:120] if len(texts) > 1 else ""
    if texts[0] in _SHELL_MAGICS:
        return [Use(path, cell, node.lineno, *c, brief(code, 120)) for t in texts[1:] for c in _commands(t)]
    if function == "run_line_magic" and texts[0] in MAGICS and getattr(node.func, "attr", "") == "magic":
        use = _magic(texts[0], texts[1:])
        return [] if use is None else [Use(path, cell, node.lineno, *use, brief(code, 120))]
    if texts[0] not in _CODE_MAGICS or len(texts) < 2:
        return []
    source = _OPTIONS.sub("", texts[1]) if function == "run_line_magic" else "\n".join(texts[2:])
    inner = uses_in(path, cell, as_python(source), names)
    first = node.lineno + (function == "run_cell_magic") - 1
    return [use._replace(line=use.line + first) for use in inner]


_CODE_MAGICS = ("time", "timeit", "capture", "prun", "memit", "mprun", "lprun", "debug")
_SHELL_MAGICS = ("bash", "sh", "script", "system", "sx", "!", "!!", "cmd")
_OPTIONS = re.compile(r"^(\s*-\w+(\s+[0-9.]+(?=\s))?)*\s*")


def _commands(text: str) -> list[_Found]:
    """The `apsi` commands of a piece of shell."""
    found = []
    for part in re.split(r"&&|\|\||[;|&\n]", text):
        words = _split(part)
        while words and (words[0] in _BEFORE or re.fullmatch(r"[A-Za-z_]\w*=.*", words[0], re.DOTALL)):
            del words[0]
        found += _command(words)
    return found


_BEFORE = ("sudo", "time", "nohup", "env", "exec", "(", "{", "then", "do", "!")


def _command(words: list[str]) -> list[_Found]:
    modules = words[:3:2] == ["-m", _PACKAGE] or words[1:3] == ["-m", _PACKAGE]
    if not words or not (os.path.basename(words[0]) == "apsi" or modules):
        return []
    return [(" ".join(words[:3]), "shell", (), ())]


_Found = tuple[str, str, tuple[str, ...], tuple[str, ...]]


def _call(node: ast.Call, names: Names) -> _Found | None:
    name = names.function(node.func)
    if name is not None:
        does = FUNCTIONS[name]
        kind = "sign" if does.kind in ("save", "convert") and _signs(node) else does.kind
        return name, kind, _literals(node, does.reads), _literals(node, does.writes)
    function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    texts = [_literal(a) for a in node.args]
    first = texts[0] if texts else None
    if function in ("run_line_magic", "run_cell_magic") and first is not None:
        return _magic(first, [t or "" for t in texts[1:]])
    if function in _SHELLS:
        return _shell(node)
    if function == "vars" and node.args and names.is_package(node.args[0]):
        return function, "dynamic", (), ()
    if function == "getattr" and node.args and names.is_package(node.args[0]):
        wanted = texts[1] if len(texts) > 1 else None
        if wanted is None or wanted in FUNCTIONS:
            return wanted or "getattr", "dynamic", (), ()
    if function in ("import_module", "__import__") and first is not None and first.split(".")[0] == _PACKAGE:
        return function, "dynamic", (), ()
    if isinstance(node.func, ast.Name) and function in ("exec", "eval") and first is not None and _PACKAGE in first:
        return function, "dynamic", (), ()
    return None


_SHELLS = ("system", "getoutput", "run", "call", "check_call", "check_output", "Popen", "getstatusoutput")


def _magic(name: str, texts: list[str]) -> _Found | None:
    if name not in MAGICS:  # (what %time and %%bash run: `_inside`)
        if name in ("load_ext", "reload_ext") and texts and texts[0].strip() == _PACKAGE:
            return f"%{name}", "load", (), ()
        return None
    words = [w for w in _split(texts[0] if texts else "") if not w.startswith("-")]
    if name == "apsi_convert":
        return f"%{name}", "convert", tuple(words[:1]), tuple(words[1:2])
    lines = [w for line in "\n".join(texts[1:]).splitlines() for w in _split(line)[:1]]  # of a cell: a path each
    return f"%{name}", MAGICS[name], (*words[: 2 if name == "apsi_compare" else 1], *lines), ()


def _shell(node: ast.Call) -> _Found | None:
    """A literal command line that runs `apsi`."""
    if not node.args:
        return None
    given = node.args[0]
    if isinstance(given, ast.List | ast.Tuple):
        found = _command([_literal(e) or "…" for e in given.elts])
    else:
        found = _commands(_literal(given) or "")
    return found[0] if found else None


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _literal(node: ast.AST) -> str | None:
    """A text that stands there as such, also inside ``Path(…)`` or ``os.path.expanduser(…)``."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function in ("Path", "PurePath", "expanduser", "expandvars", "str"):
            return _literal(node.args[0])
    return None


def _argument(node: ast.Call, position: int, name: str) -> ast.AST | None:
    plain = node.args[: position + 1]
    if len(plain) > position and not any(isinstance(a, ast.Starred) for a in plain):
        return node.args[position]
    return next((k.value for k in node.keywords if k.arg == name), None)


def _literals(node: ast.Call, wanted: tuple[tuple[int, str], ...]) -> tuple[str, ...]:
    given = (_argument(node, position, name) for position, name in wanted)
    return tuple(text for a in given if a is not None and (text := _literal(a)) is not None)


def _signs(node: ast.Call) -> bool:
    """Whether ``sign=`` or ``key=`` is given and is not plainly None or False."""
    given = [k.value for k in node.keywords if k.arg in ("sign", "key")]
    return any(not (isinstance(v, ast.Constant) and v.value in (None, False)) for v in given)
