"""`save_model` and `save_safetensors`: a parameter tree to a checkpoint, checked whole before the first byte goes out.

Contract (`docs/apsim-format.md`): the old checkpoint stays until the new one is complete; the same input gives the same
bytes; nothing is written where anything is refused. Values stream from the arrays given, so peak memory does not grow
with the model. `tests/test_save_load.py` and `tests/test_atomic.py` enforce this.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..atomic import Files, remove
from ..errors import ValueRefusedError, quote
from ..formats import apsim_write, safetensors_write
from ..formats.apsim_write import Extras, Item, compact
from ..integrity.signing import Key, Signer, signer
from ..model import ModelFile
from ..tree_write import Flat, check_text, flatten, mark
from .leaves import identity, to_item

if TYPE_CHECKING:
    Progress = Callable[[int, int], None]

WRITER = f"apsi_inspect/{__version__}"
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKmMgGtT]?)(i?)[bB]?\s*")
_NUMBERED = re.compile(r"-[0-9]{5}-of-[0-9]{5}")


def save_model(
    path: str | os.PathLike[str],
    params: Any,
    metadata: Mapping[str, Any] | None = None,
    sign: bool | bytes | str | None = None,
    shard: str | int | None = "4GB",
    *,
    durable: bool = True,
    progress: Progress | None = None,
) -> str:
    """Save a parameter tree as an .apsim checkpoint, replacing what is there as one step.

    Parameters
    ----------
    path
        ``"model.apsim"``. A large checkpoint becomes ``model-00001-of-0000N.apsim`` … and ``model.apsim.index.json``.
    params
        Records (dicts), lists and tuples of arrays (NumPy, torch, jax), pint Quantities, QTensors, Tensors of an opened
        file, and None, bool, int, float, str. An opened model is saved as its tree.
    metadata
        JSON values under string keys.
    sign
        True: with the per-user key; bytes (at least 16) or a secret string: with that. None: unsigned.
    shard
        Largest size of one file (``"4GB"`` is 4 × 10^9, ``"4GiB"`` 4 × 2^30 bytes); None: never split.
    durable
        False: do not wait for the disk (the file still appears as a whole).
    progress
        Called with the bytes written and their total.

    Returns
    -------
    str
        What to load: the file, or the index.

    Raises
    ------
    ValueRefusedError
        Something cannot be stored as it is; nothing was written. The message names its place in the tree.
    OSError
        The disk refused; the old checkpoint is as it was.
    """
    by = None if sign is None or sign is False else signer(Key(sign, create=True))
    return _save(os.fsdecode(path), params, metadata, by, shard, durable, progress, WRITER)


def _save(
    path: str,
    params: Any,
    metadata: Mapping[str, Any] | None,
    by: Signer | None,
    shard: str | int | None,
    durable: bool,
    progress: Progress | None,
    writer: str,
) -> str:
    limit = parse_size(shard)
    flat, items = _items(params)
    if metadata is not None and not isinstance(metadata, Mapping):
        raise ValueRefusedError(f"metadata is {type(metadata).__name__}; a record was expected")
    extras = Extras(writer, None if metadata is None else compact(mark(metadata)))
    report = _counter(progress, sum(item.nbytes for item in items))
    shards = [items] if limit is None else apsim_write.split(items, limit)
    extras = extras._replace(tree=apsim_write.tree_text(flat.skeleton, shards))
    if len(shards) > 1:
        return _save_shards(path, shards, extras, by, durable, report)
    with Files(durable) as files:
        apsim_write.write(files.create(path), items, extras, by, report)
        files.commit()
    stem = stem_of(path)
    remove([stem + ".apsim.index.json"])  # the other form of this checkpoint goes, its index first
    remove(_numbered(stem, ".apsim"))
    return path


def _save_shards(
    path: str,
    shards: Sequence[Sequence[Item]],
    extras: Extras,
    by: Signer | None,
    durable: bool,
    report: Callable[[int], None],
) -> str:
    stem = stem_of(path)
    index = stem + ".apsim.index.json"
    count = len(shards)
    if count > 99_999:
        raise ValueRefusedError(f"{count} shards; 99999 are possible: raise shard=")
    paths = [f"{stem}-{i:05d}-of-{count:05d}.apsim" for i in range(1, count + 1)]
    with Files(durable) as files:
        written = []
        for i, (file, items) in enumerate(zip(paths, shards, strict=True), 1):
            own = Extras(extras.writer, shard=f"{i}/{count}")
            written.append(apsim_write.write(files.create(file), items, own, None, report))
        names = [os.path.basename(p) for p in paths]
        last = files.create(index)
        last.write_at(0, [apsim_write.index_text(names, shards, written, extras, by)])
        files.commit(last, remove_first=[index])
    remove([p for p in (path, stem + ".apsim") if os.path.basename(p) != os.path.basename(index)])
    remove(p for p in _numbered(stem, ".apsim") if os.path.basename(p) not in names)
    return index


def save_safetensors(
    path: str | os.PathLike[str],
    params: Any,
    metadata: Mapping[str, str] | None = None,
    shard: str | int | None = "5GB",
    *,
    durable: bool = True,
    progress: Progress | None = None,
) -> str:
    """Save arrays as plain safetensors, replacing what is there as one step.

    Parameters
    ----------
    path
        ``"model.safetensors"``; a large one becomes ``model-00001-of-0000N.safetensors`` … and an index.
    params
        Records, lists and tuples of arrays: a name is the path with dots. Tied arrays are written once; the other names
        are kept in the metadata (name -> name of the one written), where `load_safetensors` finds them. Units,
        quantized tensors and plain values are refused: those need .apsim.
    metadata
        Strings only.
    shard, durable, progress
        As in `save_model`.

    Returns
    -------
    str
        What to load: the file, or the index.
    """
    path, limit = os.fsdecode(path), parse_size(shard)
    fields = dict(metadata or {})
    for key, value in fields.items():
        if type(key) is not str or type(value) is not str:
            raise ValueRefusedError(f"metadata {key!r:.60} is {type(value).__name__}; safetensors keeps strings only")
        check_text(key + value, f"metadata {quote(key)}")
    flat, items = _items(params)
    for item in items:
        what = "is quantized" if item.entry is not None else "has a unit" if item.unit is not None else None
        if what is not None:
            raise ValueRefusedError(f"{flat.paths[item.name]}: {what}, which safetensors cannot hold; use save_model")
    fields |= _ties(flat.skeleton, fields)
    blobs = [item.values for item in items]
    report = _counter(progress, sum(b.nbytes for b in blobs))
    shards = [items] if limit is None else apsim_write.split(items, limit)
    if len(shards) > 1:
        return _save_safetensors_shards(path, shards, fields, durable, report)
    with Files(durable) as files:
        safetensors_write.write(files.create(path), blobs, fields or None if metadata is None else fields, report)
        files.commit()
    stem = path.removesuffix(".safetensors")
    remove([stem + ".safetensors.index.json"])
    remove(_numbered(stem, ".safetensors"))
    return path


def _save_safetensors_shards(
    path: str, shards: Sequence[Sequence[Item]], fields: dict[str, str], durable: bool, report: Callable[[int], None]
) -> str:
    import json

    stem, count = path.removesuffix(".safetensors"), len(shards)
    index = stem + ".safetensors.index.json"
    paths = [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    names = [os.path.basename(p) for p in paths]
    total = sum(item.nbytes for shard in shards for item in shard)
    weight_map = {
        b.name: name
        for name, shard in zip(names, shards, strict=True)
        for b in safetensors_write.layout([item.values for item in shard])
    }
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, ensure_ascii=False, indent=2)
    with Files(durable) as files:
        for file, shard in zip(paths, shards, strict=True):
            safetensors_write.write(files.create(file), [item.values for item in shard], fields or None, report)
        last = files.create(index)
        last.write_at(0, [text.encode("utf-8")])
        files.commit(last, remove_first=[index])
    remove([path])
    remove(p for p in _numbered(stem, ".safetensors") if os.path.basename(p) not in names)
    return index


def _items(params: Any) -> tuple[Flat, list[Item]]:
    if isinstance(params, ModelFile):
        params = params.tree()
    flat = flatten(params, identity)
    return flat, [to_item(name, leaf, flat.paths[name]) for name, leaf in flat.leaves.items()]


def _ties(skeleton: Any, fields: Mapping[str, str]) -> dict[str, str]:
    """Names of the places of tied arrays beyond the first -> the name it is stored under; refuses plain values."""
    out: dict[str, str] = {}

    def walk(node: Any, path: tuple[str, ...]) -> None:
        if isinstance(node, str):
            name = ".".join(path)
            if name != node:
                out[name] = node
        elif isinstance(node, list):
            for i, child in enumerate(node):
                walk(child, (*path, str(i)))
        else:
            ((tag, value),) = node.items()
            if tag == "$literal":
                raise ValueRefusedError(
                    f"{'.'.join(path)}: a plain value is no tensor; safetensors holds tensors only: use save_model"
                )
            for i, child in enumerate(value):
                walk(*((child[1], (*path, child[0])) if tag == "$record" else (child, (*path, str(i)))))

    walk(skeleton, ())
    taken = next((name for name in out if name in fields), None)
    if taken is not None:
        raise ValueRefusedError(f"metadata has a key {quote(taken)}, which is also the name of a tied tensor")
    return out


def parse_size(size: str | int | None) -> int | None:
    """Bytes of ``"4GB"`` (10^9), ``"512 MiB"`` (2^20) or a number; None stays None."""
    if size is None:
        return None
    nbytes: float = 0
    given: Any = size
    if isinstance(given, Integral) and given is not True and given is not False:
        nbytes = int(given)
    elif isinstance(size, str) and (found := _SIZE.fullmatch(size)):
        nbytes = float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2].lower() or " ")
    if nbytes >= 1 << 63:
        raise ValueRefusedError("a size of 2^63 bytes or more was given; a size is like '4GB' or '512MiB'")
    if nbytes < 1:
        raise ValueRefusedError(f"size {size!r:.40} is not like '4GB', '512MiB' or a number of bytes above 0")
    return int(nbytes)


def stem_of(path: str) -> str:
    """The checkpoint's name without its ending."""
    return path.removesuffix(".apsim")


def _numbered(stem: str, ending: str) -> list[str]:
    """Shards of this name that are there, of any number."""
    folder, name = os.path.split(stem)
    return [
        entry.path
        for entry in os.scandir(folder or ".")
        if entry.name.startswith(name)
        and entry.name.endswith(ending)
        and _NUMBERED.fullmatch(entry.name[len(name) : -len(ending)])
    ]


def _counter(progress: Progress | None, total: int) -> Callable[[int], None]:
    done = 0

    def step(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    return step
