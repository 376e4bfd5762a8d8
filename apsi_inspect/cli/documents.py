"""`--json` of the verbs that take several files: a document a file, also of those that could not be read.

Contract: one path gives one object, several give a list in the order of the paths; a file that could not be read is an
object with `file`, `status` "unreadable", `ok` false and `error`. `tests/test_verify.py` enforces this.
"""

from __future__ import annotations

import json

from ..remote_url import masked
from ..reports import SCHEMA_VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


def unreadable(path: str, message: str) -> dict[str, Any]:
    """What stands in the place of a file that could not be read."""
    shown = masked(path)
    return {"schema_version": SCHEMA_VERSION, "file": shown, "status": "unreadable", "ok": False, "error": message}


def show(documents: Sequence[Any], paths: Sequence[str]) -> None:
    """Print the documents of these paths."""
    document = documents if len(paths) > 1 else documents[0]
    print(json.dumps(document, ensure_ascii=False, indent=1, allow_nan=False))
