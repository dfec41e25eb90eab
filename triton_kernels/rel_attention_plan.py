"""Launch plans of relative attention: pure functions of shapes, bounds and the target, for prefill and for decoding.

A plan is grid, tile shape, warps, stages and workspace, and counts the tiles, bytes and operations of given lengths. It
depends on no length, so that a captured graph keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton

from inkling_kernels.ragged import not_powers_of_two
from inkling_kernels.target import Target


@dataclass(frozen=True, slots=True)
class Work:
    """What a launch does for given lengths. `bias_tiles` of its `tiles` take a bias. `tiles_least` of the same shape
    would cover every visible (query token, key) pair if they could be packed without gaps. Bytes are before any
    cache."""

    tiles: int
    bias_tiles: int
    tiles_least: int
    bytes_read: int
    bytes_written: int
    operations: int


@dataclass(frozen=True, slots=True)
class RelAttentionConfig:
    """Tile shape of the kernel; the defaults fit every chip and every type. `block_m` rows (query tokens times the
    group's heads), `block_n` keys, at most `tokens` query tokens a tile. More tokens read each key for more rows and
    widen the bias product by 16 each."""

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

        Matrix units that read shared memory hold q and r there too, as do exact float32 products on NVIDIA. Others hold
        them in registers, which they reach through shared memory before the loop. AMD's pipeline keeps the last stage
        in registers, except gfx950's asynchronous copies.
        """
        tokens, rows = self.tile(group)
        wide, keys = 16 * tokens, self.block_n * (2 * head_dim + 16 * tokens)
        resident, stages = rows * (head_dim + wide), self.num_stages
        if {"wgmma", "tcgen05"} & target.capabilities or (target.vendor == "cuda" and itemsize == 4):
            return (resident + stages * keys) * itemsize + 2048
        if target.vendor != "cuda" and "mfma_scale" not in target.capabilities:
            return (max(rows * wide, max(1, stages - 1) * keys) + rows * self.block_n) * itemsize
        return (max(resident, stages * keys) + self.block_n * wide + rows * self.block_n) * itemsize

    def problems(self, target: Target, *, group: int, head_dim: int, itemsize: int = 2) -> tuple[str, ...]:
        """Why this configuration cannot run there; empty where it can."""
        found = not_powers_of_two(self, block_m=(16, 128), block_n=(16, 128), tokens=(1, 16), num_warps=(1, 8))
        if self.num_stages not in (1, 2, 3, 4):
            found.append(f"num_stages is {self.num_stages}; expected 1 to 4")
        if not found and (need := self.shared_bytes(target, group, head_dim, itemsize)) > target.shared_memory_bytes:
            found.append(f"needs {need} bytes of shared memory; {target} has {target.shared_memory_bytes}")
        return tuple(found)


DEFAULT = RelAttentionConfig()

# More rows a tile read each key for more queries, where registers and shared memory have room; the first that fits is
# taken.
_MMA = (RelAttentionConfig(block_m=64, tokens=16, num_stages=2), RelAttentionConfig(block_m=64, tokens=8, num_stages=2))
_MFMA = (RelAttentionConfig(block_m=64, tokens=16), RelAttentionConfig(block_m=64, tokens=8))


def rel_attention_config(
    target: Target | None, *, group: int, head_dim: int, itemsize: int = 2, kv_itemsize: int = 2
) -> RelAttentionConfig:
    """The tile shape for a target; `DEFAULT` where it is None or nothing larger fits."""
    if itemsize == 4:
        # Where exact float32 products have no matrix instruction, more threads share their operands.
        plain = target is not None and "mfma" not in target.capabilities
        return replace(DEFAULT, num_warps=8 if plain else 4)
    if target is None or not target.is_gpu or "wmma" in target.capabilities:
        return DEFAULT
    listed: tuple[RelAttentionConfig, ...] = _MFMA if "mfma" in target.capabilities else _MMA
    if "tcgen05" in target.capabilities:
        # With other numbers of stages, Triton 3.6 or 3.9 leaves some cases a few bytes short of registers.
        stages = 3 if kv_itemsize == 1 and group <= 4 else 2
        listed = (RelAttentionConfig(block_m=64, tokens=16, num_stages=stages),)
    elif "wgmma" in target.capabilities and kv_itemsize == 1 and group <= 4:
        # An fp8 tile is widened in registers, of which Triton 3.6 has too few for it in 4 warps.
        listed = (RelAttentionConfig(block_m=64, tokens=16, num_warps=8, num_stages=2), *_MMA)
    fits = (c for c in listed if not c.problems(target, group=group, head_dim=head_dim, itemsize=itemsize))
    return next(fits, DEFAULT)


def _bias_tiles(size: int, rows: int, first: int, low: int, end: int, extent: int, window: int | None) -> int:
    """Key tiles of `size` with a bias, of those that `rows` query rows from position `first` on visit: the near ones,
    and those at the window's edge, which no tile without a bias can be."""
    begin, last = low // size, -(-end // size)
    near = min(max(max(first + 1 - extent, 0) // size, begin), last)
    inside = begin if window is None else min(max(-(-max(first + rows - window, 0) // size), begin), last)
    return last - max(near, inside) + inside - begin


@dataclass(frozen=True, slots=True)
class RelAttentionPlan:
    """A launch, known without the lengths: `grid` is an upper bound of the tiles, the surplus programs return at
    once."""

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

    def spans(self, q_len: int, kv_len: int) -> list[tuple[int, int, int, int]]:
        """For each query tile of a sequence: its first key, the end of its keys, its tiles with a bias, and its first
        token's position."""
        size, spans = self.config.block_n, []
        for t0 in range(0, q_len, self.tokens):
            first = kv_len - q_len + t0
            low = max(first - self.window + 1, 0) if self.window is not None else 0
            end = max(first + min(self.tokens, q_len - t0), 0)
            near = _bias_tiles(size, self.tokens, first, low, end, self.extent, self.window)
            spans.append((low, end, near, first))
        return spans

    def work(self, q_lens: Sequence[int], kv_lens: Sequence[int]) -> Work:
        """Tiles, bytes and operations for these lengths, all key heads together."""
        size, row = self.config.block_n, self.head_dim * self.itemsize
        tiles = near_tiles = pairs = keys = tokens = 0
        for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
            tokens += q_len
            for low, end, near, first in self.spans(q_len, kv_len):
                if end > low:
                    tiles += -(-end // size) - low // size
                    near_tiles += near
                    keys += end - low
                seen = range(max(first, 0) + 1, end + 1)
                pairs += sum(seen) if self.window is None else sum(min(n, self.window) for n in seen)
        heads = self.grid[1]
        wide = 16 * self.tokens
        return Work(
            tiles=tiles * heads,
            bias_tiles=near_tiles * heads,
            tiles_least=-(-pairs // (self.tokens * size)) * heads,
            bytes_read=heads * (tokens * self.group * (row + 16 * self.itemsize)
                                + near_tiles * wide * size * self.itemsize
                                + 2 * keys * self.head_dim * self.kv_itemsize),
            bytes_written=heads * tokens * self.group * row,
            operations=heads * 2 * self.block_m * size * (2 * self.head_dim * tiles + wide * near_tiles),
        )  # fmt: skip


def rel_attention_plan(
    tokens: int, batch: int, heads: int, kv_heads: int, head_dim: int, extent: int, window: int | None, *,
    dtype: torch.dtype = torch.bfloat16, kv_dtype: torch.dtype | None = None, target: Target | None = None,
    config: RelAttentionConfig | None = None,
) -> RelAttentionPlan:  # fmt: skip
    """Plan `rel_attention` for `tokens` query rows in `batch` sequences; pure, and the same for a captured graph.
    Raises ValueError for a `config` that `target` cannot run."""
    group = heads // kv_heads
    if config is not None and target is not None:
        problems = config.problems(target, group=group, head_dim=head_dim, itemsize=dtype.itemsize)
        if problems:
            raise ValueError(f"rel_attention: config is {config}; {'; '.join(problems)}")
    kv_itemsize = (kv_dtype or dtype).itemsize
    chosen = config or rel_attention_config(
        target, group=group, head_dim=head_dim, itemsize=dtype.itemsize, kv_itemsize=kv_itemsize
    )
    per_tile, rows = chosen.tile(group)
    grid = (tokens // per_tile + batch if tokens else 0, kv_heads)
    return RelAttentionPlan(grid, per_tile, rows, chosen, group, head_dim, dtype.itemsize, kv_itemsize, extent, window)


MAX_QUERY_LEN = 9
# Rows of a tile: beyond it the sums alone would take every register.
MAX_ROWS = 128


def decode_tile(rows: int, group: int, itemsize: int) -> tuple[int, int]:
    """(heads, rows) of a tile for `rows` query rows a sequence: the whole group, or an equal part of it where that
    would pass 128 rows; in float32, whose operands take twice the room and mostly plain registers, 32."""
    most = MAX_ROWS if itemsize < 4 else MAX_ROWS // 4
    heads = max(n for n in range(1, group + 1) if group % n == 0 and (n == 1 or rows * n <= most))
    return heads, max(16, triton.next_power_of_2(rows * heads))


@dataclass(frozen=True, slots=True)
class RelAttentionDecodeConfig:
    """Keys a tile and launch shape (twice the warps for a tile of 128 rows); the defaults fit every chip in 16-bit
    types. A split has at least `min_keys` keys and a launch `programs_per_unit` programs a compute unit, where the
    lengths allow both."""

    block_n: int = 32
    num_warps: int = 4
    num_stages: int = 2
    min_keys: int = 256
    programs_per_unit: int = 2
    max_splits: int = 128

    def shared_bytes(self, target: Target, group: int, head_dim: int, rows: int, itemsize: int) -> int:
        """Shared memory that a program needs at most: 0 to 65 % above what the compiled cases take. See the prefill
        kernel's for what lies there."""
        tokens = min(8, triton.next_power_of_2(rows))
        wide = 16 * (tokens + max(0, rows - tokens))
        _, tile = decode_tile(rows, group, itemsize)
        keys, resident = self.block_n * (2 * head_dim + wide), tile * (head_dim + wide)
        if {"wgmma", "tcgen05"} & target.capabilities:
            return (resident + self.num_stages * keys) * itemsize + 2048
        if target.vendor == "cuda":
            return (tile * wide + self.block_n * wide + self.num_stages * keys) * itemsize + 2048
        if "mfma_scale" in target.capabilities:
            return (max(resident, self.num_stages * keys) + self.block_n * (wide + tile)) * itemsize
        return (max(tile * wide, max(1, self.num_stages - 1) * keys) + tile * self.block_n) * itemsize

    def problems(
        self, target: Target, *, group: int, head_dim: int, rows: int = 1, itemsize: int = 2
    ) -> tuple[str, ...]:
        """Why this configuration cannot run there; empty where it can."""
        found = not_powers_of_two(self, block_n=(16, 128), num_warps=(1, 8))
        found += [
            f"{name} is {value}; expected {least} to {most}"
            for name, value, least, most in (
                ("num_stages", self.num_stages, 1, 4),
                ("min_keys", self.min_keys, self.block_n, 1 << 20),
                ("programs_per_unit", self.programs_per_unit, 1, 16),
                ("max_splits", self.max_splits, 1, 1024),
            )
            if not least <= value <= most
        ]
        need = self.shared_bytes(target, group, head_dim, rows, itemsize)
        if not found and need > target.shared_memory_bytes:
            found.append(f"needs {need} bytes of shared memory; {target} has {target.shared_memory_bytes}")
        return tuple(found)


DECODE_DEFAULT = RelAttentionDecodeConfig()


def rel_attention_decode_config(
    target: Target | None, *, group: int, head_dim: int, rows: int, window: int | None, itemsize: int = 2
) -> RelAttentionDecodeConfig:
    """The launch shape for a target; the one that fits every chip where it is None or nothing else fits."""
    if itemsize == 4:
        # As for prefill: without a matrix instruction, more threads share the operands.
        plain = target is not None and "mfma" not in target.capabilities
        return replace(DECODE_DEFAULT, num_warps=8 if plain else 4, num_stages=1)
    chosen = DECODE_DEFAULT
    if target is None:
        return chosen
    if "mfma" in target.capabilities:
        # 64 lanes a wave: with two, each has rows of its own, and softmax and addresses are not computed four times.
        chosen = replace(DECODE_DEFAULT, num_warps=2)
    elif "wgmma" in target.capabilities and window is None:
        # Longer tiles for as many rows; those at a window's edge, which are masked as well, would not fit in registers.
        chosen = replace(DECODE_DEFAULT, block_n=64)
    facts = {"group": group, "head_dim": head_dim, "rows": rows, "itemsize": itemsize}
    return DECODE_DEFAULT if chosen.problems(target, **facts) else chosen


@dataclass(frozen=True, slots=True)
class RelAttentionDecodePlan:
    """The two launches, known without the lengths; `combine_grid` is None for one split, which writes the result."""

    grid: tuple[int, int, int]
    combine_grid: tuple[int, int] | None
    rows: int
    tokens: int
    extra: int
    heads: int
    block_m: int
    num_warps: int
    config: RelAttentionDecodeConfig
    num_splits: int
    split_keys: int
    group: int
    head_dim: int
    itemsize: int
    kv_itemsize: int
    extent: int
    window: int | None

    @property
    def workspace_bytes(self) -> int:
        """Float32 partial results of every split: sums, maxima and totals, for as many rows as there may be."""
        return self._partial_bytes(self.grid[2] * self.rows * self.grid[0] * self.heads)

    def _partial_bytes(self, lines: int) -> int:
        return 4 * self.num_splits * lines * (self.head_dim + 2) if self.num_splits > 1 else 0

    def work(self, q_lens: Sequence[int], kv_lens: Sequence[int]) -> Work:
        """Tiles, bytes and operations for these lengths, both launches."""
        size, heads = self.config.block_n, self.grid[0]
        wide = 16 * (self.tokens + self.extra)
        tiles = near_tiles = pairs = keys = 0
        for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
            first, end = kv_len - q_len, kv_len if q_len else 0
            low = max(first - self.window + 1, 0) if self.window is not None else 0
            if end > low:
                edge = None if self.rows == 1 else self.window
                tiles += -(-end // size) - low // size
                near_tiles += _bias_tiles(size, self.rows, first, low, end, self.extent, edge)
                keys += end - low
                seen = range(max(first, 0) + 1, end + 1)
                pairs += sum(seen) if self.window is None else sum(min(n, self.window) for n in seen)
        tokens = sum(q_lens)
        line = tokens * heads * self.heads
        workspace = self._partial_bytes(line)
        return Work(
            tiles=tiles * heads,
            bias_tiles=near_tiles * heads,
            tiles_least=-(-pairs // (self.rows * size)) * heads,
            bytes_read=line * (self.head_dim + 16) * self.itemsize * self.num_splits
            + workspace
            + heads * (2 * keys * self.head_dim * self.kv_itemsize + near_tiles * wide * size * self.itemsize),
            bytes_written=line * self.head_dim * self.itemsize + workspace,
            operations=heads * 2 * self.block_m * size * (2 * self.head_dim * tiles + wide * near_tiles),
        )


def rel_attention_decode_plan(
    batch: int, heads: int, kv_heads: int, head_dim: int, extent: int, window: int | None, *, max_query_len: int,
    max_kv_len: int, dtype: torch.dtype = torch.bfloat16, kv_dtype: torch.dtype | None = None,
    target: Target | None = None, split_keys: int | None = None, config: RelAttentionDecodeConfig | None = None,
) -> RelAttentionDecodePlan:  # fmt: skip
    """Plan a decode or verify step; pure. `max_kv_len` bounds the lengths and so the splits; None for `target` plans
    for 64 compute units. Raises ValueError for a `max_query_len`, `split_keys` or `config` that cannot be."""
    group = heads // kv_heads
    if isinstance(max_query_len, bool) or not isinstance(max_query_len, int) or not 1 <= max_query_len <= MAX_QUERY_LEN:
        raise ValueError(
            f"rel_attention_decode: max_query_len is {max_query_len!r}; expected 1 to {MAX_QUERY_LEN} "
            "(rel_attention takes more)"
        )
    facts = {"group": group, "head_dim": head_dim, "rows": max_query_len, "itemsize": dtype.itemsize}
    chosen = config or rel_attention_decode_config(target, window=window, **facts)
    if split_keys is not None and (split_keys < chosen.block_n or split_keys % chosen.block_n):
        raise ValueError(f"rel_attention_decode: split_keys is {split_keys}; expected a multiple of {chosen.block_n}")
    if config is not None and target is not None and (problems := config.problems(target, **facts)):
        raise ValueError(f"rel_attention_decode: config is {config}; {'; '.join(problems)}")
    span = max_kv_len if window is None else min(max_kv_len, window + max_query_len - 1)
    if split_keys is not None:
        splits = -(-span // split_keys) + (window is not None)
    else:
        units = 64 if target is None else target.compute_units
        wanted = -(-chosen.programs_per_unit * units // max(1, batch * kv_heads))
        splits = min(wanted, span // chosen.min_keys, chosen.max_splits)
    splits = max(1, splits)
    tokens = min(8, triton.next_power_of_2(max_query_len))
    part, block_m = decode_tile(max_query_len, group, dtype.itemsize)
    return RelAttentionDecodePlan(
        grid=(heads // part, splits, batch),
        combine_grid=(kv_heads, batch * max_query_len) if splits > 1 else None,
        rows=max_query_len,
        tokens=tokens,
        extra=max(0, max_query_len - tokens),
        heads=part,
        block_m=block_m,
        num_warps=min(8, chosen.num_warps * (2 if block_m == MAX_ROWS else 1)),
        config=chosen,
        num_splits=splits,
        split_keys=split_keys or 0,
        group=group,
        head_dim=head_dim,
        itemsize=dtype.itemsize,
        kv_itemsize=(kv_dtype or dtype).itemsize,
        extent=extent,
        window=window,
    )
