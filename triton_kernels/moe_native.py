"""The routed experts on matrix units with hardware block scales: packed codes and scales are multiplied as they are.

As `moe_gemm`, with the tokens quantised too, each product's input on its own:

    w13 in   hardware                              tokens quantised to
    NVFP4    tcgen05 (sm100, sm103), sm120          NVFP4 by the checkpoint's `input_scale`: W4A4
    MXFP4    tcgen05 (sm100, sm103), CDNA4          MXFP8 (E4M3 codes): W4A8
    MXFP4    sm120                                  MXFP4: W4A4, the only product of four-bit codes that it has

Products accumulate in float32; gated values `[pairs, I]` and each pair's result are rounded to bfloat16 once. Sums over
a token's experts are those of `moe_gemm`. Beside rounding, results differ from `moe_gemm`'s by what quantising the
tokens costs: about a tenth in four bits, a few hundredths in eight, of a result's standard deviation.

Weights stay in "pairs", the order of the matrix unit. NVFP4's hardware scales are unsigned: `prepare_native` moves the
signs of negative ones, which checkpoints hardly have, to the codes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from inkling_kernels.act_quant import quantise_activations
from inkling_kernels.activation import silu_mul_fn
from inkling_kernels.compile_case import CompileCase
from inkling_kernels.moe_check import QUANTISED_TOLERANCE
from inkling_kernels.moe_gemm import (
    check_experts,
    sorted_pairs,
    tile_pairs_fn,
    tile_place_fn,
    weight_on_meta,
    weighted_sum,
)
from inkling_kernels.moe_gemm_plan import MoeConfig, MoePlan, moe_experts_plan
from inkling_kernels.numerics import ExpertWeight
from inkling_kernels.target import Target

# Tensor memory takes tiles of 128 weight rows. Scales of 128 columns fill a register.
SMALL_NATIVE = MoeConfig(block_m=16, block_n=256, block_k=128, num_warps=4, num_stages=2)
LARGE_NATIVE = MoeConfig(block_m=64, block_n=256, block_k=128, num_warps=8, num_stages=2)


def token_kind(format: str, target: Target | None) -> str:
    """What tokens are quantised to for weights in `format`; see the module. MXFP8 where `target` is None."""
    if format == "nvfp4":
        return "nvfp4"
    four_bits_alone = target is not None and target.vendor == "cuda" and "tcgen05" not in target.capabilities
    return "mxfp4" if four_bits_alone else "mxfp8"


def prepare_native(weight: ExpertWeight) -> ExpertWeight:
    """`weight` with scales that the hardware reads as they are; itself where they are already."""
    if weight.format != "nvfp4" or weight.scale is None:
        return weight
    bits = weight.scale.view(torch.uint8)
    negative = bits >= 0x80
    if not bool(negative.any()):
        return weight
    flip = (negative * 0x88).to(torch.uint8).repeat_interleave(8, -1)
    return replace(weight, data=weight.data ^ flip, scale=(bits & 0x7F).view(torch.float8_e4m3fn))


@triton.jit(do_not_specialize=["tiles"])
def _native_kernel(
    out_ptr, x_ptr, x_scale_ptr, input_ptr, w_ptr, scale_ptr, scale2_ptr, order_ptr, offsets_ptr, map_ptr, tiles, top_k,
    rows, columns, out_row, x_row, x_scale_row, w_expert, w_stride, scale_expert, scale_row, scale_col, scale2_expert,
    scale2_up, NVFP4: tl.constexpr, X: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """As `moe_gemm`'s `_grouped_kernel`, of codes and scales on both sides. `GATED`: gate and up rows are multiplied in
    one tile, as they lie in memory, and parted behind the sum."""
    SIZE: tl.constexpr = 16 if NVFP4 else 32
    PACK: tl.constexpr = 2 if X == "e2m1" else 1
    ROWS: tl.constexpr = BLOCK_N * 2 if GATED else BLOCK_N
    tile, place = tile_place_fn(tiles, rows, BLOCK_N, GROUP_M)
    expert = tl.load(map_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    paired, source, to = tile_pairs_fn(order_ptr, offsets_ptr, map_ptr, tiles, tile, expert, top_k, GATED, BLOCK_M)
    source = source.to(tl.int64)
    w_row = (place * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = w_row < (rows * 2 if GATED else rows)
    w_ptr += expert * w_expert
    scale_ptr += expert * scale_expert

    total = tl.zeros([ROWS, BLOCK_M], tl.float32)
    for first in range(0, columns, BLOCK_K):
        at = first // PACK + tl.arange(0, BLOCK_K // PACK)
        x_mask = paired[None, :] & (at < columns // PACK)[:, None]
        x = tl.load(x_ptr + ((source * x_row)[None, :] + at.to(tl.int64)[:, None]), mask=x_mask, other=0)
        block = first // SIZE + tl.arange(0, BLOCK_K // SIZE)
        inside = (block < columns // SIZE)[None, :]
        block = block.to(tl.int64)[None, :]
        x_scale = tl.load(
            x_scale_ptr + ((source * x_scale_row)[:, None] + block), mask=paired[:, None] & inside, other=0
        )
        at = first // 2 + tl.arange(0, BLOCK_K // 2)
        w_mask = live[:, None] & (at < columns // 2)[None, :]
        w = tl.load(w_ptr + ((w_row * w_stride)[:, None] + at.to(tl.int64)[None, :]), mask=w_mask, other=0)
        scale_at = scale_ptr + ((w_row * scale_row)[:, None] + block * scale_col)
        w_scale = tl.load(scale_at, mask=live[:, None] & inside, other=0)
        if NVFP4:
            w_scale = w_scale.to(tl.float8e4nv, bitcast=True)
            x_scale = x_scale.to(tl.float8e4nv, bitcast=True)
        total = tl.dot_scaled(w, w_scale, "e2m1", x, x_scale, X, total)
    row = (place * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    gate, up = total, total
    if GATED:
        gate, up = tl.split(tl.trans(tl.reshape(total, [BLOCK_N, 2, BLOCK_M]), 0, 2, 1))
    if NVFP4:
        scale2 = tl.load(input_ptr)
        gate *= tl.load(scale2_ptr + expert * scale2_expert) * scale2
        up *= tl.load(scale2_ptr + (expert * scale2_expert + scale2_up)) * scale2
    y = silu_mul_fn(gate, up) if GATED else gate
    out_at = out_ptr + ((to.to(tl.int64) * out_row)[None, :] + row[:, None])
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=paired[None, :] & (row < rows)[:, None])


def native_config(pairs: int, experts: int) -> MoeConfig:
    """The tile shape for `pairs` (token, choice) pairs over `experts` experts held."""
    return LARGE_NATIVE if pairs >= 32 * experts else SMALL_NATIVE


def moe_experts_native(
    x: torch.Tensor,
    w13: ExpertWeight,
    w2: ExpertWeight,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    target: Target | None = None,
    config: MoeConfig | None = None,
) -> torch.Tensor:
    """Apply each token's experts with hardware block scales; see the module. Arguments, result and errors are those of
    `moe_gemm.moe_experts`, for weights in NVFP4 or MXFP4 in the order "pairs"; forward only.
    """
    tokens, hidden, width = check_experts(x, w13, w2, ids, weights)
    if w13.scale is None or w2.scale is None:
        raise ValueError("moe_experts_native: w13 is bf16; expected nvfp4 or mxfp4, which have block scales")
    w13.require_order("pairs", "w13")
    w2.require_order("pairs", "w2")
    experts = w13.num_experts
    chosen = config or native_config(ids.numel(), experts)
    plan = moe_experts_plan(
        tokens, ids.shape[1], experts, hidden, width, format="native", dtype=x.dtype, target=target, config=chosen
    )
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if plan.tiles == 0 or experts == 0:
        return out.zero_()
    kind = token_kind(w13.format, target)
    pairs = sorted_pairs(ids, experts, plan, target)
    inner = torch.empty(ids.numel(), width, dtype=x.dtype, device=x.device)
    _multiply(inner, x, w13, w13.scale, pairs, ids.shape[1], plan, kind, gated=True)
    each = torch.empty(ids.numel(), hidden, dtype=x.dtype, device=x.device)
    _multiply(each, inner, w2, w2.scale, pairs, ids.shape[1], plan, kind, gated=False)
    return weighted_sum(out, each, ids, weights, experts, plan)


moe_experts_native.check_tolerance = QUANTISED_TOLERANCE  # type: ignore[attr-defined]


def _multiply(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: ExpertWeight,
    scale: torch.Tensor,
    pairs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    top_k: int,
    plan: MoePlan,
    kind: str,
    *,
    gated: bool,
) -> None:
    nvfp4, scale, scale2, given = kind == "nvfp4", scale.view(torch.uint8), weight.scale2, weight.input_scale
    if nvfp4 and given is None:
        given = torch.ones(1, device=x.device)
    codes, scales = quantise_activations(x, kind, given if nvfp4 else None)
    second = (0, 0) if scale2 is None else (scale2.stride(0), scale2.stride(1) if scale2.dim() == 2 else 0)
    _native_kernel[plan.up_grid if gated else plan.down_grid](
        out, codes, scales, given, weight.data, scale, scale2, *pairs, plan.tiles, top_k, out.shape[1], weight.cols,
        out.stride(0), codes.stride(0), scales.stride(0), *weight.data.stride()[:2], *scale.stride(), *second,
        NVFP4=nvfp4, X="e4m3" if kind == "mxfp8" else "e2m1", GATED=gated, BLOCK_M=plan.config.block_m,
        BLOCK_N=plan.up_block_n if gated else plan.down_block_n, BLOCK_K=plan.config.block_k,
        GROUP_M=plan.config.group_m, num_warps=plan.config.num_warps, num_stages=plan.config.num_stages,
        enable_fp_fusion=True,
    )  # fmt: skip


def _case(format: str, tokens: int, width: int) -> CompileCase:
    def launch(target: Target) -> torch.Tensor:
        x = torch.empty(tokens, 6144, dtype=torch.bfloat16, device="meta")
        w13 = weight_on_meta(format, 256, 2 * width, 6144, "interleaved")
        w2 = weight_on_meta(format, 256, 6144, width, "plain")
        ids = torch.empty(tokens, 6, dtype=torch.int32, device="meta")
        return moe_experts_native(x, w13, w2, ids, torch.empty(tokens, 6, device="meta"), target=target)

    cuda = {"nvfp4": "mxf4nvf4", "mxfp4": "mxf8f6f4"}[format]
    wanted = dict.fromkeys(("sm100", "sm103"), f"tcgen05.mma.cta_group::1.kind::{cuda}")
    return CompileCase(
        f"{format}, {tokens} tokens, width {width}", "moe_experts=native", launch,
        instruction=wanted | {"sm120": "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4", "gfx950": "v_mfma_scale"},
        # Not sm121, which has the same products: Triton 3.6 does not compile them there.
        targets=("sm100", "sm103", "sm120", *(["gfx950"] if format == "mxfp4" else ())),
    )  # fmt: skip


COMPILE_CASES = tuple(_case(format, tokens, 768) for format in ("nvfp4", "mxfp4") for tokens in (8, 8192))
