"""What running a kernel over a tensor takes: finding it, aligned memory, a buffer as bytes, several threads.

Kernels release the GIL, so plain threads over equal ranges use the cores; results never depend on how many there are.
`tests/test_decode.py` enforces this.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

from ..errors import ValueRefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    Range = Callable[[int, int], None]
    Buffer = bytes | bytearray | memoryview | NDArray[Any]

MAX_THREADS = 8
THREADED_FROM = 1 << 20  # elements: below, starting a thread costs more than it saves


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy or ml_dtypes dtype of that name."""
    import ml_dtypes
    import numpy as np

    return np.dtype(getattr(ml_dtypes, name, name))


def aligned_empty(shape: Sequence[int], dtype: Any = "float32") -> NDArray[Any]:
    """`np.empty` whose first byte stands on a cache line, which streaming stores need (NumPy promises 16 bytes)."""
    import numpy as np

    kind: np.dtype[Any] = np.dtype(dtype)
    nbytes = prod(shape) * kind.itemsize
    raw: NDArray[Any] = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(kind).reshape(tuple(shape))


@cache
def kernel(spec: str) -> Callable[..., None]:
    """The kernel named ``"module:function"``: its explicit-vector twin where there is one and the CPU is up to it."""
    from ..kernels._jit import vectors_pay

    module, name = spec.split(":")
    if module in ("blocks", "kquants", "floats", "scaled", "encode_blocks", "encode_kquants") and vectors_pay():
        twin = getattr(import_module(f"..kernels.{module}_simd", __package__), name, None)
        if twin is not None:
            return twin  # type: ignore[no-any-return]
    return getattr(import_module(f"..kernels.{module}", __package__), name)  # type: ignore[no-any-return]


def in_parallel(run: Range, count: int, elements: int, threads: int | None) -> None:
    """Call `run(start, stop)` over [0, count); in equal parts on several threads when `elements` are many."""
    if threads is None:
        threads = min(os.cpu_count() or 1, MAX_THREADS) if elements >= THREADED_FROM else 1
    threads = max(1, min(threads, count))
    if threads == 1:
        run(0, count)
        return
    from concurrent.futures import ThreadPoolExecutor

    align = 64 if count >= 64 * 64 * threads else 1  # parts of a plain tensor begin on a cache line too
    edges = [count * i // threads // align * align for i in range(threads)] + [count]
    with ThreadPoolExecutor(threads - 1) as pool:
        others = [pool.submit(run, a, b) for a, b in pairwise(edges[1:])]
        run(edges[0], edges[1])
        for f in others:
            f.result()


def bytes_of(raw: Buffer) -> NDArray[np.uint8]:
    """A read-only view of a buffer as bytes (read-only so that a kernel is compiled for one kind of array)."""
    import numpy as np

    view = raw.view() if isinstance(raw, np.ndarray) else np.frombuffer(raw, np.uint8)
    if not view.flags.c_contiguous:
        raise ValueRefusedError("the bytes of a tensor must be C-contiguous")
    view = view.reshape(-1).view(np.uint8)
    view.flags.writeable = False
    return view
