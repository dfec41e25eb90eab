"""Causal attention with a learned relative bias, over a paged KV cache and a ragged batch.

    score[i, h, j] = scale * q[i, h] . k[j, h // group] + bias[i, h, i - j]   j <= i, and i - j < window if there is one
    bias[i, h, d]  = r[i, h, :] . proj[:, d]   for 0 <= d < extent, else 0
    out[i, h]      = softmax_j(score) v[j, h // group]

Query row `i` of a sequence is at position `kv_len - q_len + i`, so one rule covers prefill, extension, decoding and
verification. `scale` is `1 / head_dim` (q and k are normalised per head). Log scaling is already in `q` and `r`.

Layouts: `q` `[T, Hq, D]`, `r` `[T, Hq, d_rel]`, `k_pages`/`v_pages` logical `[P, page, Hkv, D]` of any strides,
`proj` `[d_rel, extent]`, `block_table` `[B, max_pages]` int32 (entries wholly outside the window may hold anything and
are not read), `cu_seqlens` `[B+1]` int32, `kv_lens` `[B]` int32. Scores, softmax and sums are float32. A row without
keys is 0. What the host knows of the lengths, `max_query_len` and `max_kv_len`, are upper bounds of any sequence's rows
and keys; like `decode_query_len` they choose between kernels and never change what is computed.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from inkling_kernels.compile_case import CompileCase
from inkling_kernels.fp8 import fp8_values_ref
from inkling_kernels.ragged import sequence_tile_fn
from inkling_kernels.rel_attention_decode import rel_attention_decode
from inkling_kernels.rel_attention_plan import MAX_QUERY_LEN, RelAttentionConfig, rel_attention_plan
from inkling_kernels.rel_attention_tile import (
    FLOOR,
    FP8_KINDS,
    attend_fn,
    cache_operands,
    check_arguments,
    check_bounds,
    meta_case,
    r_wide_fn,
    spoilt_fn,
)
from inkling_kernels.target import TARGETS, Target


@triton.jit(do_not_specialize=["tokens", "batch", "few", "window", "extent"])
def _rel_attention_kernel(
    out_ptr, q_ptr, r_ptr, k_ptr, v_ptr, proj_ptr, table_ptr, cu_ptr, kv_lens_ptr, k_scale_ptr, v_scale_ptr,
    tokens, batch, few, window, extent, scale, out_strides, q_strides, r_strides, k_strides, v_strides, proj_strides,
    table_stride, scale_stride, GROUP: tl.constexpr, D: tl.constexpr, D_REL: tl.constexpr, PAGE: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FP8: tl.constexpr, WINDOW: tl.constexpr,
    FAR: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1).to(tl.int64)
    seq, q_begin, q_len, covered, t0, first = sequence_tile_fn(
        cu_ptr, kv_lens_ptr, tl.program_id(0), tokens, batch, TOKENS
    )
    # Sequences of at most `few` rows are left to the kernel that is launched behind this one. But padding behind the
    # last sequence is not, whose rows that kernel then writes anew.
    if (t0 >= covered) | ((q_len <= few) & (covered == q_len)):
        return
    # The last tiles see the most keys: started first, they do not end last.
    t0 = (covered - 1) // TOKENS * TOKENS - t0
    # A tile of padding alone stands before the first key.
    first = tl.where(t0 < q_len, first + t0, -TOKENS)

    row = tl.arange(0, BLOCK_M)
    token = row // GROUP
    owned = (token < TOKENS) & (t0 + token < covered)
    live = owned & (t0 + token < q_len)
    at = (q_begin + t0 + token).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, D).to(tl.int64)
    q_at = (at * q_strides[0] + head * q_strides[1])[:, None] + (dim * q_strides[2])[None, :]
    q = tl.load(q_ptr + q_at, mask=live[:, None], other=0.0)
    r_row = r_ptr + at * r_strides[0] + head * r_strides[1]
    r_wide = r_wide_fn(r_row, r_strides[2], token, live, 0, D_REL, TOKENS)

    high = first + tl.minimum(TOKENS, q_len - t0)
    low = 0
    if WINDOW:
        low = tl.maximum(first - window + 1, 0)
    begin = low // BLOCK_N * BLOCK_N
    k_ptr += kv_head * k_strides[2]
    v_ptr += kv_head * v_strides[2]
    table_ptr += seq.to(tl.int64) * table_stride
    if FP8 > 0:
        scale *= tl.load(k_scale_ptr + kv_head * scale_stride)

    acc = tl.zeros([BLOCK_M, D], tl.float32)
    peak = tl.full([BLOCK_M], FLOOR, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if WINDOW:
        # Tiles before `inside` hold keys that have left the last token's window.
        inside = tl.maximum(first + TOKENS - window + BLOCK_N - 1, 0) // BLOCK_N * BLOCK_N
        inside = tl.maximum(tl.minimum(inside, high), begin)
        acc, peak, total = attend_fn(
            acc, peak, total, q, r_wide, r_wide, k_ptr, v_ptr, proj_ptr, table_ptr, k_strides, v_strides, proj_strides,
            first, token, begin, inside, low, high, window, extent, scale,
            D, D_REL, TOKENS, 0, BLOCK_N, PAGE, FP8, BIAS=True, WINDOW=True, CAUSAL=True, APART=False,
        )  # fmt: skip
        begin = inside
    # Tiles before `edge` hold no key ahead of token 0.
    edge = tl.maximum(tl.maximum(first + 1, 0) // BLOCK_N * BLOCK_N, begin)
    if FAR:
        # Tiles before `near` hold only keys beyond every token's extent.
        near = tl.minimum(tl.maximum(tl.maximum(first + 1 - extent, 0) // BLOCK_N * BLOCK_N, begin), edge)
        acc, peak, total = attend_fn(
            acc, peak, total, q, r_wide, r_wide, k_ptr, v_ptr, proj_ptr, table_ptr, k_strides, v_strides, proj_strides,
            first, token, begin, near, low, high, window, extent, scale,
            D, D_REL, TOKENS, 0, BLOCK_N, PAGE, FP8, BIAS=False, WINDOW=False, CAUSAL=False, APART=False,
        )  # fmt: skip
        begin = near
    acc, peak, total = attend_fn(
        acc, peak, total, q, r_wide, r_wide, k_ptr, v_ptr, proj_ptr, table_ptr, k_strides, v_strides, proj_strides,
        first, token, begin, edge, low, high, window, extent, scale,
        D, D_REL, TOKENS, 0, BLOCK_N, PAGE, FP8, BIAS=True, WINDOW=False, CAUSAL=False, APART=False,
    )  # fmt: skip
    acc, peak, total = attend_fn(
        acc, peak, total, q, r_wide, r_wide, k_ptr, v_ptr, proj_ptr, table_ptr, k_strides, v_strides, proj_strides,
        first, token, edge, high, low, high, window, extent, scale,
        D, D_REL, TOKENS, 0, BLOCK_N, PAGE, FP8, BIAS=True, WINDOW=False, CAUSAL=True, APART=False,
    )  # fmt: skip
    if spoilt_fn(acc):
        acc, peak, total = attend_fn(
            tl.zeros([BLOCK_M, D], tl.float32), tl.full([BLOCK_M], FLOOR, tl.float32), tl.zeros([BLOCK_M], tl.float32),
            q, r_wide, r_wide, k_ptr, v_ptr, proj_ptr, table_ptr, k_strides, v_strides, proj_strides,
            first, token, low // BLOCK_N * BLOCK_N, high, low, high, window, extent, scale,
            D, D_REL, TOKENS, 0, BLOCK_N, PAGE, FP8, BIAS=True, WINDOW=WINDOW, CAUSAL=True, APART=True,
        )  # fmt: skip
    # A row without keys has total 0 and acc 0; a NaN total stays NaN. Rows of padding share the tile's keys, and are 0.
    out = tl.where(live[:, None], acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None], 0.0)
    if FP8 > 0:
        out *= tl.load(v_scale_ptr + kv_head * scale_stride)
    out_at = (at * out_strides[0] + head * out_strides[1])[:, None] + (dim * out_strides[2])[None, :]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=owned[:, None])


def rel_attention(
    q: torch.Tensor, r: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, proj: torch.Tensor,
    block_table: torch.Tensor, cu_seqlens: torch.Tensor, kv_lens: torch.Tensor, *, window: int | None, scale: float,
    max_query_len: int | None = None, max_kv_len: int | None = None, decode_query_len: int | None = None,
    split_keys: int | None = None, kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    target: Target | None = None, config: RelAttentionConfig | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend with the Triton kernels, for any mix of prefill, extension, decode and verify rows; returns
    `[T, Hq, D]`.

    Where no sequence has more than `max_query_len` = 1 to 9 rows, `rel_attention_decode` attends with split keys;
    `max_kv_len` (default: what the block table has room for) bounds the number of splits, and `split_keys` fixes their
    size. With more rows, None, or a `config`, the kernel of this file attends, but for sequences of at most
    `decode_query_len` rows beside others: prompts and generated tokens in one step. The choice and both plans follow
    from shapes and these bounds, so a captured graph keeps them while the lengths change.

    Arguments as in the module's docstring; `q`, `r`, `proj` of one type (bfloat16, float32; float16 for tests), pages
    of that type or fp8 with `kv_scales` = float32 `(k_scale, v_scale)`, each `[1]` or `[Hkv]`, which multiply in
    registers. Rows behind the last sequence are padding and come out 0. No tensor may hold less than the lengths say:
    on a GPU they are read on the device and cannot be checked here. `proj`
    is fastest stored distance-major (`proj.stride() == (1, 16)`). `target` picks the tile shape; None fits every chip.

    Products accumulate in float32; probabilities are rounded to `q.dtype` before they meet the values. The two kernels
    agree up to the rounding of one more float32 sum.
    Raises TypeError or ValueError naming the argument, before anything is allocated or launched.
    """
    check_arguments(
        "rel_attention", q, r, k_pages, v_pages, proj, block_table, cu_seqlens, kv_lens, window, scale, kv_scales,
        max_query_len, max_kv_len,
    )  # fmt: skip
    if decode_query_len is not None and decode_query_len not in range(1, MAX_QUERY_LEN + 1):
        raise ValueError(
            f"rel_attention: decode_query_len is {decode_query_len!r}; expected 1 to {MAX_QUERY_LEN}, or None"
        )
    total, heads, head_dim = q.shape
    batch, kv_heads = len(kv_lens), k_pages.shape[2]

    def decoded(rows: int, out: torch.Tensor | None) -> torch.Tensor:
        return rel_attention_decode(
            q, r, k_pages, v_pages, proj, block_table, cu_seqlens, kv_lens, window=window, scale=scale, out=out,
            max_query_len=rows, max_kv_len=max_kv_len, split_keys=split_keys, kv_scales=kv_scales, target=target,
        )  # fmt: skip

    rows = max_query_len or 0
    if config is None and 1 <= rows <= MAX_QUERY_LEN and total <= batch * rows:
        return decoded(rows, None)
    few = decode_query_len if config is None and batch > 1 and decode_query_len else 0
    out = torch.empty((total, heads, head_dim), dtype=q.dtype, device=q.device)
    plan = rel_attention_plan(
        total, batch, heads, kv_heads, head_dim, proj.shape[1], window, dtype=q.dtype, kv_dtype=k_pages.dtype,
        target=target, config=config,
    )  # fmt: skip
    if total == 0:
        return out
    pages, scales, scale_stride = cache_operands(k_pages, v_pages, kv_scales)
    _rel_attention_kernel[plan.grid](
        out, q, r, *pages, proj, block_table, cu_seqlens, kv_lens, *scales, total, batch, few, window or 0,
        proj.shape[1], scale, out.stride(), q.stride(), r.stride(), k_pages.stride(), v_pages.stride(), proj.stride(),
        block_table.stride(0), scale_stride, **plan.constexprs, D_REL=proj.shape[0], PAGE=k_pages.shape[1],
        FP8=FP8_KINDS.get(k_pages.dtype, 0),
        num_warps=plan.config.num_warps, num_stages=plan.config.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    if few:
        decoded(few, out)
    return out


def _case(
    name: str, heads: int, kv_heads: int, window: int | None, extent: int, spills: dict[str, int], *,
    dtype: torch.dtype = torch.bfloat16, fp8: bool = False,
) -> CompileCase:  # fmt: skip
    def launch(target: Target) -> torch.Tensor:
        tensors, scales = meta_case(heads, kv_heads, extent, 8192, dtype=dtype, fp8=fp8, page=64 if fp8 else 16)
        return rel_attention(*tensors, window=window, scale=1 / 128, kv_scales=scales, target=target)

    # Exact float32 products have no matrix instruction on NVIDIA's chips and on RDNA.
    exact = {} if dtype != torch.float32 else {t.arch: "" for t in TARGETS if "mfma" not in t.capabilities}
    return CompileCase(name, "rel_attention=triton", launch, spills, exact, narrow=("proj_ptr",))


# RDNA has 256 registers a thread at most. So have the NVIDIA chips that keep sums and operands there, and some cases
# take a few more. float32 tiles take twice the registers of the types that models run in.
_FEW = dict.fromkeys(("sm80", "sm86", "sm89", "sm103", "sm120", "sm121"), 96)
_TIGHT = _FEW | {"gfx1100": 1920, "gfx1151": 1920, "gfx1201": 192}
_WIDE = {t.arch: 1024 if t.vendor == "cuda" else 4096 for t in TARGETS if "mfma" not in t.capabilities}

COMPILE_CASES = (
    _case("full, group 8", 64, 8, None, 1024, _TIGHT),
    _case("full, group 4", 32, 8, None, 1024, _TIGHT),
    _case("sliding, group 4", 64, 16, 512, 512, _TIGHT),
    _case("sliding, group 4, fp8 cache, page 64", 64, 16, 512, 512, _TIGHT, fp8=True),
    _case("full, group 8, float32", 64, 8, None, 1024, _WIDE, dtype=torch.float32),
)


# Query rows a tile of the reference: its scores stay in cache on a CPU, and a sliding layer reads window + 128 keys for
# 128.
_ROWS = 128


def _span(pages: torch.Tensor, table: list[int], lo: int, hi: int) -> torch.Tensor:
    """Keys (or values) `lo..hi-1` of one sequence as `[Hkv, hi - lo, D]`: a view where its pages lie side by side, else
    a copy."""
    page = pages.shape[1]
    ids = table[lo // page : (hi + page - 1) // page]
    adjacent = ids == list(range(ids[0], ids[0] + len(ids))) and (
        len(ids) == 1 or pages.stride(0) == page * pages.stride(1)
    )
    span = pages[ids[0] : ids[0] + len(ids)] if adjacent else pages[torch.tensor(ids, device=pages.device)]
    return span.flatten(0, 1)[lo % page : lo % page + hi - lo].transpose(0, 1)


def _weighted_sum(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`weights` `[Hkv, rows, keys]` times `values` `[Hkv, keys, D]`, where a weight of 0 hides even a NaN."""
    out = torch.bmm(weights, values)
    if math.isfinite(out.detach().sum().item()):
        return out
    bad = ~values.isfinite()
    seen = torch.bmm((weights != 0).float(), bad.float()) > 0
    return torch.bmm(weights, values.masked_fill(bad, 0.0)).masked_fill(seen, float("nan"))


def _single_rows(
    q: torch.Tensor, r: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, bank: torch.Tensor,
    block_table: torch.Tensor, kv_lens: torch.Tensor, window: int,
) -> torch.Tensor:  # fmt: skip
    """One query row of each sequence at once: `q` `[B, Hq, D]` scaled, `bank` `proj` with the distances reversed.

    At most `window` keys of each are gathered, aligned at the newest, so one product and one bias serve all sequences.
    """
    batch, heads, dim = q.shape
    page, kv_heads, keys = k_pages.shape[1], k_pages.shape[2], max(1, min(window, int(kv_lens.max())))
    position = kv_lens.long().unsqueeze(1) + torch.arange(-keys, 0, device=q.device)
    absent = position < 0
    position.clamp_(min=0)
    where = block_table.long().gather(1, position // page).clamp_(min=0).flatten(), (position % page).flatten()
    k, v = (
        pages.permute(2, 0, 1, 3)[:, where[0], where[1]].float().view(kv_heads * batch, keys, dim)
        for pages in (k_pages, v_pages)
    )
    rows = q.view(batch, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads * batch, -1, dim)
    scores = torch.bmm(rows, k.transpose(1, 2)).view(kv_heads, batch, -1, keys)
    reach = min(bank.shape[1], keys)
    bias = (r @ bank).view(batch, kv_heads, -1, bank.shape[1]).transpose(0, 1)
    scores[..., keys - reach :].add_(bias[..., bank.shape[1] - reach :])
    if absent.any():
        gone = absent.view(1, batch, 1, keys)
        weights = torch.softmax(scores.masked_fill(gone, float("-inf")), -1).masked_fill(gone, 0.0)
        v = v.masked_fill(absent.repeat(kv_heads, 1).unsqueeze(2), 0.0)
    else:
        weights = torch.softmax(scores, -1)
    out = _weighted_sum(weights.flatten(0, 1), v)
    return out.view(kv_heads, batch, -1, dim).transpose(0, 1).reshape(batch, heads, dim)


def rel_attention_ref(
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
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Attend; see the module for formula and layouts. Differentiable. Returns `[T, Hq, D]` in `q.dtype`. With
    `kv_scales` the pages are fp8, and all of them are unpacked first. Raises ValueError where a sequence has more rows
    or keys than `max_query_len` or `max_kv_len` say.

    Works in tiles of query rows and reads only the keys that some row of the tile may see, so time and memory follow
    the window on sliding layers. The bias of a tile is one product with the distances reversed; reading that product
    with a row stride one shorter moves every row's bias under its keys.
    """
    if kv_scales is not None:
        k_pages, v_pages = (fp8_values_ref(*each) for each in zip((k_pages, v_pages), kv_scales, strict=True))
    heads, kv_heads, extent, dtype = q.shape[1], k_pages.shape[2], proj.shape[1], q.dtype
    rows, bank = max(1, min(_ROWS, len(q))), proj.float().flip(1)
    q, r, starts = q.float() * scale, r.float(), cu_seqlens.tolist()
    check_bounds("rel_attention", starts, kv_lens.tolist(), max_query_len, max_kv_len)
    if window is not None and len(q) > 1 and starts == list(range(len(q) + 1)):
        return _single_rows(q, r, k_pages, v_pages, bank, block_table, kv_lens, window).to(dtype)
    q, r, tables = q.transpose(0, 1), r.transpose(0, 1), block_table.tolist()
    pieces = []
    for b, kv_len in enumerate(kv_lens.tolist()):
        begin, end = starts[b], starts[b + 1]
        blank = min(max(end - begin - kv_len, 0), end - begin)
        if blank:
            pieces.append(q.new_zeros(heads, blank, q.shape[2]))
        for t in range(begin + blank, end, rows):
            m = min(rows, end - t)
            first = kv_len - (end - t)
            lo = 0 if window is None else max(0, first - window + 1)
            keys, values = (_span(pages, tables[b], lo, first + m).float() for pages in (k_pages, v_pages))
            scores = torch.bmm(q[:, t : t + m].reshape(kv_heads, -1, q.shape[2]), keys.transpose(1, 2))
            scores = scores.view(heads, m, -1)
            band = first - extent + 1
            bias = r[:, t : t + m] @ bank
            if m > 1:
                bias = F.pad(bias, (0, m)).flatten(1)[:, : m * (extent + m - 1)].view(heads, m, -1)
            scores[..., max(band - lo, 0) :].add_(bias[..., max(lo - band, 0) :])
            if m > 1:
                corner = torch.ones(m, m, dtype=torch.bool, device=q.device)
                scores[..., -m:].masked_fill_(corner.triu(1), float("-inf"))
                if window is not None and first + m - lo > window:
                    # Row i sees keys from first + i - window + 1 on; lo may already be inside the window of the first
                    # rows.
                    cut = first - window + 1 - lo
                    edge = torch.ones(m, first + m - lo - window, dtype=torch.bool, device=q.device).tril(cut - 1)
                    scores[..., : edge.shape[1]].masked_fill_(edge, float("-inf"))
            weights = torch.softmax(scores, -1).view(kv_heads, -1, scores.shape[2])
            pieces.append(_weighted_sum(weights, values).view(heads, m, -1))
    if starts[-1] < q.shape[1]:
        pieces.append(torch.zeros_like(q[:, starts[-1] :]))
    out = torch.cat(pieces, 1) if pieces else q
    return out.transpose(0, 1).to(dtype)
