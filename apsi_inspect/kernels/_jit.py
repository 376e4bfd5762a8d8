"""The one decorator of every kernel, and the question "what can this CPU do?".

Contract: a function under `@kernel` is compiled by Numba on its first call, without the GIL, without fast maths (no
contraction, no reassociation: bits equal a C build without FMA), without bounds checks, and cached on disk. The cache
follows the sources: Numba itself looks only at the file a kernel stands in, so the digest of the modules that kernels
borrow code from is part of the key. Where nothing can be written (a read-only install without `NUMBA_CACHE_DIR`) a
kernel is compiled once per process. `tests/test_kernels.py` enforces this.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache
from numba.core.registry import cpu_target

# The modules whose code ends up inside kernels of other modules.
SHARED = ("_jit.py", "simd.py", "bits.py", "lanes.py", "encode_common.py")


@cache
def shared_digest() -> str:
    """SHA-256 of the sources that every kernel may contain code from."""
    here = Path(__file__).parent
    return hashlib.sha256(b"".join((here / name).read_bytes() for name in SHARED)).hexdigest()


class KernelCache(FunctionCache):
    """Numba's cache with `shared_digest` in the key; a cache that cannot be written costs time, not the result."""

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), shared_digest())

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as e:
            self.disable()
            warnings.warn(f"a compiled kernel could not be cached ({e}); it is compiled again in the next process",
                          RuntimeWarning, stacklevel=2)


def kernel(fn: Callable[..., Any]) -> Any:
    """Compile `fn` lazily as described at the top of this module."""
    dispatcher: Any = njit(nogil=True, fastmath=False, error_model="numpy", boundscheck=False)(fn)
    try:
        dispatcher._cache = KernelCache(fn)
    except RuntimeError as e:  # Numba: "no locator available": nowhere to write
        if "no locator" not in str(e):
            raise
    return dispatcher


@cache
def cpu_features() -> frozenset[str]:
    """The features Numba compiles for: those of the host unless NUMBA_CPU_NAME / NUMBA_CPU_FEATURES say otherwise."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return frozenset(f[1:] for f in features.split(",") if f.startswith("+"))


def cpu_has(*features: str) -> bool:
    """Whether code may use all of `features` (LLVM's names: ``"f16c"``, ``"avx2"``)."""
    return cpu_features().issuperset(features)


@cache
def half_in_hardware() -> bool:
    """Whether LLVM can convert `half` without a library call (which Numba could not resolve, and would crash on)."""
    triple = cpu_target.target_context.codegen().magic_tuple()[0]
    return triple.startswith(("aarch64", "arm64")) or cpu_has("f16c")


@cache
def vectors_pay() -> bool:
    """Whether the explicit-vector kernels are the ones to run; the plain loops serve every other CPU."""
    triple = cpu_target.target_context.codegen().magic_tuple()[0]
    return triple.startswith(("aarch64", "arm64")) or cpu_has("f16c", "avx2")
