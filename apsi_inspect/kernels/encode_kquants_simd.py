"""The encoders of super-blocks of 256, gathered from their families: explicit vectors, for CPUs where they pay.

Same names and bits as in `encode_kquants`.
"""

from __future__ import annotations

from .encode_iq4_simd import encode_iq4_xs
from .encode_kmax_simd import encode_q3_k, encode_q6_k
from .encode_kmin_simd import encode_q2_k, encode_q4_k, encode_q5_k

__all__ = ["encode_iq4_xs", "encode_q2_k", "encode_q3_k", "encode_q4_k", "encode_q5_k", "encode_q6_k"]
