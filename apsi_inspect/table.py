"""`TensorTable`: the tensors of a model as a pandas frame, wrapped (not subclassed).

The columns and dtypes of `.frame` are a contract (`SCHEMA`; `tests/test_table.py`). The frame of 100 000 tensors is
built from whole columns; a shape is one shared tuple for all tensors that have it.
"""

from __future__ import annotations

import os
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from .atomic import write_bytes
from .display import TableDisplay
from .errors import MissingPackageError, ValueRefusedError, quote, visible
from .listing import Share, block_of, candidates, companions, glob, natural_key, packing, plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from .model import ModelFile

# column -> dtype; `axis` and `block` are -1 where there is none (axis) or where one block is the whole axis (block 0)
SCHEMA: dict[str, str] = {
    "name": "object",
    "encoding": "category",
    "shape": "object",
    "ndim": "int64",
    "numel": "int64",
    "nbytes": "int64",
    "bpw": "float64",
    "offset": "int64",
    "file": "category",
    "unit": "object",
    "axis": "int64",
    "block": "int64",
    "parameters": "int64",
}


class TensorTable(TableDisplay):
    """The tensors of one model, a row each.

    Attributes
    ----------
    frame
        The pandas DataFrame, in file order, with the columns of `SCHEMA`:

        =============  ====================================================================================
        ``name``       tensor name
        ``encoding``   the container's word (``F32``, ``Q4_K``, ``int4``); a categorical
        ``shape``      row-major shape, a tuple
        ``ndim``       number of dimensions
        ``numel``      elements
        ``nbytes``     stored bytes
        ``bpw``        stored bits per element; NaN for an empty tensor
        ``offset``     absolute byte position in its file
        ``file``       base name of the file (shard); a categorical
        ``unit``       physical unit, or ""
        ``axis``       quantized tensors: the axis that scales run along; -1: none
        ``block``      quantized tensors: block length; 0: the whole axis; -1: none
        ``parameters`` logical parameters: packed weights count as weights, companions and tied copies as 0
        =============  ====================================================================================
    """

    def __init__(self, frame: pd.DataFrame, title: str = "tensors") -> None:
        self.frame, self.title = frame, title

    @classmethod
    def of(cls, model: ModelFile) -> TensorTable:
        """The table of an opened model."""
        return cls(_frame(model), os.path.basename(model.path))

    def __len__(self) -> int:
        return len(self.frame)

    def __iter__(self) -> Iterator[str]:
        return iter(self.frame["name"])

    def __repr__(self) -> str:
        n, parameters, nbytes = len(self), self.parameters, self.nbytes
        return f"<TensorTable {quote(self.title)}: {plural(n, 'tensor')}, {parameters} parameters, {nbytes} bytes>"

    @property
    def parameters(self) -> int:
        """Logical parameters of all rows."""
        return int(self.frame["parameters"].sum())

    @property
    def nbytes(self) -> int:
        """Stored bytes of all rows."""
        return int(self.frame["nbytes"].sum())

    def filter(
        self, pattern: str | None = None, *, regex: str | None = None, encoding: str | Sequence[str] | None = None
    ) -> TensorTable:
        """The rows whose name matches a glob and a regular expression, and whose encoding is one of those given.

        Raises
        ------
        ValueRefusedError
            The regular expression is none.
        """
        keep = np.ones(len(self.frame), bool)
        if pattern is not None:
            match = glob(pattern)
            keep &= np.fromiter((match(n) is not None for n in self.frame["name"]), bool, len(self.frame))
        if regex is not None:
            import re

            try:
                search = re.compile(regex).search
            except re.error as exc:
                raise ValueRefusedError(f"{quote(regex)} is no regular expression: {exc}") from None
            keep &= np.fromiter((search(n) is not None for n in self.frame["name"]), bool, len(self.frame))
        if encoding is not None:
            keep &= self.frame["encoding"].isin([encoding] if isinstance(encoding, str) else list(encoding)).to_numpy()
        return TensorTable(self.frame[keep], self.title)

    def sort(self, by: str = "name", *, descending: bool = False) -> TensorTable:
        """Rows in the order of a column; names in natural order (``blk.2`` before ``blk.10``).

        Raises
        ------
        ValueRefusedError
            No such column.
        """
        if by not in self.frame.columns:
            raise ValueRefusedError(f"no column {quote(by)}; columns: {', '.join(self.frame.columns)}")
        if by == "name":
            names = list(self.frame["name"])
            order = sorted(range(len(names)), key=lambda i: natural_key(names[i]), reverse=descending)
            return TensorTable(self.frame.iloc[order], self.title)
        return TensorTable(self.frame.sort_values(by, ascending=not descending, kind="stable"), self.title)

    def by_block(self) -> pd.DataFrame:
        """Tensors, parameters and bytes per layer or block (``blk.0``, ``model.layers.3``), in natural order."""
        blocks = self.frame["name"].map(block_of)
        sums = self.frame.groupby(blocks.to_numpy(), sort=False).agg(
            tensors=("name", "size"), parameters=("parameters", "sum"), nbytes=("nbytes", "sum")
        )
        sums.index.name = "block"
        return sums.loc[sorted(sums.index, key=natural_key)]

    def by_encoding(self) -> pd.DataFrame:
        """Tensors, parameters and bytes per encoding, the largest first."""
        groups = self.frame.groupby("encoding", observed=True, sort=False)
        sums = groups.agg(tensors=("name", "size"), parameters=("parameters", "sum"), nbytes=("nbytes", "sum"))
        return sums.sort_values("nbytes", ascending=False, kind="stable")

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """The frame as CSV text, also written to `path` where one is given (as a whole, replacing what is there)."""
        return _written(self.frame.to_csv(index=False, lineterminator="\n"), path)

    def to_markdown(self, path: str | os.PathLike[str] | None = None) -> str:
        """The frame as a Markdown table, also written to `path`; names are escaped, so that none is markup."""
        cells = [[_markdown(v) for v in row] for row in self.frame.itertuples(index=False, name=None)]
        head = [str(c) for c in self.frame.columns]
        right = [pd.api.types.is_numeric_dtype(t) for t in self.frame.dtypes]
        lines = [head, ["---:" if r else "---" for r in right], *cells]
        return _written("".join(f"| {' | '.join(row)} |\n" for row in lines), path)

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write the frame as a Parquet file.

        Raises
        ------
        MissingPackageError
            pyarrow is not installed.
        """
        import io
        from importlib.util import find_spec

        if find_spec("pyarrow") is None:
            raise MissingPackageError("pyarrow", "writing Parquet", "parquet")
        out = io.BytesIO()
        shapes = {c: self.frame[c].map(list) for c in ("shape",) if c in self.frame.columns}
        self.frame.assign(**shapes).to_parquet(out, index=False, engine="pyarrow")
        write_bytes(path, out.getvalue(), durable=False)

    def shares(self) -> list[Share]:
        """`by_encoding` as plain rows."""
        sums = self.by_encoding()
        return [
            Share(str(label), int(t), int(p), int(b))
            for label, t, p, b in zip(sums.index, sums["tensors"], sums["parameters"], sums["nbytes"], strict=True)
        ]


def frame_of(rows: Sequence[Sequence[Any]], columns: Sequence[str]) -> pd.DataFrame:
    """A plain frame of rows, for the reports of verbs."""
    return pd.DataFrame(rows, columns=list(columns))


def _written(text: str, path: str | os.PathLike[str] | None) -> str:
    if path is not None:
        write_bytes(path, text.encode("utf-8", "surrogateescape"), durable=False)
    return text


_MARKUP = str.maketrans({c: "\\" + c for c in "\\`*_{}[]<>()#+-!|~$&^"})


def _markdown(value: object) -> str:
    """A cell: numbers as they are, a shape with ×, text with all markup escaped."""
    if isinstance(value, tuple):
        return " × ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.6g}"
    return visible(value).translate(_MARKUP) if isinstance(value, str) else str(value)


def _frame(model: ModelFile) -> pd.DataFrame:
    c = model.columns
    n = len(c.names)
    starts = np.asarray(c.starts, np.int64)
    ndim = np.diff(starts)
    shapes, numel = _shapes(np.asarray(c.dims, np.int64), starts)
    nbytes = np.asarray(c.sizes, np.int64)
    with np.errstate(divide="ignore", invalid="ignore"):
        bpw = np.where(numel > 0, 8 * nbytes / numel, np.nan)
    axis, block = np.full(n, -1, np.int64), np.full(n, -1, np.int64)
    scales: dict[str, Any] = {**model.qparams, **model.affine}
    for name, q in scales.items():
        i = model.index[name]
        axis[i], block[i] = -1 if q.axis is None else q.axis, -1 if q.axis is None else q.block or 0
    files = np.zeros(n, np.int64) if c.files is None else np.asarray(c.files, np.int64)
    columns = {
        "name": np.array(c.names, object) if n else np.empty(0, object),
        "encoding": _categories(np.asarray(c.codes, np.int64), [e.name for e in c.encodings]),
        "shape": shapes,
        "ndim": ndim,
        "numel": numel,
        "nbytes": nbytes,
        "bpw": bpw,
        "offset": np.asarray(c.offsets, np.int64),
        "file": _file_names(model, files),
        "unit": _units(model, n),
        "axis": axis,
        "block": block,
        "parameters": _parameters(model, numel, files, nbytes),
    }
    return pd.DataFrame({k: pd.Series(v, dtype=_dtype(k), copy=False) for k, v in columns.items()}, copy=False)


def _dtype(column: str) -> Any:
    """Strings stay plain objects whatever pandas' default for text is."""
    return object if SCHEMA[column] == "object" else None


def _shapes(dims: NDArray[np.int64], starts: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """One shared tuple per distinct shape, and the number of elements, per tensor; a rank at a time."""
    ndim = np.diff(starts)
    shapes: NDArray[Any] = np.empty(len(ndim), object)
    numel: NDArray[np.int64] = np.ones(len(ndim), np.int64)
    for rank in np.flatnonzero(np.bincount(ndim)):
        rows = np.flatnonzero(ndim == rank)
        table = dims[starts[rows][:, None] + np.arange(rank)]
        codes, first = _distinct(table)
        known: NDArray[Any] = np.empty(len(first), object)
        known[:] = list(map(tuple, table[first].tolist()))
        shapes[rows] = known[codes]
        numel[rows] = np.array([prod(shape) for shape in known], np.int64)[codes]
    return shapes, numel


def _distinct(table: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Which distinct row each row is, and where each of those stands first: by a hash of the rows that is checked."""
    key = np.zeros(len(table), np.uint64)
    for column in table.T:
        key = (key ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    codes, keys = pd.factorize(key)
    first = np.full(len(keys), len(table))
    np.minimum.at(first, codes, np.arange(len(table)))
    if (table == table[first][codes]).all():
        return codes, first
    _, first, codes = np.unique(table, axis=0, return_index=True, return_inverse=True)
    return codes.reshape(-1), first


def _categories(codes: NDArray[np.int64], names: list[str]) -> Any:
    return pd.Categorical.from_codes(codes, pd.Index(names, dtype=object))


def _file_names(model: ModelFile, files: NDArray[np.int64]) -> Any:
    names = [os.path.basename(f) for f in model.files]
    if len(set(names)) != len(names):
        names = list(model.files)
    return _categories(files, names)


def _units(model: ModelFile, n: int) -> NDArray[Any]:
    units: NDArray[Any] = np.full(n, "", object)
    for name, unit in model.units.items():
        units[model.index[name]] = str(unit)
    return units


def _parameters(
    model: ModelFile, numel: NDArray[np.int64], files: NDArray[np.int64], nbytes: NDArray[np.int64]
) -> NDArray[np.int64]:
    """`listing.parameters`, by columns."""
    out = numel.copy()
    among = candidates(model.columns.names)
    for name, factor in packing(model, among).items():
        out[model.index[name]] *= factor
    for name in companions(model.columns.names, among).union(*(a.companions for a in model.affine.values())):
        out[model.index[name]] = 0
    offsets = np.asarray(model.columns.offsets, np.int64)
    if len(model.files) == 1 and (np.diff(offsets[nbytes > 0]) > 0).all():
        return out  # each has its own place: none is tied
    order = np.lexsort((np.arange(len(offsets)), nbytes, offsets, files))
    same = (
        (files[order][1:] == files[order][:-1])
        & (offsets[order][1:] == offsets[order][:-1])
        & (nbytes[order][1:] == nbytes[order][:-1])
        & (nbytes[order][1:] > 0)
    )
    out[order[1:][same]] = 0
    return out
