"""A plan from its JSON file, every value checked before it is believed.

Contract: what `Plan.save` wrote gives the same plan; anything else is one ModelFileError that says where.
`tests/test_plan.py` enforces this.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

from ..errors import ModelFileError, brief
from ..formats.base import load_json, unique
from ..source import FileSource
from .plan_report import KIND, SCHEMA_VERSION, Plan, PlanRow, Uniform

_LIMIT = 1 << 30
_NUMBER = (int, float)
_TYPES: dict[str, tuple[type, ...]] = {
    "path": (str,), "container": (str,), "target": (int,), "smallest": (int,), "largest": (int,), "formats": (list,),
    "rules": (list,), "weights": (str, type(None)), "sampled": (int, type(None)), "rows": (list,), "uniform": (list,),
    "bound": _NUMBER, "optimal": (bool,),
}  # fmt: skip
_ROW: dict[str, tuple[type, ...]] = {
    "name": (str,), "shape": (list,), "source": (str,), "chosen": (str,), "error": _NUMBER,
    "squares": _NUMBER, "signal": (*_NUMBER, type(None)), "nbytes": (int,),
    "marginal_gain": (*_NUMBER, type(None)), "options": (int,), "reason": (str,),
}  # fmt: skip
_UNIFORM: dict[str, tuple[type, ...]] = {"format": (str,), "nbytes": (int,), "error": _NUMBER, "fits": (bool,)}
_FLOATS = ("bound", "error", "squares", "signal", "marginal_gain")


def read(path: str) -> Plan:
    """The plan of a file."""
    source = FileSource(path)
    try:
        if source.size > _LIMIT:
            raise ModelFileError(path, f"has {source.size} bytes, too many for a plan")
        data = source.read_at(0, source.size)
    finally:
        source.close()
    try:
        text = data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise ModelFileError(path, "is no plan: it is not UTF-8 text") from None
    document = load_json(text, path, "the plan", object_pairs_hook=unique)
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise ModelFileError(path, f"is no plan: its kind is not {KIND!r}", hint="save one with plan.save")
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ModelFileError(path, f"is a plan of version {brief(version, 20)}; this reads {SCHEMA_VERSION}")
    values = _checked(path, "the plan", document, _TYPES)
    for key in ("formats", "rules"):
        if not all(isinstance(v, str) for v in values[key]):
            raise ModelFileError(path, "holds something that is no text", key)
        values[key] = tuple(values[key])
    rows = []
    for i, row in enumerate(values.pop("rows")):
        checked = _checked(path, f"row {i + 1}", row, _ROW)
        if not all(type(n) is int and n >= 0 for n in checked["shape"]):
            raise ModelFileError(path, f"shape is {brief(checked['shape'], 40)}", f"row {i + 1}")
        rows.append(PlanRow(**{**checked, "shape": tuple(checked["shape"])}))
    if len({r.name for r in rows}) != len(rows):
        raise ModelFileError(path, "has a tensor twice")
    uniform = [Uniform(**_checked(path, f"uniform {i + 1}", u, _UNIFORM)) for i, u in enumerate(values.pop("uniform"))]
    return Plan(**values, rows=tuple(rows), uniform=tuple(uniform))


def _checked(path: str, where: str, found: Any, types: dict[str, tuple[type, ...]]) -> dict[str, Any]:
    """The values under the expected keys, each of an expected type (a bool is no number)."""
    if not isinstance(found, dict):
        raise ModelFileError(path, "is no record", where)
    out = {}
    for key, expected in types.items():
        value = found.get(key)
        if key not in found or type(value) not in expected:
            what = "is missing" if key not in found else f"is {brief(value, 40)}"
            raise ModelFileError(path, f"{key} {what}; {' or '.join(t.__name__ for t in expected)} expected", where)
        if isinstance(value, _NUMBER) and key in _FLOATS:
            value = float(value) if abs(value) < 1e308 else float("inf")
            if not isfinite(value) or value < 0:
                raise ModelFileError(path, f"{key} is {brief(found[key], 40)}; a number of at least 0 expected", where)
        elif type(value) is int and value < 0:
            raise ModelFileError(path, f"{key} is {brief(value, 40)}; a number of at least 0 expected", where)
        out[key] = value
    return out
