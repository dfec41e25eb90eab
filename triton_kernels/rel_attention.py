"""Causal attention with a learned relative bias, over a paged KV cache and a ragged batch.

    score[i, h, j] = scale * q[i, h] . k[j, h // group] + bias[i, h, i - j]         j <= i, and i - j < window where there is one
    bias[i, h, d]  = r[i, h, :] . proj[:, d]   for 0 <= d < extent, else 0
    out[i, h]      = softmax_j(score) v[j, h // group]

Query row `i` of a sequence is at position `kv_len - q_len + i`, so one rule covers prefill, extension, decoding and
verification. `scale` is `1 / head_dim` (q and k are normalised per head). Log scaling is already in `q` and `r`.

Layouts: `q` `[T, Hq, D]`, `r` `[T, Hq, d_rel]`, `k_pages`/`v_pages` logical `[P, page, Hkv, D]` of any strides,
`proj` `[d_rel, extent]`, `block_table` `[B, max_pages]` int32 (entries wholly outside the window may hold anything and are
not read), `cu_seqlens` `[B+1]` int32, `kv_lens` `[B]` int32. Scores, softmax and sums are float32. A row without keys is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from inkling_kernels.rel_attention_tile import (
    FLOOR,
    FP8_KINDS,
    Work,
    attend_fn,
    cache_operands,
    check_arguments,
    r_wide_fn,
)
from inkling_kernels.target import Target


@dataclass(frozen=True, slots=True)
class RelAttentionConfig:
    """Tile shape of the kernel; the defaults fit every chip and every type. `block_m` rows (query tokens times the group's heads), `block_n` keys, at most `tokens`
    query tokens a tile. More tokens read each key for more rows and widen the bias product by 16 each."""

    block_m: int = 32
    block_n: int = 32
    tokens: int = 8
    num_warps: int = 4
    num_stages: int = 1

    def tile(self, group: int) -> tuple[int, int]:
        """(query tokens, rows) of a tile for heads in groups of `group`: both powers of two, rows at least 16."""
        tokens = min(self.tokens, 1 << (self.block_m // group).bit_length() - 1)
        return tokens, max(16, triton.next_power_of_2(tokens * group))

    def shared_bytes(self, target: Target, group: int, head_dim: int, itemsize: int) -> int:
        """Shared memory that a program needs at most: measured for the cases that are compiled, 0 to 25 % above them.

        Matrix units that read shared memory hold q and r there too. Others hold them in registers, which they reach through
        shared memory before the loop. AMD's pipeline keeps the last stage in registers, except gfx950's asynchronous copies.
        """
        tokens, rows = self.tile(group)
        wide, keys = 16 * tokens, self.block_n * (2 * head_dim + 16 * tokens)
        resident, stages = rows * (head_dim + wide), self.num_stages
        if {"wgmma", "tcgen05"} & target.capabilities:
            return (resident + stages * keys) * itemsize + 2048
        if target.vendor == "hip" and "mfma_scale" not in target.capabilities:
            return (max(rows * wide, max(1, stages - 1) * keys) + rows * self.block_n) * itemsize
        return (max(resident, stages * keys) + self.block_n * wide + rows * self.block_n) * itemsize

    def problems(self, target: Target, *, group: int, head_dim: int, itemsize: int = 2) -> tuple[str, ...]:
        """Why this configuration cannot run there; empty where it can."""
        found = [
            f"{name} is {value}; expected a power of two from {low} to {high}"
            for name, value, low, high in (
                ("block_m", self.block_m, 16, 128),
                ("block_n", self.block_n, 16, 128),
                ("tokens", self.tokens, 1, 16),
                ("num_warps", self.num_warps, 1, 8),
            )
            if not low <= value <= high or value & (value - 1)
        ]
        if self.num_stages not in (1, 2, 3, 4):
            found.append(f"num_stages is {self.num_stages}; expected 1 to 4")
        if not found and (need := self.shared_bytes(target, group, head_dim, itemsize)) > target.shared_memory_bytes:
            found.append(f"needs {need} bytes of shared memory; {target} has {target.shared_memory_bytes}")
        return tuple(found)

DEFAULT = RelAttentionConfig()

# More rows a tile read each key for more queries, where registers and shared memory have room; the first that fits is taken.
_MMA = (RelAttentionConfig(block_m=64, tokens=16, num_stages=2), RelAttentionConfig(block_m=64, tokens=8, num_stages=2))
_MFMA = (RelAttentionConfig(block_m=64, tokens=16), RelAttentionConfig(block_m=64, tokens=8))


def rel_attention_config(target: Target | None, *, group: int, head_dim: int, itemsize: int = 2) -> RelAttentionConfig:
    """The tile shape for a target; `DEFAULT` where it is None or nothing larger fits."""
    if target is None or target.vendor not in ("cuda", "hip") or "wmma" in target.capabilities or itemsize == 4:
        return DEFAULT
    listed = _MFMA if "mfma" in target.capabilities else _MMA
    fits = (c for c in listed if not c.problems(target, group=group, head_dim=head_dim, itemsize=itemsize))
    return next(fits, DEFAULT)


@triton.jit
def _find_sequence_fn(cu_ptr, tile, batch, TOKENS: tl.constexpr):
    """The last sequence `b` with `cu[b] // TOKENS + b <= tile`: tiles are numbered so that each sequence's start there."""
    low = 0
    high = batch - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(cu_ptr + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit(do_not_specialize=["batch", "window", "extent"])
def _rel_attention_kernel(
    out_ptr, q_ptr, r_ptr, k_ptr, v_ptr, proj_ptr, table_ptr, cu_ptr, kv_lens_ptr, k_scale_ptr, v_scale_ptr,
    batch, window, extent, scale, out_strides, q_strides, r_strides, k_strides, v_strides, proj_strides, table_stride,
    scale_stride, GROUP: tl.constexpr, D: tl.constexpr, D_REL: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FP8: tl.constexpr, WINDOW: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    seq = _find_sequence_fn(cu_ptr, tile, batch, TOKENS)
    q_begin = tl.load(cu_ptr + seq)
    q_len = tl.load(cu_ptr + seq + 1) - q_begin
    tiles = (q_len + TOKENS - 1) // TOKENS
    local = tile - (q_begin // TOKENS + seq)
    if local >= tiles:
        return
    # The last tiles see the most keys: started first, they do not end last.
    t0 = (tiles - 1 - local) * TOKENS
    first = tl.load(kv_lens_ptr + seq) - q_len + t0

    row = tl.arange(0, BLOCK_M)
    token = row // GROUP
    live = (token < TOKENS) & (t0 + token < q_len)
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
    # Tiles before `edge` hold no key ahead of token 0; tiles before `near` only keys beyond every token's extent.
    edge = tl.maximum(tl.maximum(first + 1, 0) // BLOCK_N * BLOCK_N, begin)
    near = tl.minimum(tl.maximum(tl.maximum(first + 1 - extent, 0) // BLOCK_N * BLOCK_N, begin), edge)
    k_ptr += kv_head * k_strides[2]
    v_ptr += kv_head * v_strides[2]
    table_ptr += seq.to(tl.int64) * table_stride
    if FP8 > 0:
        scale *= tl.load(k_scale_ptr + kv_head * scale_stride)

    acc = tl.zeros([BLOCK_M, D], tl.float32)
    peak = tl.full([BLOCK_M], FLOOR, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if FAR:
        acc, peak, total = attend_fn(
            acc, peak, total, q, r_wide, r_wide, k_ptr, v_ptr, proj_ptr, table_ptr, k_strides, v_strides, proj_strides,
            first, token, begin, near, low, high, window, extent, scale,
            D, D_REL, TOKENS, 0, BLOCK_N, PAGE, FP8, BIAS=False, WINDOW=WINDOW, CAUSAL=False,
        )  # fmt: skip
        begin = near
    acc, peak, total = attend_fn(
        acc, peak, total, q, r_wide, r_wide, k_ptr, v_ptr, proj_ptr, table_ptr, k_strides, v_strides, proj_strides,
        first, token, begin, edge, low, high, window, extent, scale,
        D, D_REL, TOKENS, 0, BLOCK_N, PAGE, FP8, BIAS=True, WINDOW=WINDOW, CAUSAL=False,
    )  # fmt: skip
    acc, peak, total = attend_fn(
        acc, peak, total, q, r_wide, r_wide, k_ptr, v_ptr, proj_ptr, table_ptr, k_strides, v_strides, proj_strides,
        first, token, edge, high, low, high, window, extent, scale,
        D, D_REL, TOKENS, 0, BLOCK_N, PAGE, FP8, BIAS=True, WINDOW=WINDOW, CAUSAL=True,
    )  # fmt: skip
    # A row without keys has total 0 and acc 0; a NaN total stays NaN.
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if FP8 > 0:
        out *= tl.load(v_scale_ptr + kv_head * scale_stride)
    out_at = (at * out_strides[0] + head * out_strides[1])[:, None] + (dim * out_strides[2])[None, :]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=live[:, None])


@dataclass(frozen=True, slots=True)
class RelAttentionPlan:
    """A launch, known without the lengths: `grid` is an upper bound of the tiles, the surplus programs return at once."""

    grid: tuple[int, int]
    tokens: int
    block_m: int
    config: RelAttentionConfig
    group: int
    head_dim: int
    itemsize: int
    kv_itemsize: int
    extent: int
    window: int | None
    workspace_bytes: int = 0

    @property
    def constexprs(self) -> dict[str, int | bool]:
        """Compile-time arguments that the plan decides."""
        far = self.window is None or self.window > self.extent
        return {"GROUP": self.group, "D": self.head_dim, "TOKENS": self.tokens, "BLOCK_M": self.block_m,
                "BLOCK_N": self.config.block_n, "WINDOW": self.window is not None, "FAR": far}  # fmt: skip

    def spans(self, q_len: int, kv_len: int) -> list[tuple[int, int, int, int, int]]:
        """For each query tile of a sequence: (rows of tokens, first key read, first key with a bias tile, end, position)."""
        spans = []
        for t0 in range(0, q_len, self.tokens):
            rows = min(self.tokens, q_len - t0)
            first = kv_len - q_len + t0
            low = max(first - self.window + 1, 0) if self.window is not None else 0
            near = max(max(first + 1 - self.extent, 0) // self.config.block_n * self.config.block_n, low)
            spans.append((rows, low, near, max(first + rows, 0), first))
        return spans

    def work(self, q_lens: Sequence[int], kv_lens: Sequence[int]) -> Work:
        """Tiles, bytes and operations for these lengths, all key heads together."""
        size, row = self.config.block_n, self.head_dim * self.itemsize
        tiles = near_tiles = pairs = keys = tokens = 0
        for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
            tokens += q_len
            for rows, low, near, end, first in self.spans(q_len, kv_len):
                if end > low:
                    tiles += -(-end // size) - low // size
                    near_tiles += -(-end // size) - near // size
                    keys += end - low
                for position in range(max(first, 0), end):
                    pairs += position + 1 if self.window is None else min(position + 1, self.window)
        heads = self.grid[1]
        wide = 16 * self.tokens
        return Work(
            tiles=tiles * heads,
            tiles_least=-(-pairs // (self.tokens * size)) * heads,
            bytes_read=heads * (tokens * self.group * (row + 16 * self.itemsize) + near_tiles * wide * size * self.itemsize
                                + 2 * keys * self.head_dim * self.kv_itemsize),
            bytes_written=heads * tokens * self.group * row,
            operations=heads * 2 * self.block_m * size * (2 * self.head_dim * tiles + wide * near_tiles),
        )  # fmt: skip


def rel_attention_plan(
    tokens: int, batch: int, heads: int, kv_heads: int, head_dim: int, extent: int, window: int | None, *,
    dtype: torch.dtype = torch.bfloat16, kv_dtype: torch.dtype | None = None, target: Target | None = None,
    config: RelAttentionConfig | None = None,
) -> RelAttentionPlan:  # fmt: skip
    """Plan `rel_attention` for `tokens` query rows in `batch` sequences; pure, and the same for a captured graph."""
    group = heads // kv_heads
    chosen = config or rel_attention_config(target, group=group, head_dim=head_dim, itemsize=dtype.itemsize)
    per_tile, rows = chosen.tile(group)
    grid = (tokens // per_tile + batch if tokens else 0, kv_heads)
    kv_itemsize = (kv_dtype or dtype).itemsize
    return RelAttentionPlan(grid, per_tile, rows, chosen, group, head_dim, dtype.itemsize, kv_itemsize, extent, window)


def rel_attention(
    q: torch.Tensor, r: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, proj: torch.Tensor,
    block_table: torch.Tensor, cu_seqlens: torch.Tensor, kv_lens: torch.Tensor, *, window: int | None, scale: float,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None, target: Target | None = None,
    config: RelAttentionConfig | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend with the Triton kernel, for any mix of prefill, extension, decode and verify rows; returns `[T, Hq, D]`.

    Arguments as in the module's docstring; `q`, `r`, `proj` of one type (bfloat16, float32; float16 for tests), pages of
    that type or fp8 with `kv_scales` = float32 `(k_scale, v_scale)`, each `[1]` or `[Hkv]`, which multiply in registers.
    No tensor may hold less than the lengths say: on a GPU they are read on the device and cannot be checked here. `proj`
    is fastest stored distance-major (`proj.stride() == (1, 16)`). `target` picks the tile shape; None fits every chip.

    Products accumulate in float32; probabilities are rounded to `q.dtype` before they meet the values.
    Raises TypeError or ValueError naming the argument, before anything is allocated or launched.
    """
    check_arguments(
        "rel_attention", q, r, k_pages, v_pages, proj, block_table, cu_seqlens, kv_lens, window, scale, kv_scales
    )
    total, heads, head_dim = q.shape
    batch, kv_heads = len(kv_lens), k_pages.shape[2]
    out = torch.empty((total, heads, head_dim), dtype=q.dtype, device=q.device)
    plan = rel_attention_plan(
        total, batch, heads, kv_heads, head_dim, proj.shape[1], window, dtype=q.dtype, kv_dtype=k_pages.dtype,
        target=target, config=config,
    )  # fmt: skip
    if total == 0:
        return out
    pages, scales, scale_stride = cache_operands(k_pages, v_pages, kv_scales)
    _rel_attention_kernel[plan.grid](
        out, q, r, *pages, proj, block_table, cu_seqlens, kv_lens, *scales, batch, window or 0, proj.shape[1], scale,
        out.stride(), q.stride(), r.stride(), k_pages.stride(), v_pages.stride(), proj.stride(), block_table.stride(0),
        scale_stride, D_REL=proj.shape[0], PAGE=k_pages.shape[1], FP8=FP8_KINDS.get(k_pages.dtype, 0), **plan.constexprs,
        num_warps=plan.config.num_warps, num_stages=plan.config.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    return out


# Query rows a tile of the reference: its scores stay in cache on a CPU, and a sliding layer reads window + 128 keys for 128.
_ROWS = 128


def _span(pages: torch.Tensor, table: list[int], lo: int, hi: int) -> torch.Tensor:
    """Keys (or values) `lo..hi-1` of one sequence as `[Hkv, hi - lo, D]`: a view where its pages lie side by side, else a copy."""
    page = pages.shape[1]
    ids = table[lo // page : (hi + page - 1) // page]
    adjacent = ids == list(range(ids[0], ids[0] + len(ids))) and (
        len(ids) == 1 or pages.stride(0) == page * pages.stride(1)
    )
    span = pages[ids[0] : ids[0] + len(ids)] if adjacent else pages[torch.tensor(ids, device=pages.device)]
    return span.flatten(0, 1)[lo % page : lo % page + hi - lo].transpose(0, 1)


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
) -> torch.Tensor:
    """Attend; see the module for formula and layouts. Differentiable. Returns `[T, Hq, D]` in `q.dtype`.

    Works in tiles of query rows and reads only the keys that some row of the tile may see, so time and memory follow the
    window on sliding layers. The bias of a tile is one product with the distances reversed; reading that product with a row
    stride one shorter moves every row's bias under its keys.
    """
    heads, kv_heads, extent, dtype = q.shape[1], k_pages.shape[2], proj.shape[1], q.dtype
    rows = min(_ROWS, len(q))
    bank = F.pad(proj.float().flip(1), (0, rows))
    q, r = (q.float() * scale).transpose(0, 1), r.float().transpose(0, 1)
    starts, tables = cu_seqlens.tolist(), block_table.tolist()
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
            bias = (r[:, t : t + m] @ bank[:, : extent + m]).flatten(1)[:, : m * (extent + m - 1)].view(heads, m, -1)
            scores[..., max(band - lo, 0) :].add_(bias[..., max(lo - band, 0) :])
            if m > 1:
                corner = torch.ones(m, m, dtype=torch.bool, device=q.device)
                scores[..., -m:].masked_fill_(corner.triu(1), float("-inf"))
                if window is not None and first + m - lo > window:
                    # Row i sees keys from first + i - window + 1 on; lo may already be inside the window of the first rows.
                    cut = first - window + 1 - lo
                    edge = torch.ones(m, first + m - lo - window, dtype=torch.bool, device=q.device).tril(cut - 1)
                    scores[..., : edge.shape[1]].masked_fill_(edge, float("-inf"))
            weights = torch.softmax(scores, -1).view(kv_heads, -1, scores.shape[2])
            pieces.append(torch.bmm(weights, values).view(heads, m, -1))
    out = torch.cat(pieces, 1) if pieces else q
    return out.transpose(0, 1).to(dtype)
