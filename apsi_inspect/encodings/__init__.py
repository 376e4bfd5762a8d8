"""How element values become bytes: the one registry of encodings."""

from __future__ import annotations

from .base import Encoding
from .ggml import GGML
from .plain import PLAIN
from .scaled import SCALED

ENCODINGS: dict[str, Encoding] = {e.name: e for e in (*PLAIN, *GGML, *SCALED)}

__all__ = ["ENCODINGS", "Encoding"]
