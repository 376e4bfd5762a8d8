"""`convert`: a model file into another container or other encodings, streamed, with a report of every change.

Contract: a dry run reads headers only, and its sizes are those of the files to the byte. Memory stays bounded whatever
the size of the model. Nothing appears under the target's name before all of it is there; nothing is overwritten unless
asked; a file of the source is replaced only as a whole, and never a shard of it. What is lost, expanded, re-encoded or
dropped is in the report. `tests/test_convert.py` enforces this.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import ValueRefusedError, quote
from ..model import ModelFile
from .convert_plan import Conversion, Options
from .convert_plan import plan as planned
from .open import open as open_model
from .save import parse_size
from .targets import container_of, parse_dtype

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ..integrity.signing import Signer
    from .changes import ConversionReport
    from .gguf import Progress, Rules
    from .plan_report import Plan

    KeyLike = bool | bytes | str


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
    plan: Plan | str | os.PathLike[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    block: int | str | None = None,
    architecture: str | None = None,
    alignment: int | None = None,
    force: bool = False,
    dry_run: bool = False,
    durable: bool = True,
    threads: int | None = None,
    executor: Executor | None = None,
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
    plan
        Instead of `dtype` and `tensor_types`: a Plan (or its file) with the encoding of each tensor. One for another
        model is refused.
    exclude
        Leave out the tensors whose name matches this glob, or one of these; the report names them. A pattern that
        matches none is refused.
    block
        For .apsim formats: elements of a block along the last axis, as in `quantize`: None is a row for 8 bits, else
        32; ``"axis"`` is a row.
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
    executor
        Read and encode on its workers (`docs/scale.md`): a `ProcessPoolExecutor`, ``Client(…).get_executor()`` of a
        dask cluster, … What is written, here and in order, is the same to the byte.
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
    conversion = prepared(
        src, dst, dtype, shard, key, sign, source_key=source_key, tensor_types=tensor_types, plan=plan, block=block,
        architecture=architecture, alignment=alignment, force=force, durable=durable, threads=threads,
        exclude=exclude, executor=executor,
    )  # fmt: skip
    with conversion as ready:
        return ready.report if dry_run else ready.write(progress)


@contextmanager
def prepared(
    src: str | os.PathLike[str] | ModelFile,
    dst: str | os.PathLike[str],
    dtype: str | None = None,
    shard: str | int | None = None,
    key: KeyLike | None = None,
    sign: KeyLike | None = None,
    *,
    source_key: KeyLike | None = None,
    tensor_types: Rules | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    block: int | str | None = None,
    architecture: str | None = None,
    alignment: int | None = None,
    force: bool = False,
    durable: bool = True,
    threads: int | None = None,
    executor: Executor | None = None,
) -> Iterator[Conversion]:
    """The planned conversion, with its source open; see `convert`."""
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
        force,
        _plan(plan, dtype, tensor_types, block),
        executor,
        exclude,
    )
    if isinstance(src, ModelFile):
        if key is not None or source_key is not None:
            raise ValueRefusedError("a key for the source needs its path, not an opened model")
        yield planned(src, options)
        return
    used = _verify(os.fsdecode(src), key, source_key, executor)
    if key is not None and not used and options.by is None:
        what = "the source is not signed, and the target is not .apsim"
        raise ValueRefusedError(f"the key has nothing to verify or sign: {what}")
    with open_model(src) as model:
        yield planned(model, options)


def _plan(
    given: Plan | str | os.PathLike[str] | None, dtype: str | None, rules: Rules | None, block: int | str | None
) -> Plan | None:
    if given is None:
        return None
    if dtype is not None or rules or block is not None:
        raise ValueRefusedError("a plan says the encoding of every tensor: leave out dtype, tensor_types and block")
    from .plan_report import plan_of

    return plan_of(given)


def _signer(container: str, key: KeyLike | None) -> Signer | None:
    from ..integrity.signing import Key, signer

    if key is None or key is False or container != "apsim":
        return None
    return signer(Key(key, create=True))


def _verify(path: str, key: KeyLike | None, source_key: KeyLike | None, executor: Executor | None) -> bool:
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
    verify(name, key=chosen, executor=executor).raise_if_failed()
    return chosen is not None
