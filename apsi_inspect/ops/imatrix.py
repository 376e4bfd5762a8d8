"""`read_imatrix`: an importance matrix of llama.cpp, how much each column of a weight matrix matters.

`llama-imatrix` runs a model over text and adds up the squares of what each weight matrix is multiplied with. Divided by
how often that was, it is the mean square of the input of each column: the weight of a column's error in the error of
the output. As GGUF (since July 2025): tensors ``<name>.in_sum2`` and ``<name>.counts``, both F32, one row and one count
for each matrix (of experts); as the older file: see `_legacy`. What `llama-quantize` makes of both is what is read here
(`tools/quantize/quantize.cpp`): a matrix that was never used has weights of 1.

Contract: a file that is no importance matrix, or is cut off or inconsistent, is one ModelFileError that says where.
`tests/test_imatrix.py` enforces this with files that the `gguf` package writes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ModelFileError, ValueRefusedError, quote
from ..listing import plural
from ..source import FileSource
from .open import open as open_model

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..model import ModelFile

SUMS, COUNTS = ".in_sum2", ".counts"
_MAX_ENTRIES, _MAX_TEXT = 1_000_000, 1 << 16  # of the older file: beyond this the numbers are no counts


@dataclass(frozen=True, slots=True)
class Imatrix:
    """The weights of the columns of a model's matrices.

    Attributes
    ----------
    path
        The file.
    weights
        Tensor name -> mean squares (float32, flat: the columns of one matrix, or of each expert after the other).
    datasets
        What text it was computed with, as the file says.
    chunks, chunk_size
        How many pieces of text, and tokens of each; 0 where the file does not say.
    """

    path: str
    weights: Mapping[str, NDArray[np.float32]]
    datasets: tuple[str, ...] = ()
    chunks: int = 0
    chunk_size: int = 0

    def columns(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32] | None:
        """The weights for a tensor: (matrices, row); None where the file has none for it.

        Raises
        ------
        ModelFileError
            They are not of its shape: the file is of another model.
        """
        found = self.weights.get(name)
        if found is None:
            return None
        row, matrices = (shape[-1] if shape else 1), prod(shape[:-2])
        if found.size not in (row, row * matrices):
            each = f"{row}" + (f" or {matrices} x {row}" if matrices != 1 else "")
            raise ModelFileError(
                self.path,
                f"has {found.size} weights, the model's tensor needs {each}",
                quote(name),
                "of another model?",
            )
        return found.reshape(-1, row)

    def __repr__(self) -> str:
        return f"<Imatrix of {plural(len(self.weights), 'tensor')}, {plural(self.chunks, 'chunk')}>"


def read_imatrix(path: str | os.PathLike[str]) -> Imatrix:
    """Read an importance matrix, of llama.cpp's GGUF kind or the older one (``.dat``).

    Raises
    ------
    OSError
        The file cannot be read.
    ModelFileError
        It is no importance matrix, or a damaged one.
    """
    name = os.fsdecode(path)
    source = FileSource(name)
    try:
        head = source.read_at(0, min(4, source.size))
        if head != b"GGUF":
            return _legacy(source)
    finally:
        source.close()
    with open_model(name, format="gguf") as model:
        return _of_gguf(model)


def _of_gguf(model: ModelFile) -> Imatrix:
    pairs: dict[str, dict[str, str]] = {}
    for stored in model:
        for ending in (SUMS, COUNTS):
            if stored.endswith(ending):
                pairs.setdefault(stored.removesuffix(ending), {})[ending] = stored
    if not pairs:
        kind = model.metadata.get("general.type", "model")
        hint = "make one with llama-imatrix"
        raise ModelFileError(
            model.path, f"is no importance matrix (its type is {quote(str(kind))}): no tensor ends in {SUMS}", hint=hint
        )
    weights = {}
    for name, pair in pairs.items():
        missing = next((e for e in (SUMS, COUNTS) if e not in pair), None)
        if missing is not None:
            raise ModelFileError(model.path, f"has no {quote(name + missing)} beside its counterpart", quote(name))
        weights[name] = _means(model, name, *(_values(model, pair[e]) for e in (SUMS, COUNTS)))
    meta = model.metadata
    datasets = meta.get("imatrix.datasets", ())
    return Imatrix(
        model.path,
        MappingProxyType(weights),
        tuple(str(d) for d in datasets) if isinstance(datasets, Iterable) and not isinstance(datasets, str) else (),
        _number(meta.get("imatrix.chunk_count")),
        _number(meta.get("imatrix.chunk_size")),
    )


def _values(model: ModelFile, stored: str) -> NDArray[np.float32]:
    tensor = model[stored]
    if tensor.encoding != "F32":
        raise ModelFileError(model.path, f"is {tensor.encoding}, F32 was expected", quote(stored))
    values: NDArray[np.float32] = np.array(tensor.numpy(), np.float32).reshape(-1)
    _check(model.path, stored, values)
    return values


def _check(path: str, name: str, values: NDArray[np.float32]) -> None:
    if not np.isfinite(values).all() or (values < 0).any():
        raise ModelFileError(
            path, "has values that are negative or not finite; sums of squares were expected", quote(name)
        )


def _means(model: ModelFile, name: str, sums: NDArray[np.float32], counts: NDArray[np.float32]) -> NDArray[np.float32]:
    if not counts.size or not sums.size or sums.size % counts.size:
        raise ModelFileError(model.path, f"has {sums.size} sums for {counts.size} counts", quote(name))
    by_matrix = sums.reshape(counts.size, -1)
    rounded = np.rint(counts)[:, None]
    means = np.divide(by_matrix, rounded, out=np.ones_like(by_matrix), where=rounded > 0)
    return _frozen(means.reshape(-1))


def _frozen(values: NDArray[np.float32]) -> NDArray[np.float32]:
    values.flags.writeable = False
    return values


def _number(value: Any) -> int:
    return int(value) if isinstance(value, int) and value >= 0 else 0


def _legacy(source: FileSource) -> Imatrix:
    """The older file, all little-endian int32 and float32.

    The number of entries; of each the length of its name, the name, how many calls, how many values, the values (sums
    over the calls); then, where the file goes on, the number of chunks, and the length and name of the data set.
    """
    reader = _Reader(source)
    count = reader.number("the number of entries", 1, _MAX_ENTRIES)
    weights = {}
    for i in range(count):
        reader.where = f"entry {i + 1} of {count}"
        name = reader.text("the length of its name", 1)
        calls = reader.number("its number of calls", 0, 1 << 31)
        sums = reader.floats(reader.number("its number of values", 1, 1 << 31))
        _check(source.name, name, sums)
        if name in weights:
            raise ModelFileError(source.name, f"has {quote(name)} twice", reader.where)
        weights[name] = _frozen(sums / np.float32(calls) if calls else sums)
    chunks, datasets = 0, ()
    if reader.left:
        reader.where = "after the last entry"
        chunks = reader.number("the number of chunks", 0, 1 << 31)
        if reader.left:
            text = reader.text("the length of the data set's name", 0)
            datasets = (text,) if text else ()  # type: ignore[assignment]
    if reader.left:
        raise ModelFileError(source.name, f"has {reader.left} bytes after its end", hint="is it an importance matrix?")
    return Imatrix(source.name, MappingProxyType(weights), datasets, chunks)


class _Reader:
    """Numbers, texts and values one after the other, each checked before it is believed."""

    def __init__(self, source: FileSource) -> None:
        self.source, self.at, self.where = source, 0, "the header"

    @property
    def left(self) -> int:
        """Bytes that have not been read."""
        return self.source.size - self.at

    def take(self, n: int, what: str) -> bytes:
        """The next bytes."""
        if n > self.left:
            reason = f"is no importance matrix or cut off: {what} takes {n} bytes, {self.left} are left"
            raise ModelFileError(self.source.name, reason, self.where)
        self.at += n
        return self.source.read_at(self.at - n, n)

    def number(self, what: str, low: int, high: int) -> int:
        """An int32 in a range."""
        value: int = struct.unpack("<i", self.take(4, what))[0]
        if not low <= value <= high:
            raise ModelFileError(self.source.name, f"is no importance matrix: {what} is {value}", self.where)
        return value

    def text(self, what: str, low: int) -> str:
        """A text after its length."""
        n = self.number(what, low, _MAX_TEXT)
        try:
            return self.take(n, "the text").decode("utf-8")
        except UnicodeDecodeError:
            reason = "is no importance matrix: a name is not UTF-8"
            raise ModelFileError(self.source.name, reason, self.where) from None

    def floats(self, n: int) -> NDArray[np.float32]:
        """Float32 values."""
        return np.frombuffer(self.take(4 * n, f"{n} values"), "<f4").astype(np.float32)


def weights_of(given: Imatrix | str | os.PathLike[str]) -> Imatrix:
    """An importance matrix as it is given to a verb: itself, or its path."""
    if isinstance(given, Imatrix):
        return given
    if isinstance(given, (str, os.PathLike)):
        return read_imatrix(given)
    raise ValueRefusedError(f"weights are {type(given).__name__}; an importance matrix or its path was expected")
