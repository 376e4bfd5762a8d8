"""`compare`: what became of a model's tensors in another file: identical, rounded, changed, missing, of another shape.

Contract: tensors are aligned by `ops.align` from headers alone, then measured pair by pair (`ops.pairs`) in bounded
memory, here or on an executor, with the same result. `tests/test_compare.py` enforces this.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..errors import ValueRefusedError, quote
from ..listing import brief, glob, totals
from ..model import Finding, ModelFile
from ..remote_url import masked
from . import carry
from .align import Pair, align
from .companion_scales import logical
from .comparison import Compared, Comparison, KeyDifference, Side
from .in_memory import model_of
from .open import open as open_model
from .pairs import measure
from .tasks import run_tasks, spec_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Executor

    from ..model import Tensor
    from .pairs import Measured

_LIMIT = 80  # characters of a metadata value
_QUIET = 64 << 20  # bytes that are compared without a bar


def compare(
    a: Any,
    b: Any,
    *,
    tensors: str | None = None,
    executor: Executor | None = None,
    progress: bool | None = None,
) -> Comparison:
    """Compare the values of two models.

    Parameters
    ----------
    a, b
        The original and the other: anything `open` takes, an opened model, or a tree of arrays and QTensors as
        `save_model` takes it (its names are the paths with dots). Names are matched as they are, by the maps of the
        `gguf` package where one is a GGUF and the other has Hugging Face names (the permuted rows of q and k of Llama
        models included), and without a leading part that only one of them has.
    tensors
        Only tensors one of whose names matches this glob.
    executor
        Does the work, a task per tensor: any `concurrent.futures.Executor`, also of processes or a cluster, where the
        workers reach the files. None: here.
    progress
        True, False, or None: show a bar where more than 64 MiB are read.

    Returns
    -------
    Comparison
        ``.verdict``: ``"identical"``, ``"rounded"`` (nothing but quantization noise) or ``"different"``; ``.same``;
        ``.tensors`` and ``.frame`` with a verdict and the measures of `quant_error` for each; what differs in the
        metadata and units.

    Raises
    ------
    ValueRefusedError
        No tensor matches, or a tree holds something else than arrays.
    OSError, ModelFileError
        A file cannot be read.
    """
    with ExitStack() as stack:
        models = [_opened(m, letter, stack) for m, letter in ((a, "A"), (b, "B"))]
        return _compare(models[0], models[1], tensors, executor, progress)


def _opened(model: Any, letter: str, stack: ExitStack) -> ModelFile:
    if isinstance(model, ModelFile):
        return model
    if isinstance(model, (str, os.PathLike)):
        return stack.enter_context(open_model(model))
    return model_of(model, f"tree {letter}")


def _compare(
    a: ModelFile, b: ModelFile, tensors: str | None, executor: Executor | None, progress: bool | None
) -> Comparison:
    aligned = align(a, b)
    pairs = list(aligned.pairs)
    if tensors is not None:
        match = glob(tensors)
        pairs = [p for p in pairs if any(n is not None and match(n) for n in (p.a, p.b))]
        if not pairs:
            raise ValueRefusedError(f"no tensor matches {quote(tensors)}")
    wanted = [p for p in pairs if _measurable(a, b, p)]
    found = dict(zip(wanted, _measured(a, b, wanted, executor, progress), strict=True))
    rows = [_compared(a, b, p, found.get(p)) for p in pairs]
    units = _differences({n: str(u) for n, u in a.units.items()}, {n: str(u) for n, u in b.units.items()})
    notes = [*aligned.notes, *_moved(found.values())]
    return Comparison(_side(a), _side(b), tuple(rows), tuple(_metadata(a, b)), tuple(units), tuple(notes))


def _moved(found: Iterable[Measured]) -> list[Finding]:
    """What a converter did to values, and is undone here."""
    layouts = [m.layout for m in found if m.layout is not None]
    rows, shifted = sum(bool(y.heads) for y in layouts), sum(bool(y.shift) for y in layouts)
    out = []
    if rows:
        text = f"{rows} q and k tensors are compared in the order of rows that GGUF has (rows permuted)"
        out.append(Finding("note", "permuted", text))
    if shifted:
        out.append(Finding("note", "shifted", f"{shifted} norms are compared with the 1 added that GGUF has"))
    return out


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def _measurable(a: ModelFile, b: ModelFile, p: Pair) -> bool:
    """Whether both are there and have the same shape, dimensions of 1 left out."""
    if p.a is None or p.b is None or (p.layout is not None and p.layout.transposed):
        return False
    return _squeezed(a.info(a.index[p.a]).shape) == _squeezed(b.info(b.index[p.b]).shape)


def _measured(
    a: ModelFile, b: ModelFile, pairs: Sequence[Pair], executor: Executor | None, progress: bool | None
) -> Iterator[Measured]:
    from tqdm.auto import tqdm

    sizes = [sum(m.info(m.index[str(n)]).nbytes for m, n in ((a, p.a), (b, p.b))) for p in pairs]
    shown = sum(sizes) > _QUIET if progress is None else progress

    here = executor is None or isinstance(executor, ThreadPoolExecutor)  # the tensors themselves will do

    def tasks() -> Iterator[tuple[Any, ...]]:
        for p in pairs:
            two = logical(a, str(p.a)), logical(b, str(p.b))
            yield (*(two if here else map(spec_of, two)), p.layout)

    with tqdm(total=sum(sizes), unit="B", unit_scale=True, desc="compare", disable=not shown, leave=False) as bar:
        for size, found in zip(sizes, run_tasks(measure, tasks(), executor), strict=True):
            bar.update(size)
            yield found


def _compared(a: ModelFile, b: ModelFile, p: Pair, m: Measured | None) -> Compared:
    x = None if p.a is None else logical(a, p.a)
    y = None if p.b is None else logical(b, p.b)
    verdict, notes = _verdict(p, x, y, m)
    if p.how == "tied" and verdict == "missing":  # the embedding has a pair of its own
        p, m = (Pair(p.a, None, "") if _is_output(p.a) else Pair(None, p.b, "")), None
        x, y = (x, None) if p.b is None else (None, y)
    return Compared(
        p.a,
        p.b,
        p.how,
        None if x is None else x.shape,
        None if y is None else y.shape,
        "" if x is None else x.encoding,
        "" if y is None else y.encoding,
        verdict,
        "; ".join(notes),
        None if m is None else m.sums,
        0 if m is None else m.differ,
        (0.0, 0.0) if m is None else m.at,
        m is not None and m.same_bytes,
        "" if m is None else m.rounded,
        _ratio(m),
    )


def _verdict(p: Pair, x: Tensor | None, y: Tensor | None, m: Measured | None) -> tuple[str, list[str]]:
    """The word for a pair, and what else there is to say."""
    if x is None or y is None:
        return "missing", [f"only in {'B' if x is None else 'A'}"]
    if m is None:
        return "shape differs", [p.layout.words] if p.layout is not None and p.layout.transposed else []
    if p.how == "tied" and not m.good:
        here, there = ("A", "B") if _is_output(p.a) else ("B", "A")
        return "missing", [f"only in {here}, and not the embedding of {there}"]
    notes = ["tied: compared with the embedding"] if p.how == "tied" else []
    if m.layout is not None:
        notes.append(m.layout.words)
    if x.shape != y.shape:
        notes.append(f"shapes {list(x.shape)} and {list(y.shape)}: dimensions of 1 left out")
    if m.signs:
        notes.append(f"{m.signs} zeros differ in sign")
    if x.unit is not None and y.unit is not None and x.unit != y.unit:
        return "changed", [f"unit {x.unit} is {y.unit}", *notes]
    if not m.differ:
        return "identical", notes
    if m.rounded or m.explained:
        return "quantization noise", notes
    return "changed", [*_change(m), *notes]


def _is_output(name: str | None) -> bool:
    return name is not None and name.endswith(("output.weight", "lm_head.weight", "embed_out.weight"))


def _ratio(m: Measured | None) -> float | None:
    if m is None or m.own is None or not m.own.squares or not m.sums.n:
        return None
    return m.sums.rmse / m.own.rmse


def _change(m: Measured) -> list[str]:
    """Why rounding does not explain it."""
    out = []
    if m.sums.nonfinite:
        out.append(f"{m.sums.nonfinite} not finite on one side")
    ratio = _ratio(m)
    if ratio is not None:
        out.append(f"{ratio:.3g} times the error of rounding")
    return out


def _side(m: ModelFile) -> Side:
    t = totals(m)
    return Side(masked(m.path), m.format, m.architecture, len(m), t.parameters, m.file_size)


def _metadata(a: ModelFile, b: ModelFile) -> list[KeyDifference]:
    """Keys that differ, whatever the containers: as `convert` carries them."""
    return _differences(*map(_plain, (a, b)))


def _plain(m: ModelFile) -> dict[str, Any]:
    said = carry.carried(m)
    return {**said.loose, **{k: carry.plain(v) for k, v in said.typed}}


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[KeyDifference]:
    out = []
    for key in dict.fromkeys([*a, *b]):
        if key not in a or key not in b or not _equal(a[key], b[key]):
            texts = (brief(side[key], _LIMIT) if key in side else None for side in (a, b))
            out.append(KeyDifference(key, *texts))
    return out


def _equal(u: Any, v: Any) -> bool:
    """NaN is equal to NaN, which carries no other meaning here."""
    return bool(u == v) or repr(u) == repr(v)
