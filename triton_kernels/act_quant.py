"""Quantise the tokens' activations to the block formats that matrix units with hardware block scales multiply.

    nvfp4   x ~ e2m1(code) * e4m3(scale[k // 16]) * scale2      scale = e4m3(amax / (6 * scale2)), scale2 given
    mxfp4   x ~ e2m1(code) * 2 ** (scale[k // 32] - 127)        amax is put into [3.5, 7): Quark's "even" rule
    mxfp8   x ~ e4m3(code) * 2 ** (scale[k // 32] - 127)        amax is put into (224, 448]: nothing saturates

Codes and E4M3 scales are rounded to nearest, ties to even, and saturate, with the same bits on every chip. `scale2` is
the static scale that a checkpoint's calibration left (`ExpertWeight.input_scale`). A block with a NaN or an infinity
gets a NaN scale, so that only its token is spoilt; a block of zeros has codes of zero.

Sources: OCP Microscaling Formats (MX) v1.0, sections 5 and 6.3; NVIDIA ModelOpt (NVFP4's scales); AMD Quark.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inkling_kernels.compile_case import CompileCase
from inkling_kernels.fp8 import fp8_fn
from inkling_kernels.moe_gemm_fp4 import e4m3_fn
from inkling_kernels.numerics import decode_e2m1, decode_e4m3, decode_e8m0, unpack_e2m1
from inkling_kernels.ragged import check_tensor
from inkling_kernels.target import TARGETS, Target

#: Values that share a scale.
BLOCKS = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}
_TWO_M119 = tl.constexpr(2.0**-119)


@triton.jit
def _e2m1_fn(x):
    """Codes of float32 values, uint8 0..15; ties to the even code, magnitudes above 6 saturate."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return (code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)).to(tl.uint8)


@triton.jit
def _power_fn(amax, TOP: tl.constexpr, ROUND_UP: tl.constexpr):
    """The E8M0 byte of the power of two that puts `amax` under 2 ** (`TOP` + 1), the next one where amax's mantissa is
    above (1.75) or, for `ROUND_UP`, at that; 1 for zeros."""
    bits = amax.to(tl.int32, bitcast=True)
    mantissa = bits & 0x7FFFFF
    next_one = (mantissa >= 0x600000) if ROUND_UP else (mantissa > 0x600000)
    byte = (bits >> 23) - TOP + next_one.to(tl.int32)
    return tl.where(bits == 0, 127, tl.minimum(tl.maximum(byte, 0), 254))


@triton.jit(do_not_specialize=["rows"])
def _quantise_kernel(
    code_ptr, scale_ptr, x_ptr, scale2_ptr, rows, columns, x_row, x_col, code_row, scale_row,
    KIND: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = 16 if KIND == "nvfp4" else 32
    B: tl.constexpr = BLOCK_K // SIZE
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    first = tl.program_id(1) * BLOCK_K
    col = (first + tl.arange(0, BLOCK_K)).to(tl.int64)
    inside = (row < rows)[:, None] & (col < columns)[None, :]
    x = tl.load(x_ptr + ((row * x_row)[:, None] + (col * x_col)[None, :]), mask=inside, other=0.0).to(tl.float32)
    x = tl.reshape(x, [BLOCK_T, B, SIZE])
    # A difference with itself is 0 but for NaN and infinity, which `tl.max` may pass over.
    bad = tl.max((x - x != 0.0).to(tl.int32), 2) != 0
    amax = tl.max(tl.where(x - x != 0.0, 0.0, tl.abs(x)), 2)
    if KIND == "nvfp4":
        scale2 = tl.load(scale2_ptr)
        byte = fp8_fn(tl.div_rn(amax, 6.0 * scale2), 1)
        step = e4m3_fn(byte) * _TWO_M119 * scale2
        byte = tl.where(bad, 0x7F, byte)
    else:
        power = _power_fn(amax, TOP=2 if KIND == "mxfp4" else 8, ROUND_UP=KIND == "mxfp4")
        step = tl.where(power == 0, 0x00400000, power << 23).to(tl.float32, bitcast=True)
        byte = tl.where(bad, 0xFF, power).to(tl.uint8)
    safe = tl.where(step > 0.0, step, 1.0)
    value = tl.where((step > 0.0)[:, :, None], tl.div_rn(x, safe[:, :, None]), 0.0)
    value = tl.reshape(tl.where(bad[:, :, None], float("nan"), value), [BLOCK_T, BLOCK_K])
    block = first // SIZE + tl.arange(0, B)
    scale_at = scale_ptr + ((row * scale_row)[:, None] + block.to(tl.int64)[None, :])
    tl.store(scale_at, byte, mask=(row < rows)[:, None] & (block < columns // SIZE)[None, :])
    if KIND == "mxfp8":
        tl.store(code_ptr + ((row * code_row)[:, None] + col[None, :]), fp8_fn(value, 1), mask=inside)
    else:
        low, high = tl.split(tl.reshape(_e2m1_fn(value), [BLOCK_T, BLOCK_K // 2, 2]))
        at = first // 2 + tl.arange(0, BLOCK_K // 2)
        mask = (row < rows)[:, None] & (at < columns // 2)[None, :]
        tl.store(code_ptr + ((row * code_row)[:, None] + at.to(tl.int64)[None, :]), low | (high << 4), mask=mask)


def quantise_activations(
    x: torch.Tensor, kind: str, scale2: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` `[T, K]` in `kind` -> codes uint8 `[T, K / 2]`, even columns in the low nibbles (mxfp8: bytes `[T, K]`), and
    scale bytes `[T, K / block]`; see the module. Any strides.

    `scale2` is NVFP4's static scale, float32 `[1]`; None is 1, an uncalibrated checkpoint's. K is a multiple of 32.
    Raises TypeError or ValueError naming the argument.
    """
    op = "quantise_activations"
    if kind not in BLOCKS:
        raise ValueError(f"{op}: kind is {kind!r}; expected one of {', '.join(BLOCKS)}")
    check_tensor(op, "x", x, (None, None), (torch.bfloat16, torch.float32))
    rows, columns = x.shape
    if columns % 32:
        raise ValueError(f"{op}: x has {columns} columns; expected a multiple of 32, whole blocks")
    if kind == "nvfp4":
        scale2 = torch.ones(1, device=x.device) if scale2 is None else scale2
        check_tensor(op, "scale2", scale2, (1,), (torch.float32,), x.device)
    elif scale2 is not None:
        raise ValueError(f"{op}: scale2 is given for {kind}; expected None, its scales are powers of two alone")
    codes = torch.empty(rows, columns if kind == "mxfp8" else columns // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, columns // BLOCKS[kind], dtype=torch.uint8, device=x.device)
    if x.numel():
        block_t, block_k = (1, 512) if rows < 64 else (8, 256)
        _quantise_kernel[(triton.cdiv(rows, block_t), triton.cdiv(columns, block_k))](
            codes, scales, x, scale2, rows, columns, *x.stride(), codes.stride(0), scales.stride(0), KIND=kind,
            BLOCK_T=block_t, BLOCK_K=block_k, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return codes, scales


def dequantise_activations(
    codes: torch.Tensor, scales: torch.Tensor, kind: str, scale2: torch.Tensor | None = None
) -> torch.Tensor:
    """What `quantise_activations` stands for, float32 `[T, K]`."""
    values = decode_e4m3(codes) if kind == "mxfp8" else decode_e2m1(unpack_e2m1(codes))
    factor = decode_e4m3(scales) if kind == "nvfp4" else decode_e8m0(scales)
    values = (values.unflatten(-1, (-1, BLOCKS[kind])) * factor.unsqueeze(-1)).flatten(-2)
    return values if scale2 is None else values * scale2


def _case(kind: str, tokens: int) -> CompileCase:
    def launch(target: Target) -> tuple[torch.Tensor, torch.Tensor]:
        scale2 = torch.empty(1, device="meta") if kind == "nvfp4" else None
        x = torch.empty(tokens, 6144, dtype=torch.bfloat16, device="meta")
        return quantise_activations(x, kind, scale2)

    anything = dict.fromkeys((t.arch for t in TARGETS), "")
    return CompileCase(f"{kind}, {tokens} tokens", "moe_experts=native", launch, instruction=anything)


COMPILE_CASES = tuple(_case(kind, tokens) for kind in BLOCKS for tokens in (8, 8192))
