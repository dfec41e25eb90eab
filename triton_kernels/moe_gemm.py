"""The routed experts: two grouped products with a SiLU gate between, weighted and summed over the chosen experts.

    out[t] = sum_k weights[t, k] * W2[e] silu_mul(W13[e] x[t]),   e = ids[t, k]

`x` `[T, H]`, `w13` an `ExpertWeight` of logical `[E, 2I, H]` with rows gate0, up0, gate1, up1, ..., `w2` of `[E, H,
I]`, `ids` `[T, k]` int32, `weights` `[T, k]` float32. An id of -1 names an expert that another rank holds and adds
nothing; any other id outside `[0, E)` is an error. Products accumulate in float32; the sum over k is float32 in
the order of `ids` (the reference: of the experts), so the result does not depend on the batch around a token.

The kernels take pairs (token, choice) in the order of their experts (`expert_sort`). Tiles hold pairs of one expert
only; which expert a tile has is worked out on the device, so nothing waits for the host. One kernel makes both
products, in every format: weight rows are the rows of the result and pairs its columns, since there are always enough
weight rows for a matrix unit and in decoding never enough pairs. Gate and up rows go to two accumulators, so the gate
is applied where the sums are. Intermediate values `[pairs, I]` and each pair's result `[pairs, H]` are rounded to
`x.dtype` once; a last kernel weighs and adds a token's results, without atomics.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from inkling_kernels.activation import silu_mul_fn, silu_mul_ref
from inkling_kernels.compile_case import CompileCase
from inkling_kernels.expert_sort import MAX_EXPERTS, sort_by_expert
from inkling_kernels.moe_gemm_fp4 import NVFP4_FACTOR, fp4_tile_fn, prepare_experts, unpack_asm
from inkling_kernels.moe_gemm_plan import MoeConfig, MoePlan, moe_experts_plan
from inkling_kernels.numerics import ExpertWeight, Layout
from inkling_kernels.ragged import FLOATS, check_tensor
from inkling_kernels.target import Target


@triton.jit(do_not_specialize=["tiles"])
def _tiles_kernel(
    map_ptr, offsets_ptr, tiles, experts, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr
):
    """For each tile its expert (-1: a surplus tile) and, `tiles` further on, its first place in the sorted order."""
    expert = tl.arange(0, BLOCK_E)
    held = expert < experts
    begin = tl.load(offsets_ptr + expert, mask=held, other=0)
    count = tl.load(offsets_ptr + 1 + expert, mask=held, other=0) - begin
    here = (count + (BLOCK_M - 1)) // BLOCK_M
    last = tl.cumsum(here, 0)
    tile = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    mine = (tile[:, None] < last[None, :]) & (tile[:, None] >= (last - here)[None, :])
    found = tl.sum(tl.where(mine, expert[None, :] + 1, 0), 1) - 1
    first = tl.sum(tl.where(mine, begin[None, :] + (tile[:, None] - (last - here)[None, :]) * BLOCK_M, 0), 1)
    tl.store(map_ptr + tile, found, mask=tile < tiles)
    tl.store(map_ptr + tiles + tile, first, mask=tile < tiles)


@triton.jit
def tile_place_fn(tiles, rows, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """This program's tile of pairs and its place among the tiles of weight rows: `GROUP_M` tiles of pairs are taken
    before the next weight rows."""
    program = tl.program_id(0)
    whole = GROUP_M * tl.cdiv(rows, BLOCK_N)
    group = program // whole
    size = tl.minimum(tiles - group * GROUP_M, GROUP_M)
    return group * GROUP_M + program % whole % size, program % whole // size


@triton.jit
def tile_pairs_fn(
    order_ptr, offsets_ptr, map_ptr, tiles, tile, expert, top_k, GATED: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Of a tile's pairs: which there are, and the rows (int32) that their input comes from and their result goes to.
    `GATED`: from their tokens to their places in the sorted order; else from there to their own."""
    member = tl.load(map_ptr + tiles + tile) + tl.arange(0, BLOCK_M)
    paired = member < tl.load(offsets_ptr + expert + 1)
    pair = tl.load(order_ptr + member, mask=paired, other=0)
    source = pair // top_k if GATED else member
    to = member if GATED else pair
    return paired, source, to


@triton.jit
def _weight_tile_fn(
    w_ptr, scale_ptr, row, live, first, columns, w_row, w_col, scale_row, scale_col,
    FORMAT: tl.constexpr, ORDER: tl.constexpr, ASM: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Columns `first ..` of an expert's rows `row` (int64) as `dtype` `[rows, BLOCK_K]`, 0 where there is nothing."""
    if FORMAT == "bf16":
        col = first + tl.arange(0, BLOCK_K)
        mask = live[:, None]
        if not EVEN:
            mask = mask & (col < columns)[None, :]
        at = w_ptr + ((row * w_row)[:, None] + (col.to(tl.int64) * w_col)[None, :])
        tile = tl.load(at, mask=mask, other=0.0).to(dtype)
    else:
        tile = fp4_tile_fn(
            w_ptr, scale_ptr, row, live, first, columns, w_row, scale_row, scale_col, FORMAT == "mxfp4", ORDER, ASM,
            BLOCK_K, EVEN, dtype,
        )  # fmt: skip
    return tile


@triton.jit(do_not_specialize=["tiles"])
def _grouped_kernel(
    out_ptr, x_ptr, w_ptr, scale_ptr, scale2_ptr, order_ptr, offsets_ptr, map_ptr, tiles, top_k, rows, columns, out_row,
    x_row, x_col, w_expert, w_row, w_col, scale_expert, scale_row, scale_col, scale2_expert, scale2_up,
    FORMAT: tl.constexpr, ORDER: tl.constexpr, ASM: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """`GATED`: x's rows are tokens, gathered; row i of the result is `silu(W[2i] x) * (W[2i + 1] x)`, stored in the
    sorted order. Else x's rows are in the sorted order and the result goes to its pair's row."""
    tile, place = tile_place_fn(tiles, rows, BLOCK_N, GROUP_M)
    expert = tl.load(map_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    paired, source, to = tile_pairs_fn(order_ptr, offsets_ptr, map_ptr, tiles, tile, expert, top_k, GATED, BLOCK_M)
    source = source.to(tl.int64)
    row = (place * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    live = row < rows
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    w_ptr += expert * w_expert
    if FORMAT != "bf16":
        scale_ptr += expert * scale_expert

    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first in range(0, columns, BLOCK_K):
        col = first + tl.arange(0, BLOCK_K)
        mask = paired[None, :]
        if not EVEN:
            mask = mask & (col < columns)[:, None]
        x_at = x_ptr + ((source * x_row)[None, :] + (col.to(tl.int64) * x_col)[:, None])
        x = tl.load(x_at, mask=mask, other=0.0)
        if GATED:
            w = _weight_tile_fn(
                w_ptr, scale_ptr, row * 2, live, first, columns, w_row, w_col, scale_row, scale_col, FORMAT, ORDER, ASM,
                BLOCK_K, EVEN, dtype,
            )  # fmt: skip
            gate = tl.dot(w, x, gate, input_precision="ieee")
            w = _weight_tile_fn(
                w_ptr, scale_ptr, row * 2 + 1, live, first, columns, w_row, w_col, scale_row, scale_col, FORMAT,
                ORDER, ASM, BLOCK_K, EVEN, dtype,
            )  # fmt: skip
            up = tl.dot(w, x, up, input_precision="ieee")
        else:
            w = _weight_tile_fn(
                w_ptr, scale_ptr, row, live, first, columns, w_row, w_col, scale_row, scale_col, FORMAT, ORDER, ASM,
                BLOCK_K, EVEN, dtype,
            )  # fmt: skip
            gate = tl.dot(w, x, gate, input_precision="ieee")
    if FORMAT == "nvfp4":
        gate *= tl.load(scale2_ptr + expert * scale2_expert) * NVFP4_FACTOR
        up *= tl.load(scale2_ptr + (expert * scale2_expert + scale2_up)) * NVFP4_FACTOR
    y = silu_mul_fn(gate, up) if GATED else gate
    out_at = out_ptr + ((to.to(tl.int64) * out_row)[None, :] + row[:, None])
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=paired[None, :] & live[:, None])


@triton.jit(do_not_specialize=["tokens"])
def _sum_kernel(
    out_ptr, y_ptr, ids_ptr, weights_ptr, tokens, top_k, experts, hidden, ids_row, ids_col, weights_row, weights_col,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    col = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = (token < tokens)[:, None] & (col < hidden)[None, :]
    total = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    for k in range(top_k):
        expert = tl.load(ids_ptr + (token * ids_row + k * ids_col), mask=token < tokens, other=-1)
        held = (expert >= 0) & (expert < experts)
        weight = tl.load(weights_ptr + (token * weights_row + k * weights_col), mask=held, other=0.0)
        at = y_ptr + (((token * top_k + k) * hidden)[:, None] + col[None, :])
        total += weight[:, None] * tl.load(at, mask=inside & held[:, None], other=0.0).to(tl.float32)
    tl.store(out_ptr + ((token * hidden)[:, None] + col[None, :]), total.to(out_ptr.dtype.element_ty), mask=inside)


def moe_experts(
    x: torch.Tensor,
    w13: ExpertWeight,
    w2: ExpertWeight,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    target: Target | None = None,
    config: MoeConfig | None = None,
) -> torch.Tensor:
    """Apply each token's experts with the Triton kernels; see the module. Returns `[T, H]` in `x.dtype`; forward only.

    `x` is bfloat16, float32 or (with unquantised weights, in tests) float16; any strides, except that packed codes are
    contiguous along their columns. Ids that name no expert are dropped; where ids are in host memory, so that reading
    them waits for nothing, those other than -1 are an error. Raises TypeError or ValueError naming the argument, before
    anything is launched.
    """
    tokens, hidden, width = check_experts(x, w13, w2, ids, weights)
    experts, top_k = w13.num_experts, ids.shape[1]
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    plan = moe_experts_plan(
        tokens, top_k, experts, hidden, width, format=w13.format, dtype=x.dtype, target=target, config=config
    )
    if out.numel() == 0:
        return out
    if plan.tiles == 0 or experts == 0:
        return out.zero_()
    pairs = sorted_pairs(ids, experts, plan, target)
    inner = torch.empty(ids.numel(), width, dtype=x.dtype, device=x.device)
    _multiply(inner, x, w13, pairs, top_k, plan, unpack_asm(target), gated=True)
    each = torch.empty(ids.numel(), hidden, dtype=x.dtype, device=x.device)
    _multiply(each, inner, w2, pairs, top_k, plan, unpack_asm(target), gated=False)
    return weighted_sum(out, each, ids, weights, experts, plan)


def sorted_pairs(
    ids: torch.Tensor, experts: int, plan: MoePlan, target: Target | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The pairs in the order of their experts, each expert's first place there, and each tile's expert and first place
    (`plan.tiles` of either)."""
    order, offsets = sort_by_expert(ids, experts, target=target)
    tile_map = torch.empty(2, plan.tiles, dtype=torch.int32, device=ids.device)
    _tiles_kernel[(triton.cdiv(plan.tiles, 16),)](
        tile_map, offsets, plan.tiles, experts, BLOCK_M=plan.config.block_m, BLOCK_T=16, num_warps=4,
        BLOCK_E=max(16, triton.next_power_of_2(experts)), enable_fp_fusion=True,
    )  # fmt: skip
    return order, offsets, tile_map


def weighted_sum(
    out: torch.Tensor, each: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: int, plan: MoePlan
) -> torch.Tensor:
    """Add each token's results `[T * k, H]`, weighed, into `out` `[T, H]`, contiguous both; returns `out`."""
    _sum_kernel[plan.sum_grid](
        out, each, ids, weights, len(ids), ids.shape[1], experts, out.shape[1], *ids.stride(), *weights.stride(),
        BLOCK_T=plan.sum_block[0], BLOCK_H=plan.sum_block[1], num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def _multiply(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: ExpertWeight,
    sorted_pairs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    top_k: int,
    plan: MoePlan,
    asm: str,
    *,
    gated: bool,
) -> None:
    data, scale, scale2 = weight.data, weight.scale, weight.scale2
    if weight.format != "bf16":
        data = data.view(torch.uint32)
    if scale is not None:
        scale = scale.view(torch.uint8)
    second = (0, 0) if scale2 is None else (scale2.stride(0), scale2.stride(1) if scale2.dim() == 2 else 0)
    _grouped_kernel[plan.up_grid if gated else plan.down_grid](
        out, x, data, scale, scale2, *sorted_pairs, plan.tiles, top_k, out.shape[1], weight.cols, out.stride(0),
        *x.stride(), *data.stride(), *(scale.stride() if scale is not None else (0, 0, 0)), *second,
        FORMAT=weight.format, ORDER=weight.order, ASM=asm, GATED=gated, BLOCK_M=plan.config.block_m,
        BLOCK_N=plan.up_block_n if gated else plan.down_block_n, BLOCK_K=plan.block_k, GROUP_M=plan.config.group_m,
        EVEN=weight.cols % plan.block_k == 0, num_warps=plan.config.num_warps, num_stages=plan.config.num_stages,
        enable_fp_fusion=True,
    )  # fmt: skip


def check_experts(
    x: torch.Tensor, w13: ExpertWeight, w2: ExpertWeight, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[int, int, int]:
    """Check all arguments; (tokens, hidden size, expert width)."""
    op = "moe_experts"
    w13.require_layout("interleaved", "w13")
    w2.require_layout("plain", "w2")
    experts, hidden, width = w13.num_experts, w13.cols, w13.rows // 2
    if w2.format != w13.format:
        raise ValueError(f"{op}: w13 is {w13.format} and w2 {w2.format}; expected one format for both")
    if (w2.num_experts, w2.rows, w2.cols) != (experts, hidden, width):
        raise ValueError(
            f"{op}: w2 is {[w2.num_experts, w2.rows, w2.cols]}; expected {[experts, hidden, width]}, as w13 is "
            f"{[experts, w13.rows, hidden]}"
        )
    if experts > MAX_EXPERTS:
        raise ValueError(f"{op}: w13 has {experts} experts; expected at most {MAX_EXPERTS}")
    dtypes = FLOATS if w13.format == "bf16" else (torch.bfloat16, torch.float32)
    check_tensor(op, "x", x, (None, hidden), dtypes)
    for name, weight in (("w13", w13), ("w2", w2)):
        if weight.device != x.device:
            raise ValueError(f"{op}: {name} is on {weight.device}; expected {x.device} like x; move it there")
        if weight.format == "bf16":
            continue
        if weight.cols % 32:
            raise ValueError(f"{op}: {name} has {weight.cols} columns; expected a multiple of 32 of packed codes")
        if weight.data.stride(2) != 1 or any(n % 4 for n in (*weight.data.stride()[:2], weight.data.storage_offset())):
            raise ValueError(
                f"{op}: {name}'s codes have strides {list(weight.data.stride())} at {weight.data.storage_offset()}; "
                "expected contiguous columns and rows that begin at 32-bit words: make it contiguous"
            )
    check_tensor(op, "ids", ids, (len(x), None), (torch.int32,), x.device)
    check_tensor(op, "weights", weights, tuple(ids.shape), (torch.float32,), x.device)
    if ids.device.type == "cpu" and ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < experts:
        raise ValueError(
            f"{op}: ids run from {int(ids.min())} to {int(ids.max())}; expected 0..{experts - 1}, or -1 for an expert "
            "that is held elsewhere"
        )
    return len(x), hidden, width


def weight_on_meta(format: str, experts: int, rows: int, columns: int, layout: Layout) -> ExpertWeight:
    """A weight of the `meta` device, for compilation."""
    if format == "bf16":
        data = torch.empty(experts, rows, columns, dtype=torch.bfloat16, device="meta")
        return ExpertWeight("bf16", data, layout=layout)
    data = torch.empty(experts, rows, columns // 2, dtype=torch.uint8, device="meta")
    if format == "mxfp4":
        return ExpertWeight("mxfp4", data, data.new_empty(experts, rows, columns // 32), layout=layout)
    apart = (2,) if layout == "interleaved" else ()
    scale2 = torch.empty(experts, *apart, dtype=torch.float32, device="meta")
    return ExpertWeight("nvfp4", data, data.new_empty(experts, rows, columns // 16), scale2, layout=layout)


def _case(format: str, tokens: int, width: int) -> CompileCase:
    def launch(target: Target) -> torch.Tensor:
        x = torch.empty(tokens, 6144, dtype=torch.bfloat16, device="meta")
        w13 = prepare_experts(weight_on_meta(format, 256, 2 * width, 6144, "interleaved"), target)
        w2 = prepare_experts(weight_on_meta(format, 256, 6144, width, "plain"), target)
        ids = torch.empty(tokens, 6, dtype=torch.int32, device="meta")
        return moe_experts(x, w13, w2, ids, torch.empty(tokens, 6, device="meta"), target=target)

    # RDNA has 256 registers a thread. Where NVIDIA keeps sums in registers, ptxas gives some tiles two or four
    # too few.
    spills = {"gfx1100": 192, "gfx1151": 192} | dict.fromkeys(("sm80", "sm86", "sm89", "sm120", "sm121"), 16)
    return CompileCase(f"{format}, {tokens} tokens, width {width}", "moe_experts=triton", launch, spills)


# A width that no tile divides beside one that all do.
COMPILE_CASES = (
    _case("bf16", 8, 768),
    _case("bf16", 8192, 768),
    _case("nvfp4", 8, 768),
    _case("nvfp4", 8192, 768),
    _case("nvfp4", 8, 96),
    _case("mxfp4", 8, 768),
    _case("mxfp4", 8192, 768),
)


# Sorted rows that are gathered and multiplied at a time: what lies between the two products stays in cache on a CPU.
_ROWS = 512


def _runs(experts: list[int], counts: list[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Cut the sorted rows into runs of at most `_ROWS`, each a list of `(expert, first row, last row + 1)`."""
    run: list[tuple[int, int, int]] = []
    end = 0
    for expert, count in zip(experts, counts, strict=True):
        begin, end = end, end + count
        for first in range(begin if expert >= 0 else end, end, _ROWS):
            last = min(first + _ROWS, end)
            if run and last - run[0][1] > _ROWS:
                yield run
                run = []
            run.append((expert, first, last))
    if run:
        yield run


def moe_experts_ref(
    x: torch.Tensor, w13: ExpertWeight, w2: ExpertWeight, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Apply each token's experts; see the module. Packed weights are unpacked one expert at a time. Differentiable in
    `x`, `weights` and unquantised expert weights. Returns `[T, H]` in `x.dtype`; raises `ValueError` for an id out of
    range.
    """
    w13.require_layout("interleaved", "w13")
    w2.require_layout("plain", "w2")
    ordered, order = torch.sort(ids.flatten(), stable=True)
    found, counts = (t.tolist() for t in torch.unique_consecutive(ordered, return_counts=True))
    if found and not -1 <= found[0] <= found[-1] < w13.num_experts:
        raise ValueError(
            f"moe_experts: ids run from {found[0]} to {found[-1]}; expected 0..{w13.num_experts - 1}, "
            "or -1 for an expert that is held elsewhere"
        )
    token, weight = order // ids.shape[1], weights.flatten()[order].unsqueeze(1)
    out = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for run in _runs(found, counts):
        first, last, sizes = run[0][1], run[-1][2], [b - a for _, a, b in run]
        rows = x.index_select(0, token[first:last]).split(sizes)
        gate_up = [F.linear(part, w13.dequant(e, x.dtype)) for (e, _, _), part in zip(run, rows, strict=True)]
        hidden = silu_mul_ref(torch.cat(gate_up)).split(sizes)
        down = [F.linear(part, w2.dequant(e, x.dtype)) for (e, _, _), part in zip(run, hidden, strict=True)]
        out.index_add_(0, token[first:last], torch.cat(down) * weight[first:last])
    return out.to(x.dtype)
