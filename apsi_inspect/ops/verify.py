"""`verify`: are the bytes of a model what its digests say, and did the holder of a key sign them.

Contract: a wrong digest or signature is a status in the `Report`, a file that cannot be read at all is an exception; a
shard that is missing makes the whole incomplete. Digests show damage, only a signature checked with a key shows who
vouches. With an executor only the digests of chunks and files are taken elsewhere (`ops.verify_tasks`), and the report
is the same. `tests/test_verify.py` enforces the states.
"""

from __future__ import annotations

import os
from contextlib import closing
from typing import NamedTuple, Protocol

from ..errors import ApsiError, ModelFileError, TruncatedFileError, VerificationError
from ..formats import apsim, safetensors, sharded
from ..formats.apsim_write import index_sha256
from ..formats.base import open_beside
from ..integrity import check, signing
from ..listing import plural
from ..reports import ORDER, Part, Report
from .open import find_in_folder, open_source, source_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from concurrent.futures import Executor
    from typing import Any

    from ..integrity.check import Claims, Damage
    from ..model import ModelFile
    from ..source import ByteSource

    Progress = Callable[[int, int], None]


class Options(NamedTuple):
    """How to check."""

    key: signing.Key | None = None
    full: bool = False
    threads: int | None = None
    progress: Progress | None = None
    executor: Executor | None = None


class FileResult(NamedTuple):
    """One file, checked."""

    table: Part
    data: Part
    metadata: Part
    damage: list[Damage]

    @property
    def parts(self) -> list[Part]:
        """In order."""
        return [self.table, self.data, self.metadata]


def verify(
    path: str | os.PathLike[str],
    key: bool | bytes | str | None = None,
    full: bool = False,
    *,
    threads: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Report:
    """Check a model file: structure, tensor table, data, metadata, signature, every shard.

    Parameters
    ----------
    path
        A file, an index, a folder, or the URL of a file; its chunks are fetched by ranges.
    key
        Check the signature with it: True (the per-user key), bytes, or a secret.
    full
        Also take the digest of the whole data in one stream where chunks have been checked already.
    threads
        How many hash chunks; by default all cores, up to 8.
    executor
        Take the digests on its workers instead (`docs/scale.md`): a `ProcessPoolExecutor`, ``Client(…).get_executor()``
        of a dask cluster, … The report is the same.
    progress
        Called with the bytes checked and their total.
    storage_options
        Of a URL, as in `open`.

    Returns
    -------
    Report
        ``.status``, ``.ok``, ``.parts``, ``.damage``; `raise_if_failed`. A format without digests is ``"not-checked"``.

    Raises
    ------
    OSError
        The file is missing or unreadable.
    ModelFileError
        It is no model file, or its header is malformed.
    ValueRefusedError
        The key cannot be used (empty, too short, or there is no per-user key).
    """
    options = Options(None if key is None or key is False else signing.Key(key), full, threads, progress, executor)
    with closing(source_of(find(path), storage_options)) as source:
        try:
            model = None if _is_apsim_index(source) else open_source(source)
        except TruncatedFileError as exc:
            part = Part("structure", "incomplete", exc.reason if exc.where is None else f"{exc.where}: {exc.reason}")
            return Report(source.name, "unknown", "incomplete", (part,), with_key=options.key is not None)
        if model is None:
            return verify_index(source, options)
        with model:
            return verify_model(source, model, options)


def find(path: str | os.PathLike[str]) -> str:
    """The file itself; of a folder the model in it; the index of ``NAME.apsim`` where only that is there."""
    name = os.fsdecode(path)
    if os.path.isdir(name):
        return find_in_folder(name)
    index = name.removesuffix(".apsim") + ".apsim.index.json"
    return index if not os.path.exists(name) and os.path.exists(index) else name


def verify_opened(
    model: ModelFile,
    key: bool | bytes | str | None = None,
    full: bool = False,
    *,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Report:
    """`verify` over the files that an opened model holds; of a sharded one, the index is read again."""
    secret = None if key is None or key is False else signing.Key(key)
    options = Options(secret, full, progress=progress, executor=executor)
    if len(model.sources) == 1 and model.sources[0].name == model.path:
        return verify_model(model.sources[0], model, options)
    if model.format != "apsim":
        return _without_digests(model, options)
    with closing(open_beside(model.sources[0], os.path.basename(model.path))) as source:
        return verify_index(source, options, model)


def _is_apsim_index(source: ByteSource) -> bool:
    head = source.read_at(0, min(65_536, source.size))
    if not source.name.endswith(".json") and head[:1] != b"{":
        return False
    if not sharded.sniff(head, source.size) or head[8:9] == b"{":
        return False
    metadata = sharded.load_index(source).get("metadata")
    return isinstance(metadata, dict) and metadata.get("format") == "apsi-model"


def verify_model(source: ByteSource, model: ModelFile, options: Options) -> Report:
    """Check an opened model over the files that it holds open; `source` is what was opened (the index, of shards)."""
    if model.format != "apsim":
        return _without_digests(model, options)
    if len(model.sources) > 1 or source not in model.sources:
        return verify_index(source, options, model)
    claims = check.read_claims(source)
    step = _stepper(options, _work(claims, options))
    result = _judge(source, claims, options, digests_of([(source, claims)], options, step))
    signature = signature_part(options.key, claims.signature, [claims.signed], None)
    structure = Part("structure", "intact", f"{plural(len(model), 'tensor')}, {model.file_size} bytes")
    parts = (structure, *result.parts, signature)
    return _report(model.path, parts, result.damage, model.findings, claims.signature, options)


def _without_digests(model: ModelFile, options: Options) -> Report:
    if model.format == "safetensors" and {"apsi", "sha256"} <= model.metadata.keys():
        reason = "has the digests of an .apsim file, but not its mark (format: apsi-model): it was changed"
        part = Part("structure", "damaged", reason)
        return Report(model.path, "safetensors", "damaged", (part,), (), model.findings, None, options.key is not None)
    structure = Part("structure", "intact", f"{plural(len(model), 'tensor')}, {model.file_size} bytes")
    reason = f"{model.format} files carry no digests; save as .apsim to have them"
    status = "unsigned" if options.key is not None else "not-checked"
    parts = (structure, Part("data", "not-checked", reason), Part("signature", status, reason))
    return Report(model.path, model.format, "not-checked", parts, (), model.findings, None, options.key is not None)


def _work(claims: Claims, options: Options) -> int:
    return claims.size * (2 if claims.chunks is not None and options.full else 1)


def _stepper(options: Options, total: int) -> Callable[[int], None]:
    done = 0

    def step(count: int) -> None:
        nonlocal done
        done += count
        if options.progress is not None:
            options.progress(done, total)

    return step


class Digests(Protocol):
    """What judges the digests of files, one after the other."""

    def bad_chunks(self, source: ByteSource, claims: Claims) -> list[int]:
        """The chunks that do not have their digest."""

    def stream_holds(self, source: ByteSource, claims: Claims) -> bool:
        """Whether the digest of table and data in one stream fits."""


class _Here(NamedTuple):
    """Digests taken in this process."""

    options: Options
    step: Callable[[int], None]

    def bad_chunks(self, source: ByteSource, claims: Claims) -> list[int]:
        return check.bad_chunks(source, claims, self.options.threads, self.step)

    def stream_holds(self, source: ByteSource, claims: Claims) -> bool:
        return check.stream_holds(source, claims, self.step)


def digests_of(files: list[tuple[ByteSource, Claims]], options: Options, step: Callable[[int], None]) -> Digests:
    """The digests of files that will be judged in this order."""
    if options.executor is None:
        return _Here(options, step)
    from .verify_tasks import Elsewhere

    return Elsewhere(files, options.full, options.executor, step)


def check_file(source: ByteSource, claims: Claims, options: Options, step: Callable[[int], None]) -> FileResult:
    """Check the digests of one file."""
    return _judge(source, claims, options, digests_of([(source, claims)], options, step))


def _judge(source: ByteSource, claims: Claims, options: Options, digests: Digests) -> FileResult:
    metadata = metadata_part(claims)
    if claims.chunks is None:
        return FileResult(*_by_stream(claims, digests.stream_holds(source, claims)), metadata, [])
    table = table_part(claims)
    bad = digests.bad_chunks(source, claims)
    damage = check.damage_of(source, claims, bad)
    data = Part("data", "intact", f"{claims.size} bytes in {plural(len(claims.chunks), 'chunk')}")
    if bad:
        names = list(dict.fromkeys(n for d in damage for n in d.tensors))
        data = Part("data", "damaged", f"{len(bad)} of {len(claims.chunks)} chunks differ: {check.name_some(names)}")
    elif options.full and not digests.stream_holds(source, claims):
        data = Part("data", "damaged", "the chunks fit, but the digest of the whole (sha256) differs")
    return FileResult(table, data, metadata, damage)


def metadata_part(claims: Claims) -> Part:
    """Status of everything in the metadata."""
    fits = check.metadata_holds(claims)
    if fits is None:
        return Part("metadata", "not-checked", "no digest covers the metadata (base profile)")
    if fits:
        return Part("metadata", "intact", "as meta_sha256 says")
    reason = "units, quantization, tree or the user's metadata were changed (meta_sha256 differs)"
    return Part("metadata", "damaged", reason)


def table_part(claims: Claims) -> Part:
    """Status of the tensor table of a file with chunks."""
    fits = check.table_holds(claims)
    if fits is None:
        return Part("table", "not-checked", "shares one digest with the data")
    if fits:
        return Part("table", "intact", plural(len(claims.spans), "tensor"))
    return Part("table", "damaged", "the tensor table or the list of chunk digests was changed (root differs)")


def _by_stream(claims: Claims, holds: bool) -> tuple[Part, Part]:
    if holds:
        table = Part("table", "intact", plural(len(claims.spans), "tensor"))
        return table, Part("data", "intact", f"{claims.size} bytes")
    return (
        Part("table", "not-checked", "shares one digest with the data, which differs"),
        Part("data", "damaged", "the data or the tensor table was changed (sha256 differs)"),
    )


def signature_part(
    key: signing.Key | None, signature: dict[str, Any] | None, shards: list[tuple[str, str]], index: str | None
) -> Part:
    """Status of the signature."""
    if signature is None:
        return Part("signature", "unsigned", "is not signed" + (", although a key was given to check" if key else ""))
    if key is None:
        return Part("signature", "not-checked", f"signed with key {signature['key_id']}; give the key to check it")
    status = signing.check(key, signature, shards, index)
    message = {
        "authentic": f"signed with this key ({signature['key_id']})",
        "other-key": f"is signed with another key ({signature['key_id']})",
        "damaged": "was changed after it was signed: the key is right, the signature does not fit",
    }[status]
    return Part("signature", status, message)


def _report(
    path: str,
    parts: tuple[Part, ...],
    damage: list[Damage],
    findings: tuple[Any, ...],
    signature: dict[str, Any] | None,
    options: Options,
) -> Report:
    words = {p.status for p in parts if p.name != "signature"}
    last = next((p.status for p in parts if p.name == "signature"), "not-checked")
    words |= {last} if options.key is not None or last == "damaged" else set()
    words -= {"not-checked"} if words - {"not-checked"} else set()
    status = "authentic" if last == "authentic" and words <= {"intact", "authentic"} else min(words, key=ORDER.index)
    key_id = None if signature is None else str(signature["key_id"])
    return Report(path, "apsim", status, parts, tuple(damage), findings, key_id, options.key is not None)


def verify_index(source: ByteSource, options: Options, model: ModelFile | None = None) -> Report:
    """Check a sharded checkpoint: the index, then shard after shard, also where some are missing or damaged."""
    metadata, rows, first = _index(source)
    parts = [first]
    signature = metadata.get("signature")
    sources = {os.path.basename(s.name): s for s in model.sources} if model is not None else {}
    step = _stepper(options, int(metadata["total_size"]) if type(metadata.get("total_size")) is int else 0)
    opened: Iterable[Part | _Shard] = (
        _open_shard(source, sources.get(file), file, row, f"{number}/{len(rows)}")
        for number, (file, row) in enumerate(rows.items(), 1)
    )
    if options.executor is not None:  # headers first, then the digests of all shards without a pause between them
        opened = list(opened)
    files = [(s.source, s.claims) for s in opened if isinstance(s, _Shard)] if options.executor is not None else []
    digests = digests_of(files, options, step)
    damage: list[Damage] = []
    for shard in opened:
        part, found = (shard, []) if isinstance(shard, Part) else _check_shard(shard, options, digests)
        parts.append(part)
        damage += found
    findings: tuple[Any, ...] = ()
    if all(p.status == "intact" for p in parts):
        parts.insert(0, _structure(source, model))
        findings = _findings(source, model)
    shards = [(row["sha256"], row["meta_sha256"]) for row in rows.values()]
    parts.append(signature_part(options.key, signature, shards, metadata["index_sha256"]))
    return _report(source.name, tuple(parts), damage, findings, signature, options)


def _index(source: ByteSource) -> tuple[dict[str, Any], dict[str, dict[str, Any]], Part]:
    """Metadata of an .apsim index, its shards, and the status of the index itself."""
    metadata = sharded.load_index(source)["metadata"]
    rows = sharded.listed_shards(metadata, source.name)
    if metadata.get("signature") is not None:
        apsim.check_signature(metadata["signature"], source.name)
    if index_sha256(metadata) == metadata["index_sha256"]:
        return metadata, rows, Part("index", "intact", f"{len(rows)} shards")
    return metadata, rows, Part("index", "damaged", "the index was changed (index_sha256 differs)")


def verify_index_only(source: ByteSource, key: signing.Key | None) -> None:
    """The index's own digest and signature; raises where they do not hold."""
    metadata, rows, part = _index(source)
    if part.status == "intact" and key is not None:
        shards = [(row["sha256"], row["meta_sha256"]) for row in rows.values()]
        part = signature_part(key, metadata.get("signature"), shards, metadata["index_sha256"])
    if part.status not in ("intact", "authentic"):
        raise VerificationError(source.name, f"{part.status}: {part.message}", status=part.status)


def _structure(source: ByteSource, model: ModelFile | None) -> Part:
    try:
        model = sharded.read(source) if model is None else model
    except ModelFileError as exc:
        return Part("structure", "damaged", f"{exc.where}: {exc.reason}" if exc.where else exc.reason)
    return Part("structure", "intact", f"{plural(len(model), 'tensor')}, {model.file_size} bytes")


def _findings(source: ByteSource, model: ModelFile | None) -> tuple[Any, ...]:
    try:
        return (sharded.read(source) if model is None else model).findings
    except ApsiError:
        return ()  # said by the structure already


class _Shard(NamedTuple):
    """A shard whose header is what the index means; `given`: its source belongs to an opened model."""

    name: str
    source: ByteSource
    claims: Claims
    given: bool


def _open_shard(
    index: ByteSource, source: ByteSource | None, file: str, row: dict[str, Any], place: str
) -> Part | _Shard:
    """One shard, if it is there and the one that the index means."""
    name = f"shard {file}"
    given = source
    try:
        source = sharded.open_shard(index, file) if given is None else given
        header = safetensors.parse_header(source)
        if not apsim.is_apsim(header):
            return Part(name, "damaged", "is not .apsim")
        apsim.read_header(source, header)
        claims = check.read_claims(source)
    except TruncatedFileError as exc:
        return Part(name, "incomplete", exc.reason)
    except (OSError, ModelFileError) as exc:
        reason = exc.reason if isinstance(exc, ModelFileError) else str(exc)
        return Part(name, "incomplete" if isinstance(exc, OSError) or "missing" in reason else "damaged", reason)
    if claims.meta.get("shard") != place:
        found = sharded.which_shard(claims.meta)
        return Part(name, "damaged", f"{found}, the index wants shard {place}: shards are mixed")
    if claims.signed != (row["sha256"], row["meta_sha256"]):
        reason = "its digests are not those of the index: shards of different checkpoints are mixed"
        return Part(name, "damaged", reason)
    return _Shard(name, source, claims, given is not None)


def _check_shard(shard: _Shard, options: Options, digests: Digests) -> tuple[Part, list[Damage]]:
    """The bytes of one shard."""
    result = _judge(shard.source, shard.claims, options, digests)
    if not shard.given:
        shard.source.close()
    worst = min(result.parts, key=lambda p: ORDER.index(p.status))
    if worst.status == "damaged":
        return Part(shard.name, "damaged", f"{worst.name}: {worst.message}"), result.damage
    return Part(shard.name, "intact", f"{plural(len(shard.claims.spans), 'tensor')}, {shard.claims.size} bytes"), []
