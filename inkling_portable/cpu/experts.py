"""The routed experts on a CPU, unquantised: tokens grouped by expert, so that an expert's weights are read once.

Pairs (token, choice) are sorted by expert. A part of the first product takes some of them, 4 tokens of an expert at a
time, and leaves `weight * silu(gate) * up` in float32; a part of the second takes some columns of the result, for all
pairs in the order of their experts, so that no sum is shared and its order is fixed. Where an expert has few tokens the
second product runs along the weight's rows; where it has many, along the transposed weight, copied an expert at a time.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from inkling_kernels.moe_gemm import moe_experts_ref
from inkling_kernels.numerics import ExpertWeight
from inkling_portable.cpu.tiles import (
    FEW,
    FLOAT,
    INT,
    LIKE,
    blend_fn,
    clear_fn,
    dot_fn,
    dots_fn,
    four_fn,
    gate_fn,
    kernel,
    parallel_kernel,
    parts_of,
    read_fn,
    records,
    row_fn,
    span_fn,
    widen_fn,
)

#: Multiplications below which another thread costs more than it saves.
_LEAST = 1 << 16


@kernel
def _sort(order, offsets, ids, experts):
    """Put the pairs' numbers into `order` by expert, and where each expert's begin into `offsets` `[experts + 1]`.
    Pairs of expert -1 are left out. Returns whether every id is in range.
    """
    expert = row_fn(INT, ids, order.size)
    clear_fn(offsets)
    for p in range(order.size):
        if not -1 <= expert[p] < experts:
            return False
        if expert[p] >= 0:
            offsets[expert[p]] += 1
    # Now counts; then ends, from which each expert's pairs are filled in backwards, so that begins remain.
    for e in range(experts):
        offsets[e + 1] += offsets[e]
    for p in range(order.size - 1, -1, -1):
        if expert[p] >= 0:
            offsets[expert[p]] -= 1
            order[offsets[expert[p]]] = p
    return True


@kernel
def _up_part(
    part, parts, like, hidden, width, order, offsets, weights, top_k, x, x_stride, w, stride, row_stride, inputs
):
    """Rows of the sorted pairs in `hidden` `[at least pairs, at least width]`."""
    weight = row_fn(FLOAT, weights, order.size)
    begin, end = span_fn(offsets[-1], part, parts)
    for e in range(offsets.size - 1):
        first, last = max(begin, offsets[e]), min(end, offsets[e + 1])
        if first >= last:
            continue
        rows = (last - first + 3) // 4 * 4
        wide, made = np.empty((rows, inputs), np.float32), np.empty((rows, 2 * width), np.float32)
        for i in range(rows):
            token = order[min(first + i, last - 1)] // top_k
            read_fn(wide[i], like, x + token * x_stride * like.itemsize)
        for n in range(0, 2 * width, 4):
            four = four_fn(like, w + e * stride * like.itemsize, row_stride, n, 2 * width - 1, inputs)
            for t in range(0, rows, 4):
                found = dots_fn(wide[t : t + 4], four)
                for i in range(4):
                    for j in range(min(4, 2 * width - n)):
                        made[t + i, n + j] = found[4 * i + j]
        for i in range(last - first):
            gate_fn(hidden[first + i, :width], made[i])
            for k in range(width):
                hidden[first + i, k] *= weight[order[first + i]]


@parallel_kernel
def _up_parallel(
    parts, like, hidden, width, order, offsets, weights, top_k, x, x_stride, w, stride, row_stride, inputs
):
    for part in prange(parts):
        _up_part(
            part, parts, like, hidden, width, order, offsets, weights, top_k, x, x_stride, w, stride, row_stride, inputs
        )


@kernel
def _down_part(part, parts, like, out, hidden, width, order, offsets, top_k, w, stride, row_stride, few):
    """Columns of `out` `[T, H]` float32."""
    begin, end = span_fn(out.shape[1], part, parts)
    size = end - begin
    # A row length that is no power of two, lest its columns fall on each other in the processor's cache.
    turned, spare = np.empty((width + 4, (size + 15) // 16 * 16 + 16), np.float32), np.empty(size, np.float32)
    for k in range(width, width + 4):
        clear_fn(turned[k])
    for t in range(len(out)):
        clear_fn(out[t, begin:end])
    for e in range(offsets.size - 1):
        first, last = offsets[e], offsets[e + 1]
        base = w + (e * stride + begin * row_stride) * like.itemsize
        for n in range(size if first < last else 0):
            row = row_fn(like, base + n * row_stride * like.itemsize, width)
            if few:
                for p in range(first, last):
                    out[order[p] // top_k, begin + n] += dot_fn(hidden[p, :width], row)
            else:
                for k in range(width):
                    turned[k, n] = widen_fn(row[k])
        for p in range(first, first if few else last, 4):
            y0 = out[order[p] // top_k, begin:end]
            y1 = out[order[p + 1] // top_k, begin:end] if p + 1 < last else spare
            y2 = out[order[p + 2] // top_k, begin:end] if p + 2 < last else spare
            y3 = out[order[p + 3] // top_k, begin:end] if p + 3 < last else spare
            for k in range(0, width, 4):
                four = turned[k, :size], turned[k + 1, :size], turned[k + 2, :size], turned[k + 3, :size]
                blend_fn(y0, y1, y2, y3, hidden[p : p + 4, k : k + 4], four)


@parallel_kernel
def _down_parallel(parts, like, out, hidden, width, order, offsets, top_k, w, stride, row_stride, few):
    for part in prange(parts):
        _down_part(part, parts, like, out, hidden, width, order, offsets, top_k, w, stride, row_stride, few)


def moe_experts(
    x: torch.Tensor, w13: ExpertWeight, w2: ExpertWeight, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """`moe_experts_ref` for unquantised experts, grouped for any number of tokens; results are rounded once."""
    (rows, inputs), (experts, outs, width), top_k, like = x.shape, w2.data.shape, ids.shape[1], LIKE.get(x.dtype)
    fits = (
        like is not None
        and (w13.layout, w2.layout) == ("interleaved", "plain")
        and x.dtype == w13.data.dtype == w2.data.dtype
        and inputs == outs
        and w13.data.shape == (experts, 2 * width, inputs)
        and ids.shape == weights.shape == (rows, top_k)
        and (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
        and x.stride(1) == w13.data.stride(2) == w2.data.stride(2) == 1
        and not records(x, weights, w13.data, w2.data)
    )
    order, offsets = np.empty(ids.numel(), np.int32), np.empty(experts + 1, np.int32)
    ids, weights = ids.contiguous(), weights.contiguous()
    if not fits or not _sort(order, offsets, ids.data_ptr(), experts):
        return moe_experts_ref(x, w13, w2, ids, weights)
    # The last group of 4 reads past the pairs, and past a width that is no multiple of 4.
    hidden, out = np.zeros((len(order) + 4, -(-width // 4) * 4), np.float32), torch.empty(rows, outs)
    up = (
        hidden, width, order, offsets, weights.data_ptr(), top_k, x.data_ptr(), x.stride(0), w13.data.data_ptr(),
        *w13.data.stride()[:2], inputs,
    )  # fmt: skip
    down = out.numpy(), hidden, width, order, offsets, top_k, w2.data.data_ptr(), *w2.data.stride()[:2], rows <= FEW
    parts = parts_of(len(order) * width * inputs, _LEAST)
    if parts == 1:
        _up_part(0, 1, like, *up)
        _down_part(0, 1, like, *down)
    else:
        _up_parallel(parts, like, *up)
        _down_parallel(parts, like, *down)
    return out.to(x.dtype)
