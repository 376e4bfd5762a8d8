"""`save_gguf` and `load_gguf`: a parameter tree to a GGUF file that runtimes load, and back.

Contract: what is written is byte for byte what `gguf.GGUFWriter` writes for the same keys and tensors in one order,
encoded as ggml does; nothing is written where anything is refused; whatever is not stored as asked is in the report.
`tests/test_gguf_write.py` enforces this.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ..atomic import Files, remove
from ..encodings import Encoding
from ..errors import UnknownFormatError
from ..formats import gguf_extras, gguf_write
from ..formats.gguf_keys import known_type
from ..formats.gguf_values import Value, python
from ..formats.gguf_write import Layout, Spec
from ..formats.safetensors_write import Blob
from ..model import Finding, ModelFile, Tensor
from ..qtensor import QTensor
from ..tree_write import flatten, needs_skeleton
from ..units_pint import is_quantity, unit_of
from .changes import ConversionReport, TensorChange
from .convert_tasks import job_of
from .gguf_keys_of import Keys, file_keys, typed_keys, with_alignment
from .inputs import ArrayInput, Input, ScaledInput, input_of
from .lazy import MetadataRecord, lazy_tree
from .leaves import identity, to_array
from .open import open as open_model
from .pipeline import Pipeline
from .recode import is_copy, maker
from .save import parse_size
from .shared import Shared
from .targets import Choice, assign, choose, parse_dtype, parse_rules

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ..tree import record
    from ..units import Unit

    Progress = Callable[[int, int], None]
    Rules = Sequence[str | tuple[str, str]] | dict[str, str]


class Planned(NamedTuple):
    """A tensor that is to be written, and how."""

    source: Input
    choice: Choice
    unit: Unit | None = None
    nbytes_before: int = 0
    tensor: Tensor | None = None  # of a file

    @property
    def spec(self) -> Spec:
        """Its entry in a table."""
        return Spec(self.source.name, self.choice.encoding, self.source.shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.source.shape)


def save_gguf(
    path: str | os.PathLike[str],
    params: Any,
    metadata: Mapping[str, Any] | None = None,
    dtype: str | None = "f16",
    architecture: str | None = None,
    *,
    tensor_types: Rules | None = None,
    alignment: int | None = None,
    shard: str | int | None = None,
    durable: bool = True,
    progress: Progress | None = None,
) -> ConversionReport:
    """Save a parameter tree as GGUF (version 3), replacing what is there as one step.

    Parameters
    ----------
    path
        ``"model.gguf"``.
    params
        As in `save_model`: records, lists and tuples of arrays, pint Quantities, QTensors, Tensors; a tensor's name is
        its path with dots. An opened model is saved as its tree.
    metadata
        A record of ints, floats, bools, strings, bytes, lists, NumPy scalars and arrays. Keys have dots
        (``{"llama.context_length": 4096}``), or underscores (``record(llama_context_length=4096)``), or are records in
        records. A key that runtimes know takes the type they expect; the rules for others are in `docs/convert.md`.
    dtype
        ``"f32"``, ``"f16"``, ``"bf16"``, ``"q8_0"``, ``"q4_0"``, ``"q4_k"``, …: every encoding that we can make. What
        cannot be in blocks is written F32 (fewer than two dimensions) or F16 and reported; integers keep their type.
        None: everything as it is.
    architecture
        Sets `general.architecture`, which runtimes need.
    tensor_types
        Exceptions: ``["blk.*.attn_v.weight=q6_k"]`` or a dict; the last one that matches counts.
    alignment
        Of the tensors' data; 32 by default, or what the metadata says.
    shard
        Split into ``model-00001-of-0000N.gguf`` … of at most so much data each (``"4GB"``).
    durable
        False: do not wait for the disk.
    progress
        Called with the bytes written and their total.

    Returns
    -------
    ConversionReport
        What was written, and every tensor that is not stored as asked.

    Raises
    ------
    ValueRefusedError
        Something cannot be stored; nothing was written.
    OSError
        The disk refused; what was there is as it was.
    """
    asked = None if dtype is None else parse_dtype(dtype, "gguf")
    keys = with_alignment(typed_keys(metadata, architecture), alignment)
    planned, skeleton, notes = plan_tree(params, asked, tensor_types)
    keys = keys._replace(notes=[*keys.notes, *notes])
    keys = file_keys(keys, asked, [(p.choice.encoding, p.numel) for p in planned])
    keys = with_extras(keys, planned, skeleton)
    plan = plan_gguf(os.fsdecode(path), planned, keys, parse_size(shard))
    report = report_of(os.fsdecode(path), planned, plan, keys)
    report.findings += write_gguf(plan, planned, durable=durable, progress=progress)
    return report


def plan_tree(params: Any, asked: Encoding | None, rules: Rules | None) -> tuple[list[Planned], Any, list[Finding]]:
    """The tensors of a tree with their encodings, its skeleton where the names do not rebuild it, and what is tied."""
    if isinstance(params, ModelFile):
        params = params.tree()
    flat = flatten(params, identity)
    by_rule = assign(list(flat.leaves), parse_rules(rules, "gguf"))
    planned = []
    for name, leaf in flat.leaves.items():
        source, unit, nbytes = to_input(name, leaf, flat.paths[name])
        want = by_rule.get(name, asked)
        choice = choose(name, source.encoding, source.shape, "gguf", want, name in by_rule)
        planned.append(Planned(source, choice, unit, nbytes))
    names = [p.source.name for p in planned]
    notes = []
    more = _places(flat.skeleton) - len(names)
    if more:
        text = f"{more} tied tensors are stored once, under the first of their names; {gguf_extras.TREE} has the others"
        notes.append(Finding("note", "tied", text))
    return planned, flat.skeleton if needs_skeleton(flat.skeleton, names) else None, notes


def _places(node: Any) -> int:
    """How many leaves of a skeleton are tensors."""
    if isinstance(node, str):
        return 1
    if isinstance(node, list):
        return sum(map(_places, node))
    ((tag, value),) = node.items()
    if tag == "$record":
        return sum(_places(child) for _, child in value)
    return sum(map(_places, value)) if tag == "$tuple" else 0


def to_input(name: str, leaf: Any, where: str) -> tuple[Input, Unit | None, int]:
    """A leaf of a tree as values in pieces, its unit, and its bytes."""
    if isinstance(leaf, Tensor):
        return input_of(leaf, name), leaf.unit, leaf.nbytes
    unit = None
    if is_quantity(leaf):
        unit, leaf = unit_of(leaf, where), leaf.magnitude
    if isinstance(leaf, QTensor):
        return ScaledInput(leaf.tensor(name), name), leaf.unit if unit is None else unit, leaf.nbytes
    array = to_array(leaf, where, scalar=unit is not None)
    return ArrayInput(name, array), unit, array.nbytes


def with_extras(keys: Keys, planned: Sequence[Planned], skeleton: Any) -> Keys:
    """The keys with units and tree."""
    from ..formats.apsim_write import compact

    out = [(k, v) for k, v in keys.keys if not k.startswith(gguf_extras.UNITS) and k != gguf_extras.TREE]
    for p in planned:
        if p.unit is not None:
            out.append((gguf_extras.UNITS + p.source.name, Value("STRING", gguf_extras.unit_text(p.unit))))
    if skeleton is not None:
        out.append((gguf_extras.TREE, Value("STRING", compact(skeleton))))
    return keys._replace(keys=out)


class GgufPlan(NamedTuple):
    """The files that are to be written."""

    paths: list[str]
    parts: list[tuple[list[int], Layout]]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(layout.size for _, layout in self.parts)


def plan_gguf(path: str, planned: Sequence[Planned], keys: Keys, limit: int | None) -> GgufPlan:
    """Layouts from headers alone."""
    parts = gguf_write.layouts(keys.keys, [p.spec for p in planned], limit, keys.alignment)
    return GgufPlan(gguf_write.part_names(path, len(parts)), parts)


def write_gguf(
    plan: GgufPlan,
    planned: Sequence[Planned],
    *,
    durable: bool = True,
    progress: Progress | None = None,
    threads: int | None = None,
    executor: Executor | None = None,
    stale: Sequence[str] = (),
) -> list[Finding]:
    """Write planned tensors; `stale` files are removed when the new ones are complete."""
    total, shared = plan.size, Shared()
    with Pipeline(threads, executor, shared) as pipeline, Files(durable) as files:
        blobs = [blob_of(p, pipeline, shared) for p in planned]
        pipeline.order([b.name for b in blobs])
        done = 0
        for name, (which, layout) in zip(plan.paths, plan.parts, strict=True):
            out = files.create(name)
            position = out.write_at(0, [layout.header])
            for i, offset in zip(which, layout.offsets, strict=True):
                position = out.write_at(position, [bytes(offset - position)])
                for piece in blobs[i].pieces():
                    position = out.write_at(position, [piece])
                    shared.give_back(piece)
                    if progress is not None:
                        progress(done + position, total)
            out.write_at(position, [bytes(layout.size - position)])
            done += layout.size
            if progress is not None:
                progress(done, total)
        files.commit()
    remove(stale)
    return shared.findings()


def blob_of(p: Planned, pipeline: Pipeline, shared: Shared) -> Blob:
    """The bytes of a planned tensor in a plain or block encoding."""
    cuts, make = maker(p.source, p.choice.encoding, shared)
    spec, job = p.spec, None
    if pipeline.executor is not None and not is_copy(p.source, p.choice.encoding):
        job = job_of(p.tensor, p.source.name, spec.encoding.name)
    return pipeline.blob(spec.name, spec.encoding.name, spec.shape, spec.nbytes, cuts, make, job)


def report_of(path: str, planned: Sequence[Planned], plan: GgufPlan, keys: Keys) -> ConversionReport:
    """The report of a GGUF that is to be written."""
    tensors = [change_of(p) for p in planned]
    findings = [*keys.notes, *gguf_write.findings(keys.keys, [p.spec for p in planned])]
    return ConversionReport("", path, "gguf", plan.paths, 0, plan.size, tensors, [], findings)


def change_of(p: Planned, nbytes: int | None = None) -> TensorChange:
    """The report's row of a planned tensor."""
    s, c = p.source, p.choice
    stored = p.spec.nbytes if nbytes is None else nbytes
    return TensorChange(
        s.name, s.name, s.shape, s.encoding.name, c.encoding.name, c.action, c.reason, p.nbytes_before, stored
    )


def load_gguf(
    path: str | os.PathLike[str], decode: bool = True, *, storage_options: Mapping[str, Any] | None = None
) -> record:
    """Load a GGUF file.

    Parameters
    ----------
    path
        A file, any part of a split one, a folder, or a URL: then every tensor is fetched when it is read.
    decode
        True: leaves are arrays: read-only views of the mapped file for F16, F32, F64 and integers; block formats and
        BF16 become float32 when they are read from the record for the first time. False: leaves are `Tensor` objects,
        as the file has them.
    storage_options
        Of a URL, as in `open`.

    Returns
    -------
    record
        ``params``: the tree that the names give (``blk.0.attn_q.weight`` is ``params.blk[0].attn_q.weight``), and
        ``metadata``: a record of Python values under the file's own keys; ``metadata.llama_context_length`` finds
        ``llama.context_length`` too. NumPy scalars and arrays stand where a Python value would not be saved as it was.

    Raises
    ------
    OSError, ModelFileError
        As `open`.
    """
    from ..tree import record

    model = open_model(path, storage_options=storage_options)
    if model.format != "gguf":
        model.close()
        raise UnknownFormatError(model.path, f"is {model.format}, GGUF was expected", hint="use open")
    params = lazy_tree(model) if decode else model.tree()
    return record(params=params, metadata=metadata_of(model))


def metadata_of(model: ModelFile) -> MetadataRecord:
    """The metadata of an opened GGUF as `typed_keys` takes it back; units and tree are in the parameters."""
    types = getattr(model.metadata, "types", {})
    out = MetadataRecord()
    for key, value in model.metadata.items():
        if not key.startswith((gguf_extras.UNITS, "split.")) and key != gguf_extras.TREE:
            out[key] = python(value, types[key], known_type(key))
    return out
