"""The cases of `data/cases/steps.json` that say what to do, one after the other; each is scripted under its id."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

CASES = Path(__file__).parent / "data" / "cases"
Script = Callable[[dict[str, Any], Path], None]


class Scripts:
    """The cases of one family, and the functions that carry out their steps."""

    def __init__(self, prefix: str) -> None:
        document = json.loads((CASES / "steps.json").read_text(encoding="utf-8"))
        self.cases = {c["id"]: c for c in document["cases"] if c["id"].startswith(prefix)}
        self.scripts: dict[str, Script] = {}

    def __call__(self, *ids: str) -> Callable[[Script], Script]:
        """Decorator: this function carries out these cases; it is given the case and an empty folder."""

        def take(script: Script) -> Script:
            assert not self.scripts.keys() & set(ids)
            self.scripts |= dict.fromkeys(ids, script)
            return script

        return take


def entry(case: dict[str, Any], folder: Path) -> Path:
    """A copy of the case's file in a folder."""
    source = CASES / case["entry"]
    copy = folder / source.name
    copy.write_bytes(source.read_bytes())
    return copy
