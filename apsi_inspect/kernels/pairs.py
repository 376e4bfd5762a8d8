"""Which values of two arrays are not equal: counted in one pass.

Contract: two NaN are equal whatever their bits, zeros are equal whatever their sign, and of these the pairs whose signs
differ are counted apart. Counts do not depend on CPU, threads or cuts. `tests/test_pairs.py` compares with NumPy.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel

U32 = np.uint32
SEGMENT = 1 << 16  # pairs that are counted in 32 bits, as wide as the values: so LLVM makes vectors of both


@kernel
def unequal(x, y, u, v):
    """How many pairs differ, and how many zeros differ in their sign only.

    `x` and `y` are floats of one width, `u` and `v` their bits. Bits that differ in equal numbers are a zero's sign.
    """
    differ, signs = np.int64(0), np.int64(0)
    for a in range(0, x.size, SEGMENT):
        some, few = U32(0), U32(0)
        for i in range(a, min(x.size, a + SEGMENT)):
            p, q = x[i], y[i]
            some = U32(some + U32((p != q) & ((p == p) | (q == q))))
            few = U32(few + U32((p == q) & (u[i] != v[i])))
        differ += np.int64(some)
        signs += np.int64(few)
    return differ, signs
