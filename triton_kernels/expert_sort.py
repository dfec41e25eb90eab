"""The order in which a grouped product takes the chosen experts' tokens: a stable counting sort on the device.

Pair `p` of `ids` `[T, k]` is choice `p % k` of token `p // k`. With `e(p)` its expert among those held here,

    order   = the pairs sorted by (e(p), p), those without an expert last
    offsets = offsets[e] pairs have an expert below e

Sinks take part where `ids` names them (experts `E .. E + S - 1`, see `routing_with_sinks`), and under expert
parallelism a map says which global experts are held. Two launches: each program counts the experts of its share of the
pairs; then each adds up everyone's counts, so it knows where its own pairs begin, and ranks them. Integers only, no
atomics on memory: the order is the same on every chip and every run. Sizes follow from shapes and nothing is copied to
the host, so graphs can capture it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inkling_kernels.compile_case import NO_MATRIX, CompileCase
from inkling_kernels.ragged import check_config, check_tensor, not_powers_of_two
from inkling_kernels.target import Target

MAX_EXPERTS = 1024


@dataclass(frozen=True, slots=True)
class ExpertSortConfig:
    """Pairs that a program ranks at a time, and how many programs there are at most."""

    pairs: int = 64
    sorters: int = 256
    num_warps: int = 8

    def problems(self, target: Target) -> tuple[str, ...]:
        """Why this configuration cannot run there; empty where it can."""
        return tuple(not_powers_of_two(self, pairs=(16, 256), sorters=(1, 1024), num_warps=(1, 8)))


DEFAULT = ExpertSortConfig()


@triton.jit
def _expert_fn(ids_ptr, map_ptr, pair, pairs, listed, experts):
    """The local expert of each pair, `experts` for a pair that is dropped: no id, not held here, or past the last
    pair."""
    expert = tl.load(ids_ptr + pair, mask=pair < pairs, other=-1)
    if map_ptr is not None:
        known = (expert >= 0) & (expert < listed)
        expert = tl.load(map_ptr + expert.to(tl.int64), mask=known, other=-1)
    return tl.where((expert >= 0) & (expert < experts), expert, experts)


@triton.jit(do_not_specialize=["pairs", "share"])
def _count_kernel(
    counts_ptr, ids_ptr, map_ptr, pairs, share, listed, experts, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    sorter = tl.program_id(0).to(tl.int64)
    begin = sorter * share
    counts = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, share, BLOCK_P):
        pair = begin + first + tl.arange(0, BLOCK_P)
        expert = _expert_fn(ids_ptr, map_ptr, pair, pairs, listed, experts)
        counts += tl.histogram(expert, BLOCK_E).to(tl.int32)
    tl.store(counts_ptr + sorter * BLOCK_E + tl.arange(0, BLOCK_E), counts)


@triton.jit(do_not_specialize=["pairs", "share", "sorters"])
def _place_kernel(
    order_ptr, offsets_ptr, counts_ptr, ids_ptr, map_ptr, pairs, share, sorters, listed, experts,
    BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    sorter = tl.program_id(0).to(tl.int64)
    bin_ = tl.arange(0, BLOCK_E)
    total = tl.zeros([BLOCK_E], tl.int32)
    before = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, sorters, BLOCK_S):
        other = start + tl.arange(0, BLOCK_S)
        at = counts_ptr + (other * BLOCK_E)[:, None] + bin_[None, :]
        counts = tl.load(at, mask=(other < sorters)[:, None] & (bin_ >= 0)[None, :], other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where((other < sorter)[:, None], counts, 0), 0)
    first_of = tl.cumsum(total, 0) - total
    if sorter == 0:
        tl.store(offsets_ptr + bin_, first_of, mask=bin_ <= experts)
    place = first_of + before
    begin = sorter * share
    lane = tl.arange(0, BLOCK_P)
    for first in range(0, share, BLOCK_P):
        pair = begin + first + lane
        expert = _expert_fn(ids_ptr, map_ptr, pair, pairs, listed, experts)
        # Pairs before this one with its expert: those whose key is less by 1 to `lane`. One unsigned comparison says
        # both.
        key = expert * BLOCK_P + lane
        less = (key[:, None] - key[None, :] - 1).to(tl.uint32)
        rank = tl.sum((less < lane.to(tl.uint32)[:, None]).to(tl.int32), 1)
        at = tl.gather(place, expert, 0) + rank
        tl.store(order_ptr + at, pair.to(tl.int32), mask=pair < pairs)
        place += tl.histogram(expert, BLOCK_E).to(tl.int32)


@dataclass(frozen=True, slots=True)
class SortPlan:
    """Two launches of `sorters` programs with `share` pairs each; `workspace_bytes` of counts pass between them."""

    sorters: int
    share: int
    block_p: int
    block_e: int
    num_warps: int
    workspace_bytes: int


def sort_plan(
    pairs: int, experts: int, target: Target | None = None, config: ExpertSortConfig | None = None
) -> SortPlan:
    """Plan the sort of `pairs` pairs over `experts` local experts and a last bin for those that are dropped; pure."""
    config = config or DEFAULT
    block_e = max(64, triton.next_power_of_2(experts + 1))
    share = config.pairs * triton.cdiv(pairs, config.pairs * config.sorters)
    sorters = triton.cdiv(pairs, share) if pairs else 1
    return SortPlan(sorters, max(share, config.pairs), config.pairs, block_e, config.num_warps, 4 * sorters * block_e)


def sort_by_expert(
    ids: torch.Tensor,
    num_experts: int,
    *,
    expert_map: torch.Tensor | None = None,
    target: Target | None = None,
    config: ExpertSortConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort `ids` `[T, k]` int32; returns `order` `[T * k]` and `offsets` `[num_experts + 1]`, both int32.

    `num_experts` counts the experts held here (0 where other ranks hold them all), `expert_map` `[global experts]`
    int32 gives each global id's number among them, -1 where another rank holds it; without a map ids are those numbers.
    Expert `e` has the pairs `order[offsets[e]:offsets[e + 1]]`. Ids that name no expert held here (-1, out of range)
    are dropped: their pairs stand behind `offsets[num_experts]`, which no expert reaches.

    Raises TypeError or ValueError naming the argument, before anything is allocated or launched.
    """
    check_tensor("sort_by_expert", "ids", ids, (None, None), (torch.int32,))
    if not isinstance(num_experts, int) or not 0 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"sort_by_expert: num_experts is {num_experts!r}; expected 0 to {MAX_EXPERTS}")
    if expert_map is not None:
        check_tensor("sort_by_expert", "expert_map", expert_map, (None,), (torch.int32,), ids.device)
        expert_map = expert_map.contiguous()
    if ids.numel() >= 1 << 31:
        raise ValueError(f"sort_by_expert: ids has {ids.numel()} pairs; expected fewer than 2**31")
    config = config or DEFAULT
    if target is not None:
        check_config("sort_by_expert", config.problems(target))
    flat, pairs = ids.contiguous(), ids.numel()
    plan = sort_plan(pairs, num_experts, target, config)
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
    counts = torch.empty(plan.sorters, plan.block_e, dtype=torch.int32, device=ids.device)
    listed = len(expert_map) if expert_map is not None else 0
    blocks = {"BLOCK_P": plan.block_p, "BLOCK_E": plan.block_e, "num_warps": plan.num_warps, "enable_fp_fusion": True}
    _count_kernel[(plan.sorters,)](counts, flat, expert_map, pairs, plan.share, listed, num_experts, **blocks)
    _place_kernel[(plan.sorters,)](
        order, offsets, counts, flat, expert_map, pairs, plan.share, plan.sorters, listed, num_experts, BLOCK_S=8,
        **blocks,
    )  # fmt: skip
    return order, offsets


def _case(name: str, top_k: int, experts: int, mapped: bool) -> CompileCase:
    def launch(target: Target) -> object:
        ids = torch.empty(8192, top_k, dtype=torch.int32, device="meta")
        expert_map = torch.empty(256, dtype=torch.int32, device="meta") if mapped else None
        return sort_by_expert(ids, experts, expert_map=expert_map, target=target)

    return CompileCase(name, "routing=triton", launch, instruction=NO_MATRIX)


COMPILE_CASES = (
    _case("all experts and sinks", 8, 258, False),
    _case("one rank of eight", 6, 32, True),
)
