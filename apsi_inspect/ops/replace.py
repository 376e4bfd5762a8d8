"""What a conversion may replace: nothing unasked, and never a part of its own source.

A single source file may be replaced by its conversion: the file appears as a whole, over the old name, and mappings of
the old one keep its bytes. `tests/test_convert.py` enforces this.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import ValueRefusedError, quote

if TYPE_CHECKING:
    from ..model import ModelFile


def others_of(path: str, files: Sequence[str], container: str) -> list[str]:
    """Files of another form of the same target (one file, or parts of another number): stale beside it."""
    ending = "." + container
    stem = path[: -len(ending)] if path.lower().endswith(ending) else path
    folder, name = os.path.split(stem)
    pattern = re.compile(re.escape(name) + r"(-[0-9]{5}-of-[0-9]{5})?" + re.escape(ending) + r"(\.index\.json)?")
    try:
        entries = os.listdir(folder or ".")
    except FileNotFoundError:
        raise FileNotFoundError(2, "no such folder", folder) from None
    there = [os.path.join(folder, e) for e in entries if pattern.fullmatch(e)]
    return sorted(f for f in there if f not in files and os.path.abspath(f) not in map(os.path.abspath, files))


def check_target(model: ModelFile, files: Sequence[str], others: Sequence[str], force: bool) -> None:
    """Refuse to replace what the user has not said, and any shard of the source."""
    own = {os.path.realpath(f) for f in [model.path, *model.files]}
    sharded = len(model.files) > 1 or os.path.realpath(model.path) not in map(os.path.realpath, model.files)
    for path in [*files, *others]:
        real = os.path.realpath(path)
        same = real in own or any(os.path.exists(f) and os.path.exists(real) and os.path.samefile(f, real) for f in own)
        if same and (sharded or path in others):
            raise ValueRefusedError(f"{quote(path)} is a part of the source: choose another name for the target")
        if not force and os.path.lexists(path):
            raise FileExistsError(17, "is already there (force=True, --force to replace it)", path)
