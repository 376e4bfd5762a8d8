"""`Plan`: an encoding for each tensor, what it costs and why; frozen, saved as JSON, carried out by `convert`.

Contract: `nbytes` is the size of the tensors' data that `convert` writes, to the byte, and `file_size` that of its
files. A saved plan that is loaded is equal to the first; a file that is no plan is one ModelFileError. A plan fits only
a model with its names and shapes. `tests/test_plan.py` enforces this.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from math import fsum, inf, log10, nan, prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ..display import Displayable
from ..errors import ValueRefusedError, quote, visible
from ..listing import human_size, plural
from .targets import choose, parse_dtype

if TYPE_CHECKING:
    import pandas as pd

    from ..encodings import Encoding
    from ..model import ModelFile

SCHEMA_VERSION = 1
KIND = "apsi_inspect encoding plan"
COLUMNS = (
    "name", "shape", "from", "chosen", "numel", "error", "sqnr_db", "nbytes", "bpw", "marginal_gain", "options",
    "reason",
)  # fmt: skip


class PlanRow(NamedTuple):
    """One tensor of a plan.

    Attributes
    ----------
    source, chosen
        Encodings in the model and in the plan.
    error
        Sum of the squared errors of its values, or sum of w (x - y)² where the plan is weighted.
    squares, signal
        Sums of the squared errors, and of the squares of its values (None where they were not looked at).
    nbytes
        Stored bytes of its data.
    marginal_gain
        Error that the step from the next smaller encoding saves per byte; None for the smallest.
    options
        How many encodings there were to choose from.
    reason
        Why there was no choice, or which formats do not fit and what stands for them.
    """

    name: str
    shape: tuple[int, ...]
    source: str
    chosen: str
    error: float
    squares: float
    signal: float | None
    nbytes: int
    marginal_gain: float | None
    options: int
    reason: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise in dB: infinite without error, NaN where the values were not looked at."""
        return _decibels(self.signal, self.squares)


class Uniform(NamedTuple):
    """What one format for all tensors would give (`convert` with this `dtype`, and the rules of the plan)."""

    format: str
    nbytes: int
    error: float
    fits: bool


@dataclass(frozen=True, slots=True)
class Plan(Displayable):
    """An encoding for each tensor of a model.

    Attributes
    ----------
    path
        The model it was made for.
    container
        ``"gguf"``, ``"apsim"`` or ``"safetensors"``.
    target
        Bytes of tensor data that it had to stay within; above `largest`, it is not reached (`reached`).
    smallest, largest
        The range of sizes that were possible: every tensor with its smallest, and with its most exact encoding.
    formats
        What there was to choose from.
    rules
        The rules of `keep`, as text.
    weights
        The importance matrix, or None.
    sampled
        Values of each tensor that were looked at; None: all.
    rows
        A row per tensor, in the order of the model.
    uniform
        One format for all, for comparison.
    bound
        No plan within the target has a smaller error (as measured).
    optimal
        Whether the plan is known to be the best one; else `bound` says how far it can be from it.
    """

    path: str
    container: str
    target: int
    smallest: int
    largest: int
    formats: tuple[str, ...]
    rules: tuple[str, ...]
    weights: str | None
    sampled: int | None
    rows: tuple[PlanRow, ...]
    uniform: tuple[Uniform, ...]
    bound: float
    optimal: bool
    schema_version: int = field(default=SCHEMA_VERSION, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors' data."""
        return sum(r.nbytes for r in self.rows)

    @property
    def reached(self) -> bool:
        """Whether the target set the size: False where it is above the largest size that makes the error smaller."""
        return self.target <= self.largest

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(r.numel for r in self.rows)

    @property
    def bpw(self) -> float:
        """Stored bits per element."""
        return 8 * self.nbytes / self.numel if self.numel else 0.0

    @property
    def error(self) -> float:
        """Sum over all values of (x - y)², or of w (x - y)² where `weights` are given."""
        return fsum(r.error for r in self.rows)

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise in dB over all tensors whose values were looked at (not weighted)."""
        seen = [(r.signal, r.squares) for r in self.rows if r.signal is not None]
        return _decibels(fsum(s[0] for s in seen), fsum(s[1] for s in seen)) if seen else nan

    @property
    def fallbacks(self) -> list[PlanRow]:
        """The tensors that not all of the formats fit, or that had no choice."""
        return [r for r in self.rows if r.reason]

    @property
    def frame(self) -> pd.DataFrame:
        """A row per tensor: ``name, shape, from, chosen, numel, error, sqnr_db, nbytes, bpw, marginal_gain, …``."""
        from ..table import frame_of

        rows = [
            (
                r.name, r.shape, r.source, r.chosen, r.numel, r.error, r.sqnr_db, r.nbytes,
                8 * r.nbytes / r.numel if r.numel else 0.0,
                nan if r.marginal_gain is None else r.marginal_gain, r.options, r.reason,
            )
            for r in self.rows
        ]  # fmt: skip
        return frame_of(rows, COLUMNS)

    def file_size(self, dst: str | os.PathLike[str]) -> int:
        """Bytes of the files that ``convert(self.path, dst, plan=self)`` writes, headers included."""
        from .convert import convert

        return convert(self.path, dst, plan=self, force=True, dry_run=True).size_after

    def encodings(self, model: ModelFile, container: str) -> dict[str, Encoding]:
        """The encoding of each tensor of the model that is to be converted.

        Raises
        ------
        ValueRefusedError
            The plan is for another model or container.
        """
        from .plan_choices import written

        if container != self.container:
            raise ValueRefusedError(f"the plan is for {self.container}, not for {container}; make one with container=")
        names = written(model)
        planned = {r.name: r for r in self.rows}
        missing = next((n for n in names if n not in planned), None)
        if missing is not None:
            raise ValueRefusedError(f"the plan is for another model: it does not have tensor {quote(missing)}")
        there = set(names)
        for r in self.rows:
            if r.name not in there:
                raise ValueRefusedError(f"the plan is for another model: this one does not have tensor {quote(r.name)}")
            shape = model[r.name].shape
            if shape != r.shape:
                what = f"tensor {quote(r.name)} has shape {shape}, {r.shape} is planned"
                raise ValueRefusedError(f"the plan is for another model: {what}")
        return {r.name: _encoding(r, model, container) for r in self.rows}

    def to_llama_quantize(self, target: str = "planned.gguf") -> list[str]:
        """The arguments with which `llama-quantize` chooses the same types; see `plan_llama`."""
        from .plan_llama import arguments

        return arguments(self, target)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values, with a `schema_version`; `load` takes them back."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["rows"] = [{**r._asdict(), "shape": list(r.shape)} for r in self.rows]
        values["uniform"] = [u._asdict() for u in self.uniform]
        values["formats"], values["rules"] = list(self.formats), list(self.rules)
        sums = {"nbytes": self.nbytes, "bpw": self.bpw, "error": self.error, "sqnr_db": _finite(self.sqnr_db)}
        version = values.pop("schema_version")
        return {"schema_version": version, "kind": KIND, "reached": self.reached, **sums, **values}

    def save(self, path: str | os.PathLike[str], *, durable: bool = True) -> str:
        """Write the plan as JSON, replacing what is there as one step; returns the path."""
        import json

        from ..atomic import write_bytes

        name = os.fsdecode(path)
        text = json.dumps(self.to_dict(), ensure_ascii=False, indent=1, allow_nan=False)
        write_bytes(name, (text + "\n").encode("utf-8", "surrogatepass"), durable)
        return name

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote.

        Raises
        ------
        OSError
            The file cannot be read.
        ModelFileError
            It is no plan, or one of a later version.
        """
        from .plan_file import read

        return read(os.fsdecode(path))

    def __repr__(self) -> str:
        size = f"{human_size(self.nbytes)} ({self.bpw:.3f} bits per weight)"
        rows = plural(len(self.rows), "tensor")
        return f"<Plan for {visible(self.path, 80)}: {rows}, {size}, SQNR {decibels(self.sqnr_db)}>"

    def _parts(self) -> Any:
        from .plan_parts import plan_parts

        return plan_parts(self)


def _encoding(row: PlanRow, model: ModelFile, container: str) -> Encoding:
    """The encoding that a row names: that of the tensor as it is, or one that floats can be written in."""
    from .inputs import input_of

    source = input_of(model[row.name]).encoding
    kept = choose(row.name, source, row.shape, container, None).encoding
    if row.chosen == kept.name:
        return kept
    if source.kind not in ("float", "block", "scaled"):
        what = f"tensor {quote(row.name)} is {source.name}, {quote(row.chosen, 20)} is planned"
        raise ValueRefusedError(f"the plan is for another model: {what}")
    return parse_dtype(row.chosen, container)


def _decibels(signal: float | None, squares: float) -> float:
    if not squares:
        return inf
    return nan if signal is None else 10 * log10(signal / squares) if signal else -inf


def decibels(value: float) -> str:
    """A ratio in dB as text: infinite where nothing changes, a dash where no values were looked at."""
    return "–" if value != value else "infinite" if value == inf else f"{value:.2f} dB"


def _finite(value: float) -> float | None:
    return value if abs(value) < inf else None


def plan_of(given: Any) -> Plan:
    """A plan as it is given to `convert`: itself, or the path of its file."""
    if isinstance(given, Plan):
        return given
    if isinstance(given, (str, os.PathLike)):
        return Plan.load(given)
    raise ValueRefusedError(f"plan is {type(given).__name__}; a Plan or the path of one was expected")
