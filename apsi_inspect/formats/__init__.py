"""The container formats, one file each, and their one ordered registry.

A format is imported when a file may be of it: `apsi model info` of one kind of file pays for that kind only.
"""

from __future__ import annotations

from importlib import import_module

from .base import Format

TYPE_CHECKING = False
if TYPE_CHECKING:
    FORMATS: tuple[Format, ...]  # all of them, in order; made on use

# Module, its Format, and what every such file begins with where that is known (so that others need not import it).
# Superset first: an .apsim file is a safetensors file. What has no magic number comes late; an index is JSON, last.
_REGISTRY = (
    ("gguf", "GGUF", b"GGUF"),
    ("apsim", "APSIM", b""),
    ("safetensors", "SAFETENSORS", b""),
    ("torch", "TORCH", b""),
    ("onnx", "ONNX", b""),
    ("sharded", "INDEX", b""),
)

__all__ = ["FORMATS", "Format", "sniffed"]


def _format(module: str, name: str) -> Format:
    found: Format = getattr(import_module(f".{module}", __name__), name)
    return found


def sniffed(head: bytes, size: int) -> Format | None:
    """The first format that a file of `size` bytes beginning with `head` may be of."""
    for module, name, magic in _REGISTRY:
        if head.startswith(magic):
            found = _format(module, name)
            if found.sniff(head, size):
                return found
    return None


def __getattr__(name: str) -> object:
    if name != "FORMATS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return tuple(_format(module, constant) for module, constant, _ in _REGISTRY)
