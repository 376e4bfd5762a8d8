"""The dependency rule: who may import whom, and what opening a file may load."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import handmade
from .handmade import Gguf

PACKAGE = Path(__file__).parent.parent / "apsi_inspect"
# Layers from the lowest; a module imports from its own layer and from lower ones.
LAYERS = [
    {"errors", "units", "tree", "source", "remote", "atomic", "permit", "kernels", "display", "css"},
    {"encodings", "model", "listing", "parts", "qtensor", "reports"},
    {"formats", "integrity"},
    {"table"},
    {"ops", "samples"},
    {"notebook", "cli"},
]
EXEMPT = {"display", "__init__", "__main__"}  # of anything, inside functions
HEAVY = {"numba", "pandas", "matplotlib", "numpy", "IPython", "ipywidgets", "pint", "torch", "onnx", "ml_dtypes"}


def layer(module: str) -> int:
    """Layer of a module by its first component; files such as `parts_html` belong to `parts`."""
    for i, names in enumerate(LAYERS):
        if module in names or module.partition("_")[0] in names:
            return i
    raise AssertionError(f"{module} stands in no layer")


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(Module, line, whether at module level) of every import, with relative ones made absolute."""
    package = path.relative_to(PACKAGE.parent).with_suffix("").parts
    package = package[:-1]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inside = {id(n) for f in functions for n in ast.walk(f)}
    conditions = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    typing = {id(n) for condition in conditions for n in ast.walk(condition)}
    for node in ast.walk(tree):
        if id(node) in typing:
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            names = [f"{module}.{alias.name}" for alias in node.names]
        for name in names:
            yield name, node.lineno, id(node) not in inside


MODULES = sorted(p for p in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_downwards(path: Path) -> None:
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    for name, line, top in imports(path):
        parts = name.split(".")
        if parts[0] != "apsi_inspect" or parts[1:] in ([], ["__version__"]) or (own in EXEMPT and not top):
            continue
        rank = 0 if own in EXEMPT - {"__main__"} else layer("cli" if own == "__main__" else own)
        assert layer(parts[1]) <= rank, f"line {line}: {name}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "kernels").glob("*.py")), ids=lambda p: p.name)
def test_kernels_import_numpy_and_numba_alone(path: Path) -> None:
    for name, line, _ in imports(path):
        first = name.split(".")[0]
        known = first in sys.stdlib_module_names or first in ("numpy", "numba", "llvmlite", "gguf")
        assert known or name.startswith("apsi_inspect.kernels"), f"line {line}: {name}"


def test_heavy_packages_are_imported_where_the_design_says() -> None:
    for path in MODULES:
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for name, line, top in imports(path):
            first = name.split(".")[0]
            where = f"{path.relative_to(PACKAGE)}, line {line}: {name}"
            if first in ("IPython", "ipywidgets", "matplotlib"):
                assert own in ("notebook", "cli", "__init__"), where
            if first == "pandas":
                assert own in ("table", "notebook", "cli"), where
            if first in ("torch", "onnx", "pint", "fsspec", "dask", "gguf"):
                assert not top, where
            if first == "numba":
                assert own == "kernels", where


def loaded(code: str, *args: object) -> set[str]:
    """Which heavy packages a fresh process has loaded after the code."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)", *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {m.split(".")[0] for m in done.stdout.split()} & HEAVY


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded("import apsi_inspect") == set()


BLOBS = {
    "model.safetensors": handmade.safetensors([("a", "BF16", [2], bytes(4))], {"k": "v"}),
    "model.gguf": Gguf().file([("general.architecture", "STRING", "x"), ("t", "ARRAY", ("STRING", ["a"] * 3000))]),
    "model.apsim": (Path(__file__).parent / "data" / "golden" / "qtensors.apsim").read_bytes(),
}
LOOK = """
import apsi_inspect
m = apsi_inspect.open(sys.argv[1])
m.tree(), m.findings, dict(m.metadata), repr(m), [(t.name, t.shape, t.bpw, bytes(t.raw())) for t in m.values()]
"""


@pytest.mark.parametrize("name", BLOBS)
def test_opening_and_looking_loads_nothing_heavy(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(BLOBS[name])
    assert loaded(LOOK, path) == set()


@pytest.mark.parametrize("name", BLOBS)
def test_model_info_loads_nothing_heavy(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(BLOBS[name])
    for more in ([], ["--json"]):
        code = f"""
import contextlib, io
from apsi_inspect.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    try:
        code = main(["model", "info", sys.argv[1], *{more!r}])
    except SystemExit as exc:
        code = exc.code
assert not code, code
"""
        assert loaded(code, path) == set()


def test_looking_at_values_needs_numpy_and_no_pandas(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(BLOBS["model.safetensors"])
    found = loaded("import apsi_inspect, numpy\nnumpy.asarray(apsi_inspect.open(sys.argv[1])['a'])", path)
    assert "numpy" in found
    assert not found & {"pandas", "matplotlib", "IPython", "ipywidgets", "torch", "pint", "gguf"}
