"""The short convolution, and the attention's inputs made with it, on any number of rows; see `inkling_kernels`.

A row's taps are added in one order wherever they come from, so no chunking changes its bits.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from inkling_kernels.kv_cache import qkvr_prep_ref
from inkling_kernels.short_conv import short_conv_ref
from inkling_portable.cpu.rows import normed_fn, rms_norm
from inkling_portable.cpu.tiles import (
    FLOAT,
    INT,
    LIKE,
    LONG,
    clear_fn,
    helper,
    kernel,
    narrow_fn,
    read_fn,
    records,
    row_fn,
    widen_fn,
    write_fn,
)


@helper
def _convolve_fn(total, like, x, x_stride, i, position, w, width, state, ring_stride, ring):
    """Write into `total` the convolution of a sequence's row `i` of this step, `x` being the address of its row 0.

    `state` is the address of the sequence's ring, 0 where it has none.
    """
    size = total.size
    own = row_fn(like, x + i * x_stride * like.itemsize, size)
    for c in range(size):
        total[c] = widen_fn(own[c]) * w[c * width + width - 1] + widen_fn(own[c])
    for back in range(1, width):
        if i >= back:
            row = row_fn(like, x + (i - back) * x_stride * like.itemsize, size)
        elif position >= back and state:
            row = row_fn(like, state + (position - back) % ring * ring_stride * like.itemsize, size)
        else:
            break
        for c in range(size):
            total[c] += widen_fn(row[c]) * w[c * width + width - 1 - back]


@helper
def _keep_fn(like, x, x_stride, rows, length, state, ring_stride, ring, size):
    """Put the last inputs of a sequence that now has `length` tokens into its ring, if it has one."""
    for i in range(max(rows - min(ring, length), 0), rows if state else 0):
        own = row_fn(like, x + i * x_stride * like.itemsize, size)
        kept = row_fn(like, state + (length - rows + i) % ring * ring_stride * like.itemsize, size)
        for c in range(size):
            kept[c] = own[c]


@helper
def _sound_fn(starts, lengths, slots, rows, sequences):
    """Whether a batch stays within its rows and its state."""
    sound = starts[0] == 0 and starts[-1] <= rows
    for b in range(lengths.size):
        sound &= starts[b] <= starts[b + 1] and lengths[b] >= 0 and slots[b] < sequences
    return sound


@kernel
def _short_conv(
    like, y, x, x_stride, residual, w, width, state, slot_stride, ring_stride, ring, slots, cu, lens,
    sequences, batch, rows, size,
):  # fmt: skip
    total, old, weight = np.empty(size, np.float32), np.empty(size, np.float32), row_fn(FLOAT, w, size * width)
    starts, lengths, slot = row_fn(INT, cu, batch + 1), row_fn(INT, lens, batch), row_fn(INT, slots, batch)
    if not _sound_fn(starts, lengths, slot, rows, sequences):
        return False
    for b in range(batch):
        begin, end, length = starts[b], starts[b + 1], lengths[b]
        first = x + begin * x_stride * like.itemsize
        own = state + slot[b] * slot_stride * like.itemsize if state and slot[b] >= 0 else 0
        for t in range(begin, end):
            _convolve_fn(
                total, like, first, x_stride, t - begin, length - (end - t), weight, width, own, ring_stride, ring
            )
            write_fn(like, y + t * size * like.itemsize, total)
        _keep_fn(like, first, x_stride, end - begin, length, own, ring_stride, ring, size)
    for t in range(rows):
        out = row_fn(like, y + t * size * like.itemsize, size)
        if t >= starts[batch]:
            clear_fn(out)
        if residual:
            read_fn(old, like, residual + t * size * like.itemsize)
            for c in range(size):
                out[c] = narrow_fn(like, old[c] + widen_fn(out[c]))
    return True


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor | None,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    kv_lens: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`short_conv_ref`, in one call whatever the number of rows, and one for the norm."""
    (rows, size), batch = x.shape, None
    added = x if residual is None else residual.contiguous()
    if added.shape == x.shape and added.dtype == x.dtype and not records(x, weight, added):
        batch = _batch_of(x, weight, state, slots, cu_seqlens, kv_lens)
    if batch is not None:
        y = torch.empty(rows, size, dtype=x.dtype)
        pointers = y.data_ptr(), x.data_ptr(), x.stride(0), 0 if residual is None else added.data_ptr()
        if _short_conv(LIKE[x.dtype], *pointers, *batch, rows, size):
            return y if norm_weight is None else (y, rms_norm(y, norm_weight, eps))
    return short_conv_ref(x, weight, state, slots, cu_seqlens, kv_lens, residual, norm_weight=norm_weight, eps=eps)


@kernel
def _qkvr_prep(
    like, q, r, k_pages, k_page, k_token, k_head, v_pages, v_page, v_token, v_head, mapping, page, room, x, x_stride,
    q_norm, k_norm, eps, heads, kv_heads, dim, d_rel, floor, alpha, w, width, state, slot_stride, ring_stride,
    ring, slots, cu, lens, sequences, batch, rows,
):  # fmt: skip
    size, kv = like.itemsize, kv_heads * dim
    total, wide, weight = np.empty(2 * kv, np.float32), np.empty(dim, np.float32), row_fn(FLOAT, w, 2 * kv * width)
    starts, lengths, slot = row_fn(INT, cu, batch + 1), row_fn(INT, lens, batch), row_fn(INT, slots, batch)
    q_weight, k_weight, places = row_fn(like, q_norm, dim), row_fn(like, k_norm, dim), row_fn(LONG, mapping, rows)
    if not _sound_fn(starts, lengths, slot, rows, sequences):
        return False
    for t in range(starts[batch]):
        if places[t] >= room:
            return False
    for b in range(batch):
        begin, end, length = starts[b], starts[b + 1], lengths[b]
        first = x + (begin * x_stride + heads * dim) * size
        own = state + slot[b] * slot_stride * size if slot[b] >= 0 else 0
        for t in range(begin, end):
            position, here, tau = length - (end - t), x + t * x_stride * size, np.float32(1)
            if floor and position >= floor:
                tau += np.float32(alpha) * np.float32(math.log(np.float32(position + 1) / np.float32(floor)))
            for h in range(heads):
                read_fn(wide, like, here + h * dim * size)
                normed_fn(like, q + (t * heads + h) * dim * size, wide, q_weight, eps, tau)
            old = row_fn(like, here + (heads * dim + 2 * kv) * size, heads * d_rel)
            out = row_fn(like, r + t * heads * d_rel * size, heads * d_rel)
            for i in range(out.size):
                out[i] = narrow_fn(like, widen_fn(old[i]) * tau)
            if places[t] < 0:
                continue
            _convolve_fn(total, like, first, x_stride, t - begin, position, weight, width, own, ring_stride, ring)
            for c in range(2 * kv):
                total[c] = widen_fn(narrow_fn(like, total[c]))
            at, offset = places[t] // page, places[t] % page
            for h in range(kv_heads):
                key, value = total[h * dim : (h + 1) * dim], total[kv + h * dim : kv + (h + 1) * dim]
                key_at = k_pages + (at * k_page + offset * k_token + h * k_head) * size
                normed_fn(like, key_at, key, k_weight, eps, np.float32(1))
                write_fn(like, v_pages + (at * v_page + offset * v_token + h * v_head) * size, value)
        _keep_fn(like, first, x_stride, end - begin, length, own, ring_stride, ring, 2 * kv)
    clear_fn(row_fn(like, q + starts[batch] * heads * dim * size, (rows - starts[batch]) * heads * dim))
    clear_fn(row_fn(like, r + starts[batch] * heads * d_rel * size, (rows - starts[batch]) * heads * d_rel))
    return True


def qkvr_prep(
    qkvr: torch.Tensor,
    conv_weight: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    state: torch.Tensor | None,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    kv_lens: torch.Tensor,
    kv_cache: tuple[torch.Tensor, torch.Tensor] | None,
    slot_mapping: torch.Tensor | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    d_rel: int,
    log_scaling_n_floor: int | None,
    log_scaling_alpha: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`qkvr_prep_ref`, with state and cache in one call whatever the number of rows."""
    q_size, kv_size, rows = num_heads * head_dim, num_kv_heads * head_dim, qkvr.shape[0]
    tensors, batch = (qkvr, q_norm, k_norm, *(kv_cache or ())), None
    if state is not None and kv_cache is not None and slot_mapping is not None and not records(conv_weight, *tensors):
        kv = qkvr[:, q_size : q_size + 2 * kv_size]
        fits = (
            qkvr.shape[1] == q_size + 2 * kv_size + num_heads * d_rel
            and q_norm.shape == k_norm.shape == (head_dim,)
            and kv_cache[0].shape == kv_cache[1].shape == (*kv_cache[0].shape[:2], num_kv_heads, head_dim)
            and all(tensor.dtype == qkvr.dtype and tensor.stride(-1) == 1 for tensor in tensors)
            and slot_mapping.shape == (rows,)
            and slot_mapping.dtype == torch.int64
            and slot_mapping.is_contiguous()
        )
        batch = _batch_of(kv, conv_weight, state, slots, cu_seqlens, kv_lens) if fits else None
    if batch is not None and kv_cache is not None and slot_mapping is not None:
        q = torch.empty(rows, num_heads, head_dim, dtype=qkvr.dtype)
        r = torch.empty(rows, num_heads, d_rel, dtype=qkvr.dtype)
        pages = [part for cache in kv_cache for part in (cache.data_ptr(), *cache.stride()[:3])]
        page, room = kv_cache[0].shape[1], kv_cache[0].shape[0] * kv_cache[0].shape[1]
        written = _qkvr_prep(
            LIKE[qkvr.dtype], q.data_ptr(), r.data_ptr(), *pages, slot_mapping.data_ptr(), page, room, qkvr.data_ptr(),
            qkvr.stride(0), q_norm.data_ptr(), k_norm.data_ptr(), eps, num_heads, num_kv_heads, head_dim, d_rel,
            log_scaling_n_floor or 0, log_scaling_alpha, *batch, rows,
        )  # fmt: skip
        if written:
            return q, r, *kv_cache
    return qkvr_prep_ref(
        qkvr, conv_weight, q_norm, k_norm, eps, state, slots, cu_seqlens, kv_lens, kv_cache, slot_mapping,
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, d_rel=d_rel,
        log_scaling_n_floor=log_scaling_n_floor, log_scaling_alpha=log_scaling_alpha,
    )  # fmt: skip


def _batch_of(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor | None,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    kv_lens: torch.Tensor,
) -> tuple[int, ...] | None:
    """What the kernels take of a convolution's weight, state and batch; None where they are not made for it."""
    (batch,), width = kv_lens.shape, weight.shape[1]
    sequences, ring, size = (batch, width, x.shape[1]) if state is None else state.shape
    fits = (
        x.dtype in LIKE
        and (state is None or (state.dtype == x.dtype and state.stride(2) == 1))
        and (size,) == x.shape[1:] == weight.shape[:1]
        and ring >= max(width - 1, 1)
        and weight.dtype == torch.float32
        and weight.is_contiguous()
        and x.stride(1) == 1
        and slots.shape == (batch,)
        and cu_seqlens.shape == (batch + 1,)
        and slots.dtype == cu_seqlens.dtype == kv_lens.dtype == torch.int32
        and slots.is_contiguous()
        and cu_seqlens.is_contiguous()
        and kv_lens.is_contiguous()
    )
    if not fits:
        return None
    pointers = slots.data_ptr(), cu_seqlens.data_ptr(), kv_lens.data_ptr()
    kept = (0, 0, 0) if state is None else (state.data_ptr(), *state.stride()[:2])
    return weight.data_ptr(), width, *kept, ring, *pointers, sequences, batch
