"""What the adapter uses of AITER, computed on the CPU by what AITER documents, without its code.

Left out: AITER rounds activations to MXFP4, in which the adapter has no part.
"""

from __future__ import annotations

from enum import IntEnum

from aiter import dtypes

__all__ = ["ActivationType", "QuantType", "dtypes"]


class ActivationType(IntEnum):
    No = -1
    Silu = 0
    Gelu = 1
    Swiglu = 2


class QuantType(IntEnum):
    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5
