"""`model_info` and its kin: what is in a file, as a plain record that `--json` prints as it is.

Headers only; nothing here imports NumPy. `SCHEMA_VERSION` counts changes of meaning. `tests/test_info.py` compares the
facts with independent readers.
"""

from __future__ import annotations

import math
import os

from ..errors import ModelFileError
from ..listing import choose, rows, totals
from ..model import ModelFile
from ..tree import record
from .open import open as open_model

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SCHEMA_VERSION = 1
_LONG = 16  # longer arrays are abbreviated
_ENDS = 3


def info_of(model: ModelFile, tensors: str | None = None, sort: str | None = None) -> record:
    """The facts of an opened model.

    Parameters
    ----------
    model
        An opened model.
    tensors, sort
        As in `listing.rows`; they choose and order the ``tensors`` entry only.

    Returns
    -------
    record
        ``schema_version, file, format, architecture, facts, files, file_size, tensor_count, parameters, nbytes, bpw,
        encodings, metadata, findings, tensors``; every value is JSON. Arrays of more than 16 elements stand as
        ``{"type", "count", "first", "last"}``; those of a closed file with both ends empty.
    """
    everything = rows(model, sort="file")
    t = totals(model, everything)
    picked = choose(everything, tensors, sort)
    return record(
        schema_version=SCHEMA_VERSION,
        file=model.path,
        format=model.format,
        architecture=model.architecture,
        facts=record((k.replace(" ", "_"), plain(v)) for k, v in model.facts.items()),
        files=[os.path.basename(f) for f in model.files],
        file_size=model.file_size,
        tensor_count=t.tensors,
        parameters=t.parameters,
        nbytes=t.nbytes,
        bpw=round(t.bpw, 6),
        encodings=[
            record(encoding=s.label, tensors=s.tensors, parameters=s.parameters, nbytes=s.nbytes) for s in t.by_encoding
        ],
        metadata=record((k, plain(v)) for k, v in model.metadata.items()),
        findings=[record(f._asdict()) for f in model.findings],
        tensors=[record({**r._asdict(), "shape": list(r.shape), "bpw": round(r.bpw, 6)}) for r in picked],
    )


def plain(value: Any) -> Any:
    """A metadata value as JSON: long arrays abbreviated, non-finite floats as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, complex):
        return str(value)
    if isinstance(value, dict):
        return record((k, plain(v)) for k, v in value.items())
    n = len(value)
    kind = getattr(value, "element_type", "item")
    try:
        if n <= _LONG:
            return [plain(v) for v in value[:]]
        ends = [plain(v) for v in value[:_ENDS]], [plain(v) for v in value[n - _ENDS :]]
    except ModelFileError:  # closed: what the header said still stands
        return record(type=kind, count=n, first=[], last=[])
    return record(type=kind, count=n, first=ends[0], last=ends[1])


def model_info(model: ModelFile | str | os.PathLike[str]) -> record:
    """What is in a model file of any format, from its header; see `info_of` for the fields.

    Parameters
    ----------
    model
        A path, or an opened model.

    Raises
    ------
    OSError, ModelFileError
        As `open`.
    """
    return _info_as(model)


def gguf_info(model: ModelFile | str | os.PathLike[str]) -> record:
    """`model_info` of a GGUF file; any other file is refused."""
    return _info_as(model, "gguf")


def safetensors_info(model: ModelFile | str | os.PathLike[str]) -> record:
    """`model_info` of a safetensors file (or index, or folder); any other file is refused."""
    return _info_as(model, "safetensors")


def _info_as(model: ModelFile | str | os.PathLike[str], format: str | None = None) -> record:
    if not isinstance(model, ModelFile):
        with open_model(model) as opened:
            return _info_as(opened, format)
    alike = ("safetensors", "apsim") if format == "safetensors" else (format,)
    if format is not None and model.format not in alike:
        raise ModelFileError(model.path, f"is {model.format}, {format} was expected", hint="use model_info")
    return info_of(model)
