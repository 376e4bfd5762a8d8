"""The files of a conversion into safetensors or .apsim: their plan with exact sizes, and writing them.

Contract: `plan` reads no value; the sizes it gives are those of the files that `write` makes. Files appear together,
when all are complete. (`ops.gguf` has the same for GGUF.) `tests/test_convert.py` compares plan and files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..atomic import Files, remove
from ..encodings import ENCODINGS
from ..encodings.scaled import CODE_DTYPE
from ..errors import ValueRefusedError
from ..formats import apsim_write, safetensors_write
from ..formats.apsim_write import Extras, Item, Written
from ..qtensor import packed_shape
from .convert_tasks import job_of
from .gguf import Planned, blob_of
from .inputs import ScaledInput, even_cuts
from .recode import ScaledMaker
from .shared import Shared

if TYPE_CHECKING:
    from ..encodings import Encoding
    from ..formats.safetensors_write import Blob
    from ..integrity.signing import Signer
    from .pipeline import Pipeline

INDEX = ".index.json"
_NO_DIGESTS = Written("0" * 64, "0" * 64)


class FilePlan(NamedTuple):
    """The files to be written: paths, what each holds, the index (None: a single file), the bytes of all."""

    container: str
    paths: list[str]
    shards: list[list[Item]]
    index_path: str | None
    size: int

    @property
    def files(self) -> list[str]:
        """All paths; the last one is what to open."""
        return [*self.paths, *([self.index_path] if self.index_path else [])]


def items_of(
    planned: Sequence[Planned], pipeline: Pipeline, shared: Shared, container: str, block: int | str | None
) -> list[Item]:
    """The tensors as a file of the safetensors family holds them; quantized ones as codes and scales."""
    out = []
    for p in planned:
        if p.choice.encoding.kind == "scaled":
            out.append(_scaled_item(p, pipeline, block))
        else:
            out.append(Item(blob_of(p, pipeline, shared), unit=p.unit if container == "apsim" else None))
    return out


def _scaled_item(p: Planned, pipeline: Pipeline, block: int | str | None) -> Item:
    fmt = p.choice.encoding.name
    name = p.source.name
    if isinstance(p.source, ScaledInput) and p.source.encoding.name == fmt:
        return _kept_item(p, p.source, pipeline)
    m = ScaledMaker(p.source, fmt, block)
    cuts = m.cuts()
    code: Encoding = ENCODINGS[m.code_dtype]
    nbytes = [_product(m.code_shape) * code.block_bytes, _product(m.scale_shape) * 4]
    tensor = None if pipeline.executor is None else p.tensor
    jobs = [job_of(tensor, name, fmt, part, block) for part in ("codes", "scales")]
    codes = pipeline.blob(name, m.code_dtype, m.code_shape, nbytes[0], cuts, m.codes, jobs[0])
    scales = pipeline.blob(f"{name}__qscale", "F32", m.scale_shape, nbytes[1], cuts, m.scales, jobs[1])
    return Item(codes, scales, m.entry, p.unit)


def _kept_item(p: Planned, source: ScaledInput, pipeline: Pipeline) -> Item:
    """Codes and scales as the source has them, in pieces."""
    tensor, q, name = source.tensor, source.qparams, source.name
    nbytes = tensor.nbytes - q.scale_nbytes

    def piece(start: int) -> Callable[[int, int], bytes]:
        return lambda a, b: tensor.source.read_at(start + a, b - a)

    dtype, shape = CODE_DTYPE[tensor.encoding], packed_shape(tensor.shape, q.packing)
    codes = pipeline.blob(name, dtype, shape, nbytes, even_cuts(nbytes, 1), piece(tensor.offset))
    entry = {
        "format": tensor.encoding,
        "shape": list(tensor.shape),
        "axis": q.axis,
        "packing": q.packing,
        "scale_shape": None if q.scale_shape is None else list(q.scale_shape),
        "block": q.block,
    }
    if q.scale_shape is None:
        return Item(codes, None, entry, p.unit)
    cuts = even_cuts(q.scale_nbytes, 1)
    scales = pipeline.blob(f"{name}__qscale", "F32", q.scale_shape, q.scale_nbytes, cuts, piece(q.scale_offset))
    return Item(codes, scales, entry, p.unit)


def _product(shape: Sequence[int]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


def plan(
    path: str,
    container: str,
    items: list[Item],
    limit: int | None,
    extras: Extras,
    fields: dict[str, str] | None,
    by: Signer | None,
) -> FilePlan:
    """Names, shards and exact sizes."""
    shards = [items] if limit is None else apsim_write.split(items, limit)
    ending = "." + container
    stem = path[: -len(ending)] if path.lower().endswith(ending) else path
    if len(shards) == 1:
        size = apsim_write.planned_size(items, extras, by) if container == "apsim" else _plain_size(items, fields)
        return FilePlan(container, [path], shards, None, size)
    count = len(shards)
    if count > 99_999:
        raise ValueRefusedError(f"{count} shards; at most 99999 can be named: choose a larger size")
    paths = [f"{stem}-{i:05d}-of-{count:05d}{ending}" for i in range(1, count + 1)]
    out = FilePlan(container, paths, shards, stem + ending + INDEX, 0)
    if container == "apsim":
        size = sum(apsim_write.planned_size(s, _own(extras, i, count)) for i, s in enumerate(shards, 1))
        size += len(_apsim_index(out, [_NO_DIGESTS] * count, extras, by))
    else:
        size = sum(_plain_size(s, fields) for s in shards) + len(_plain_index(out))
    return out._replace(size=size)


def _own(extras: Extras, number: int, count: int) -> Extras:
    return Extras(extras.writer, shard=f"{number}/{count}")


def _blobs(items: Sequence[Item]) -> list[Blob]:
    return safetensors_write.layout([b for item in items for b in item.blobs])


def _plain_size(items: Sequence[Item], fields: dict[str, str] | None) -> int:
    head = safetensors_write.header(safetensors_write.table(_blobs(items)), fields)
    return len(head) + sum(i.nbytes for i in items)


def _apsim_index(p: FilePlan, written: list[Written], extras: Extras, by: Signer | None) -> bytes:
    return apsim_write.index_text([os.path.basename(f) for f in p.paths], p.shards, written, extras, by)


def _plain_index(p: FilePlan) -> bytes:
    """The index of Hugging Face's layout."""
    total = sum(i.nbytes for shard in p.shards for i in shard)
    weight_map = {b.name: os.path.basename(f) for f, s in zip(p.paths, p.shards, strict=True) for b in _blobs(s)}
    document = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(document, ensure_ascii=False, indent=2).encode("utf-8")


def write(
    p: FilePlan,
    extras: Extras,
    fields: dict[str, str] | None,
    by: Signer | None,
    pipeline: Pipeline,
    durable: bool,
    progress: Callable[[int], None] | None,
    stale: Sequence[str] = (),
) -> None:
    """Write the files of a plan; `stale` files are removed once all are complete."""
    pipeline.order([b.name for shard in p.shards for b in _blobs(shard) if b.name in pipeline])
    with Files(durable) as files:
        written = []
        for number, (path, items) in enumerate(zip(p.paths, p.shards, strict=True), 1):
            out = files.create(path)
            if p.container == "apsim":
                own = extras if p.index_path is None else _own(extras, number, len(p.paths))
                written.append(apsim_write.write(out, items, own, by if p.index_path is None else None, progress))
            else:
                safetensors_write.write(out, [i.values for i in items], fields, progress)
        last = None
        if p.index_path is not None:
            last = files.create(p.index_path)
            text = _apsim_index(p, written, extras, by) if p.container == "apsim" else _plain_index(p)
            last.write_at(0, [text])
        files.commit(last, remove_first=[p.index_path] if p.index_path else [])
    remove(sorted(stale, key=lambda f: not f.endswith(INDEX)))  # an index first: no mix that loads
