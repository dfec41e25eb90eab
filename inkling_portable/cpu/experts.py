"""The routed experts on a CPU: tokens grouped by expert, so that an expert's weights are read, or unpacked, once.

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
from inkling_portable.cpu.packed import dense_fn, place_of
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
    helper,
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
#: Columns of the second weight that are turned at a time: they stay in the nearer caches.
_COLUMNS = 256


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
def _up_part(part, parts, like, hidden, width, order, offsets, weights, top_k, x, x_stride, place, scales, inputs):
    """Rows of the sorted pairs in `hidden` `[at least pairs, at least width]`."""
    weight = row_fn(FLOAT, weights, order.size)
    begin, end = span_fn(offsets[-1], part, parts)
    dense = np.empty((2 * width if scales.size else 0, inputs), like.dtype)
    for e in range(offsets.size - 1):
        first, last = max(begin, offsets[e]), min(end, offsets[e + 1])
        if first >= last:
            continue
        rows = (last - first + 3) // 4 * 4
        wide, made = np.empty((rows, inputs), np.float32), np.empty((rows, 2 * width), np.float32)
        for i in range(rows):
            token = order[min(first + i, last - 1)] // top_k
            read_fn(wide[i], like, x + token * x_stride * like.itemsize)
        base, stride = dense_fn(dense, like, place, scales, e, 0)
        for n in range(0, 2 * width, 4):
            four = four_fn(like, base, stride, n, 2 * width - 1, inputs)
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
def _up_parallel(parts, like, hidden, width, order, offsets, weights, top_k, x, x_stride, place, scales, inputs):
    for part in prange(parts):
        _up_part(part, parts, like, hidden, width, order, offsets, weights, top_k, x, x_stride, place, scales, inputs)


@helper
def _add_turned_fn(out, like, hidden, width, tokens, turned, made, w, stride):
    """Add to some columns of the rows `tokens` of `out` the products of `hidden` with those columns' weight rows."""
    size = out.shape[1]
    for n in range(size):
        row = row_fn(like, w + n * stride * like.itemsize, width)
        for k in range(width):
            turned[k, n] = widen_fn(row[k])
    for p in range(0, tokens.size, 4):
        for i in range(4):
            clear_fn(made[i])
        for k in range(0, width, 4):
            four = turned[k, :size], turned[k + 1, :size], turned[k + 2, :size], turned[k + 3, :size]
            blend_fn(made[0, :size], made[1, :size], made[2, :size], made[3, :size], hidden[p : p + 4, k : k + 4], four)
        for i in range(min(4, tokens.size - p)):
            row = out[tokens[p + i]]
            for n in range(size):
                row[n] += made[i, n]


@kernel
def _down_part(part, parts, like, out, outs, hidden, width, order, offsets, top_k, place, scales, few):
    """Some columns of the result, which lie together in `out` float32: what two cores write shall not be neighbours."""
    begin, end = span_fn(outs, part, parts)
    rows = order.size // top_k
    own = out[rows * begin : rows * end].reshape(rows, end - begin)
    # Rows of no power of two, lest they fall on each other in the processor's cache.
    turned, made = np.empty((width + 4, _COLUMNS + 16), np.float32), np.empty((4, _COLUMNS + 16), np.float32)
    for k in range(width, width + 4):
        clear_fn(turned[k])
    for t in range(rows):
        clear_fn(own[t])
    tokens = np.empty(order.size, np.int32)
    for p in range(order.size):
        tokens[p] = order[p] // top_k
    dense = np.empty((end - begin if scales.size else 0, width), like.dtype)
    for e in range(offsets.size - 1):
        first, last = offsets[e], offsets[e + 1]
        if first == last:
            continue
        base, stride = dense_fn(dense, like, place, scales, e, begin)
        for n in range(end - begin if few else 0):
            row = row_fn(like, base + n * stride * like.itemsize, width)
            for p in range(first, last):
                own[tokens[p], n] += dot_fn(hidden[p, :width], row)
        for n in range(0, 0 if few else end - begin, _COLUMNS):
            columns, some = own[:, n : min(n + _COLUMNS, end - begin)], base + n * stride * like.itemsize
            pairs = hidden[first : last + 4]
            _add_turned_fn(columns, like, pairs, width, tokens[first:last], turned, made, some, stride)


@parallel_kernel
def _down_parallel(parts, like, out, outs, hidden, width, order, offsets, top_k, place, scales, few):
    for part in prange(parts):
        _down_part(part, parts, like, out, outs, hidden, width, order, offsets, top_k, place, scales, few)


def moe_experts(
    x: torch.Tensor, w13: ExpertWeight, w2: ExpertWeight, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """`moe_experts_ref`, grouped for any number of tokens and in any format; a token's result is rounded once."""
    (rows, inputs), (experts, outs, width), like = x.shape, (w2.num_experts, w2.rows, w2.cols), LIKE.get(x.dtype)
    fits = (
        like is not None
        and (w13.layout, w2.layout) == ("interleaved", "plain")
        and (w13.num_experts, w13.rows, w13.cols) == (experts, 2 * width, inputs)
        and inputs == outs
        and ids.shape == weights.shape == (rows, ids.shape[1])
        and (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
        and ids.shape[1] > 0
        and x.stride(1) == 1
        and not records(x, weights, w13.data, w2.data)
    )
    gate_up, back = place_of(w13, x.dtype), place_of(w2, x.dtype)
    order, offsets, top_k = np.empty(ids.numel(), np.int32), np.empty(experts + 1, np.int32), ids.shape[1]
    ids, weights = ids.contiguous(), weights.contiguous()
    if not fits or gate_up is None or back is None or not _sort(order, offsets, ids.data_ptr(), experts):
        return moe_experts_ref(x, w13, w2, ids, weights)
    # The last group of 4 reads past the pairs, and past a width that is no multiple of 4.
    hidden, out = np.zeros((len(order) + 4, -(-width // 4) * 4), np.float32), torch.empty(rows * outs)
    up = hidden, width, order, offsets, weights.data_ptr(), top_k, x.data_ptr(), x.stride(0), *gate_up, inputs
    down = out.numpy(), outs, hidden, width, order, offsets, top_k, *back, rows <= FEW
    parts = parts_of(len(order) * width * inputs, _LEAST)
    if parts == 1:
        _up_part(0, 1, like, *up)
        _down_part(0, 1, like, *down)
    else:
        _up_parallel(parts, like, *up)
        _down_parallel(parts, like, *down)
    spans = (span_fn.py_func(outs, part, parts) for part in range(parts))
    columns = [out[rows * begin : rows * end].view(rows, end - begin) for begin, end in spans]
    return (columns[0] if parts == 1 else torch.cat(columns, 1)).to(x.dtype)
