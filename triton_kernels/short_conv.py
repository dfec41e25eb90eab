"""Short causal depthwise convolution with an inner residual, over a ragged batch.

    y[t, c] = x[t, c] + sum_{j=0..W-1} w[c, j] * x[t - (W-1) + j, c]        (rows before the sequence are zero)

One call serves prefill, extension, decoding and verification. Taps that reach before the rows of this step come from
the sequence's state: the last inputs of the channel in a ring, the row of position `p` at `p % R`. With `R >= W - 1 +
drafts` the ring still holds the accepted rows after drafts were rejected, so nothing has to be rolled back. A paged
state has a block table: position `p` lives in block `slots[b, p // R]`, and every row is kept.

Layouts: `x` `[T, C]` rows of all sequences one after another (any row stride), `weight` `[C, W]` float32, `state`
`[S, R, C]`, `slots` `[B]` int32 (the sequence's row of `state`) or `[B, N]` (its block table), `cu_seqlens` `[B+1]`
int32, `kv_lens` `[B]` int32 (tokens of the sequence including this step's). Row `i` of sequence `b` is at position
`kv_lens[b] - q_len[b] + i`; rows at negative positions are padding, whose results mean nothing and which leave every
state as it was.
Arithmetic is float32 in the order of the formula, rounded to `x.dtype` once; `residual` is then added in `x.dtype`.
With a `norm_weight` the launch also gives the RMS norm of that sum (`inkling_kernels.norm`).

The kernel cuts the batch into tiles of rows that never cross a sequence (`inkling_kernels.ragged`). The tile with a
sequence's first rows is the only one to touch its ring: it reads the old rows, waits for its other threads, then writes
the new ones. A row's value is the same chain of fused multiply-adds wherever its taps come from, so no chunking changes
its bits. For the norm a program takes whole rows, a run of channels after the other, and does so twice: once for the
squares, once to write. The second time the inputs are in cache, and no thread reads what another has written.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
import triton
import triton.language as tl

from inkling_kernels.compile_case import NO_MATRIX, CompileCase
from inkling_kernels.norm import rms_norm_ref
from inkling_kernels.ragged import check_config, check_tensor, not_powers_of_two, sequence_tile_fn
from inkling_kernels.short_conv_tile import check_conv, convolved_fn, keep_fn, owner_fn
from inkling_kernels.target import Target


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """A tile's channels, and its rows where sequences have many rows a step and where they have few. With a norm tiles
    have `few_rows` and `norm_channels` whatever the lengths, so that a row's sum of squares is always the same."""

    channels: int = 256
    rows: int = 16
    few_rows: int = 4
    norm_channels: int = 1024
    num_warps: int = 4

    def problems(self, target: Target) -> tuple[str, ...]:
        """Why this configuration cannot run there; empty where it can."""
        bounds = {"rows": (1, 128), "few_rows": (1, 128), "norm_channels": (16, 4096), "num_warps": (1, 8)}
        return tuple(not_powers_of_two(self, channels=(16, 2048), **bounds))


DEFAULT = ShortConvConfig()


@triton.jit
def _sum_fn(
    x_ptr, weight_ptr, state_ptr, residual_ptr, x_strides, weight_strides, state_strides, residual_strides, channel,
    slot, slots_ptr, slots_block, ring, begin, length, covered, local, start, column_live, WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Rows `local ..` of a sequence, convolved and rounded, with the residual: `[BLOCK_T, C]` of x's type."""
    y = convolved_fn(
        x_ptr, x_strides[0], channel * x_strides[1], weight_ptr, channel * weight_strides[0], weight_strides[1],
        state_ptr, state_strides[0], state_strides[1], channel * state_strides[2], slot, slots_ptr, slots_block, ring,
        begin, length, local, start, column_live, WIDTH, BLOCK_T, PAGED,
    ).to(x_ptr.dtype.element_ty)  # fmt: skip
    if residual_ptr is not None:
        row = local + tl.arange(0, BLOCK_T)
        live = (row < covered)[:, None] & column_live[None, :]
        at = ((begin + row).to(tl.int64) * residual_strides[0])[:, None] + (channel * residual_strides[1])[None, :]
        residual = tl.load(residual_ptr + at, mask=live, other=0.0)
        y = (residual.to(tl.float32) + y.to(tl.float32)).to(y.dtype)
    return y


@triton.jit
def _write_fn(
    out_ptr, normed_ptr, x_ptr, weight_ptr, state_ptr, residual_ptr, norm_ptr, x_strides, weight_strides,
    state_strides, residual_strides, norm_stride, scale, channel, channels, slot, slots_ptr, slots_block, ring, begin,
    length, covered, local, start, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Write a run of channels of the result, of what the state keeps, and of the norm, whose rows `scale` scales."""
    column_live = channel < channels
    y = _sum_fn(
        x_ptr, weight_ptr, state_ptr, residual_ptr, x_strides, weight_strides, state_strides, residual_strides,
        channel, slot, slots_ptr, slots_block, ring, begin, length, covered, local, start, column_live, WIDTH, BLOCK_T,
        PAGED,
    )  # fmt: skip
    if state_ptr is not None:
        keep_fn(
            x_ptr, x_strides[0], channel * x_strides[1], state_ptr, state_strides[0], state_strides[1],
            channel * state_strides[2], slot, slots_ptr, slots_block, ring, begin, length, local, start, column_live,
            BLOCK_T, PAGED,
        )  # fmt: skip
    row = local + tl.arange(0, BLOCK_T)
    live = (row < covered)[:, None] & column_live[None, :]
    at = ((begin + row).to(tl.int64) * channels)[:, None] + channel[None, :]
    tl.store(out_ptr + at, y, mask=live)
    if norm_ptr is not None:
        weight = tl.load(norm_ptr + channel * norm_stride, mask=column_live, other=0.0).to(tl.float32)
        normed = (y.to(tl.float32) * scale[:, None]).to(y.dtype).to(tl.float32) * weight[None, :]
        tl.store(normed_ptr + at, normed.to(y.dtype), mask=live)


@triton.jit(do_not_specialize=["rows", "batch", "ring", "eps"])
def _short_conv_kernel(
    out_ptr, normed_ptr, x_ptr, weight_ptr, state_ptr, slots_ptr, cu_ptr, kv_lens_ptr, residual_ptr, norm_ptr, rows,
    batch, channels, ring, eps, x_strides, weight_strides, state_strides, slots_strides, residual_strides, norm_stride,
    WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    seq, begin, length, covered, local, start = sequence_tile_fn(
        cu_ptr, kv_lens_ptr, tl.program_id(0), rows, batch, BLOCK_T
    )
    if local >= covered:
        return
    slot = -1
    if state_ptr is not None:
        slot, slots_ptr = owner_fn(slots_ptr, slots_strides, seq, PAGED)
    run = tl.arange(0, BLOCK_C).to(tl.int64)
    scale = tl.zeros([BLOCK_T], tl.float32)
    if norm_ptr is None:
        _write_fn(
            out_ptr, normed_ptr, x_ptr, weight_ptr, state_ptr, residual_ptr, norm_ptr, x_strides, weight_strides,
            state_strides, residual_strides, norm_stride, scale, tl.program_id(1) * BLOCK_C + run, channels, slot,
            slots_ptr, slots_strides[1], ring, begin, length, covered, local, start, WIDTH, BLOCK_T, PAGED,
        )  # fmt: skip
    else:
        for first in range(0, channels, BLOCK_C):
            y = _sum_fn(
                x_ptr, weight_ptr, state_ptr, residual_ptr, x_strides, weight_strides, state_strides, residual_strides,
                first + run, slot, slots_ptr, slots_strides[1], ring, begin, length, covered, local, start,
                first + run < channels, WIDTH, BLOCK_T, PAGED,
            ).to(tl.float32)  # fmt: skip
            scale += tl.sum(y * y, 1)
        scale = 1.0 / tl.sqrt(scale / channels + eps)
        for first in range(0, channels, BLOCK_C):
            _write_fn(
                out_ptr, normed_ptr, x_ptr, weight_ptr, state_ptr, residual_ptr, norm_ptr, x_strides, weight_strides,
                state_strides, residual_strides, norm_stride, scale, first + run, channels, slot, slots_ptr,
                slots_strides[1], ring, begin, length, covered, local, start, WIDTH, BLOCK_T, PAGED,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShortConvPlan:
    """A launch: (row tiles at most, programs along the channels), the tile, warps."""

    grid: tuple[int, int]
    block_t: int
    block_c: int
    num_warps: int


def short_conv_plan(
    rows: int, channels: int, batch: int, width: int, target: Target | None = None,
    config: ShortConvConfig | None = None, norm: bool = False,
) -> ShortConvPlan:  # fmt: skip
    """Plan `rows` rows of `batch` sequences, with or without the norm behind; pure, and right for any lengths. Every
    target takes the same plan so far."""
    config = config or DEFAULT
    # Rows that reach into the ring must all lie in the first tile of their sequence.
    least = triton.next_power_of_2(max(1, width - 1))
    if norm:
        block_t = max(least, config.few_rows)
        block_c = min(config.norm_channels, max(16, triton.next_power_of_2(channels)))
        return ShortConvPlan((rows // block_t + batch, 1), block_t, block_c, min(8, 2 * config.num_warps))
    block_t = max(least, config.rows if rows >= config.rows * batch else config.few_rows)
    block_c = min(config.channels, max(16, triton.next_power_of_2(channels)))
    return ShortConvPlan((rows // block_t + batch, triton.cdiv(channels, block_c)), block_t, block_c, config.num_warps)


def short_conv(
    x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor | None, slots: torch.Tensor, cu_seqlens: torch.Tensor,
    kv_lens: torch.Tensor, residual: torch.Tensor | None = None, *, norm_weight: torch.Tensor | None = None,
    eps: float = 0.0, target: Target | None = None, config: ShortConvConfig | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Convolve `x` `[T, C]` with the Triton kernel and write its newest rows into `state` in place; forward only.

    Layouts as in the module's docstring, any strides; `x` and `residual` bfloat16, float32 or (in tests) float16,
    `state` any of these. Padding is as in `short_conv_ref`; a row at a position before 0 is not kept. Returns a
    contiguous `[T, C]` in `x.dtype`, and with a `norm_weight` `[C]` of that type a pair of it and its RMS norm.

    Raises TypeError or ValueError naming the argument, before anything is allocated or launched.
    """
    check_conv("short_conv", x, weight, state, slots, cu_seqlens, kv_lens)
    rows, channels = x.shape
    if residual is not None:
        check_tensor("short_conv", "residual", residual, (rows, channels), (x.dtype,), x.device)
    if norm_weight is not None:
        check_tensor("short_conv", "norm_weight", norm_weight, (channels,), (x.dtype,), x.device)
    if not eps >= 0:
        raise ValueError(f"short_conv: eps is {eps!r}; expected 0 or more")
    config = config or DEFAULT
    if target is not None:
        check_config("short_conv", config.problems(target))
    out = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    normed = torch.empty_like(out) if norm_weight is not None else None
    if out.numel():
        plan = short_conv_plan(rows, channels, len(kv_lens), weight.shape[1], target, config, normed is not None)
        _short_conv_kernel[plan.grid](
            out, normed, x, weight, state, slots, cu_seqlens, kv_lens, residual, norm_weight, rows, len(kv_lens),
            channels, state.shape[1] if state is not None else 1, float(eps), x.stride(), weight.stride(),
            state.stride() if state is not None else (0, 0, 0), (*slots.stride(), 0)[:2],
            residual.stride() if residual is not None else (0, 0),
            norm_weight.stride(0) if norm_weight is not None else 0, WIDTH=weight.shape[1], BLOCK_T=plan.block_t,
            BLOCK_C=plan.block_c, PAGED=slots.dim() == 2, num_warps=plan.num_warps, enable_fp_fusion=True,
        )  # fmt: skip
    return out if normed is None else (out, normed)


def _case(
    name: str, rows: int, batch: int, kept: bool = True, dtype: torch.dtype = torch.bfloat16, norm: bool = False
) -> CompileCase:
    def launch(target: Target) -> object:
        def int32(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device="meta")

        x = torch.empty(rows, 6144, dtype=dtype, device="meta")
        weight = torch.empty(6144, 4, dtype=torch.float32, device="meta")
        state = x.new_empty(64, 11, 6144) if kept else None
        where = int32(batch), int32(batch + 1), int32(batch)
        norm_weight = x.new_empty(6144) if norm else None
        return short_conv(
            x, weight, state, *where, torch.empty_like(x), norm_weight=norm_weight, eps=1e-6, target=target
        )

    return CompileCase(name, "short_conv=triton", launch, instruction=NO_MATRIX)


COMPILE_CASES = (
    _case("prefill", 8192, 4),
    _case("decode", 64, 64),
    _case("prefill, float32", 8192, 4, dtype=torch.float32),
    _case("no state", 8192, 4, kept=False),
    _case("with the norm", 8192, 4, norm=True),
    _case("with the norm, float32", 64, 64, dtype=torch.float32, norm=True),
)


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring sequences with equally many rows, and where their state lies.

    `old` are slot and ring row of the inputs before each sequence's rows, both `[sequences, past]`, and `absent` says
    which of them do not exist; `kept` are slot and ring row of the inputs that stay, `source` their rows in the batch.
    """

    begin: int
    sequences: int
    rows: int
    old: tuple[torch.Tensor, torch.Tensor]
    absent: torch.Tensor | None
    kept: tuple[torch.Tensor, torch.Tensor]
    source: torch.Tensor


def _block(blocks: tuple[int, ...], position: int, ring: int, paged: bool) -> int:
    """The row of the state that holds a position of the sequence with these entries of `slots`; -1 where none does."""
    return blocks[position // ring] if paged and position >= 0 else blocks[0]


# Every convolution of a step asks for the same: what the lengths say is worked out once.
@lru_cache(maxsize=32)
def _runs_of(
    starts: tuple[int, ...],
    lens: tuple[int, ...],
    slots: tuple[tuple[int, ...], ...],
    past: int,
    ring: int,
    paged: bool,
    device: torch.device,
) -> list[_Run]:
    runs, begin = [], 0
    counts = [b - a for a, b in pairwise(starts)]
    for end in range(1, len(counts) + 1):
        if end < len(counts) and counts[end] == counts[begin]:
            continue
        rows, owners = counts[begin], list(zip(slots[begin:end], lens[begin:end], strict=True))
        before = [(blocks, p) for blocks, n in owners for p in range(n - rows - past, n - rows)]
        old = [(max(_block(blocks, p, ring, paged), 0), p % ring) for blocks, p in before]
        absent = [p < 0 or _block(blocks, p, ring, paged) < 0 for blocks, p in before]
        kept = [
            (_block(blocks, p, ring, paged), p % ring, starts[begin] + i * rows + p - (n - rows))
            for i, (blocks, n) in enumerate(owners)
            for p in range(max(n - (rows if paged else min(rows, ring)), 0), n)
            if _block(blocks, p, ring, paged) >= 0
        ]
        # Not inference tensors, which a later call that records gradients could not use.
        with torch.inference_mode(False):
            read = torch.tensor(old, dtype=torch.int64, device=device).view(end - begin, past, 2)
            gone = torch.tensor(absent, device=device).view(end - begin, past, 1) if any(absent) else None
            slot, row, source = torch.tensor(kept, dtype=torch.int64, device=device).view(-1, 3).t().contiguous()
        if rows:
            runs.append(_Run(starts[begin], end - begin, rows, (read[..., 0], read[..., 1]), gone, (slot, row), source))
        begin = end
    return runs


def short_conv_ref(
    x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor | None, slots: torch.Tensor, cu_seqlens: torch.Tensor,
    kv_lens: torch.Tensor, residual: torch.Tensor | None = None, *, norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Convolve `x` `[T, C]`, write this step's inputs into `state` in place and add `residual` `[T, C]`.

    Returns `[T, C]` in `x.dtype`; with a `norm_weight` `[C]` a pair of that and its `rms_norm_ref`. Differentiable in
    all but `state`. Further as `convolved_ref`.
    """
    y = convolved_ref(x, weight, state, slots, cu_seqlens, kv_lens)
    if residual is not None:
        y = residual + y
    return y if norm_weight is None else (y, rms_norm_ref(y, norm_weight, eps))


def convolved_ref(
    x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor | None, slots: torch.Tensor, cu_seqlens: torch.Tensor,
    kv_lens: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Convolve `x` `[T, C]` and write this step's inputs into `state` in place; see the module for formula and layouts.

    Without `state` every sequence starts at its first row (training). A sequence whose slot is -1 neither reads nor
    writes state. Rows behind `cu_seqlens[-1]` are padding and give 0. Returns `[T, C]` in `x.dtype`. Raises
    `ValueError` where the ring holds fewer than `W - 1` rows.
    """
    past = weight.shape[1] - 1
    if state is not None and slots.dim() == 1 and state.shape[1] < past:
        raise ValueError(
            f"short_conv: state keeps {state.shape[1]} rows a sequence; a width of {past + 1} needs {past}"
        )
    taps = weight.float().t().contiguous()
    starts, ring = tuple(cu_seqlens.tolist()), state.shape[1] if state is not None else past
    paged = slots.dim() == 2
    owners = tuple(map(tuple, (slots if paged else slots.unsqueeze(1)).tolist()))
    pieces = []
    for run in _runs_of(starts, tuple(kv_lens.tolist()), owners, past, max(ring, 1), paged, x.device):
        rows = x[run.begin : run.begin + run.sequences * run.rows].unflatten(0, (run.sequences, run.rows))
        if state is None:
            old = rows.new_zeros(run.sequences, past, x.shape[1])
        else:
            old = state[run.old].to(x.dtype)
            if run.absent is not None:
                old = old.masked_fill(run.absent, 0.0)
            state[run.kept] = x[run.source].to(state.dtype)
        wide = torch.cat([old, rows], 1).float()
        y = wide[:, : run.rows] * taps[0]
        for j in range(1, past + 1):
            y.addcmul_(wide[:, j : j + run.rows], taps[j])
        pieces.append((y + wide[:, past:]).to(x.dtype).flatten(0, 1))
    if starts[-1] < len(x):
        pieces.append(torch.zeros_like(x[starts[-1] :]))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else x.clone()
