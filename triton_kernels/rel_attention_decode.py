"""Relative attention for decoding and verification: 1 to 9 query rows a sequence, the keys split over programs.

The formula, layouts and arguments of :mod:`inkling_kernels.rel_attention`. All rows of a sequence, times the heads of a
group, are one tile, so each key and value is read once for all of them. `splits` programs share a sequence's keys; each
leaves its sum of weighted values, its maximum and its total in float32, and a second launch combines them in order:

    out = sum_s exp(peak_s - peak) acc_s / sum_s exp(peak_s - peak) total_s        peak = max_s peak_s

Lengths are read on the device and the grid follows from shapes and bounds alone, so a captured graph replays with other
lengths. Sliding layers read at most window + rows keys. Where `split_keys` is given, the split boundaries are its
multiples in absolute key positions instead of a share of the length: then a sequence's bits depend on nothing but the
sequence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inkling_kernels.compile_case import CompileCase
from inkling_kernels.ragged import check_tensor
from inkling_kernels.rel_attention_plan import RelAttentionDecodeConfig, rel_attention_decode_plan
from inkling_kernels.rel_attention_tile import (
    FLOOR,
    FP8_KINDS,
    attend_fn,
    cache_operands,
    check_arguments,
    meta_case,
    r_wide_fn,
    spoilt_fn,
)
from inkling_kernels.target import TARGETS, Target


@triton.jit
def _bounds_fn(cu_ptr, kv_lens_ptr, seq, window, ROWS: tl.constexpr, WINDOW: tl.constexpr):
    """(first row of q, rows, position of row 0, first key, end of the keys) of a sequence; no keys where it has no
    rows. One of more than ROWS is another kernel's, and has none here."""
    q_begin = tl.load(cu_ptr + seq)
    q_len = tl.load(cu_ptr + seq + 1) - q_begin
    q_len = tl.where(q_len > ROWS, 0, q_len)
    kv_len = tl.load(kv_lens_ptr + seq)
    first = kv_len - q_len
    high = tl.where(q_len > 0, kv_len, 0)
    low = 0
    if WINDOW:
        low = tl.maximum(first - window + 1, 0)
    return q_begin, q_len, first, low, high


@triton.jit(do_not_specialize=["window", "extent", "tokens"])
def _rel_attention_decode_kernel(
    out_ptr, acc_ptr, stats_ptr, q_ptr, r_ptr, k_ptr, v_ptr, proj_ptr, table_ptr, cu_ptr, kv_lens_ptr, k_scale_ptr,
    v_scale_ptr, window, extent, scale, tokens, out_strides, q_strides, r_strides, k_strides, v_strides, proj_strides,
    table_stride, scale_stride, HEADS: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, D_REL: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, EXTRA: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, SPLIT_KEYS: tl.constexpr, FP8: tl.constexpr, WINDOW: tl.constexpr,
    FAR: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    kv_head = part // PARTS
    split = tl.program_id(1)
    seq = tl.program_id(2)
    q_begin, q_len, first, low, high = _bounds_fn(cu_ptr, kv_lens_ptr, seq, window, ROWS, WINDOW)

    row = tl.arange(0, BLOCK_M)
    token = row // HEADS
    live = token < q_len
    at = (q_begin + token).to(tl.int64)
    head = part * HEADS + row % HEADS
    dim = tl.arange(0, D).to(tl.int64)
    q_at = (at * q_strides[0] + head * q_strides[1])[:, None] + (dim * q_strides[2])[None, :]
    q = tl.load(q_ptr + q_at, mask=live[:, None], other=0.0)
    r_row = r_ptr + at * r_strides[0] + head * r_strides[1]
    r_wide = r_wide_fn(r_row, r_strides[2], token, live, 0, D_REL, TOKENS)
    r_extra = r_wide
    if EXTRA > 0:
        r_extra = r_wide_fn(r_row, r_strides[2], token, live, TOKENS, D_REL, EXTRA)

    if SPLIT_KEYS > 0:
        begin = low // SPLIT_KEYS * SPLIT_KEYS + split * SPLIT_KEYS
        end = tl.minimum(begin + SPLIT_KEYS, high)
        begin = tl.maximum(begin, low // BLOCK_N * BLOCK_N)
    else:
        begin = low // BLOCK_N * BLOCK_N
        share = ((high - begin + BLOCK_N - 1) // BLOCK_N + SPLITS - 1) // SPLITS * BLOCK_N
        begin += split * share
        end = tl.minimum(begin + share, high)
    k_ptr += kv_head * k_strides[2]
    v_ptr += kv_head * v_strides[2]
    table_ptr += seq.to(tl.int64) * table_stride
    if FP8 > 0:
        scale *= tl.load(k_scale_ptr + kv_head * scale_stride)

    acc = tl.zeros([BLOCK_M, D], tl.float32)
    peak = tl.full([BLOCK_M], FLOOR, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    start = begin
    # A single row sees every key that is read, so its window has no edge within them.
    SEVERAL: tl.constexpr = ROWS > 1
    ALIGNED: tl.constexpr = WINDOW and ROWS == 1
    if WINDOW and SEVERAL:
        # Tiles before `inside` hold keys that have left the last row's window.
        inside = tl.maximum(first + ROWS - window + BLOCK_N - 1, 0) // BLOCK_N * BLOCK_N
        inside = tl.minimum(tl.maximum(inside, begin), end)
        acc, peak, total = attend_fn(
            acc, peak, total, q, r_wide, r_extra, k_ptr, v_ptr, proj_ptr, table_ptr, k_strides, v_strides, proj_strides,
            first, token, begin, inside, low, high, window, extent, scale,
            D, D_REL, TOKENS, EXTRA, BLOCK_N, PAGE, FP8, BIAS=True, WINDOW=True, CAUSAL=True, APART=False,
        )  # fmt: skip
        begin = inside
    if FAR:
        # Tiles before `near` hold only keys beyond every row's extent.
        near = tl.maximum(first + 1 - extent, 0) // BLOCK_N * BLOCK_N
        near = tl.minimum(tl.maximum(near, begin), end)
        acc, peak, total = attend_fn(
            acc, peak, total, q, r_wide, r_extra, k_ptr, v_ptr, proj_ptr, table_ptr, k_strides, v_strides, proj_strides,
            first, token, begin, near, low, high, window, extent, scale,
            D, D_REL, TOKENS, EXTRA, BLOCK_N, PAGE, FP8, BIAS=False, WINDOW=ALIGNED, CAUSAL=False, APART=False,
        )  # fmt: skip
        begin = near
    if SEVERAL:
        # Tiles before `edge` hold no key ahead of row 0.
        edge = tl.minimum(tl.maximum(tl.maximum(first + 1, 0) // BLOCK_N * BLOCK_N, begin), end)
        acc, peak, total = attend_fn(
            acc, peak, total, q, r_wide, r_extra, k_ptr, v_ptr, proj_ptr, table_ptr, k_strides, v_strides, proj_strides,
            first, token, begin, edge, low, high, window, extent, scale,
            D, D_REL, TOKENS, EXTRA, BLOCK_N, PAGE, FP8, BIAS=True, WINDOW=False, CAUSAL=False, APART=False,
        )  # fmt: skip
        begin = edge
    acc, peak, total = attend_fn(
        acc, peak, total, q, r_wide, r_extra, k_ptr, v_ptr, proj_ptr, table_ptr, k_strides, v_strides, proj_strides,
        first, token, begin, end, low, high, window, extent, scale,
        D, D_REL, TOKENS, EXTRA, BLOCK_N, PAGE, FP8, BIAS=True, WINDOW=ALIGNED, CAUSAL=True, APART=False,
    )  # fmt: skip
    # Where it is False the question itself is left out, as `and` would not do.
    if SEVERAL:  # noqa: SIM102
        if spoilt_fn(acc):
            acc, peak, total = attend_fn(
                tl.zeros([BLOCK_M, D], tl.float32), tl.full([BLOCK_M], FLOOR, tl.float32),
                tl.zeros([BLOCK_M], tl.float32), q, r_wide, r_extra, k_ptr, v_ptr, proj_ptr, table_ptr, k_strides,
                v_strides, proj_strides, first, token, start, end, low, high, window, extent, scale,
                D, D_REL, TOKENS, EXTRA, BLOCK_N, PAGE, FP8, BIAS=True, WINDOW=WINDOW, CAUSAL=True, APART=True,
            )  # fmt: skip
    if SPLITS == 1:
        out = acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
        if FP8 > 0:
            out *= tl.load(v_scale_ptr + kv_head * scale_stride)
        out_at = (at * out_strides[0] + head * out_strides[1])[:, None] + (dim * out_strides[2])[None, :]
        tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=live[:, None])
        at = (tl.load(cu_ptr + tl.num_programs(2)) + seq * ROWS + token).to(tl.int64)
        out_at = (at * out_strides[0] + head * out_strides[1])[:, None] + (dim * out_strides[2])[None, :]
        padding = tl.zeros([BLOCK_M, D], out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_at, padding, mask=((token < ROWS) & (at < tokens))[:, None])
    else:
        line = ((split.to(tl.int64) * tl.num_programs(2) + seq) * ROWS + token) * (tl.num_programs(0) * HEADS) + head
        # A split without keys for a row leaves only its total of 0, by which the combination knows not to read the
        # rest.
        tl.store(acc_ptr + line[:, None] * D + dim[None, :], acc, mask=(live & (total != 0.0))[:, None])
        tl.store(stats_ptr + line * 2, peak, mask=live)
        tl.store(stats_ptr + (line * 2 + 1), total, mask=live)


@triton.jit(do_not_specialize=["window", "tokens"])
def _combine_kernel(
    out_ptr, acc_ptr, stats_ptr, cu_ptr, kv_lens_ptr, v_scale_ptr, window, tokens, out_strides, scale_stride,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, SPLITS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr, FP8: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0).to(tl.int64)
    seq = tl.program_id(1) // ROWS
    row = tl.program_id(1) % ROWS
    q_begin, q_len, _, low, high = _bounds_fn(cu_ptr, kv_lens_ptr, seq, window, ROWS, WINDOW)
    live = tl.arange(0, BLOCK_H) < GROUP
    head = kv_head * GROUP + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, D).to(tl.int64)
    cell = (head * out_strides[1])[:, None] + (dim * out_strides[2])[None, :]
    at = (tl.load(cu_ptr + tl.num_programs(1) // ROWS) + tl.program_id(1)).to(tl.int64)
    padding = tl.zeros([BLOCK_H, D], out_ptr.dtype.element_ty)
    if at < tokens:
        tl.store(out_ptr + at * out_strides[0] + cell, padding, mask=live[:, None])
    if row >= q_len:
        return
    at = (q_begin + row).to(tl.int64)
    used = SPLITS
    if SPLIT_KEYS > 0:
        used = tl.minimum((high - low // SPLIT_KEYS * SPLIT_KEYS + SPLIT_KEYS - 1) // SPLIT_KEYS, SPLITS)
    acc = tl.zeros([BLOCK_H, D], tl.float32)
    peak = tl.full([BLOCK_H], FLOOR, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    for split in range(used):
        line = (split * tl.num_programs(1).to(tl.int64) + tl.program_id(1)) * (tl.num_programs(0) * GROUP) + head
        part_peak = tl.load(stats_ptr + line * 2, mask=live, other=FLOOR)
        part_total = tl.load(stats_ptr + (line * 2 + 1), mask=live, other=0.0)
        held = live & (part_total != 0.0)
        part = tl.load(acc_ptr + line[:, None] * D + dim[None, :], mask=held[:, None], other=0.0)
        raised = tl.maximum(peak, part_peak)
        old = tl.exp2(peak - raised)
        new = tl.exp2(part_peak - raised)
        acc = acc * old[:, None] + part * new[:, None]
        total = total * old + part_total * new
        peak = raised
    out = acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    if FP8 > 0:
        out *= tl.load(v_scale_ptr + kv_head * scale_stride)
    tl.store(out_ptr + at * out_strides[0] + cell, out.to(out_ptr.dtype.element_ty), mask=live[:, None])


def rel_attention_decode(
    q: torch.Tensor, r: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, proj: torch.Tensor,
    block_table: torch.Tensor, cu_seqlens: torch.Tensor, kv_lens: torch.Tensor, *, window: int | None, scale: float,
    max_query_len: int, max_kv_len: int | None = None, split_keys: int | None = None,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None, out: torch.Tensor | None = None,
    target: Target | None = None, config: RelAttentionDecodeConfig | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend for at most `max_query_len` (1 to 9) query rows a sequence; returns `[T, Hq, D]` in `q.dtype`.

    Arguments as for :func:`inkling_kernels.rel_attention.rel_attention`. The rows of a sequence that has more than
    `max_query_len` are left unwritten: give `out`, like `q`, where another kernel writes them. Padding behind the last
    sequence comes out 0. No sequence may have more keys than `max_kv_len` (default: what the block table has room for),
    which bounds the number of splits. `split_keys` fixes the split size, for results that do not depend on the rest of
    the batch. The split results are float32; the rest as in the prefill kernel.

    Raises TypeError or ValueError naming the argument, before anything is allocated or launched.
    """
    check_arguments(
        "rel_attention_decode", q, r, k_pages, v_pages, proj, block_table, cu_seqlens, kv_lens, window, scale,
        kv_scales, None, max_kv_len,
    )  # fmt: skip
    tokens, heads, head_dim = q.shape
    batch, kv_heads, page = len(kv_lens), k_pages.shape[2], k_pages.shape[1]
    plan = rel_attention_decode_plan(
        batch, heads, kv_heads, head_dim, proj.shape[1], window, max_query_len=max_query_len,
        max_kv_len=block_table.shape[1] * page if max_kv_len is None else max_kv_len, dtype=q.dtype,
        kv_dtype=k_pages.dtype, target=target, split_keys=split_keys, config=config,
    )  # fmt: skip
    if out is None and tokens > batch * plan.rows:
        raise ValueError(
            f"rel_attention_decode: q has {tokens} rows; expected at most {batch * plan.rows}, max_query_len a sequence"
        )
    if out is None:
        out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    else:
        check_tensor("rel_attention_decode", "out", out, tuple(q.shape), (q.dtype,), q.device)
    if tokens == 0:
        return out
    acc = stats = None
    if plan.num_splits > 1:
        lines = (plan.num_splits, batch * plan.rows, heads)
        acc = torch.empty((*lines, head_dim), dtype=torch.float32, device=q.device)
        stats = torch.empty((*lines, 2), dtype=torch.float32, device=q.device)
    pages, scales, scale_stride = cache_operands(k_pages, v_pages, kv_scales)
    shared = {"D": head_dim, "ROWS": plan.rows, "SPLITS": plan.num_splits}
    shared |= {"SPLIT_KEYS": plan.split_keys, "FP8": FP8_KINDS.get(k_pages.dtype, 0), "WINDOW": window is not None}
    _rel_attention_decode_kernel[plan.grid](
        out, acc, stats, q, r, *pages, proj, block_table, cu_seqlens, kv_lens, *scales, window or 0, proj.shape[1],
        scale, tokens, out.stride(), q.stride(), r.stride(), k_pages.stride(), v_pages.stride(), proj.stride(),
        block_table.stride(0), scale_stride, **shared, HEADS=plan.heads, PARTS=plan.group // plan.heads,
        D_REL=proj.shape[0], PAGE=page, TOKENS=plan.tokens,
        EXTRA=plan.extra, BLOCK_M=plan.block_m, BLOCK_N=plan.config.block_n,
        FAR=window is None or window > proj.shape[1], num_warps=plan.num_warps,
        num_stages=plan.config.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    if plan.combine_grid is not None:
        _combine_kernel[plan.combine_grid](
            out, acc, stats, cu_seqlens, kv_lens, scales[1], window or 0, tokens, out.stride(), scale_stride, **shared,
            GROUP=plan.group, BLOCK_H=triton.next_power_of_2(plan.group), num_warps=1, num_stages=1,
            enable_fp_fusion=True,
        )  # fmt: skip
    return out


def _case(
    name: str, heads: int, kv_heads: int, window: int | None, extent: int, rows: int, instruction: dict[str, str],
    spills: dict[str, int], *, dtype: torch.dtype = torch.bfloat16, fp8: bool = False,
) -> CompileCase:  # fmt: skip
    def launch(target: Target) -> torch.Tensor:
        tensors, scales = meta_case(heads, kv_heads, extent, 4 * rows, dtype=dtype, fp8=fp8, page=64 if fp8 else 16)
        return rel_attention_decode(
            *tensors, window=window, scale=1 / 128, max_query_len=rows, kv_scales=scales, target=target
        )

    # Exact float32 products have no matrix instruction on NVIDIA's chips and on RDNA.
    exact = {} if dtype != torch.float32 else {t.arch: "" for t in TARGETS if "mfma" not in t.capabilities}
    return CompileCase(name, "rel_attention=triton", launch, spills, instruction | exact, narrow=("proj_ptr",))


# Fewer than 64 rows: below what Hopper's and Blackwell's larger instructions multiply at once.
_FEW = {"sm90": "mma.sync", "sm100": "mma.sync", "sm103": "mma.sync"}
# RDNA has 256 registers a thread at most.
_RDNA_1 = {"gfx1100": 320, "gfx1151": 320}
# float32 tiles take twice the registers of the types that models run in.
_WIDE = {t.arch: 512 if t.vendor == "cuda" else 3840 for t in TARGETS if "mfma" not in t.capabilities}
# Chips whose sums and operands share one file of registers are a few short for nine rows, too.
_NINE_AMD = {"gfx1100": 2304, "gfx1151": 2304, "gfx1201": 576, "gfx90a": 96}
_NINE = _NINE_AMD | dict.fromkeys(("sm80", "sm86", "sm89", "sm120", "sm121"), 96)

COMPILE_CASES = (
    _case("full, group 8, 1 row", 64, 8, None, 1024, 1, _FEW, _RDNA_1),
    _case("full, group 8, 9 rows", 64, 8, None, 1024, 9, {}, _NINE),
    _case("full, group 4, 9 rows", 32, 8, None, 1024, 9, {}, _NINE),
    _case("full, group 8, 9 rows, float32", 64, 8, None, 1024, 9, {}, _WIDE, dtype=torch.float32),
    _case("sliding, group 4, 1 row, fp8 cache, page 64", 64, 16, 512, 512, 1, _FEW, _RDNA_1, fp8=True),
    _case("sliding, group 4, 9 rows", 64, 16, 512, 512, 9, {}, _NINE),
)
