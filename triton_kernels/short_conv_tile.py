"""What the convolution and the preparation of attention's inputs share: the taps, the state, the check of both.

Layouts and arithmetic are those of `inkling_kernels.short_conv`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inkling_kernels.ragged import FLOATS, check_batch, check_tensor

MAX_WIDTH = 8


@triton.jit
def owner_fn(slots_ptr, slots_strides, seq, PAGED: tl.constexpr):
    """A sequence's row of `state` (-1: it has none) and where its entries of `slots` begin."""
    slots_ptr += seq.to(tl.int64) * slots_strides[0]
    slot = 0
    if not PAGED:
        slot = tl.load(slots_ptr)
    return slot, slots_ptr


@triton.jit
def state_row_fn(slot, slots_ptr, slots_block, position, live, ring, state_slot, state_row, PAGED: tl.constexpr):
    """Offsets (int64) in `state` of the rows that hold `position`, right where `live`."""
    if PAGED:
        slot = tl.load(slots_ptr + (position // ring).to(tl.int64) * slots_block, mask=live, other=0)
    return slot.to(tl.int64) * state_slot + (position % ring).to(tl.int64) * state_row


@triton.jit
def convolved_fn(
    x_ptr, x_row, x_at, weight_ptr, weight_at, weight_tap, state_ptr, state_slot, state_row, state_at,
    slot, slots_ptr, slots_block, ring, begin, length, local, start, column_live,
    WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Float32 `[BLOCK_T, C]`: rows `local ..` of a sequence, convolved; rows past its last are 0. `x_at`, `weight_at`
    and `state_at` are the channels' int64 offsets in their tensors. Rows before position 0, and all older rows where
    there is no state, are 0."""
    index = local + tl.arange(0, BLOCK_T)
    live = index < length
    total = tl.zeros([BLOCK_T, x_at.shape[0]], tl.float32)
    tap = total
    for j in tl.static_range(WIDTH):
        source = index - (WIDTH - 1 - j)
        new = (live & (source >= 0))[:, None] & column_live[None, :]
        at = (begin + source).to(tl.int64) * x_row
        tap = tl.load(x_ptr + at[:, None] + x_at[None, :], mask=new, other=0.0)
        if state_ptr is not None and j < WIDTH - 1:
            position = tl.where(slot >= 0, start + source, -1)
            old = live & (source < 0) & (position >= 0)
            at = state_row_fn(slot, slots_ptr, slots_block, position, old, ring, state_slot, state_row, PAGED)
            old = old[:, None] & column_live[None, :]
            held = tl.load(state_ptr + at[:, None] + state_at[None, :], mask=old, other=0.0)
            tap = tl.where(old, held.to(tap.dtype), tap)
        tap = tap.to(tl.float32)
        weight = tl.load(weight_ptr + (weight_at + j * weight_tap), mask=column_live, other=0.0)
        total = tl.fma(tap, tl.broadcast_to(weight[None, :], tap.shape), total)
    return total + tap


@triton.jit
def keep_fn(
    x_ptr, x_row, x_at, state_ptr, state_slot, state_row, state_at, slot, slots_ptr, slots_block, ring, begin, length,
    local, start, column_live, BLOCK_T: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Write a sequence's inputs where positions from 0 on belong. Into a ring: in its first tile, after all its threads
    have read it, the newest ones, as many as it has rows for. Into pages, where no row takes another's place: every
    tile its own."""
    if PAGED:
        kept = tl.minimum(length - local, BLOCK_T)
        newest = local
    else:
        kept = tl.where(local == 0, tl.minimum(length, ring), 0)
        newest = length - kept
        if kept > 0:
            tl.debug_barrier()
    for first in range(0, kept, BLOCK_T):
        index = newest + first + tl.arange(0, BLOCK_T)
        position = tl.where(slot >= 0, start + index, -1)
        live = (index < length) & (position >= 0)
        kept_at = state_row_fn(slot, slots_ptr, slots_block, position, live, ring, state_slot, state_row, PAGED)
        live = live[:, None] & column_live[None, :]
        at = (begin + index).to(tl.int64) * x_row
        x = tl.load(x_ptr + at[:, None] + x_at[None, :], mask=live, other=0.0)
        tl.store(state_ptr + kept_at[:, None] + state_at[None, :], x.to(state_ptr.dtype.element_ty), mask=live)


def check_conv(
    op: str, x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor | None, slots: torch.Tensor,
    cu_seqlens: torch.Tensor, kv_lens: torch.Tensor,
) -> None:  # fmt: skip
    """Raise TypeError or ValueError for what a convolution of `x` `[T, C]` cannot take."""
    check_tensor(op, "x", x, (None, None), FLOATS)
    check_tensor(op, "weight", weight, (x.shape[1], None), (torch.float32,), x.device)
    width = weight.shape[1]
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"{op}: weight has a width of {width}; expected 1 to {MAX_WIDTH}")
    if state is not None:
        check_tensor(op, "state", state, (None, None, x.shape[1]), FLOATS, x.device)
        # Rows of a paged state are never overwritten by later ones, so a block of one row would do.
        if state.shape[1] < (1 if slots.dim() == 2 else max(1, width - 1)):
            raise ValueError(
                f"{op}: state keeps {state.shape[1]} rows a sequence; a width of {width} needs {max(1, width - 1)}"
            )
    check_batch(op, len(x), slots, cu_seqlens, kv_lens, state, x.device)
