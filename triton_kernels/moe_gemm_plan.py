"""Tile shapes of the grouped expert products, their limits, and the plan of a launch; no tensors and no device.

A tile is `block_m` of one expert's (token, choice) pairs by `block_n` of its weight rows. Few pairs an expert (decode,
short prompts): the weights are read once and the time is theirs, so tiles hold no more pairs than a matrix unit needs.
Many pairs: larger tiles, and tiles of an expert that follow one another share its rows in cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from inkling_kernels.ragged import not_powers_of_two
from inkling_kernels.target import Target


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """`block_m` pairs, `block_n` weight rows (gate and up rows: half of each) and, for 16-bit activations, `block_k`
    columns at a time; `group_m` tiles of pairs are taken before the next weight rows. The defaults fit every chip."""

    block_m: int = 16
    block_n: int = 128
    block_k: int = 64
    group_m: int = 8
    num_warps: int = 4
    num_stages: int = 2

    def columns(self, itemsize: int) -> int:
        """Columns at a time: half as many where an activation has 32 bits, 32 (an MXFP4 block) at least."""
        return max(32, self.block_k * 2 // max(itemsize, 2))

    def shared_bytes(self, format: str, itemsize: int) -> int:
        """Shared memory that a program needs at most: each stage's tiles, for codes also the unpacked tile, and what
        the results pass through on their way to memory. `format` "native": codes are multiplied as they are, with
        tokens of a byte at most."""
        block_k = self.columns(itemsize)
        weights, tokens = self.block_n * block_k * itemsize, self.block_m * block_k * itemsize
        packed = weights if format == "bf16" else self.block_n * block_k * 9 // 16
        unpacked = 0 if format in ("bf16", "native") else weights
        if format == "native":
            tokens = self.block_m * block_k * 17 // 16
        return max(self.num_stages * (packed + tokens) + unpacked, self.block_m * self.block_n * 4) + 1024

    def problems(self, target: Target, *, format: str = "bf16", itemsize: int = 2) -> tuple[str, ...]:
        """Why this configuration cannot run there; empty where it can."""
        least = 8 if _has_narrow_tiles(target) else 16
        found = not_powers_of_two(
            self, block_m=(least, 256), block_n=(32, 256), block_k=(32, 256), group_m=(1, 64), num_warps=(1, 8)
        )
        if self.num_stages not in (1, 2, 3, 4, 5):
            found.append(f"num_stages is {self.num_stages}; expected 1 to 5")
        if not found and (need := self.shared_bytes(format, itemsize)) > target.shared_memory_bytes:
            found.append(f"needs {need} bytes of shared memory; {target} has {target.shared_memory_bytes}")
        return tuple(found)


def _has_narrow_tiles(target: Target) -> bool:
    """Whether the matrix unit takes 8 pairs: `mma.sync` does. Tensor memory and AMD's units take 16, and for fewer
    Triton 3.6 leaves Hopper's `wgmma`, which 3.9 does not; counted on it, 8 save nothing."""
    return target.vendor == "cuda" and not {"wgmma", "tcgen05"} & target.capabilities


SMALL_BATCH = MoeConfig()
# Where the matrix unit takes so few: half the products and tokens' bytes of `SMALL_BATCH`.
NARROW_BATCH = MoeConfig(block_m=8)
# RDNA: longer rows of codes reach the matrix unit through shared memory in fewer instructions than through lanes, and
# half as many of them fit its registers.
SMALL_BATCH_WMMA = MoeConfig(block_n=64, block_k=128)
LARGE_BATCH = MoeConfig(block_m=64)
# Where shared memory has room for three stages of it.
FULL_BATCH = MoeConfig(block_m=128, num_warps=8, num_stages=3)
# From so many pairs an expert on, on average, tiles of the next size are mostly full; below `SMALL_FROM` hardly an
# expert has more than 8.
SMALL_FROM = 2
LARGE_FROM = 32
FULL_FROM = 96


def moe_config(
    pairs: int, experts: int, target: Target | None = None, *, format: str = "bf16", itemsize: int = 2
) -> MoeConfig:
    """The tile shape for `pairs` (token, choice) pairs over `experts` experts held; one that fits every chip where
    `target` is None."""
    if pairs >= FULL_FROM * experts and target and not FULL_BATCH.problems(target, format=format, itemsize=itemsize):
        return FULL_BATCH
    if pairs >= LARGE_FROM * experts:
        return LARGE_BATCH
    if pairs < SMALL_FROM * experts and target and _has_narrow_tiles(target):
        return NARROW_BATCH
    packed = format != "bf16" and target is not None and "wmma" in target.capabilities
    return SMALL_BATCH_WMMA if packed else SMALL_BATCH


@dataclass(frozen=True, slots=True)
class MoePlan:
    """The launches of `moe_experts`, known from shapes alone: at most `tiles` tiles of pairs, the surplus ones return
    at once; programs of the two products; the sum's tile and grid; bytes of intermediate results."""

    config: MoeConfig
    tiles: int
    block_k: int
    up_block_n: int
    up_grid: tuple[int]
    down_block_n: int
    down_grid: tuple[int]
    sum_block: tuple[int, int]
    sum_grid: tuple[int, int]
    workspace_bytes: int


def moe_experts_plan(
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    width: int,
    *,
    format: str = "bf16",
    dtype: torch.dtype = torch.bfloat16,
    target: Target | None = None,
    config: MoeConfig | None = None,
) -> MoePlan:
    """Plan `moe_experts` for `tokens` tokens of `top_k` choices each over `experts` experts of `width` held here; pure.

    Raises ValueError for a configuration that `target` cannot run.
    """
    pairs = tokens * top_k
    chosen = config or moe_config(pairs, experts, target, format=format, itemsize=dtype.itemsize)
    if target is not None and (problems := chosen.problems(target, format=format, itemsize=dtype.itemsize)):
        raise ValueError(f"moe_experts: config cannot be used: {'; '.join(problems)}")
    # Every tile but an expert's last is full, and no tile is empty.
    tiles = min(pairs, pairs // chosen.block_m + experts)
    sum_columns = min(1024, max(16, triton.next_power_of_2(hidden)))
    sum_rows = max(1, 2048 // sum_columns) if tokens < 64 else max(1, 8192 // sum_columns)
    return MoePlan(
        config=chosen,
        tiles=tiles,
        block_k=chosen.columns(dtype.itemsize),
        up_block_n=chosen.block_n // 2,
        up_grid=(tiles * triton.cdiv(width, chosen.block_n // 2),),
        down_block_n=chosen.block_n,
        down_grid=(tiles * triton.cdiv(hidden, chosen.block_n),),
        sum_block=(sum_rows, sum_columns),
        sum_grid=(triton.cdiv(tokens, sum_rows), triton.cdiv(hidden, sum_columns)),
        workspace_bytes=pairs * (hidden + width) * dtype.itemsize + 4 * (pairs + experts + 1 + 2 * tiles),
    )
