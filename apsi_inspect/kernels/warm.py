"""Compile every kernel into the cache: what `apsi warm` does, once per machine and version.

Each kernel that this CPU would run is called over an empty range, with arrays of the kinds the drivers pass (inputs
read-only), which compiles it or loads it from the cache. `tests/test_kernels.py` and `tests/test_error.py` check that
decoding, encoding, statistics and errors compile nothing afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np

from ._jit import vectors_pay

Task = tuple[str, Callable[..., Any], tuple[Any, ...]]


def _array(shape: int | tuple[int, ...], dtype: Any, *, given: bool = False) -> np.ndarray:
    """Zeros; read-only when a driver gives it to a kernel to read."""
    a = np.zeros(shape, dtype)
    a.flags.writeable = not given
    return a


def _functions(module: str, prefix: str) -> Iterator[tuple[str, Any]]:
    """The kernels of a module by name; the explicit-vector twin of each where it is the one that runs."""
    plain = import_module(f"..{module}", __name__)
    names = [n for n, f in vars(plain).items() if n.startswith(prefix) and hasattr(f, "py_func")]
    twins = plain
    if vectors_pay():
        try:
            twins = import_module(f"..{module}_simd", __name__)
        except ModuleNotFoundError as e:
            if e.name != f"{plain.__name__}_simd":
                raise
    for name in names:
        yield f"{module}.{name}", getattr(twins, name, getattr(plain, name))


def _decoders() -> Iterator[Task]:
    raw, values, codes = _array(0, np.uint8, given=True), _array(0, np.float32), _array(0, np.uint8)
    table, grid = _array(256, np.float32, given=True), _array((1, 8), np.int8, given=True)
    for module in ("blocks", "kquants", "iquants"):
        for name, f in _functions(module, "decode_"):
            yield name, f, (raw, values, 0, 0, *((grid,) if "grid" in f.py_func.__code__.co_varnames else ()))
    for name, f in _functions("floats", "widen"):
        yield name, f, (raw, values, 0, 0, *((table, 0) if "table" in f.py_func.__code__.co_varnames else ()))
    for name, f in _functions("floats", "unpack_"):
        yield name, f, (raw, codes, 0, 0)
    matrix, scale = _array((0, 1), np.float32), _array((1, 1), np.float32, given=True)
    for name, f in _functions("scaled", "decode_"):
        yield name, f, (raw, matrix, 0, 0, table, 0, scale, 1, 1, 1, 1)


def _encoders() -> Iterator[Task]:
    x, raw = _array(0, np.float32, given=True), _array(0, np.uint8)
    for module in ("encode_blocks", "encode_kquants", "encode_floats"):
        for name, f in _functions(module, "encode_"):
            yield name, f, (x, raw, 0, 0)
    for name, f in _functions("encode_floats", "count_"):
        yield name, f, (x, 0, 0)
    scale = _array(0, np.float32)
    for name, f in _functions("encode_scaled", "encode_runs"):
        yield name, f, (x, raw, scale, 0, 1, 1, False, 0, 0)
    for name, f in _functions("encode_scaled", "encode_across"):
        yield name, f, (x, raw, scale, 0, 1, 1, 1, 0, 0)
    for name, f in _functions("encode_scaled", "absmax"):
        yield name, f, (x, 0, 0, _array(32, np.float32))
    for name, f in _functions("encode_scaled", "scale_of"):
        yield name, f, (np.float32(0), np.float32(1))
    for name, f in _functions("encode_scaled", "pack_"):
        yield name, f, (raw, raw, 1, 0, 0)


def _errors() -> Iterator[Task]:
    from . import error, scaled

    x, d = _array(0, np.float32, given=True), _array(0, np.float64, given=True)
    y, rows, row = _array(0, np.float32), _array((0, 1), float), _array(error.COLUMNS, float)
    yield "error.pair_sums", error.pair_sums, (x, x, rows)
    yield "error.wide_sums", error.wide_sums, (d, x, rows)
    yield "error.wide_sums", error.wide_sums, (d, d, rows)
    yield "error.weigh", error.weigh, (x, x, _array(1, np.float32, given=True), 0, row)
    yield "error.rest", error.rest, (x, x, 0, row)
    yield "error.alone", error.alone, (x, row)
    yield "error.alone", error.alone, (d, row)
    yield "error.beyond", error.beyond, (x, y, y, np.float32(0), np.float32(0))
    yield "error.put_codes", error.put_codes, (_array(0, np.uint8), 1, 0, 1, 0)
    yield "error.outside", error.outside, (x, np.float32(0), np.float32(1))
    yield "error.outside_runs", error.outside_runs, (x, x, np.float32(1), 1, 1)
    raw, table = _array(0, np.uint8, given=True), _array(256, np.float32, given=True)
    matrix, scale = _array((0, 1), np.float32), _array((1, 1), np.float32, given=True)
    yield "scaled.decode_none", scaled.decode_none, (raw, matrix, 0, 0, table, 0, scale, 1, 1, 1, 1)
    if vectors_pay():
        for name, f in _functions("error_blocks", "error_"):
            yield name, f, (x, rows)


def _others() -> Iterator[Task]:
    from . import pairs, scan, stats

    counters = _array(0, np.uint32)
    yield "stats.stats_f32", stats.stats_f32, (_array(0, np.float32, given=True), 0, 0, _array((0, 1), float), counters)
    for f, i in ((np.float32, np.uint32), (np.float64, np.uint64)):
        x, bits = _array(0, f, given=True), _array(0, i, given=True)
        yield "pairs.unequal", pairs.unequal, (x, x, bits, bits)
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    yield "scan.safetensors_header", scan.safetensors_header, (header, 0, 4, [("F32", 1, 4)])
    yield "scan.gguf_tensors", scan.gguf_tensors, (b"", 0, 0, 0, [(1, 4)], 32)
    yield "scan.string_starts", scan.string_starts, (b"", 0)


def warm(progress: Callable[[int, int, str], None] | None = None) -> int:
    """Compile all kernels, or load them from the cache.

    Parameters
    ----------
    progress
        Called with (how many are done, how many there are, the name of the next) before each kernel and at the end.

    Returns
    -------
    int
        How many kernels there are.
    """
    tasks = [*_decoders(), *_encoders(), *_errors(), *_others()]
    for done, (name, f, args) in enumerate(tasks):
        if progress is not None:
            progress(done, len(tasks), name)
        f(*args)
    if progress is not None:
        progress(len(tasks), len(tasks), "")
    return len(tasks)
