"""Fast scans of headers: the same columns as the plain parsers of `formats`, or None where anything is unusual.

A scan runs only in a process that has Numba loaded already. It accepts less than the plain parser, never more: an
escape in a name, white space or another order than the reference's writer gives, a big-endian file, a broken rule, a
number beyond 2**59, a name that may stand twice: for all of these it gives None, and the plain parser decides. It reads
nothing outside the buffer it is given.
`tests/test_scan.py` runs scans and plain parsers over the same files.

Names come as one text with a line break after each (JSON has no bare line break in a string): one decoding and one
`split` is the fastest way to many strings. Number columns are `array('q')`: Python ints to Python, a buffer to NumPy.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from ._jit import kernel

MAX_RANK = 64
MAX_GGUF_RANK, MAX_GGUF_NAME = 4, 63  # more is read with a warning: not here
LIMIT = 1 << 59  # of a number, an element count or a size: no sum or product below overflows
_LEAST = 40  # bytes of the shortest entry of a safetensors header, a few less
_QUOTE, _BACKSLASH, _COMMA, _DIGIT, _LINE, _OPEN, _CLOSE, _END = (np.int64(ord(c)) for c in '"\\,0\n{}]')
_SEED, _PRIME = np.uint64(0x9E3779B97F4A7C15), np.uint64(0x100000001B3)
_ZERO = np.int64(0)  # a start value that Numba does not take for a constant, with a compilation of its own
_METADATA, _DTYPE, _SHAPE, _OFFSETS = b'__metadata__":{', b':{"dtype":"', b',"shape":[', b',"data_offsets":['


def safetensors_header(
    text: bytes, start: int, size: int, encodings: Sequence[tuple[str, int, int]]
) -> tuple[list[str], tuple[int, int] | None, list[array[int]]] | None:
    """Scan the JSON text of a safetensors header.

    Parameters
    ----------
    text
        The header, not yet checked in any way.
    start, size
        Where the data begins and how long the file is: the tensors must fill it exactly.
    encodings
        Name, elements and bytes of a block of each dtype.

    Returns
    -------
    tuple or None
        Names; where the value of ``__metadata__`` stands in the text (not checked), or None; and the columns codes,
        dims, starts, offsets (absolute), sizes.
    """
    if not text:
        return None
    words = np.array([_dtype_word(name) for name, _, _ in encodings])
    blocks = np.array([block[1:] for block in encodings])
    cap = len(text) // _LEAST + 1
    names, hashes = np.empty(len(text) + 1, np.uint8), np.empty(cap, np.uint64)
    codes, sizes, begins, starts = (np.empty(k, np.int64) for k in (cap, cap, cap, cap + 1))
    dims, meta = np.empty(len(text) // 8 + MAX_RANK, np.int64), np.full(2, -1)
    n, used = _safetensors(
        np.frombuffer(text, np.uint8), size - start, words, blocks,
        names, hashes, codes, dims, starts, begins, sizes, meta,
    )  # fmt: skip
    found = _names(names[:used], hashes[:n]) if n > 0 else None
    if found is None:
        return None
    columns = (codes[:n], dims[: starts[n]], starts[: n + 1], begins[:n] + start, sizes[:n])
    return found, (int(meta[0]), int(meta[1])) if meta[0] >= 0 else None, [_array(c) for c in columns]


def gguf_tensors(
    table: bytes,
    start: int,
    size: int,
    n: int,
    blocks: Sequence[tuple[int, int]],
    alignment: int,
) -> tuple[list[str], list[int], list[array[int]]] | None:
    """Scan the tensor table of a little-endian GGUF file of version 2 or 3.

    Parameters
    ----------
    table
        The bytes from the start of the table; what stands behind it does not matter.
    start, size
        Where the table begins and how long the file is.
    n
        Number of tensors.
    blocks
        Elements and bytes of a block by ggml's type id; (0, 0) where there is no such type.

    Returns
    -------
    tuple or None
        Names; the type ids that occur; and the columns codes (indices into these), dims (row-major), starts, offsets
        (absolute), sizes.
    """
    names, hashes = np.empty(n * (MAX_GGUF_NAME + 1), np.uint8), np.empty(n, np.uint64)
    types, offsets, sizes, starts = (np.empty(k, np.int64) for k in (n, n, n, n + 1))
    dims = np.empty(n * MAX_GGUF_RANK, np.int64)
    position, used, end = _gguf(
        np.frombuffer(table, np.uint8), n, np.array(blocks), alignment,
        names, hashes, types, dims, starts, offsets, sizes,
    )  # fmt: skip
    begin = start + position + -(start + position) % alignment
    found = _names(names[:used], hashes) if position > 0 and begin + end <= size else None
    if found is None:
        return None
    kinds = np.flatnonzero(np.bincount(types, minlength=len(blocks)))
    codes = np.searchsorted(kinds, types)
    columns = (codes, dims[: starts[n]], starts, offsets + begin, sizes)
    return found, kinds.tolist(), [_array(c) for c in columns]


def table_bytes(n: int) -> int:
    """The most bytes of a table of `n` tensors that `gguf_tensors` takes."""
    return n * (8 + MAX_GGUF_NAME + 4 + MAX_GGUF_RANK * 8 + 4 + 8)


def skip_strings(data: bytes, position: int, count: int) -> tuple[int, int]:
    """Step over at most `count` strings with a length (64 bits, little-endian) in front.

    Returns
    -------
    tuple
        The position after the last whole string, and how many are left: all within `data`.
    """
    found: tuple[int, int] = _skip(np.frombuffer(data, np.uint8), position, count, _NONE)
    return found


def string_starts(data: bytes | memoryview, count: int) -> array[int] | None:
    """Where each of `count` strings begins, length included; None where `data` does not hold them."""
    out = np.empty(count, np.int64)
    _, left = _skip(np.frombuffer(data, np.uint8), 0, count, out)
    return None if left else _array(out)


_NONE = np.empty(0, np.int64)


def _array(column: np.ndarray) -> array[int]:
    out = array("q")
    out.frombytes(np.ascontiguousarray(column).data.cast("B"))
    return out


def _dtype_word(name: str) -> int:
    """A dtype's name as a number, no two alike: up to eleven digits to the base 49, none of them zero."""
    word = 0
    for c in name:
        word = word * 49 + ord(c) - 47
    return word


def _names(joined: np.ndarray, hashes: np.ndarray) -> list[str] | None:
    """The names, or None where two have the same hash (the plain parser looks whether they are the same)."""
    hashes.sort()
    if np.any(hashes[1:] == hashes[:-1]):
        return None
    try:
        return str(joined[:-1].data, "utf-8").split("\n")
    except UnicodeDecodeError:
        return None


@kernel
def _safetensors(text, space, words, blocks, names, hashes, codes, dims, starts, begins, sizes, meta):
    """Number of tensors (0 where anything is unusual) and bytes of `names`."""
    n = used = ndims = end = code = i = _ZERO
    size = len(text)
    while size > 0 and text[size - 1] == 32:  # the padding
        size -= 1
    starts[0] = 0
    while i + 1 < size and text[i] == (_COMMA if i else _OPEN) and text[i + 1] == _QUOTE and n < len(codes):
        i += 2
        inside = _match(text, i, _METADATA)
        if inside > 0:
            if meta[0] >= 0:
                break
            i = _skip_object(text, inside)
            meta[0], meta[1] = inside - 1, i
        else:
            i, used, hashes[n] = _name(text, i, names, used)
            i, code = _dtype(text, _match(text, i, _DTYPE), words, code)
            i, ndims = _shape(text, _match(text, i, _SHAPE), dims, starts[n])
            begin, i = _integer(text, _match(text, i, _OFFSETS), _COMMA)
            stop, i = _integer(text, i, _END)
            if i < 0 or i >= size or text[i] != _CLOSE or begin != end:
                break
            i += 1
            nbytes = _size(dims, starts[n], ndims, blocks[code, 0], blocks[code, 1])
            if nbytes < 0 or begin + nbytes != stop:
                break
            codes[n], begins[n], sizes[n] = code, begin, nbytes
            end = stop
            n += 1
            starts[n] = ndims
        if i == size - 1 and text[i] == _CLOSE:
            return n if end == space else 0, used
        if i < 0:
            break
    return 0, 0


@kernel
def _match(text, i, word):
    """The position after `word`; -1 where it does not stand at i (or i is -1)."""
    if i < 0 or i + len(word) > len(text):
        return -1
    for k in range(len(word)):
        if text[i + k] != word[k]:
            return -1
    return i + len(word)


@kernel
def _name(text, i, names, used):
    """Copy a string without escapes to `names`, and a line break: position after it (or -1), end of `names`, hash."""
    h = _SEED
    while i < len(text) and text[i] != _QUOTE:
        c = text[i]
        if c < 32 or c == _BACKSLASH:
            return -1, used, h
        names[used] = c
        h = (h ^ np.uint64(c)) * _PRIME
        used += 1
        i += 1
    names[used] = _LINE
    return i + 1 if i < len(text) else -1, used + 1, h


@kernel
def _skip_object(text, i):
    """The position after an object that was entered before i, by its braces; -1 where it does not end."""
    depth, quoted = 1, False
    while 0 < i < len(text):
        c = text[i]
        i += 1
        if c == _QUOTE:
            quoted = not quoted
        elif quoted:
            i += c == _BACKSLASH
        elif c == _OPEN:
            depth += 1
        elif c == _CLOSE:
            depth -= 1
            if depth == 0:
                return i
    return -1


@kernel
def _dtype(text, i, words, guess):
    """Position after a dtype's name and its quote (or -1), and its index; the one before it is tried first."""
    if i < 0:
        return -1, guess
    word, end = _ZERO, min(i + 12, len(text))
    while i < end and text[i] != _QUOTE:
        digit = np.int64(text[i]) - 47
        if not 1 <= digit <= 48:
            return -1, guess
        word = word * 49 + digit
        i += 1
    if i == end:
        return -1, guess
    if words[guess] == word:
        return i + 1, guess
    for code in range(len(words)):
        if words[code] == word:
            return i + 1, code
    return -1, guess


@kernel
def _shape(text, i, dims, k):
    """Position after a list that was entered before i (or -1), and where its integers end in `dims`, from k on."""
    if 0 <= i < len(text) and text[i] == _END:
        return i + 1, k
    limit = min(k + MAX_RANK, len(dims))
    while 0 <= i < len(text) and k < limit:
        dim, after = _integer(text, i, _COMMA)
        if after < 0:
            dim, after = _integer(text, i, _END)
            if after >= 0:
                dims[k] = dim
                return after, k + 1
        dims[k] = dim
        k += 1
        i = after
    return -1, k


@kernel
def _integer(text, i, stop):
    """A plain integer with `stop` behind it: its value, and the position after both (or -1)."""
    first, value = i, _ZERO
    while 0 <= i < len(text) and i - first < 18 and 48 <= text[i] <= 57:
        value = value * 10 + (np.int64(text[i]) - _DIGIT)
        i += 1
    good = (
        0 <= first < i < len(text) and text[i] == stop and value <= LIMIT and (text[first] != _DIGIT or i - first == 1)
    )
    return value, i + 1 if good else -1


@kernel
def _size(dims, first, end, block, nbytes):
    """Bytes of a tensor; -1 where they are no whole blocks, or where a product passes the limit."""
    numel = 1
    for k in range(first, end):
        dim = dims[k]
        if dim < 0 or dim > LIMIT:
            return -1
        if (dim >> 29 != 0 or numel >> 30 != 0) and dim != 0 and numel > LIMIT // dim:
            return -1
        numel *= dim
    blocks = numel
    if block != 1:
        if block == 0 or numel % block:
            return -1
        blocks = numel // block
    return blocks * nbytes if blocks < 1 << 50 else -1


@kernel
def _gguf(table, n, blocks, alignment, names, hashes, types, dims, starts, offsets, sizes):
    """Bytes of the table (-1 where anything is unusual) and of `names`, and the end of the data."""
    i = used = k = end = expected = _ZERO
    starts[0] = 0
    for t in range(n):
        length = _u64(table, i) if i + 8 <= len(table) else -1
        i += 8
        if length < 0 or length > MAX_GGUF_NAME or i + length + 4 > len(table):
            return -1, 0, 0
        h = _SEED
        for b in range(i, i + length):
            c = table[b]
            if c == _LINE:
                return -1, 0, 0
            names[used] = c
            used += 1
            h = (h ^ np.uint64(c)) * _PRIME
        hashes[t] = h
        names[used] = _LINE
        used += 1
        i += length
        rank = _u32(table, i)
        i += 4
        if rank > MAX_GGUF_RANK or i + 8 * rank + 12 > len(table):
            return -1, 0, 0
        for d in range(rank):
            dims[k + rank - 1 - d] = _u64(table, i)
            i += 8
        kind = _u32(table, i)
        offset = _u64(table, i + 4)
        i += 12
        if kind >= len(blocks) or offset != expected:
            return -1, 0, 0
        block = blocks[kind, 0]
        size = _size(dims, k, k + rank, block, blocks[kind, 1])
        if size < 0 or (block > 1 and (rank == 0 or dims[k + rank - 1] % block != 0)):
            return -1, 0, 0
        k += rank
        end = offset + size
        if end > LIMIT:
            return -1, 0, 0
        expected = (end + alignment - 1) & -alignment
        starts[t + 1], types[t], offsets[t], sizes[t] = k, kind, offset, size
    return i, used, end


@kernel
def _skip(data, i, count, out):
    """Step over whole strings, noting in `out` (where it is as long) where each begins."""
    done = 0
    while done < count and i + 8 <= len(data):
        length = _u64(data, i)
        if length < 0 or length > len(data) - i - 8:
            break
        if done < len(out):
            out[done] = i
        i += 8 + length
        done += 1
    return i, count - done


@kernel
def _u32(data, i):
    """The little-endian 32-bit number at i (index arithmetic without a sign saves the test for a negative one)."""
    j, one = np.uint64(i), np.uint64(1)
    low = np.int64(data[j]) | np.int64(data[j + one]) << 8
    return low | np.int64(data[j + one + one]) << 16 | np.int64(data[j + one + one + one]) << 24


@kernel
def _u64(data, i):
    """The little-endian 64-bit number at i, negative where int64 does not hold it."""
    return _u32(data, i) | _u32(data, i + 4) << 32
