"""Relative attention of few query rows over the paged cache; formula and layouts are those of `rel_attention_ref`.

A query row's heads that share keys are taken 4 at a time: scores of all the keys that they see, the bias added from its
end, softmax over the whole row, weighted sum. Rows and key heads are shared out to threads.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from inkling_kernels.rel_attention import rel_attention_ref
from inkling_portable.cpu.tiles import (
    FEW,
    INT,
    LIKE,
    blend_fn,
    clear_fn,
    dots_fn,
    exp_fn,
    four_fn,
    helper,
    kernel,
    largest_fn,
    parallel_kernel,
    parts_of,
    read_fn,
    records,
    row_fn,
    write_fn,
)

#: Values of keys below which another thread costs more than it saves.
_LEAST = 1 << 15


@helper
def _scores_fn(scores, like, q, keys, page_stride, stride, table, page, low, end):
    """Scores `[4, at least n]` of 4 rows `q` `[4, D]` float32 and the keys `low..end-1`, n of them."""
    for p in range(low // page, (end - 1) // page + 1):
        base, last = keys + table[p] * page_stride * like.itemsize, min(end - p * page, page) - 1
        for j in range(max(low - p * page, 0), last + 1, 4):
            found = dots_fn(q, four_fn(like, base, stride, j, last, q.shape[1]))
            for i in range(4):
                for c in range(4):
                    scores[i, p * page + j - low + c] = found[4 * i + c]


@helper
def _add_bias_fn(scores, like, r, proj, extent, count):
    """Add `r . proj` at each of the nearest `extent` of `count` keys, the last of which is at distance 0."""
    near, d_rel = min(extent, count), r.shape[1]
    for d in range(0, near, 4):
        found = dots_fn(r, four_fn(like, proj, d_rel, d, near - 1, d_rel))
        for i in range(4):
            for c in range(min(4, near - d)):
                scores[i, count - 1 - d - c] += found[4 * i + c]


@helper
def _sum_fn(out, like, weights, values, page_stride, stride, table, page, low, end):
    """Add to `out` `[4, D]` float32 the values of keys `low..end-1`, weighted by `weights` `[4, n]`."""
    f = np.empty((4, 4), np.float32)
    for p in range(low // page, (end - 1) // page + 1):
        base, last = values + table[p] * page_stride * like.itemsize, min(end - p * page, page) - 1
        for j in range(max(low - p * page, 0), last + 1, 4):
            for i in range(4):
                for c in range(4):
                    f[i, c] = weights[i, p * page + j - low + c] if j + c <= last else 0
            blend_fn(out[0], out[1], out[2], out[3], f, four_fn(like, base, stride, j, last, out.shape[1]))


@kernel
def _rel_attention_part(
    part, parts, like, y, q, r, k_pages, k_page, k_token, k_head, v_pages, v_page, v_token, v_head,
    proj, tables, table_stride, cu, lens, rows, batch, heads, kv_heads, dim, d_rel, extent, page, window, scale,
):  # fmt: skip
    size, group, b = like.itemsize, heads // kv_heads, 0
    starts, lengths = row_fn(INT, cu, batch + 1), row_fn(INT, lens, batch)
    out, own_q, own_r = np.empty((4, dim), np.float32), np.empty((4, dim), np.float32), np.empty((4, d_rel), np.float32)
    for item in range(rows * kv_heads * part // parts, rows * kv_heads * (part + 1) // parts):
        t, g = item // kv_heads, item % kv_heads
        while b < batch and t >= starts[b + 1]:
            b += 1
        end = lengths[b] - (starts[b + 1] - 1 - t) if b < batch else 0
        low, count = max(0, end - window), min(end, window)
        for h in range(g * group, (g + 1) * group, 4):
            held = min(4, (g + 1) * group - h)
            for i in range(4):
                head = h + min(i, held - 1)
                read_fn(own_q[i], like, q + (t * heads + head) * dim * size)
                read_fn(own_r[i], like, r + (t * heads + head) * d_rel * size)
                clear_fn(out[i])
                for c in range(dim):
                    own_q[i, c] *= np.float32(scale)
            if end > 0:
                table, scores = (
                    row_fn(INT, tables + 4 * b * table_stride, table_stride),
                    np.empty((4, count + 4), np.float32),
                )
                _scores_fn(scores, like, own_q, k_pages + g * k_head * size, k_page, k_token, table, page, low, end)
                _add_bias_fn(scores, like, own_r, proj, extent, count)
                for i in range(4):
                    row, total = scores[i, :count], np.float32(0)
                    top = largest_fn(row)
                    for j in range(count):
                        row[j] = exp_fn(row[j] - top)
                    for j in range(count):
                        total += row[j]
                    for j in range(count):
                        row[j] /= total
                _sum_fn(out, like, scores, v_pages + g * v_head * size, v_page, v_token, table, page, low, end)
            for i in range(held):
                write_fn(like, y + (t * heads + h + i) * dim * size, out[i])


@parallel_kernel
def _rel_attention_parallel(
    parts, like, y, q, r, k_pages, k_page, k_token, k_head, v_pages, v_page, v_token, v_head,
    proj, tables, table_stride, cu, lens, rows, batch, heads, kv_heads, dim, d_rel, extent, page, window, scale,
):  # fmt: skip
    for part in prange(parts):
        _rel_attention_part(
            part, parts, like, y, q, r, k_pages, k_page, k_token, k_head, v_pages, v_page, v_token,
            v_head, proj, tables, table_stride, cu, lens, rows, batch, heads, kv_heads, dim, d_rel, extent, page,
            window, scale,
        )  # fmt: skip


@kernel
def _sound(tables, table_stride, cu, lens, batch, rows, page, pages, window, most_rows, most_keys):
    """Whether the sequences are within their bounds, and all pages that the rows see are there."""
    starts, lengths = row_fn(INT, cu, batch + 1), row_fn(INT, lens, batch)
    if starts[0] != 0 or starts[batch] > rows:
        return False
    for b in range(batch):
        count, table = starts[b + 1] - starts[b], row_fn(INT, tables + 4 * b * table_stride, table_stride)
        if not 0 <= count <= most_rows or lengths[b] > min(most_keys, table_stride * page):
            return False
        low = max(0, lengths[b] - count + 1 - window)
        for p in range(low // page, (lengths[b] + page - 1) // page if count else 0):
            if not 0 <= table[p] < pages:
                return False
    return True


def rel_attention(
    q: torch.Tensor,
    r: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    proj: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    window: int | None,
    scale: float,
    max_query_len: int | None = None,
    max_kv_len: int | None = None,
    decode_query_len: int | None = None,
) -> torch.Tensor:
    """`rel_attention_ref`, for up to `FEW` rows in one call."""
    (rows, heads, dim), (pages, page, kv_heads, _), (d_rel, extent) = q.shape, k_pages.shape, proj.shape
    (batch, width), where = block_table.shape, (block_table, cu_seqlens, kv_lens)
    seen, like = window or 1 << 62, LIKE.get(q.dtype)
    fits = (
        rows <= FEW
        and like is not None
        and q.dtype == r.dtype == k_pages.dtype == v_pages.dtype == proj.dtype
        and block_table.dtype == cu_seqlens.dtype == kv_lens.dtype == torch.int32
        and k_pages.stride(3) == v_pages.stride(3) == 1
        and block_table.is_contiguous()
        and cu_seqlens.is_contiguous()
        and kv_lens.is_contiguous()
        and r.shape == (rows, heads, d_rel)
        and k_pages.shape == v_pages.shape == (pages, page, kv_heads, dim)
        and heads % kv_heads == 0
        and kv_lens.shape == (batch,)
        and cu_seqlens.shape == (batch + 1,)
        and not records(q, r, k_pages, v_pages, proj)
    )
    table = block_table.data_ptr(), width, cu_seqlens.data_ptr(), kv_lens.data_ptr()
    bounds = (rows if max_query_len is None else max_query_len, 1 << 62 if max_kv_len is None else max_kv_len)
    if not fits or not _sound(*table, batch, rows, page, pages, seen, *bounds):
        return rel_attention_ref(
            q, r, k_pages, v_pages, proj, *where, window=window, scale=scale, max_query_len=max_query_len,
            max_kv_len=max_kv_len,
        )  # fmt: skip
    # What belongs to a distance lies side by side, as the model keeps it.
    q, r, proj = q.contiguous(), r.contiguous(), proj.t().contiguous()
    y = torch.empty_like(q)
    call = (
        like, y.data_ptr(), q.data_ptr(), r.data_ptr(), k_pages.data_ptr(), *k_pages.stride()[:3], v_pages.data_ptr(),
        *v_pages.stride()[:3], proj.data_ptr(), *table, rows, batch, heads, kv_heads, dim, d_rel, extent, page, seen,
        scale,
    )  # fmt: skip
    parts = min(parts_of(rows * min(width * page, seen) * dim * kv_heads, _LEAST), rows * kv_heads)
    _rel_attention_part(0, 1, *call) if parts == 1 else _rel_attention_parallel(parts, *call)
    return y
