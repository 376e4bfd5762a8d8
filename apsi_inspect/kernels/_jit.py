"""The one decorator of every kernel, and the question "what can this CPU do?".

Contract: a function under `@kernel` is compiled by Numba on its first call, without the GIL, without fast maths (no
contraction, no reassociation: bits equal a C build without FMA), without bounds checks, and cached on disk. The cache
follows the sources: Numba itself looks only at the file a kernel stands in, so the digest of the modules that it
borrows code from is part of the key. Where nothing can be written (a read-only install without `NUMBA_CACHE_DIR`) a
kernel is compiled once per process. `tests/test_kernels.py` enforces this.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache
from numba.core.registry import cpu_target

# The modules whose code ends up inside kernels of other modules.
HERE = Path(__file__).parent


@cache
def borrowed(module: str) -> frozenset[str]:
    """The modules of this package that `module` takes code or constants from, itself among them."""
    text = (HERE / f"{module}.py").read_text(encoding="utf-8")
    found = {module}
    for name in re.findall(r"^from \.(\w+) import", text, re.MULTILINE):
        found |= borrowed(name)
    return frozenset(found)


@cache
def sources_digest(module: str) -> str:
    """SHA-256 of all the sources that a kernel of `module` may contain code from."""
    names = borrowed(module) if (HERE / f"{module}.py").exists() else borrowed("bits")
    return hashlib.sha256(b"".join((HERE / f"{name}.py").read_bytes() for name in sorted(names))).hexdigest()


@cache
def _say_once() -> None:
    """Tell a person at a terminal or a notebook what the first use is waiting for; APSI_QUIET=1 silences it."""
    if (sys.stderr.isatty() or "ipykernel" in sys.modules) and not os.environ.get("APSI_QUIET"):
        print("apsi_inspect: compiling for this CPU, once; `apsi warm` compiles everything ahead", file=sys.stderr)


class KernelCache(FunctionCache):
    """Numba's cache with `sources_digest` in the key; a cache that cannot be written costs time, not the result."""

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        module = self._py_func.__module__.rpartition(".")[2]
        return (*super()._index_key(sig, codegen), sources_digest(module))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = super().load_overload(sig, target_context)
        if found is None:
            _say_once()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as e:
            self.disable()
            warnings.warn(
                f"a compiled kernel could not be cached ({e}); it is compiled again in the next process",
                RuntimeWarning,
                stacklevel=2,
            )


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
