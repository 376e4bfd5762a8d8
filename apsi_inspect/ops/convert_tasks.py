"""The work of `convert` in tasks: ranges of a tensor, read, encoded and given back by the workers of an executor.

Contract: the bytes are those that this process would make of the same ranges. What is only copied is not sent through
workers. `tests/test_executor.py` enforces this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..encodings import ENCODINGS
from .inputs import input_of
from .recode import ScaledMaker, maker
from .shared import Shared
from .tasks import TensorSpec, spec_of, tensor_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..model import Tensor

    Ranges = Sequence[tuple[int, int]]


class Job(NamedTuple):
    """A tensor in another encoding, or a part of it.

    Attributes
    ----------
    tensor, name
        What is read, and its name in messages.
    encoding
        What it becomes.
    part
        ``"values"``; of an .apsim format ``"codes"`` or ``"scales"``.
    block
        Of an .apsim format, as in `quantize`.
    """

    tensor: TensorSpec
    name: str
    encoding: str
    part: str = "values"
    block: int | str | None = None


def job_of(tensor: Tensor | None, name: str, encoding: str, part: str = "values", block: Any = None) -> Job | None:
    """The job for a tensor of a file; None where there is no file: then this process does it."""
    return None if tensor is None else Job(spec_of(tensor), name, encoding, part, block)


def run_job(job: Job, ranges: Ranges) -> tuple[list[Any], list[tuple[str, str, int]]]:
    """In a worker: the bytes of each range, and how many values became infinite (`Shared.overflowed`)."""
    source, shared = input_of(tensor_of(job.tensor), job.name), Shared()
    if job.part == "values":
        _, make = maker(source, ENCODINGS[job.encoding], shared)
    else:
        scaled = ScaledMaker(source, job.encoding, job.block)
        make = scaled.codes if job.part == "codes" else scaled.scales
    return [make(a, b) for a, b in ranges], shared.counts
