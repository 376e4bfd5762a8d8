"""Chunks of a file behind a URL, each checked when it is fetched: only checked bytes are given out.

Contract: what is checked is what is served, in one reading; the last few chunks are kept, as neighbouring tensors share
them. The mapped file's twin is `check.Lazy`. `tests/test_remote_model.py` enforces this.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from ..errors import VerificationError
from .check import damage_of, name_some
from .digests import CHUNK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..source import ByteSource
    from .check import Claims

_KEPT = 4  # chunks


class LazyFetched:
    """The checked bytes of one file.

    Parameters
    ----------
    source
        The file.
    claims
        What its header says; it has digests of chunks.
    """

    def __init__(self, source: ByteSource, claims: Claims) -> None:
        self.name, self.size = source.name, source.size
        self._source, self._claims = source, claims
        self._chunks: OrderedDict[int, memoryview] = OrderedDict()

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Checked bytes of a range of the data section.

        Raises
        ------
        VerificationError
            One of its chunks is damaged.
        """
        out, begin = memoryview(bytearray(nbytes)), offset - self._claims.start
        for i in range(begin // CHUNK, -(-(begin + nbytes) // CHUNK)):
            a, z = max(begin, i * CHUNK), min(begin + nbytes, (i + 1) * CHUNK)
            out[a - begin : z - begin] = self._chunk(i)[a - i * CHUNK : z - i * CHUNK]
        return out.toreadonly()

    def _chunk(self, number: int) -> memoryview:
        if number not in self._chunks:
            self._chunks[number] = self._fetched(number)
        self._chunks.move_to_end(number)
        while len(self._chunks) > _KEPT:
            self._chunks.popitem(last=False)
        return self._chunks[number]

    def _fetched(self, number: int) -> memoryview:
        assert self._claims.chunks is not None
        nbytes = min(CHUNK, self._claims.size - number * CHUNK)
        data = self._source.view(self._claims.start + number * CHUNK, nbytes)
        if hashlib.sha256(data).hexdigest() != self._claims.chunks[number]:
            (damage,) = damage_of(self._source, self._claims, [number])
            raise VerificationError(
                self.name,
                f"bytes {damage.begin} to {damage.end} are damaged (chunk {number}): {name_some(damage.tensors)}",
                hint="they came so from the server: tell who keeps the file",
            )
        return data
