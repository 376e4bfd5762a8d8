"""`open`: a path or a URL to a `ModelFile`, by content, header only.

The head of the file is read once and offered to every format's `sniff`; the name's ending is compared with the content
and never trusted. A folder opens its index, or its one model file.
"""

from __future__ import annotations

import os

from ..errors import ModelFileError, UnknownFormatError, ValueRefusedError, quote
from ..formats import sniffed
from ..formats.base import extension_finding
from ..model import Finding
from ..permit import check_read, is_url
from ..source import FileSource

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from ..model import ModelFile
    from ..source import ByteSource

_HEAD = 65_536
_MODEL_ENDINGS = (".safetensors", ".gguf", ".apsim")
_OTHER_ENDINGS = (".onnx", ".pt", ".pth", ".ckpt")  # only where a folder has none of the above
_NONE = "not a safetensors, GGUF, .apsim, PyTorch or ONNX file"
# What a file that is no model file often turns out to be, and what to say of it.
_STRANGERS = (
    (b"version https://git-lfs", "is a Git LFS pointer, not the model itself", "run: git lfs pull"),
    (b"<!DOCTYPE", "is an HTML page, probably a download that failed", "download it again"),
    (b"<html", "is an HTML page, probably a download that failed", "download it again"),
    (b"lmgg", "is an old ggml file from before GGUF", "convert it with the tools of its time"),
    (b"fmgg", "is an old ggml file from before GGUF", "convert it with the tools of its time"),
    (b"tjgg", "is an old ggml file from before GGUF", "convert it with the tools of its time"),
    (b"FUGG", "has the magic FUGG, GGUF was expected: its bytes are swapped", None),
    (b"\x89HDF", "is an HDF5 file (Keras?), which is not supported", None),
    (b"\x1f\x8b", "is compressed with gzip", "decompress it first"),
)


def open(
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    stream: bool = False,
) -> ModelFile:
    """Open a model file and read its header; no tensor is touched.

    Parameters
    ----------
    path
        A file, the index of a sharded checkpoint, any part of a split GGUF, or a folder that holds one of these. Or the
        URL of a file: ``https://``, ``hf://ORGANISATION/REPOSITORY[@REVISION][/FILE]``, ``s3://``, and what else fsspec
        knows; it is read by ranges (`docs/remote.md`).
    format
        Read as this format (``"safetensors"``, ``"gguf"``, ``"apsim"``, ``"pytorch"``, ``"onnx"``) instead of finding
        out from the content.
    storage_options
        Of a URL: ``headers``, ``token``, ``timeout`` and ``retries`` for http and hf, else what its file system takes.
    stream
        Download the file behind a URL to a temporary one first (for servers that give no ranges).

    Returns
    -------
    ModelFile
        A Mapping from tensor names to tensors; also a context manager.

    Raises
    ------
    OSError
        The file is missing or unreadable.
    ModelFileError
        It is no model file, or a damaged one; the message names the file, the place and the reason.
    """
    source = source_of(path, storage_options, stream)
    try:
        model = open_source(source, format)
    except BaseException:
        source.close()
        raise
    if source not in model.sources:
        source.close()
    return model


def source_of(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None, stream: bool = False
) -> ByteSource:
    """The bytes of a file, of the model in a folder, or of what is behind a URL; see `open`."""
    name = os.fsdecode(os.fspath(path))
    if is_url(name):
        from ..remote import open_source as open_url

        return open_url(name, storage_options, stream)
    if storage_options or stream:
        raise ValueRefusedError(f"{quote(name)} is a path: storage_options and stream are for URLs")
    return FileSource(find_in_folder(name) if os.path.isdir(name) else name)


def as_path(model: Any) -> str | os.PathLike[str]:
    """A path as it is.

    Raises
    ------
    ValueRefusedError
        It is something else, such as a tree of arrays; the message says what to do.
    """
    if isinstance(model, (str, os.PathLike)):
        return model
    raise ValueRefusedError(
        f"model is a {type(model).__name__}; a path or an opened model was expected (save arrays with save_model, open"
        " the file)"
    )


def open_source(source: ByteSource, format: str | None = None) -> ModelFile:
    """Open what a `ByteSource` gives."""
    if format is not None:
        return _settled(_named(format)(source))
    head = source.read_at(0, min(_HEAD, source.size))
    found = sniffed(head, source.size)
    if found is None:
        raise stranger(source, head)
    model = found.read(source)
    index = found.name == "index"
    endings = (".safetensors",) if model.format == "safetensors" and not index else found.extensions
    note = extension_finding(source.name, model.format, (*endings, ".json") if index else endings)
    lone = _lone_shard(source.name, model)
    model.findings = (*model.findings, *(f for f in (note, lone) if f is not None))
    return _settled(model)


def _settled(model: ModelFile) -> ModelFile:
    """Headers have been read: what is behind a URL is no longer read ahead."""
    for source in model.sources:
        settle = getattr(source, "settle", None)
        if settle is not None:
            settle()
    return model


def _named(format: str) -> Callable[[ByteSource], ModelFile]:
    from ..formats import FORMATS, apsim, safetensors

    readers = {**{f.name: f.read for f in FORMATS}, "safetensors": safetensors.read, "apsim": apsim.read}
    if format not in readers:
        raise ValueRefusedError(f"format {quote(str(format))} is not known; known: {', '.join(sorted(readers))}")
    return readers[format]


def stranger(source: ByteSource, head: bytes) -> ModelFileError:
    """The error for a file that no format knows: say what it is where we can."""
    if not head:
        return UnknownFormatError(source.name, "is empty (0 bytes)")
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    for magic, what, hint in _STRANGERS:
        if start[: len(magic)].lower() == magic.lower():
            return UnknownFormatError(source.name, f"{_NONE}: it {what}", hint=hint)
    if source.name.lower().endswith((".safetensors", ".apsim")) or (len(head) > 8 and head[8:9] == b"{"):
        from ..formats import safetensors

        try:  # let the parser say what is wrong with the header
            safetensors.parse_header(source)
        except ModelFileError as exc:
            return exc
    if source.name.lower().endswith(".onnx"):
        from ..formats import onnx

        try:
            onnx.read(source)
        except ModelFileError as exc:
            return exc
    return UnknownFormatError(
        source.name,
        f"{_NONE}: it begins with {bytes(head[:8])!r}, which is no known magic",
    )


def find_in_folder(folder: str) -> str:
    """The index or the one model file of a folder.

    Raises
    ------
    ModelFileError
        There is none, or more than one.
    """
    check_read(folder, local=True)
    entries = sorted(n for n in os.listdir(folder) if not n.startswith("."))
    indexes = [n for n in entries if n.endswith((".safetensors.index.json", ".apsim.index.json"))]
    files = [n for n in entries if n.lower().endswith(_MODEL_ENDINGS)]
    splits = [n for n in files if n.endswith(".gguf") and "-00001-of-" in n]
    whole = [n for n in files if not _is_numbered(n)]
    pickled = [n for n in entries if n.endswith(".bin.index.json")]
    weights = [n for n in entries if n.startswith("pytorch_model") and n.endswith(".bin")]
    others = weights + [n for n in entries if n.lower().endswith(_OTHER_ENDINGS)]
    for group in (indexes, splits + whole, files, pickled, others):
        if len(group) == 1:
            return os.path.join(folder, group[0])
        if group:
            shown = ", ".join(quote(n) for n in group[:5]) + (" …" if len(group) > 5 else "")
            raise ModelFileError(folder, f"holds {len(group)} models: {shown}", hint="name one of them")
    raise ModelFileError(folder, "is a folder without a model file or an index")


def _is_numbered(name: str) -> bool:
    stem, _, rest = name.rpartition("-of-")
    return bool(stem) and rest[:5].isdigit()


def _lone_shard(path: str, model: ModelFile) -> Finding | None:
    """A safetensors shard that was opened by itself, by its name."""
    name = os.path.basename(path)
    if model.format != "safetensors" or len(model.sources) != 1 or not _is_numbered(name):
        return None
    stem, _, rest = name.rpartition("-of-")
    return Finding(
        "warning",
        "one-shard",
        f"by its name this is shard {quote(stem[-5:])} of {quote(rest[:5])}; open the index or the folder instead",
    )
