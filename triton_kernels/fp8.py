"""float32 to fp8 E4M3 with the same bits on every chip, whatever its own cast does.

Rounds once to nearest, ties to even; magnitudes beyond the largest finite value, infinities too, become it; NaN stays
NaN.

    kind  type       largest  smallest normal  subnormal step  NaN
    1     e4m3fn     448      2**-6            2**-9           0x7F (and 0xFF)
    2     e4m3fnuz   240      2**-7            2**-10          0x80; there is no -0

Below the smallest normal number, adding the power of two whose last place is the subnormal step leaves the code in the
low bits of the sum; above it, the code is the rounded upper bits with the bias of the exponent changed.

Sources: OCP 8-bit Floating Point Specification; AMD CDNA3 ISA guide for the FNUZ encoding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def fp8_fn(x, KIND: tl.constexpr):
    """float32 as the byte of e4m3fn (KIND 1) or e4m3fnuz (KIND 2)."""
    LARGEST: tl.constexpr = 448.0 if KIND == 1 else 240.0
    SMALLEST: tl.constexpr = 0.015625 if KIND == 1 else 0.0078125
    # 2**14 and 2**13: float32 numbers whose last place is 2**-9 and 2**-10.
    STEP: tl.constexpr = 16384.0 if KIND == 1 else 8192.0
    STEP_BITS: tl.constexpr = 0x46800000 if KIND == 1 else 0x46000000
    REBIAS: tl.constexpr = (127 - 7) << 3 if KIND == 1 else (127 - 8) << 3
    size = tl.minimum(tl.abs(x), LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - REBIAS
    code = tl.where(size < SMALLEST, (size + STEP).to(tl.int32, bitcast=True) - STEP_BITS, normal)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    if KIND == 1:
        code = tl.where(x == x, code | sign, 0x7F)
    else:
        code = tl.where(x == x, tl.where(code == 0, 0, code | sign), 0x80)
    return code.to(tl.uint8)


def fp8_ref(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` as bytes (uint8) of `dtype`: float8_e4m3fn, float8_e4m3fnuz, or uint8 for the first of them."""
    kind = torch.float8_e4m3fn if dtype == torch.uint8 else dtype
    largest = torch.finfo(kind).max
    return x.float().clamp(-largest, largest).masked_fill(x.isnan(), float("nan")).to(kind).view(torch.uint8)


def fp8_values_ref(stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What fp8 pages `[P, page, Hkv, D]` stand for, in float32; `scale` `[1]` or `[Hkv]` multiplies."""
    return stored.view(torch.float8_e4m3fn if stored.dtype == torch.uint8 else stored.dtype).float() * scale[:, None]
