"""Inputs that show what a kernel must not read, and how far a result may be off. For tests and benchmarks, not run
time.

Everything that a kernel has no right to read is NaN, so that reading it shows in the result: the unused slots of pages,
pages of no sequence, the rows behind the last row of a tensor. Block-table entries that no key needs point far outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

# No allocation of a test reaches this far: a page that is read through it is an illegal address on any device.
BOGUS_PAGE = 1 << 24

# Two roundings to the stored type, of the probabilities and of the result, each by up to half a unit in the last place:
# a bound, not an estimate. In float32 the exponential's and the sums' errors are the larger part.
_UNIT = {torch.bfloat16: 2 * 2.0**-8, torch.float16: 2 * 2.0**-11, torch.float32: 2.0**-17}


def tolerance(dtype: torch.dtype, magnitude: torch.Tensor) -> torch.Tensor:
    """How far each element may be from the exact one. `magnitude` is what its sum would be with every term positive."""
    return _UNIT[dtype] * magnitude + 1e-30


def guarded(tensor: torch.Tensor, margin: int = 4) -> torch.Tensor:
    """A copy of a float tensor whose rows (first axis) lie inside a buffer of NaN: `margin` rows before, behind, and
    one element beside every innermost row, so that its rows are strided."""
    shape = (tensor.shape[0] + 2 * margin, *tensor.shape[1:-1], tensor.shape[-1] + 16)
    buffer = torch.full(shape, float("nan"), dtype=tensor.dtype, device=tensor.device)
    inside = buffer[margin : margin + tensor.shape[0], ..., : tensor.shape[-1]]
    inside.copy_(tensor)
    return inside


@dataclass
class PagedBatch:
    """A ragged batch over a paged cache, with its keys and values also as one dense `[kv_len, Hkv, D]` a sequence."""

    q: torch.Tensor
    r: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    proj: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens: torch.Tensor
    kv_lens: torch.Tensor
    q_lens: list[int]
    window: int | None
    scale: float
    keys: list[torch.Tensor] = field(repr=False)
    values: list[torch.Tensor] = field(repr=False)

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        """The operation's positional arguments."""
        names = ("q", "r", "k_pages", "v_pages", "proj", "block_table", "cu_seqlens", "kv_lens")
        return tuple(getattr(self, name) for name in names)

    @property
    def options(self) -> dict[str, Any]:
        """The operation's keyword arguments."""
        return {"window": self.window, "scale": self.scale}

    def alone(self, index: int) -> PagedBatch:
        """Sequence `index` in a batch of one, over the same pages."""
        begin = sum(self.q_lens[:index])
        rows = slice(begin, begin + self.q_lens[index])
        device = self.q.device
        return PagedBatch(
            self.q[rows], self.r[rows], self.k_pages, self.v_pages, self.proj, self.block_table[index : index + 1],
            torch.tensor([0, self.q_lens[index]], dtype=torch.int32, device=device), self.kv_lens[index : index + 1],
            [self.q_lens[index]], self.window, self.scale, [self.keys[index]], [self.values[index]],
        )  # fmt: skip


def paged_batch(
    lengths: Sequence[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int = 32,
    page: int = 16,
    extent: int = 24,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    head_major: bool = False,
    unused_pages: tuple[int, int] = (BOGUS_PAGE, -1),
) -> PagedBatch:
    """A batch of sequences with `(q_len, kv_len)` each, pages shuffled, everything that must not be read poisoned.

    Slots outside what the rows may see are NaN, and table entries of pages wholly outside it are, in turn,
    `unused_pages`; page 0 belongs to nobody and is NaN, for whom an illegal address would be too much.
    `head_major` stores the cache as `[P, Hkv, page, D]`, so that its strides differ.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    q_lens, kv_lens = [q for q, _ in lengths], [kv for _, kv in lengths]
    tokens, width = sum(q_lens), max([-(-kv // page) for kv in kv_lens] + [0]) + 1
    pages = len(lengths) * width + 2
    free = torch.randperm(pages - 1, generator=generator).add(1).tolist()
    shape = (pages, kv_heads, page, head_dim) if head_major else (pages, page, kv_heads, head_dim)
    caches = [torch.full(shape, float("nan"), dtype=dtype) for _ in range(2)]
    k_pages, v_pages = (cache.transpose(1, 2) if head_major else cache for cache in caches)
    table = torch.full((len(lengths), width), unused_pages[0], dtype=torch.int32)
    table[:, 1::2] = unused_pages[1]
    keys, values = [], []
    for row, (q_len, kv_len) in enumerate(lengths):
        keys.append(normal(kv_len, kv_heads, head_dim))
        values.append(normal(kv_len, kv_heads, head_dim))
        low = max(kv_len - q_len - window + 1, 0) if window is not None else 0
        for position in range(low, kv_len) if q_len else ():
            if position == low or position % page == 0:
                table[row, position // page] = free.pop()
            at = (int(table[row, position // page]), position % page)
            k_pages[at], v_pages[at] = keys[-1][position], values[-1][position]
    return PagedBatch(
        q=guarded(normal(tokens, heads, head_dim)).to(device),
        r=guarded(normal(tokens, heads, 16)).to(device),
        k_pages=k_pages.to(device),
        v_pages=v_pages.to(device),
        proj=guarded(normal(extent, 16)).t().to(device),
        block_table=table.to(device),
        cu_seqlens=torch.tensor([sum(q_lens[:n]) for n in range(len(q_lens) + 1)], dtype=torch.int32, device=device),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        q_lens=q_lens,
        window=window,
        scale=1.0 / head_dim,
        keys=keys,
        values=values,
    )
