"""`HardwarePlan`: what a model needs, frozen; the same facts as text, HTML, JSON and a frame.

`tests/test_hardware.py` enforces the numbers; the views are in `notebook/render_hardware.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..display import HardwareDisplay
from ..errors import ValueRefusedError
from .save import parse_size

if TYPE_CHECKING:
    from .attention import AttentionShape
    from .hardware_weights import Training, Weights

SCHEMA_VERSION = 1


class Cache(NamedTuple):
    """The KV cache for `batch` sequences of `context` tokens each."""

    context: int
    batch: int
    nbytes: int
    formula: str


class Need(NamedTuple):
    """One case: what it takes, and how many devices of one size hold it.

    Attributes
    ----------
    encoding
        Of the weights; or ``"training: adamw"``.
    context
        Tokens; None where no cache is counted.
    nbytes
        Weights and cache.
    device
        Memory of one device in bytes.
    devices
        ceil(nbytes / (device × (1 − overhead))).
    """

    encoding: str
    context: int | None
    nbytes: int
    device: int
    devices: int


@dataclass(frozen=True, slots=True)
class HardwarePlan(HardwareDisplay):
    """What a model needs; made by `hardware_plan`.

    Attributes
    ----------
    name
        The file, or what was given instead.
    parameters, active_parameters
        Logical parameters, and those that a token uses in a mixture of experts (None where the keys do not say).
    exact
        Whether the sizes of the weights are exact (a file) or estimates (a number of parameters).
    weights, cache, training, needs
        The rows: weights per encoding, cache per context, parts of training, devices per case.
    attention
        The shape that the cache was worked out from; None where it is not known.
    overhead, kv_dtype, shard
        As given: the share of a device that is kept free, the encoding of the cache, the size of a file.
    assumptions
        What was assumed, in sentences.
    """

    name: str
    parameters: int
    active_parameters: int | None
    exact: bool
    weights: tuple[Weights, ...]
    cache: tuple[Cache, ...]
    training: tuple[Training, ...]
    needs: tuple[Need, ...]
    attention: AttentionShape | None
    overhead: float
    kv_dtype: str
    shard: int
    assumptions: tuple[str, ...]

    def devices(self, encoding: str, context: int | None = None, device: int | str | None = None) -> int:
        """How many devices one case needs; of several contexts the longest, of several devices the first."""
        size = None if device is None else parse_size(device)
        found = [n for n in self.needs if n.encoding == encoding and size in (None, n.device)]
        found = [n for n in found if context in (None, n.context)]
        if not found:
            raise ValueRefusedError(f"the plan has no case {encoding!r:.40}, context {context}, device {device}")
        first = found[0].device
        return max(n.devices for n in found if n.device == first)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values, with a `schema_version`."""
        shape = self.attention
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.name,
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "exact": self.exact,
            "weights": [w._asdict() for w in self.weights],
            "attention": None
            if shape is None
            else {**shape._asdict(), "groups": [g._asdict() for g in shape.groups], "notes": list(shape.notes)},
            "kv_dtype": self.kv_dtype,
            "cache": [c._asdict() for c in self.cache],
            "training": [t._asdict() for t in self.training],
            "overhead": self.overhead,
            "shard": self.shard,
            "needs": [n._asdict() for n in self.needs],
            "assumptions": list(self.assumptions),
        }

    def __repr__(self) -> str:
        kind = f", {self.attention.kind}" if self.attention else ""
        cases = f"{len(self.weights)} encodings, {len(self.cache)} contexts"
        return f"<HardwarePlan {self.name!r}: {self.parameters} parameters{kind}; {cases}>"
