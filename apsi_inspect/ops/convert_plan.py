"""A conversion that is planned from headers alone, and can then be written.

Contract: `Conversion.report` says what `write` will do, sizes to the byte; making it reads no value and writes nothing.
`tests/test_convert.py` enforces this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import __version__
from ..errors import ModelFileError, ValueRefusedError, quote
from ..formats.apsim_write import Extras, compact, logical_order, split, tree_text
from ..formats.gguf_write import ALIGNMENT
from ..model import Finding, ModelFile
from ..tree import from_names
from ..tree_write import needs_skeleton
from . import carry, convert_files, exclude
from .changes import ConversionReport, KeyChange
from .gguf import Planned, change_of, plan_gguf, report_of, with_extras, write_gguf
from .gguf_keys_of import ALIGN, Keys, file_keys, with_alignment
from .inputs import input_of
from .pipeline import Pipeline
from .replace import check_target, others_of
from .shared import Shared
from .targets import assign, choose, parse_rules

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Executor

    from ..encodings import Encoding
    from ..integrity.signing import Signer
    from .gguf import Progress, Rules
    from .plan_report import Plan

_OF_GGUF = ("no-architecture", "long-name", "rank")  # findings about a GGUF file that need not hold for the target
_NOTHING: dict[str, Any] = {"$record": []}  # the tree of a model without tensors, which any reader makes


class Options(NamedTuple):
    """What a conversion was asked for."""

    path: str
    container: str
    asked: Encoding | None
    rules: Rules | None
    limit: int | None
    block: int | str | None
    architecture: str | None
    alignment: int | None
    by: Signer | None
    durable: bool
    threads: int | None
    force: bool
    plan: Plan | None = None
    executor: Executor | None = None
    exclude: str | Sequence[str] | None = None


class Conversion(NamedTuple):
    """A planned conversion.

    Attributes
    ----------
    report
        What will be written (as of a dry run).
    run
        Writes it; takes the progress function, returns findings that only the values could give.
    """

    report: ConversionReport
    run: Callable[[Progress | None], list[Finding]]

    def write(self, progress: Progress | None = None) -> ConversionReport:
        """Write, and give the final report."""
        findings = self.run(progress)
        r = self.report
        findings = [*r.findings, *findings]
        return ConversionReport(
            r.source, r.target, r.format, r.files, r.size_before, r.size_after, r.tensors, r.keys, findings
        )


def plan(model: ModelFile, o: Options) -> Conversion:
    """Plan the conversion of an opened model."""
    incomplete = next((f for f in model.findings if f.code == "incomplete"), None)
    if incomplete is not None:
        raise ModelFileError(model.path, incomplete.message, hint="all parts are needed to convert it")
    said = carry.carried(model)
    aside = {name for affine in model.affine.values() for name in affine.companions}
    names = [name for name in _names(model, said.skeleton) if name not in aside]
    gone = set(exclude.excluded(names, o.exclude))
    left_out = exclude.said([n for n in names if n in gone])
    names = [n for n in names if n not in gone]
    said = said._replace(skeleton=exclude.pruned(said.skeleton, gone))
    by_rule = assign(names, parse_rules(o.rules, o.container))
    if o.plan is not None:
        by_rule = o.plan.encodings(model, o.container)
    planned: list[Planned] = []
    refused: list[str] = []
    for name in names:
        try:
            planned.append(_plan_tensor(model, name, by_rule.get(name, o.asked), name in by_rule, o, said))
        except ValueRefusedError as exc:
            refused.append(str(exc))
    exclude.refuse(refused, o.container)
    conversion = (_to_gguf if o.container == "gguf" else _to_family)(model, planned, said, o)
    conversion.report.findings[:0] = left_out
    return conversion


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
    source = input_of(tensor)
    if o.plan is not None and asked == choose(name, source.encoding, tensor.shape, o.container, None).encoding:
        asked, ruled = None, False  # as it is
    choice = choose(name, source.encoding, tensor.shape, o.container, asked, ruled)
    if tensor.affine is not None and choice.action == "kept":
        choice = choice._replace(action="expanded", reason="codes become the values they stand for")
    return Planned(source, choice, said.units.get(name), tensor.nbytes, tensor)


def _to_gguf(model: ModelFile, planned: list[Planned], said: carry.Carried, o: Options) -> Conversion:
    typed, changes = carry.to_gguf(said, o.architecture)
    stated = dict(typed).get(ALIGN)
    keys = Keys(typed, ALIGNMENT if stated is None else stated.value, [])
    keys = with_alignment(keys, keys.alignment if o.alignment is None else o.alignment)
    asked = o.asked if o.plan is None else _main(planned)
    changed = asked if any(p.choice.action != "kept" for p in planned) else None
    keys = file_keys(keys, changed, [(p.choice.encoding, p.numel) for p in planned])
    needed = said.skeleton not in (None, _NOTHING) and needs_skeleton(said.skeleton, [p.source.name for p in planned])
    keys = with_extras(keys, planned, said.skeleton if needed else None)
    files = plan_gguf(o.path, planned, keys, o.limit)
    stale = others_of(o.path, files.paths, "gguf")
    check_target(model, files.paths, stale, o.force)

    def run(progress: Progress | None) -> list[Finding]:
        return write_gguf(
            files, planned, durable=o.durable, progress=progress, threads=o.threads, executor=o.executor, stale=stale
        )

    return Conversion(_finish(report_of(o.path, planned, files, keys), model, changes), run)


def _main(planned: list[Planned]) -> Encoding | None:
    """The encoding that holds most of the elements of a plan."""
    sums: dict[Encoding, int] = {}
    for p in planned:
        sums[p.choice.encoding] = sums.get(p.choice.encoding, 0) + p.numel
    return max(sums, key=sums.__getitem__, default=None)


def _to_family(model: ModelFile, planned: list[Planned], said: carry.Carried, o: Options) -> Conversion:
    shared = Shared()
    pipeline = Pipeline(o.threads, o.executor, shared)
    items = convert_files.items_of(planned, pipeline, shared, o.container, o.block)
    shards = [items] if o.limit is None else split(items, o.limit)
    fields: dict[str, str] | None = None
    if o.container == "apsim":
        record, changes = carry.to_json(said)
        skeleton = said.skeleton if said.skeleton is not None else _skeleton([p.source.name for p in planned])
        text = None if record is None else compact(record)
        extras = Extras(f"apsi_inspect/{__version__}", text, tree_text(skeleton, shards))
    else:
        order = [i.name for s in shards for i in logical_order(s)]
        needed = said.skeleton not in (None, _NOTHING) and needs_skeleton(said.skeleton, order)
        fields, changes = carry.to_strings(said, said.skeleton if needed else None)
        extras = Extras("")
    files = convert_files.plan(o.path, o.container, items, o.limit, extras, fields, o.by)
    stale = others_of(o.path, files.files, o.container)
    check_target(model, files.files, stale, o.force)
    sizes = {i.name: i.nbytes for i in items}
    tensors = [change_of(p, sizes[p.source.name]) for p in planned]
    report = ConversionReport(model.path, o.path, o.container, files.files, 0, files.size, tensors, [], [])

    def run(progress: Progress | None) -> list[Finding]:
        with pipeline:
            step = _counter(progress, sum(sizes.values()))
            convert_files.write(files, extras, fields, o.by, pipeline, o.durable, step, stale)
        return shared.findings()

    return Conversion(_finish(report, model, changes), run)


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


def _finish(report: ConversionReport, model: ModelFile, changes: list[KeyChange]) -> ConversionReport:
    kept = [f for f in model.findings if f.severity == "warning" and f.code not in _OF_GGUF]
    findings = [*report.findings, *(Finding(f.severity, f.code, f"source: {f.message}") for f in kept)]
    r = report
    return ConversionReport(
        model.path, r.target, r.format, r.files, model.file_size, r.size_after, r.tensors, changes, findings, True
    )
