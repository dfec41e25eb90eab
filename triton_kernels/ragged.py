"""Ragged batches on the device: which sequence and rows a program owns; and the checks that launchers share.

Rows of all sequences lie one after another. `cu_seqlens` `[B+1]` int32 says where each begins, `kv_lens` `[B]` int32
how many tokens it has including this step's, so row `i` of sequence `b` is at position `kv_lens[b] - q_len[b] + i`.

Tiles of `BLOCK_T` rows never cross a sequence: those of sequence `b` are numbered from `cu_seqlens[b] // BLOCK_T + b`
on, so a grid of `T // BLOCK_T + B` covers every batch of those shapes and the lengths stay on the device.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def sequence_tile_fn(cu_ptr, kv_lens_ptr, tile, rows, batch, BLOCK_T: tl.constexpr):
    """What tile number `tile` is: (sequence, its first row in the batch, its rows, the rows that its tiles cover, the
    tile's first row within it, the position of its row 0). Tiles of the last sequence also cover the padding behind it,
    up to row `rows`; a surplus tile begins at or past what is covered."""
    low = 0
    high = batch - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(cu_ptr + middle) // BLOCK_T + middle <= tile:
            low = middle
        else:
            high = middle - 1
    begin = tl.load(cu_ptr + low)
    length = tl.load(cu_ptr + low + 1) - begin
    local = (tile - (begin // BLOCK_T + low)) * BLOCK_T
    covered = tl.where(low == batch - 1, rows - begin, length)
    return low, begin, length, covered, local, tl.load(kv_lens_ptr + low) - length


def check_tensor(
    op: str,
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None = None,
) -> None:
    """Raise TypeError or ValueError unless `tensor` has the shape (None: any size), one of the types and the device."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: {name} is {type(tensor).__name__}; expected a torch.Tensor")
    wanted = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
    if tensor.dim() != len(shape) or any(w not in (None, n) for w, n in zip(shape, tensor.shape, strict=True)):
        raise ValueError(f"{op}: {name} has shape {list(tensor.shape)}; expected {wanted}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{op}: {name} is {tensor.dtype}; expected {' or '.join(map(str, dtypes))}; cast it")
    if device is not None and tensor.device != device:
        raise ValueError(f"{op}: {name} is on {tensor.device}; expected {device} like the other tensors; move it there")


def check_batch(
    op: str,
    rows: int,
    slots: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    kv_lens: torch.Tensor,
    state: torch.Tensor | None,
    device: torch.device,
) -> None:
    """Check the tensors that describe a ragged batch, and on the CPU, where reading them waits for nothing, their
    values. `slots` is `[B]`, or a block table `[B, any]`.

    `cu_seqlens` may end short of `rows`: the rows behind it are the padding of a captured graph.
    """
    batch = len(kv_lens) if isinstance(kv_lens, torch.Tensor) and kv_lens.dim() == 1 else None
    ends = None if batch is None else batch + 1
    named = [("kv_lens", kv_lens, batch), ("cu_seqlens", cu_seqlens, ends)]
    if state is not None and (not isinstance(slots, torch.Tensor) or slots.dim() != 2):
        named.append(("slots", slots, batch))  # type: ignore[arg-type]
    elif state is not None and slots is not None:
        check_tensor(op, "slots", slots, (batch, None), (torch.int32,), device)
    for name, tensor, size in named:
        check_tensor(op, name, tensor, (size,), (torch.int32,), device)
        if tensor.numel() > 1 and tensor.stride(0) != 1:
            raise ValueError(f"{op}: {name} has stride {tensor.stride(0)}; expected a contiguous tensor")
    if rows and len(kv_lens) == 0:
        raise ValueError(f"{op}: kv_lens is empty and x has {rows} rows; expected at least one sequence")
    if device.type != "cpu":
        return
    starts = cu_seqlens.tolist()
    if starts[0] != 0 or starts[-1] > rows or any(a > b for a, b in pairwise(starts)):
        raise ValueError(f"{op}: cu_seqlens is {starts}; expected a rise from 0 to at most the {rows} rows of x")
    lens = kv_lens.tolist()
    if min(lens, default=0) < 0:
        raise ValueError(f"{op}: kv_lens has {min(lens)}; expected numbers of tokens, 0 or more")
    if state is not None and slots is not None and slots.numel() and int(slots.max()) >= len(state):
        raise ValueError(f"{op}: slots has {int(slots.max())}; expected rows of state below {len(state)}, or -1")


def not_powers_of_two(config: object, **bounds: tuple[int, int]) -> list[str]:
    """Which numbers of a configuration, by name, are no powers of two within their bounds."""
    named = ((name, getattr(config, name), *limits) for name, limits in bounds.items())
    return [
        f"{name} is {value}; expected a power of two from {low} to {high}"
        for name, value, low, high in named
        if not low <= value <= high or value & (value - 1)
    ]


def check_config(op: str, problems: tuple[str, ...]) -> None:
    """Raise ValueError where a configuration has problems."""
    if problems:
        raise ValueError(f"{op}: config cannot be used: {'; '.join(problems)}")
