"""What the terminal can show."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO


def colour(stream: TextIO) -> bool:
    """Colour only on a terminal, and never where NO_COLOR is set (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width() -> int | None:
    """Columns of the terminal, or None in a pipe: lines are not cut there."""
    if not sys.stdout.isatty():
        return None
    try:
        return max(40, int(os.environ.get("COLUMNS") or os.get_terminal_size().columns))
    except (OSError, ValueError):
        return None
