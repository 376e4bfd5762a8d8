"""The encoders of super-blocks of 256, gathered from their families: what `Encoding.encode` names.

`encode_kmin` has Q2_K, Q4_K and Q5_K, `encode_kmax` Q3_K and Q6_K, `encode_iq4` IQ4_XS: plain loops, the definition.
"""

from __future__ import annotations

from .encode_iq4 import encode_iq4_xs
from .encode_kmax import encode_q3_k, encode_q6_k
from .encode_kmin import encode_q2_k, encode_q4_k, encode_q5_k

__all__ = ["encode_iq4_xs", "encode_q2_k", "encode_q3_k", "encode_q4_k", "encode_q5_k", "encode_q6_k"]
