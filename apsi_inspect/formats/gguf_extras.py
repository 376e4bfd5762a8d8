"""What GGUF has no field for and we keep in keys of our own: units of tensors, and the shape of the parameter tree.

``apsi.units.TENSOR`` is a STRING: ``{"unit": …, "symbol": …}``, the unit as `docs/apsim-format.md`, section 4 has it.
``apsi.tree`` is a STRING: the tree of section 3. What does not keep to the rules there is not used, with a warning:
the file is a good GGUF all the same. `tests/test_gguf_write.py` enforces this.
"""

from __future__ import annotations

import json

from ..errors import ModelFileError, quote
from ..model import Finding
from ..units import Unit, UnitError, parse_unit, valid_symbol
from .apsim import check_json, check_tree
from .base import load_json, unique

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

UNITS, TREE, METADATA = "apsi.units.", "apsi.tree", "apsi.metadata"


def unit_text(unit: Unit) -> str:
    """The value of ``apsi.units.TENSOR``."""
    coherent = list(unit.dim)
    whole = {"dim": coherent, "scale": repr(float(unit.scale)), "offset": repr(float(unit.offset))}
    fields = {"unit": coherent if unit.is_coherent else whole, "symbol": unit.symbol}
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


def parse_unit_text(text: str, file: str, what: str) -> Unit:
    """The unit of such a value; ModelFileError or UnitError where it breaks the rules."""
    value = load_json(text, file, what, object_pairs_hook=unique)
    check_json(value, file, what)
    if not isinstance(value, dict) or not {"unit"} <= value.keys() <= {"unit", "symbol"}:
        raise UnitError("a unit is an object of unit and symbol")
    symbol = value.get("symbol")
    if symbol is not None and not valid_symbol(symbol):
        raise UnitError(f"symbol {quote(str(symbol), 40)} breaks the grammar")
    return parse_unit(value["unit"], symbol)


def read_extras(
    metadata: Mapping[str, Any], names: Sequence[str], file: str
) -> tuple[dict[str, Unit], Any, list[Finding]]:
    """Units and tree of an opened file, and what was wrong with them."""
    units: dict[str, Unit] = {}
    findings: list[Finding] = []
    ours = [k for k in metadata if k.startswith(("apsi.units.", TREE))]
    there = set(names) if ours else set()
    tree = None
    for key in ours:
        value = metadata[key]
        try:
            if key == TREE:
                tree = load_json(_string(value), file, TREE, object_pairs_hook=unique)
                check_json(tree, file, TREE)
                check_tree(tree, there, file)
            elif key.startswith(UNITS):
                name = key[len(UNITS) :]
                if name not in there:
                    raise UnitError(f"names tensor {quote(name)}, which is not there")
                units[name] = parse_unit_text(_string(value), file, key)
        except (ModelFileError, UnitError) as exc:
            reason = exc.reason if isinstance(exc, ModelFileError) else str(exc)
            findings.append(Finding("warning", "apsi-key", f"metadata key {quote(key)} is not used: {reason}"))
            tree = None if key == TREE else tree
    return units, tree, findings


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise UnitError("is not a STRING")
    return value
