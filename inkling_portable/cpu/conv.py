"""The short convolution, and the attention's inputs made with it, on any number of rows; see `inkling_kernels`.

A row's taps are added in one order wherever they come from, so no chunking changes its bits.
"""

from __future__ import annotations

import numpy as np
import torch

from inkling_kernels.kv_cache import qkvr_prep_ref
from inkling_kernels.ragged import check_tensor
from inkling_kernels.short_conv import check_conv, short_conv_ref
from inkling_portable.cpu.rows import normed_fn, rms_norm
from inkling_portable.cpu.tiles import (
    FLOAT,
    INT,
    LIKE,
    LONG,
    jit,
    narrow_fn,
    read_fn,
    records,
    row_fn,
    widen_fn,
    write_fn,
)


@jit
def _convolve(total, like, x, x_stride, i, position, w, width, state, ring):
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
            row = row_fn(like, state + (position - back) % ring * size * like.itemsize, size)
        else:
            break
        for c in range(size):
            total[c] += widen_fn(row[c]) * w[c * width + width - 1 - back]


@jit
def _keep(like, x, x_stride, rows, length, state, ring, size):
    """Put the last inputs of a sequence that now has `length` tokens into its ring, if it has one."""
    for i in range(max(rows - min(ring, length), 0), rows if state else 0):
        own = row_fn(like, x + i * x_stride * like.itemsize, size)
        kept = row_fn(like, state + (length - rows + i) % ring * size * like.itemsize, size)
        for c in range(size):
            kept[c] = own[c]


@jit
def _sound(starts, lengths, slots, rows, sequences):
    """Whether a batch stays within its rows and its state."""
    if starts[0] != 0 or starts[-1] > rows:
        return False
    for b in range(lengths.size):
        if starts[b] > starts[b + 1] or lengths[b] < 0 or slots[b] >= sequences:
            return False
    return True


@jit
def _short_conv(
    like, y, x, x_stride, w, width, residual, residual_stride, state, ring, slots, cu, lens, sequences, batch, rows, size
):  # fmt: skip
    total, old, weight = np.empty(size, np.float32), np.zeros(size, np.float32), row_fn(FLOAT, w, size * width)
    starts, lengths, slot = row_fn(INT, cu, batch + 1), row_fn(INT, lens, batch), row_fn(INT, slots, batch)
    if not _sound(starts, lengths, slot, rows, sequences):
        return False
    for b in range(batch):
        begin, end, length = starts[b], starts[b + 1], lengths[b]
        first = x + begin * x_stride * like.itemsize
        own = state + slot[b] * ring * size * like.itemsize if slot[b] >= 0 else 0
        for t in range(begin, end):
            _convolve(total, like, first, x_stride, t - begin, length - (end - t), weight, width, own, ring)
            write_fn(like, y + t * size * like.itemsize, total)
        _keep(like, first, x_stride, end - begin, length, own, ring, size)
    for t in range(rows):
        out = row_fn(like, y + t * size * like.itemsize, size)
        if t >= starts[batch]:
            out[:] = 0
        if residual:
            read_fn(old, like, residual + t * residual_stride * like.itemsize)
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
    """`short_conv_ref`, with a ring of state in one call whatever the number of rows, and one for the norm."""
    if state is None or slots.dim() > 1 or records(x, weight):
        return short_conv_ref(x, weight, state, slots, cu_seqlens, kv_lens, residual, norm_weight=norm_weight, eps=eps)
    rows, size = x.shape
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype or residual.stride(1) != 1):
        check_tensor("short_conv", "residual", residual, (rows, size), (x.dtype,))
        raise ValueError(f"short_conv: residual has strides {residual.stride()}; expected contiguous columns")
    width, batch = _checked("short_conv", x, weight, state, slots, cu_seqlens, kv_lens)
    y = torch.empty(rows, size, dtype=x.dtype)
    added = (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    pointers = y.data_ptr(), x.data_ptr(), x.stride(0), weight.data_ptr(), width, *added
    if not _short_conv(LIKE[x.dtype], *pointers, *batch, rows, size):
        check_conv("short_conv", x, weight, state, slots, cu_seqlens, kv_lens)
    return y if norm_weight is None else (y, rms_norm(y, norm_weight, eps))


@jit
def _qkvr_prep(
    like, q, r, k_pages, k_page, k_token, k_head, v_pages, v_page, v_token, v_head, mapping, page, room, x, x_stride, w,
    width, q_norm, k_norm, eps, heads, kv_heads, dim, d_rel, floor, alpha, state, ring, slots, cu, lens, sequences, batch,
    rows,
):  # fmt: skip
    size, kv = like.itemsize, kv_heads * dim
    total, wide, weight = np.empty(2 * kv, np.float32), np.empty(dim, np.float32), row_fn(FLOAT, w, 2 * kv * width)
    starts, lengths, slot = row_fn(INT, cu, batch + 1), row_fn(INT, lens, batch), row_fn(INT, slots, batch)
    q_weight, k_weight, places = row_fn(like, q_norm, dim), row_fn(like, k_norm, dim), row_fn(LONG, mapping, rows)
    if not _sound(starts, lengths, slot, rows, sequences):
        return False
    for t in range(starts[batch]):
        if places[t] >= room:
            return False
    for b in range(batch):
        begin, end, length = starts[b], starts[b + 1], lengths[b]
        first = x + (begin * x_stride + heads * dim) * size
        own = state + slot[b] * ring * 2 * kv * size if slot[b] >= 0 else 0
        for t in range(begin, end):
            position, here, tau = length - (end - t), x + t * x_stride * size, np.float32(1)
            if floor and position >= floor:
                tau += np.float32(alpha) * np.log(np.float32(position + 1) / np.float32(floor))
            for h in range(heads):
                read_fn(wide, like, here + h * dim * size)
                normed_fn(like, q + (t * heads + h) * dim * size, wide, q_weight, eps, tau)
            old = row_fn(like, here + (heads * dim + 2 * kv) * size, heads * d_rel)
            out = row_fn(like, r + t * heads * d_rel * size, heads * d_rel)
            for i in range(out.size):
                out[i] = narrow_fn(like, widen_fn(old[i]) * tau)
            if places[t] < 0:
                continue
            _convolve(total, like, first, x_stride, t - begin, position, weight, width, own, ring)
            for c in range(2 * kv):
                total[c] = widen_fn(narrow_fn(like, total[c]))
            at, offset = places[t] // page, places[t] % page
            for h in range(kv_heads):
                key, value = total[h * dim : (h + 1) * dim], total[kv + h * dim : kv + (h + 1) * dim]
                key_at = k_pages + (at * k_page + offset * k_token + h * k_head) * size
                normed_fn(like, key_at, key, k_weight, eps, np.float32(1))
                write_fn(like, v_pages + (at * v_page + offset * v_token + h * v_head) * size, value)
        _keep(like, first, x_stride, end - begin, length, own, ring, 2 * kv)
    row_fn(like, q + starts[batch] * heads * dim * size, (rows - starts[batch]) * heads * dim)[:] = 0
    row_fn(like, r + starts[batch] * heads * d_rel * size, (rows - starts[batch]) * heads * d_rel)[:] = 0
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
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "d_rel": d_rel}
    paged = slots.dim() > 1
    if state is None or paged or kv_cache is None or slot_mapping is None or records(qkvr, conv_weight, q_norm, k_norm):
        scaling = {"log_scaling_n_floor": log_scaling_n_floor, "log_scaling_alpha": log_scaling_alpha}
        batch = state, slots, cu_seqlens, kv_lens, kv_cache, slot_mapping
        return qkvr_prep_ref(qkvr, conv_weight, q_norm, k_norm, eps, *batch, **sizes, **scaling)
    (k_pages, v_pages), (q_size, kv_size) = kv_cache, (num_heads * head_dim, num_kv_heads * head_dim)
    check_shapes("qkvr_prep", qkvr, q_norm, k_norm, k_pages, v_pages, slot_mapping, **sizes)
    x = qkvr[:, q_size : q_size + 2 * kv_size]
    width, batch = _checked("qkvr_prep", x, conv_weight, state, slots, cu_seqlens, kv_lens)
    q = torch.empty(len(qkvr), num_heads, head_dim, dtype=qkvr.dtype)
    r = torch.empty(len(qkvr), num_heads, d_rel, dtype=qkvr.dtype)
    pages = k_pages.data_ptr(), *k_pages.stride()[:3], v_pages.data_ptr(), *v_pages.stride()[:3]
    page, room = k_pages.shape[1], k_pages.shape[0] * k_pages.shape[1]
    inputs = qkvr.data_ptr(), qkvr.stride(0), conv_weight.data_ptr(), width, q_norm.data_ptr(), k_norm.data_ptr(), eps
    written = _qkvr_prep(
        LIKE[qkvr.dtype], q.data_ptr(), r.data_ptr(), *pages, slot_mapping.data_ptr(), page, room, *inputs,
        *sizes.values(), log_scaling_n_floor or 0, log_scaling_alpha, *batch, len(qkvr),
    )  # fmt: skip
    if not written:
        check_conv("qkvr_prep", x, conv_weight, state, slots, cu_seqlens, kv_lens)
        raise ValueError(
            f"qkvr_prep: slot_mapping has {int(slot_mapping.max())}; expected slots below {room}, or -1 for none"
        )
    return q, r, k_pages, v_pages


def check_shapes(
    op: str,
    qkvr: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    d_rel: int,
) -> None:
    """Raise ValueError or TypeError where `qkvr_prep`'s tensors do not fit together."""
    columns, kv = num_heads * (head_dim + d_rel) + 2 * num_kv_heads * head_dim, (num_kv_heads, head_dim)
    fits = (
        qkvr.shape[1:] == (columns,)
        and slot_mapping.shape == qkvr.shape[:1]
        and q_norm.shape == k_norm.shape == (head_dim,)
        and k_pages.shape[2:] == kv
        and k_pages.shape == v_pages.shape
        and qkvr.dtype == q_norm.dtype == k_norm.dtype == k_pages.dtype == v_pages.dtype
        and slot_mapping.dtype == torch.int64
        and slot_mapping.is_contiguous()
        and qkvr.stride(1) == k_pages.stride(3) == v_pages.stride(3) == q_norm.stride(0) == k_norm.stride(0) == 1
    )
    if fits:
        return
    check_tensor(op, "qkvr", qkvr, (None, columns), tuple(LIKE))
    check_tensor(op, "slot_mapping", slot_mapping, (len(qkvr),), (torch.int64,))
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        check_tensor(op, name, norm, (head_dim,), (qkvr.dtype,))
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        check_tensor(op, name, pages, (*k_pages.shape[:2], *kv), (qkvr.dtype,))
    raise ValueError(f"{op}: an argument's last dimension has a stride; expected contiguous ones")


def _checked(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    kv_lens: torch.Tensor,
) -> tuple[int, tuple[int, ...]]:
    """A convolution's width, and what the kernels take of its batch and state; ValueError or TypeError where the
    tensors do not fit together.
    """
    ring, batch = state.shape[1], len(kv_lens)
    fits = (
        state.dtype == x.dtype
        and state.is_contiguous()
        and (state.shape[2],) == x.shape[1:] == weight.shape[:1]
        and ring >= max(weight.shape[1] - 1, 1)
        and weight.dtype == torch.float32
        and weight.is_contiguous()
        and x.stride(1) == 1
        and len(slots) == batch == len(cu_seqlens) - 1
        and slots.dtype == cu_seqlens.dtype == kv_lens.dtype == torch.int32
        and (batch == 0 or slots.stride(0) == cu_seqlens.stride(0) == kv_lens.stride(0) == 1)
    )
    if not fits:
        check_conv(op, x, weight, state, slots, cu_seqlens, kv_lens)
        raise ValueError(
            f"{op}: x, weight and state have strides {x.stride()}, {weight.stride()} and {state.stride()}; "
            "expected contiguous ones, x's rows aside"
        )
    pointers = slots.data_ptr(), cu_seqlens.data_ptr(), kv_lens.data_ptr()
    return weight.shape[1], (state.data_ptr(), ring, *pointers, len(state), batch)
