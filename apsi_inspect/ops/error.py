"""`quant_error`: what quantizing would cost, tensor by tensor and format by format, without writing anything.

Contract: each piece of a tensor is read once and tried in all formats while it is in the cache; the values it is
compared with are those of a converted file, bit for bit. Memory stays bounded by a few pieces a thread, and the figures
do not depend on how many threads or which executor there are. What `convert` would not store in the format gets no
figure but a note, and the error of what it gets instead counts in the totals. `tests/test_error.py` compares with
gguf's and ml_dtypes' own quantizers in float64.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..encodings.run import MAX_THREADS
from ..errors import ValueRefusedError, quote
from ..kernels.error import COLUMNS
from ..listing import plural
from ..model import ModelFile
from .error_pieces import Job, measure, measure_spec, pieces
from .error_subjects import Subject, subjects_of
from .error_sums import ErrorSums, from_rows
from .error_table import ErrorRow, ErrorTable
from .open import open as open_model
from .recode import ScaledMaker
from .targets import Choice, choose, menu_of, parse_dtype
from .tasks import run_tasks, spec_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Executor

    from numpy.typing import ArrayLike

    from ..encodings import Encoding

FORMATS = ("q8_0", "q6_k", "q5_k", "q4_k", "q4_0", "mxfp4", "int8", "int4")  # what is measured by default


class Format(NamedTuple):
    """A format, and the container whose rules say which tensors get it."""

    word: str
    encoding: Encoding
    container: str


def parse_format(word: str, container: str = "apsim") -> Format:
    """A format by the word that `convert` takes, in any case: ``"q4_k"``, ``"f16"``, ``"int8"``.

    Parameters
    ----------
    container
        Whose rules hold for what .apsim and GGUF both have: ``"apsim"`` or ``"gguf"``.

    Raises
    ------
    ValueRefusedError
        Not known, or one that cannot be made here.
    """
    blocks = [m for m in menu_of("gguf") if m not in menu_of("apsim")]
    into = "gguf" if isinstance(word, str) and word.upper() in blocks else "apsim"
    try:
        encoding = parse_dtype(word, into)
    except ValueRefusedError as exc:
        known = ", ".join(m.lower() for m in [*blocks, *menu_of("apsim")])
        raise ValueRefusedError(f"format {word!r:.40} is not known; known: {known}") from exc
    if container == "gguf" and encoding.name.upper() in menu_of("gguf"):
        return Format(encoding.name.lower(), parse_dtype(word, "gguf"), "gguf")
    return Format(encoding.name.lower(), encoding, into)


def quant_error(
    model_or_tensor: Any,
    formats: str | Sequence[str] | None = None,
    tensors: str | None = None,
    sample: int | None = None,
    *,
    weights: Mapping[str, ArrayLike] | None = None,
    container: str | None = None,
    executor: Executor | None = None,
    progress: bool | None = None,
) -> ErrorTable:
    """What storing tensors in other formats would change.

    Parameters
    ----------
    model_or_tensor
        An opened model or a path; a Tensor; an array (NumPy, torch, jax), QTensor or pint Quantity; or a tree of them.
        What is stored quantized is decoded first, so that errors are those of quantizing again.
    formats
        Words as `convert` takes them: ``"q8_0"``, ``"q4_k"``, ``"mxfp4"``, ``"f16"``, ``"f8_e4m3"``, ``"int4"``, …
        (the formats of .apsim along the last axis, with their default blocks). None: q8_0, q6_k, q5_k, q4_k, q4_0,
        mxfp4, int8 and int4.
    tensors
        Only the tensors whose name matches this glob.
    sample
        Measure only about so many elements of each tensor, in whole rows spread evenly over it; the result says so.
    weights
        Importance of the columns (an imatrix): tensor name -> a non-negative number for each element of the last axis,
        or for each matrix of a stack of them. Gives `weighted_mse`; the quantizers do not use it.
    container
        ``"gguf"`` or ``"apsim"``: whose rules say which tensors get a plain float (f16, bf16, …), as GGUF keeps norms
        in float32. None: those of GGUF for a GGUF model, else of .apsim. A format that only one of them has goes by its
        own.
    executor
        Any `concurrent.futures.Executor` (of processes or a cluster: over files only). None: threads of this process.
    progress
        True, False, or None: show a bar where more than 64 MiB are read.

    Returns
    -------
    ErrorTable
        `.frame` has a row for each tensor and format, `.totals` one for each format: size and error of all tensors as
        `convert` would store them, also of those that cannot have the format and get another encoding. An element is
        *clipped* where it lies beyond the least or the greatest value that the codes of its block can stand for, with
        the scale (and minimum) the block has, by more than half the distance between that value and its neighbour; for
        a plain float, beyond its range by the same measure. *Zeroed* where it becomes 0 and was not. Values that are
        not finite leave the row of a block format without figures, and `note` counts them.

    Raises
    ------
    ValueRefusedError
        A format or a glob that names nothing; an argument of the wrong type; weights that do not fit; with an
        executor, values that are in memory.
    OSError, ModelFileError
        As `open`.
    """
    if isinstance(model_or_tensor, (str, os.PathLike)):
        with open_model(model_or_tensor) as opened:
            return quant_error(
                opened, formats, tensors, sample, weights=weights, container=container, executor=executor,
                progress=progress,
            )  # fmt: skip
    if sample is not None and (isinstance(sample, bool) or not isinstance(sample, int) or sample < 1):
        raise ValueRefusedError(f"sample is {sample!r:.40}; a number of elements was expected")
    if tensors is not None and not isinstance(tensors, str):
        raise ValueRefusedError(f"tensors is {tensors!r:.40}; a pattern of names like 'blk.*' was expected")
    if container not in (None, "gguf", "apsim"):
        raise ValueRefusedError(f"container is {container!r:.40}; 'gguf' or 'apsim' was expected")
    if formats is not None and not isinstance(formats, Iterable):
        raise ValueRefusedError(f"formats is {formats!r:.40}; words like ['q8_0', 'q4_k'] were expected")
    words = FORMATS if formats is None else (formats,) if isinstance(formats, str) else tuple(formats)
    into = container or ("gguf" if isinstance(model_or_tensor, ModelFile) and model_or_tensor.format == "gguf" else "")
    wanted = list(dict.fromkeys(parse_format(word, into) for word in words))
    if not wanted:
        raise ValueRefusedError("no format was given")
    subjects, title = subjects_of(model_or_tensor, tensors, weights or {})
    rows = _rows(subjects, wanted, sample, executor, progress)
    return ErrorTable(rows, title, [f.word for f in wanted], sample)


def _choice(subject: Subject, fmt: Format) -> Choice:
    s = subject.source
    return choose(s.name, s.encoding, s.shape, fmt.container, fmt.encoding)


def _measured(fmt: Format, choice: Choice) -> bool:
    return choice.encoding == fmt.encoding


def _unchanged(subject: Subject, choice: Choice) -> bool:
    """Whether the values stay as they are, so that nothing need be tried."""
    affine = subject.tensor is not None and subject.tensor.affine is not None
    return choice.action in ("kept", "exact", "expanded") and (choice.action != "kept" or not affine)


def _stored(subject: Subject, choice: Choice) -> int:
    """Bytes in the format, scales included."""
    s, numel = subject.source, prod(subject.source.shape)
    if choice.encoding == s.encoding:
        return subject.nbytes
    if choice.encoding.kind == "scaled":
        made = ScaledMaker(s, choice.encoding.name, None)
        return prod(made.code_shape) + 4 * prod(made.scale_shape)
    return -(-numel * choice.encoding.block_bytes // choice.encoding.block_size)


def _trial(subject: Subject, choice: Choice) -> tuple[Encoding, bool] | None:
    """What is tried for a choice, also where it is not what was asked for; None for what is no float."""
    if subject.source.encoding.kind not in ("float", "block", "scaled"):
        return None
    return choice.encoding, _unchanged(subject, choice)


def _job(subject: Subject, wanted: list[Format], sample: int | None) -> Job:
    """Each trial once: formats that a tensor cannot have often have the same encoding instead."""
    trials = dict.fromkeys(_trial(subject, _choice(subject, f)) for f in wanted)
    return Job(tuple(t for t in trials if t is not None), subject.weights, sample)


def _rows(
    subjects: list[Subject], wanted: list[Format], sample: int | None, executor: Executor | None, progress: bool | None
) -> list[ErrorRow]:
    jobs = [_job(s, wanted, sample) for s in subjects]
    total = sum(s.nbytes for s, job in zip(subjects, jobs, strict=True) if job.trials)
    shown = total > 64 << 20 if progress is None else progress
    from tqdm.auto import tqdm

    found: list[ErrorRow] = []
    with tqdm(total=total, unit="B", unit_scale=True, desc="quant_error", disable=not shown, leave=False) as bar:
        for i, sums in _all_sums(subjects, jobs, executor):
            found += _rows_of(subjects[i], wanted, dict(zip(jobs[i].trials, sums, strict=True)))
            bar.update(subjects[i].nbytes if jobs[i].trials else 0)
    return found


def _all_sums(
    subjects: list[Subject], jobs: list[Job], executor: Executor | None
) -> Iterator[tuple[int, list[ErrorSums]]]:
    """For each tensor in order: the sums of each format that is tried."""
    near = executor is None or isinstance(executor, ThreadPoolExecutor)
    parts = [pieces(s.source, job) for s, job in zip(subjects, jobs, strict=True)]
    place = [(i, part) for i, cut in enumerate(parts) for part in cut]
    threads = min(os.cpu_count() or 1, MAX_THREADS, max(len(place), 1))
    function: Callable[..., Any] = measure if near else measure_spec
    given = [s.source if near else _spec(s) if cut else None for s, cut in zip(subjects, parts, strict=True)]
    tasks = ((given[i], jobs[i], part) for i, part in place)
    pool = ThreadPoolExecutor(threads) if executor is None and threads > 1 else None
    with pool or nullcontext():
        results = run_tasks(function, tasks, executor or pool)
        for i, job in enumerate(jobs):
            rows = [next(results) for _ in parts[i]]
            all_rows = np.concatenate(rows, axis=1) if rows else np.zeros((len(job.trials), 0, COLUMNS))
            yield i, [from_rows(r) for r in all_rows]


def _spec(subject: Subject) -> Any:
    if subject.tensor is None:
        raise ValueRefusedError(
            f"{quote(subject.source.name)} is in memory, where no other process reads it; save it, or leave out the"
            " executor"
        )
    return spec_of(subject.tensor)


def _rows_of(subject: Subject, wanted: list[Format], sums: Mapping[tuple[Encoding, bool], ErrorSums]) -> list[ErrorRow]:
    """The rows of a tensor; `sums` of its trials."""
    source = subject.source
    numel = prod(source.shape)
    out = []
    for fmt in wanted:
        choice = _choice(subject, fmt)
        trial = _trial(subject, choice)
        tried = None if trial is None else sums[trial]
        found, instead = (tried, None) if _measured(fmt, choice) else (None, tried)
        note = _note(subject, choice, found)
        out.append(ErrorRow(source.name, fmt.word, numel, found, _stored(subject, choice), note, instead))
    return out


def _note(subject: Subject, choice: Choice, found: ErrorSums | None) -> str:
    name = choice.encoding.name.lower()
    if found is None:
        stays = choice.encoding == subject.source.encoding
        reason = choice.reason or f"it is no float but {subject.source.encoding.name}"
        return f"convert {'keeps' if stays else 'stores'} it {'as' if stays else 'in'} {name}: {reason}"
    if found.nonfinite:
        return f"{plural(found.nonfinite, 'value')} not finite, or too large for {name}"
    return f"is stored in {name}" if _unchanged(subject, choice) and choice.action == "kept" else ""


__all__ = ["FORMATS", "ErrorTable", "parse_format", "quant_error"]
