"""`convert`: a model file into another container or other encodings, streamed, with a report of every change.

Contract: a dry run reads headers only, and its sizes are those of the files to the byte. Memory stays bounded whatever
the size of the model. Nothing appears under the target's name before all of it is there; nothing is overwritten unless
asked; a file of the source is replaced only as a whole, and never a shard of it. What is lost, expanded, re-encoded or
dropped is in the report. `tests/test_convert.py` enforces this.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import __version__
from ..errors import ModelFileError, ValueRefusedError, quote
from ..formats.apsim_write import Extras, compact, logical_order, split, tree_text
from ..formats.gguf_write import ALIGNMENT
from ..model import Finding, ModelFile
from ..tree import from_names
from ..tree_write import mark, needs_skeleton
from . import carry, convert_files
from .changes import ConversionReport, KeyChange
from .gguf import Planned, change_of, overflow_findings, plan_gguf, report_of, with_extras, write_gguf
from .gguf_keys_of import ALIGN, Keys, file_keys, with_alignment
from .inputs import input_of
from .open import open as open_model
from .pipeline import Pipeline
from .recode import Overflows
from .save import parse_size
from .targets import assign, choose, container_of, parse_dtype, parse_rules

if TYPE_CHECKING:
    from ..encodings import Encoding
    from ..integrity.signing import Signer
    from .gguf import Progress, Rules

    KeyLike = bool | bytes | str


_OF_GGUF = ("no-architecture", "long-name", "rank")  # findings about a GGUF file that need not hold for the target


class Options(NamedTuple):
    """What a conversion was asked for."""

    path: str
    container: str
    asked: Encoding | None
    rules: Rules | None
    limit: int | None
    block: int | None
    architecture: str | None
    alignment: int | None
    by: Signer | None
    durable: bool
    threads: int | None


def convert(
    src: str | os.PathLike[str] | ModelFile,
    dst: str | os.PathLike[str],
    dtype: str | None = None,
    shard: str | int | None = None,
    key: KeyLike | None = None,
    sign: KeyLike | None = None,
    *,
    source_key: KeyLike | None = None,
    tensor_types: Rules | None = None,
    block: int | None = None,
    architecture: str | None = None,
    alignment: int | None = None,
    force: bool = False,
    dry_run: bool = False,
    durable: bool = True,
    threads: int | None = None,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert a model file.

    Parameters
    ----------
    src
        Anything `open` takes: a file, an index, any part of a split GGUF, a folder; or an opened model.
    dst
        The ending says the container: ``.gguf``, ``.safetensors``, ``.apsim``.
    dtype
        Encoding of the float tensors: ``"f16"``, ``"bf16"``, ``"q8_0"``, ``"q4_k"``, …; in .apsim also ``"int8"``,
        ``"int4"``, ``"fp8"``, …. None: as they are where the target has their encoding, else exactly (Q8_0 and Q4_0 in
        .apsim) or as float32. Integers keep their type. What cannot be stored so is reported.
    shard
        Split into files of at most so much data (``"4GB"``); None: one file.
    key
        Signs an .apsim target, and verifies the source where that is a signed .apsim.
    sign, source_key
        Other keys for the one and the other; with `source_key` an unsigned source is refused.
    tensor_types
        Exceptions to `dtype`: ``["blk.*.attn_v.weight=q6_k"]`` or a dict; the last one that matches counts.
    block
        For .apsim formats: elements of a block along the last axis; None: one scale a row.
    architecture, alignment
        For GGUF, as in `save_gguf`.
    force
        Replace what stands under the target's names.
    dry_run
        Only say what would be done.
    durable
        False: do not wait for the disk.
    threads
        How many; by default one a core. The bytes are the same for any number.
    progress
        Called with the bytes written and their total.

    Returns
    -------
    ConversionReport
        Every tensor and key that is not simply kept, and the sizes before and after.

    Raises
    ------
    ValueRefusedError
        The target cannot hold something, or an argument means nothing; nothing was written.
    FileExistsError
        The target is there, and `force` was not given.
    OSError, ModelFileError
        The source cannot be read, or the disk refused; what was there is as it was.
    """
    container = container_of(os.fsdecode(dst))
    options = Options(
        os.fsdecode(dst),
        container,
        None if dtype is None else parse_dtype(dtype, container),
        tensor_types,
        parse_size(shard),
        block,
        architecture,
        alignment,
        _signer(container, sign if sign is not None else key),
        durable,
        threads,
    )
    if isinstance(src, ModelFile):
        if key is not None or source_key is not None:
            raise ValueRefusedError("a key for the source needs its path, not an opened model")
        return _convert(src, options, force, dry_run, progress)
    used = _verify(os.fsdecode(src), key, source_key)
    if key is not None and not used and options.by is None:
        raise ValueRefusedError("there is nothing to sign or verify with the key: neither source nor target is .apsim")
    with open_model(src) as model:
        return _convert(model, options, force, dry_run, progress)


def _signer(container: str, key: KeyLike | None) -> Signer | None:
    from ..integrity.signing import Key, signer

    if key is None or key is False or container != "apsim":
        return None
    return signer(Key(key, create=True))


def _verify(path: str, key: KeyLike | None, source_key: KeyLike | None) -> bool:
    """Check digests of an .apsim source, and its signature where it has one; True where a key was used."""
    from .load import find
    from .verify import verify

    name = find(path)
    with open_model(name) as model:
        if model.format != "apsim":
            if source_key is not None:
                raise ValueRefusedError(f"{quote(path)} is {model.format}, which carries no signature to check")
            return False
        signed = model.facts.get("signature", "none") != "none"
    chosen = source_key if source_key is not None else key if signed else None
    verify(name, key=chosen).raise_if_failed()
    return chosen is not None


def _convert(
    model: ModelFile, o: Options, force: bool, dry_run: bool, progress: Progress | None
) -> ConversionReport:
    incomplete = next((f for f in model.findings if f.code == "incomplete"), None)
    if incomplete is not None:
        raise ModelFileError(model.path, incomplete.message, hint="all parts are needed to convert it")
    said = carry.carried(model)
    names = _names(model, said.skeleton)
    by_rule = assign(names, parse_rules(o.rules, o.container))
    planned = [_plan_tensor(model, name, by_rule.get(name, o.asked), name in by_rule, o, said) for name in names]
    if o.container == "gguf":
        return _to_gguf(model, planned, said, o, force, dry_run, progress)
    return _to_family(model, planned, said, o, force, dry_run, progress)


def _names(model: ModelFile, skeleton: Any) -> list[str]:
    """The tensors in the order of the tree where there is one, else as stored."""
    names = list(model.columns.names)
    if skeleton is None:
        return names
    ordered: dict[str, None] = {}
    stack = [skeleton]
    while stack:
        node = stack.pop()
        if isinstance(node, str):
            ordered[node] = None
        elif isinstance(node, list):
            stack += reversed(node)
        elif "$record" in node:
            stack += [child for _, child in reversed(node["$record"])]
        elif "$tuple" in node:
            stack += reversed(node["$tuple"])
    return list(ordered) if len(ordered) == len(names) else names


def _plan_tensor(
    model: ModelFile, name: str, asked: Encoding | None, ruled: bool, o: Options, said: carry.Carried
) -> Planned:
    tensor = model[name]
    if o.container != "gguf" and (name == "__metadata__" or (o.container == "apsim" and name.endswith("__qscale"))):
        raise ValueRefusedError(f"tensor {quote(name)}: {o.container} uses that name itself")
    choice = choose(name, tensor.info.encoding, tensor.shape, o.container, asked, ruled)
    return Planned(input_of(tensor), choice, said.units.get(name), tensor.nbytes)


def _to_gguf(
    model: ModelFile,
    planned: list[Planned],
    said: carry.Carried,
    o: Options,
    force: bool,
    dry_run: bool,
    progress: Progress | None,
) -> ConversionReport:
    typed, changes = carry.to_gguf(said, o.architecture)
    stated = dict(typed).get(ALIGN)
    keys = Keys(typed, ALIGNMENT if stated is None else stated.value, [])
    keys = with_alignment(keys, keys.alignment if o.alignment is None else o.alignment)
    changed = o.asked if any(p.choice.action != "kept" for p in planned) else None
    stored = [(p.choice.encoding, int(p.nbytes_before)) for p in planned]
    keys = file_keys(keys, changed, stored)
    needed = said.skeleton is not None and needs_skeleton(said.skeleton, [p.source.name for p in planned])
    keys = with_extras(keys, planned, said.skeleton if needed else None)
    plan = plan_gguf(o.path, planned, keys, o.limit)
    _check_target(model, plan.paths, _others(o.path, plan.paths, "gguf"), force)
    if dry_run:
        report = report_of(model.path, o.path, planned, plan, keys)
    else:
        report = write_gguf(
            o.path, planned, keys, o.limit, durable=o.durable, progress=progress, threads=o.threads,
            stale=_others(o.path, plan.paths, "gguf"),
        )  # fmt: skip
    return _finish(report, model, changes, dry_run)


def _to_family(
    model: ModelFile,
    planned: list[Planned],
    said: carry.Carried,
    o: Options,
    force: bool,
    dry_run: bool,
    progress: Progress | None,
) -> ConversionReport:
    overflows = Overflows()
    fields: dict[str, str] | None = None
    with Pipeline(o.threads) as pipeline:
        items = convert_files.items_of(planned, pipeline, overflows, o.container, o.block)
        shards = [items] if o.limit is None else split(items, o.limit)
        if o.container == "apsim":
            record, changes = carry.to_json(said)
            skeleton = said.skeleton if said.skeleton is not None else _skeleton(list(model.columns.names))
            text = None if record is None else compact(mark(record))
            extras = Extras(f"apsi_inspect/{__version__}", text, tree_text(skeleton, shards))
        else:
            order = [i.name for s in shards for i in logical_order(s)]
            needed = said.skeleton is not None and needs_skeleton(said.skeleton, order)
            fields, changes = carry.to_strings(said, said.skeleton if needed else None)
            extras = Extras("")
        plan = convert_files.plan(o.path, o.container, items, o.limit, extras, fields, o.by)
        others = _others(o.path, plan.files, o.container)
        _check_target(model, plan.files, others, force)
        if not dry_run:
            step = _counter(progress, sum(i.nbytes for i in items))
            convert_files.write(plan, extras, fields, o.by, pipeline, o.durable, step, others)
    sizes = {i.name: i.nbytes for i in items}
    tensors = [change_of(p, sizes[p.source.name]) for p in planned]
    findings = overflow_findings(overflows)
    report = ConversionReport(model.path, o.path, o.container, plan.files, 0, plan.size, tensors, [], findings)
    return _finish(report, model, changes, dry_run)


def _counter(progress: Progress | None, total: int) -> Callable[[int], None]:
    done = 0

    def step(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    return step


def _skeleton(names: list[str]) -> Any:
    """The tree that a reader makes of these names in this order."""

    def walk(node: Any) -> Any:
        if isinstance(node, list):
            return [walk(child) for child in node]
        if isinstance(node, dict):
            return {"$record": [[k, walk(child)] for k, child in node.items()]}
        return node

    tree = from_names(names, str)
    return {"$record": [[n, n] for n in names]} if tree is None else walk(tree)


def _finish(report: ConversionReport, model: ModelFile, changes: list[KeyChange], dry_run: bool) -> ConversionReport:
    kept = [f for f in model.findings if f.severity == "warning" and f.code not in _OF_GGUF]
    report.source, report.size_before, report.keys, report.dry_run = model.path, model.file_size, changes, dry_run
    report.findings = [*report.findings, *(Finding(f.severity, f.code, f"source: {f.message}") for f in kept)]
    return report


def _others(path: str, files: Sequence[str], container: str) -> list[str]:
    """Files of another form of the same target (one file, or parts of another number): stale beside it."""
    ending = "." + container
    stem = path[: -len(ending)] if path.lower().endswith(ending) else path
    folder, name = os.path.split(stem)
    pattern = re.compile(re.escape(name) + r"(-[0-9]{5}-of-[0-9]{5})?" + re.escape(ending) + r"(\.index\.json)?")
    try:
        entries = os.listdir(folder or ".")
    except FileNotFoundError:
        raise FileNotFoundError(2, "no such folder", folder) from None
    there = [os.path.join(folder, e) for e in entries if pattern.fullmatch(e)]
    return sorted(f for f in there if f not in files and os.path.abspath(f) not in map(os.path.abspath, files))


def _check_target(model: ModelFile, files: Sequence[str], others: Sequence[str], force: bool) -> None:
    """Refuse to replace what the user has not said, and any shard of the source."""
    own = {os.path.realpath(f) for f in [model.path, *model.files]}
    sharded = len(model.files) > 1 or os.path.realpath(model.path) not in map(os.path.realpath, model.files)
    for path in [*files, *others]:
        real = os.path.realpath(path)
        same = real in own or any(os.path.exists(f) and os.path.exists(real) and os.path.samefile(f, real) for f in own)
        if same and (sharded or path in others):
            raise ValueRefusedError(f"{quote(path)} is a part of the source: choose another name for the target")
        if not force and os.path.lexists(path):
            raise FileExistsError(17, "is already there (force=True, --force to replace it)", path)
