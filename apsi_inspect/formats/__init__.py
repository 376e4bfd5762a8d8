"""The container formats, one file each, and their one ordered registry."""

from __future__ import annotations

from .apsim import APSIM
from .base import Format
from .gguf import GGUF
from .safetensors import SAFETENSORS
from .sharded import INDEX

# Superset first: an .apsim file is a safetensors file. An index is plain JSON, tried last.
FORMATS: tuple[Format, ...] = (GGUF, APSIM, SAFETENSORS, INDEX)

__all__ = ["FORMATS", "Format"]
