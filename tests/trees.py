"""Random parameter trees, and comparing two of them to the last bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

DTYPES = [
    np.dtype(d)
    for d in (
        "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
        "float16", "float32", "float64", "complex64",
        ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu,
        ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz,
    )
]  # fmt: skip
SHAPES = [(), (0,), (1,), (5,), (3, 4), (2, 0, 3), (4, 3, 2)]


def bits(rng: np.random.Generator, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """An array of random bits (NaN payloads, −0.0 and all)."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = rng.integers(0, 2 if dtype == np.bool_ else 256, count, np.uint8)
    return raw.view(dtype).reshape(shape)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Arrays of any dtype, shape and memory layout."""
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    a = bits(rng, draw(st.sampled_from(DTYPES)), draw(st.sampled_from(SHAPES)))
    how = draw(st.sampled_from(["plain", "fortran", "reversed", "strided", "big"]))
    if how == "fortran":
        return np.asfortranarray(a)
    if how == "reversed" and a.ndim:
        return a[::-1]
    if how == "strided" and a.ndim:
        return np.repeat(a, 2, axis=-1)[..., ::2]
    if how == "big" and a.dtype.kind in "iufc" and a.dtype.isbuiltin == 1 and a.dtype.itemsize > 1:
        return a.astype(a.dtype.newbyteorder(">"))
    return a


keys = st.one_of(
    st.sampled_from(
        ["a", "b", "W", "layers", "0", "1", "2", "a.b", "%", "%2E", "a%2Eb", "", ".", "..", "$record", "é", "é"]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
).filter(lambda k: not k.endswith("__qscale") and k != "__metadata__")
literals = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(exclude_categories=["Cs"]))
)
leaves = st.one_of(arrays(), literals)
nodes = st.recursive(
    leaves,
    lambda child: st.one_of(
        st.dictionaries(keys, child, max_size=4), st.lists(child, max_size=4), st.lists(child, max_size=3).map(tuple)
    ),
    max_leaves=12,
)
trees = st.one_of(
    st.dictionaries(keys, nodes, max_size=4), st.lists(nodes, max_size=4), st.lists(nodes, max_size=3).map(tuple)
)


def same(a: Any, b: Any) -> bool:
    """Equal structure, key order, types and bits."""
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        kind = list if isinstance(a, list) else tuple
        return type(b) is kind and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and same_bits(a, b)
    if isinstance(a, float):
        return type(b) is float and (np.float64(a).tobytes() == np.float64(b).tobytes() or (a != a and b != b))
    return type(a) is type(b) and bool(a == b)


def same_bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Equal dtype (byte order aside), shape and bits."""
    little = a.dtype.newbyteorder("=")
    return little == b.dtype and a.shape == b.shape and np.ascontiguousarray(a, little).tobytes() == b.tobytes()
