"""Short causal depthwise convolution with an inner residual, over a ragged batch.

    y[t, c] = x[t, c] + sum_{j=0..W-1} w[c, j] * x[t - (W-1) + j, c]        (rows before the sequence are zero)

One call serves prefill, extension, decoding and verification. Taps that reach before the rows of this step come from
the sequence's state: the last inputs of the channel in a ring, the row of position `p` at `p % R`. With `R >= W - 1 +
drafts` the ring still holds the accepted rows after drafts were rejected, so nothing has to be rolled back.

Layouts: `x` `[T, C]` rows of all sequences one after another (any row stride), `weight` `[C, W]` float32, `state`
`[S, R, C]`, `slots` `[B]` int32 (the sequence's row of `state`), `cu_seqlens` `[B+1]` int32, `kv_lens` `[B]` int32
(tokens of the sequence including this step's). Row `i` of sequence `b` is at position `kv_lens[b] - q_len[b] + i`.
Arithmetic is float32 in the order of the formula, rounded to `x.dtype` once; `residual` is then added in `x.dtype`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch


def uniform_runs(cu_seqlens: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield `(first, last + 1, first row, rows each)` of every run of neighbouring sequences with equally many rows."""
    lens = [b - a for a, b in pairwise(cu_seqlens)]
    start = 0
    for i in range(1, len(lens) + 1):
        if i == len(lens) or lens[i] != lens[start]:
            if lens[start]:
                yield start, i, cu_seqlens[start], lens[start]
            start = i


def short_conv_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor | None,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    kv_lens: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve `x` `[T, C]` and write this step's inputs into `state` in place; see the module for formula and layouts.

    Without `state` every sequence starts at its first row (training). Differentiable in `x`, `weight` and `residual`.
    Returns `[T, C]` in `x.dtype`. Raises `ValueError` where the ring holds fewer than `W - 1` rows.
    """
    width = weight.shape[1]
    if state is not None and state.shape[1] < width - 1:
        raise ValueError(
            f"short_conv: state keeps {state.shape[1]} rows a sequence; a width of {width} needs {width - 1}"
        )
    taps = weight.float().unbind(1)
    lens, slot_ids = kv_lens.tolist(), slots.tolist()
    pieces = []
    for b0, b1, t0, n in uniform_runs(cu_seqlens.tolist()):
        rows = x[t0 : t0 + (b1 - b0) * n].unflatten(0, (b1 - b0, n))
        if state is None:
            past = rows.new_zeros(b1 - b0, width - 1, x.shape[1])
        else:
            ring, flat = state.shape[1], state.flatten(0, 1)
            first = [length - n for length in lens[b0:b1]]
            at = [
                s * ring + p % ring
                for s, f in zip(slot_ids[b0:b1], first, strict=True)
                for p in range(f - width + 1, f)
            ]
            past = flat.index_select(0, torch.tensor(at, device=x.device)).unflatten(0, (b1 - b0, width - 1))
            for i, f in enumerate(first):
                if f < width - 1:
                    past[i, : width - 1 - f] = 0
            keep = min(n, ring)
            to = [
                s * ring + p % ring
                for s, f in zip(slot_ids[b0:b1], first, strict=True)
                for p in range(f + n - keep, f + n)
            ]
            flat.index_copy_(0, torch.tensor(to, device=x.device), rows[:, n - keep :].flatten(0, 1).to(state.dtype))
        ext = torch.cat([past.to(x.dtype), rows], 1).float()
        y = ext[:, :n] * taps[0]
        for j in range(1, width):
            y = torch.addcmul(y, ext[:, j : j + n], taps[j])
        pieces.append((y + ext[:, width - 1 :]).to(x.dtype).flatten(0, 1))
    y = pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else x.clone()
    return y if residual is None else residual + y
