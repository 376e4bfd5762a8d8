"""`load_model` and `load_safetensors`: a checkpoint to a tree of arrays that are views of the mapped file.

Contract (`docs/apsim-format.md`): with ``verify=True`` (the default) every digest is checked before anything is
returned, over the same map that serves the values afterwards; with ``"lazy"`` a chunk is checked when a tensor that
touches it is first read. Arrays are read-only. `tests/test_save_load.py` enforces this.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from ..encodings.scaled import CODE_DTYPE
from ..encodings.values import decode, numpy_dtype
from ..errors import UnknownFormatError, ValueRefusedError, VerificationError
from ..formats.base import is_mapped
from ..formats.safetensors import DTYPES
from ..integrity.check import Lazy, read_claims
from ..integrity.fetched import LazyFetched
from ..integrity.signing import Key
from ..model import ModelFile
from ..qtensor import QTensor, packed_shape
from ..tree import from_names, from_skeleton, record
from .lazy import Later, lazily
from .open import open as open_model
from .open import open_source, source_of
from .verify import (
    Options,
    check_file,
    metadata_part,
    signature_part,
    table_part,
    verify_index_only,
    verify_model,
)
from .verify import find as find

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from ..source import ByteSource
    from ..units import Unit


def load_model(
    path: str | os.PathLike[str],
    key: bool | bytes | str | None = None,
    verify: bool | str = True,
    *,
    progress: Callable[[int, int], None] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """Load an .apsim checkpoint.

    Parameters
    ----------
    path
        The file, the index of a sharded checkpoint, or ``NAME.apsim`` where only ``NAME.apsim.index.json`` is there.
        Or a URL: with ``verify="lazy"`` only chunks that are touched are fetched, else the whole, into memory.
    key
        Refuse what is not signed with this key: True (the per-user key), bytes, or a secret. Turns verification on.
    verify
        True: check every digest before anything is returned. ``"lazy"``: check the metadata now and each chunk of 8 MiB
        when a tensor that touches it is first taken out of the tree (one that stands in a tuple: now). False: check
        nothing.
    progress
        Called with the bytes checked and their total.
    storage_options
        Of a URL, as in `open`.

    Returns
    -------
    record, list or tuple
        The tree as it was saved: read-only arrays that are views of the mapped file where the bytes allow, pint
        Quantities, QTensors, plain values. Tied tensors come back as one object. The metadata is in ``model_info``.

    Raises
    ------
    OSError
        The file is missing or unreadable.
    ModelFileError
        It is no .apsim file or a malformed one.
    VerificationError
        Digests or the signature do not hold; ``.status`` is ``"damaged"``, ``"unsigned"`` or ``"other-key"``.
    """
    if verify not in (True, False, "lazy"):
        raise ValueRefusedError(f"verify is {verify!r:.40}; True, 'lazy' or False was expected")
    name = find(path)
    signed = None if key is None or key is False else Key(key)
    source = source_of(name, storage_options)
    try:
        model = open_source(source)
        if model.format != "apsim":
            hint = f"use load_{model.format}" if model.format in ("safetensors", "gguf") else "use open"
            raise UnknownFormatError(source.name, f"is {model.format}, not .apsim", hint=hint)
        if verify == "lazy":
            tree = lazily(_tree(model, _lazy_leaves(source, model, signed)))
            if not is_mapped(model.sources[0]):  # what has not been fetched is still to be read
                return tree
        else:
            _hold(model)
            if verify or signed is not None:
                verify_model(source, model, Options(signed, progress=progress)).raise_if_failed()
            tree = _tree(model, Leaves(model).leaf)
        model.close()  # the arrays keep the map
        source.close()
        return tree
    except BaseException:
        source.close()
        raise


def _hold(model: ModelFile) -> None:
    """What is behind a URL comes into memory once: the bytes that are checked are those that are given out."""
    for each in model.sources:
        hold = getattr(each, "hold", None)
        if hold is not None:
            hold()


def _lazy_leaves(source: ByteSource, model: ModelFile, key: Key | None) -> Callable[[str], Any]:
    """Leaves that are checked when they are read; all that does not wait for that is checked now."""
    if source not in model.sources:
        verify_index_only(source, key)
    elif key is not None:
        claims = read_claims(source)
        part = signature_part(key, claims.signature, [claims.signed], None)
        if part.status != "authentic":
            raise VerificationError(source.name, f"{part.status}: {part.message}", status=part.status)
    checks = [_lazy_checks(each) for each in model.sources]
    leaves = Leaves(model, [c if isinstance(c, LazyFetched) else None for c in checks])

    def make(name: str) -> Any:
        info, q = model.info(leaves.index[name]), model.qparams.get(name)
        check = checks[info.file]
        if isinstance(check, Lazy):
            check.check(info.offset, info.nbytes - (q.scale_nbytes if q else 0))
            if q is not None:
                check.check(q.scale_offset, q.scale_nbytes)
        return leaves.leaf(name)

    return lambda name: Later(lambda: make(name))


def _lazy_checks(source: ByteSource) -> Lazy | LazyFetched | None:
    """What checks the chunks of a file; None where it has none and was checked whole. Metadata and table: now."""
    claims = read_claims(source)
    failed = [p for p in (metadata_part(claims), table_part(claims)) if p.status == "damaged"]
    if not failed and claims.chunks is None:
        if not is_mapped(source):
            source.hold()  # type: ignore[attr-defined]
        failed = [p for p in check_file(source, claims, Options(), lambda n: None).parts if p.status == "damaged"]
    if failed:
        raise VerificationError(source.name, f"{failed[0].name} damaged: {failed[0].message}")
    if claims.chunks is None:
        return None
    return Lazy(source, claims) if is_mapped(source) else LazyFetched(source, claims)


def load_safetensors(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Any:
    """Load plain safetensors: a file, an index, a folder, or a URL (then all of it comes into memory).

    Returns
    -------
    record or list
        The tree that the names give, of read-only arrays; see `load_model`. Names that the metadata gives for tied
        tensors (as `save_safetensors` writes them) are restored. One flat record where the names give no tree.

    Raises
    ------
    OSError, ModelFileError
        As `open`.
    """
    model = open_model(path, storage_options=storage_options)
    if model.format not in ("safetensors", "apsim"):
        model.close()
        raise UnknownFormatError(model.path, f"is {model.format}, not safetensors", hint="use open")
    if model.format == "apsim":
        model.close()
        model = open_model(path, "safetensors", storage_options=storage_options)
    names = list(model.columns.names)
    there = set(names)
    ties = {k: v for k, v in model.metadata.items() if isinstance(v, str) and v in there and k not in there}
    leaves = Leaves(model)
    arrays: dict[str, Any] = {}

    def leaf(name: str) -> Any:
        stored = ties.get(name, name)
        if stored not in arrays:
            arrays[stored] = leaves.leaf(stored)
        return arrays[stored]

    names += ties
    tree = from_names(names, leaf)
    if tree is None:
        tree = record((name, leaf(name)) for name in names)
    model.close()  # the arrays keep the map
    return tree


def _tree(model: ModelFile, leaf: Callable[[str], Any]) -> Any:
    """The tree of a model with leaves made by `leaf`, each once."""
    for finding in model.findings:
        if finding.severity == "warning":
            warnings.warn(f"{model.path}: {finding.message}", stacklevel=3)
    if model.skeleton is None:
        tree = from_names(model.columns.names, leaf)
        return tree if tree is not None else record((name, leaf(name)) for name in model.columns.names)
    made: dict[str, Any] = {}

    def once(name: str) -> Any:
        if name not in made:
            made[name] = leaf(name)
        return made[name]

    return from_skeleton(model.skeleton, once)


class Fetched:
    """Bytes that are fetched, and checked, when a range of them is taken."""

    def __init__(self, source: LazyFetched) -> None:
        self.source = source

    def __getitem__(self, span: slice) -> NDArray[np.uint8]:
        return np.frombuffer(self.source.view(span.start, span.stop - span.start), np.uint8)


class Leaves:
    """Arrays of an opened model, by name: views of its files, with a unit or scales where they have them."""

    def __init__(self, model: ModelFile, fetched: Sequence[LazyFetched | None] = ()) -> None:
        self.model = model
        self.columns = c = model.columns
        self.index = model.index
        given = fetched or [None] * len(model.sources)
        self.bases: list[Any] = [
            np.frombuffer(s.view(0, s.size), np.uint8) if f is None else Fetched(f)
            for s, f in zip(model.sources, given, strict=True)
        ]
        self.dtypes = [numpy_dtype(e.dtype) if e.decode is None and e.kind != "bool" else None for e in c.encodings]
        self.units: dict[Unit, Any] = {}

    def leaf(self, name: str) -> Any:
        """The array, Quantity or QTensor of a name."""
        value = self.values(name)
        unit = self.model.units.get(name)
        if unit is None or isinstance(value, QTensor):
            return value
        return self.pint(unit).Quantity(value, self.units[unit])

    def pint(self, unit: Unit) -> Any:
        """The unit registry, with `unit` looked up in it."""
        from ..units_pint import pint_units

        if unit not in self.units:
            self.units[unit], warning = pint_units(unit)
            if warning is not None:
                warnings.warn(f"{self.model.path}: {warning}", stacklevel=6)
        return self.units[unit]._REGISTRY

    def values(self, name: str) -> NDArray[Any] | QTensor:
        """The array or QTensor of a name."""
        if name in self.model.qparams:
            return self.quantized(name)
        c, i = self.columns, self.index[name]
        start = c.offsets[i]
        raw = self.bases[c.files[i] if c.files is not None else 0][start : start + c.sizes[i]]
        shape = tuple(c.dims[c.starts[i] : c.starts[i + 1]])
        dtype = self.dtypes[c.codes[i]]
        if dtype is not None:
            array: NDArray[Any] = raw.view(dtype).reshape(shape)
            return array
        array = decode(c.encodings[c.codes[i]], raw, shape)
        array.flags.writeable = False
        return array

    def quantized(self, name: str) -> QTensor:
        """A QTensor over the mapped codes and scales."""
        info, q = self.model.info(self.index[name]), self.model.qparams[name]
        base, fmt = self.bases[info.file], info.encoding.name
        packed = base[info.offset : info.offset + info.nbytes - q.scale_nbytes]
        dtype = numpy_dtype(DTYPES[CODE_DTYPE[fmt]].dtype)
        scale = None
        if q.scale_shape is not None:
            scale = base[q.scale_offset : q.scale_offset + q.scale_nbytes].view("<f4").reshape(q.scale_shape)
        shape = packed_shape(info.shape, q.packing)
        return QTensor(fmt, packed.view(dtype).reshape(shape), scale, info.shape, q.axis, q.block, info.unit)
