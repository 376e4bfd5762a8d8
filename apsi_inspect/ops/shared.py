"""What the pieces of one conversion share: spare buffers, and how many values became infinite.

A buffer that was written is used again, which saves the page faults of a fresh one. Only a buffer that came from here
is ever taken back. `tests/test_convert.py` enforces this.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from ..errors import quote
from ..model import Finding

SPARE = 16  # buffers that are kept


class Shared:
    """One for each conversion; its methods may be called from any thread."""

    def __init__(self) -> None:
        self._counts: list[tuple[str, str, int]] = []
        self._spare: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
        self._lent: weakref.WeakValueDictionary[int, np.ndarray[Any, Any]] = weakref.WeakValueDictionary()

    def buffer(self, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """An uninitialised buffer on a cache line."""
        try:
            root = self._spare.pop()
        except IndexError:
            root = np.empty(nbytes + 64, np.uint8)
        if root.size < nbytes + 64:
            root = np.empty(nbytes + 64, np.uint8)
        self._lent[id(root)] = root
        start = -root.ctypes.data % 64
        return root[start : start + nbytes]

    def give_back(self, piece: Any) -> None:
        """Take a buffer back, if it is one of ours; nobody may look at it afterwards."""
        base = piece.base if isinstance(piece, np.ndarray) else None
        root = self._lent.get(id(base))
        if root is not None and root is base:
            del self._lent[id(base)]
            if len(self._spare) < SPARE:
                self._spare.append(root)

    def overflowed(self, name: str, encoding: str, count: int) -> None:
        """So many values of a tensor became infinite."""
        self._counts.append((name, encoding, count))

    @property
    def counts(self) -> list[tuple[str, str, int]]:
        """What `overflowed` was told."""
        return self._counts

    def findings(self) -> list[Finding]:
        """A sentence for each tensor some of whose values became infinite."""
        totals: dict[tuple[str, str], int] = {}
        for name, encoding, count in self._counts:
            totals[name, encoding] = totals.get((name, encoding), 0) + count
        text = "tensor {}: {} values are too large for {} and became infinite"
        return [Finding("warning", "overflow", text.format(quote(n), count, e)) for (n, e), count in totals.items()]
