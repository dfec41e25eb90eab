"""The order of a grouped product against numpy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inkling_kernels.expert_sort import ExpertSortConfig, sort_by_expert, sort_plan
from inkling_kernels.routing import routing, routing_with_sinks
from inkling_kernels.target import TARGETS


def check(device: torch.device, ids: np.ndarray, experts: int, local: np.ndarray | None = None, **options: int) -> None:
    config = ExpertSortConfig(**options) if options else None
    expert_map = None if local is None else torch.from_numpy(local).to(device)
    order, offsets = sort_by_expert(torch.from_numpy(ids).to(device), experts, expert_map=expert_map, config=config)
    assert (order.dtype, offsets.dtype) == (torch.int32, torch.int32)
    mine = ids.ravel().astype(np.int64)
    if local is not None:
        padded = np.append(local, -1)
        mine = padded[np.where((mine >= 0) & (mine < len(local)), mine, len(local))]
    mine = np.where((mine >= 0) & (mine < experts), mine, experts)
    np.testing.assert_array_equal(order.cpu().numpy(), np.argsort(mine, kind="stable"))
    np.testing.assert_array_equal(offsets.cpu().numpy(), np.searchsorted(np.sort(mine), np.arange(experts + 1)))


def test_core_many_tokens_over_all_experts_and_sinks(kernel_device: torch.device) -> None:
    """Several programs, each with several rounds; 258 experts are no power of two."""
    rng = np.random.default_rng(0)
    ids = np.concatenate([rng.integers(0, 256, (70, 6)), np.full((70, 1), 256), np.full((70, 1), 257)], 1)
    check(kernel_device, ids.astype(np.int32), 258, pairs=16, sorters=8)
    check(kernel_device, ids.astype(np.int32), 258)


@settings(max_examples=20, deadline=None)
@given(
    tokens=st.integers(0, 60),
    top_k=st.integers(1, 8),
    experts=st.integers(1, 260),
    skew=st.sampled_from([0.0, 1.0, 4.0]),
    mapped=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_ids(
    kernel_device: torch.device, tokens: int, top_k: int, experts: int, skew: float, mapped: bool, seed: int
) -> None:
    """Ids of no expert, of another rank and out of range are dropped, never misplaced."""
    rng = np.random.default_rng(seed)
    ids = (rng.random((tokens, top_k)) ** (1 + skew) * (experts + 4)).astype(np.int32) - 2
    local = None
    if mapped:
        local = np.full(experts, -1, np.int32)
        held = rng.permutation(experts)[: max(1, experts // 3)]
        local[held] = np.arange(len(held))
        experts = len(held)
    check(kernel_device, ids, experts, local, pairs=16, sorters=4)


@pytest.mark.parametrize("tokens", [0, 1, 64, 65])
def test_empty_one_hot_and_full_tiles(kernel_device: torch.device, tokens: int) -> None:
    for expert in (0, 7):
        check(kernel_device, np.full((tokens, 1), expert, np.int32), 8)
    check(kernel_device, np.full((tokens, 2), -1, np.int32), 8)
    check(kernel_device, np.full((tokens, 2), 256, np.int32), 8)
    check(kernel_device, np.full((tokens, 2), 2**31 - 1, np.int32), 8)


@pytest.mark.parametrize("ranks", [1, 3, 8, 300])
def test_expert_parallel_ranks_share_the_pairs_out(kernel_device: torch.device, ranks: int) -> None:
    """258 experts and sinks in runs over ranks, the last of 300 with none: every pair is one rank's, in its place."""
    rng = np.random.default_rng(ranks)
    chosen = np.argsort(rng.random((9, 256)), 1)[:, :6]
    ids = np.concatenate([chosen, np.full((9, 1), 256), np.full((9, 1), 257)], 1).astype(np.int32)
    seen: list[int] = []
    for rank in range(ranks) if ranks < 9 else (0, 113, 256, 257, 258, 299):
        bounds = [258 * at // ranks if ranks < 258 else min(at, 258) for at in (rank, rank + 1)]
        local = np.full(258, -1, np.int32)
        held = np.arange(*bounds)
        local[held] = held - bounds[0]
        check(kernel_device, ids, len(held), local)
        order, offsets = (
            x.tolist()
            for x in sort_by_expert(
                torch.from_numpy(ids).to(kernel_device), len(held), expert_map=torch.from_numpy(local).to(kernel_device)
            )
        )
        for expert, pairs in enumerate(pairwise(offsets)):
            assert all(ids.ravel()[pair] == bounds[0] + expert for pair in order[slice(*pairs)])
        seen += order[: offsets[-1]]
    assert ranks > 8 or sorted(seen) == list(range(72))


def test_strided_ids(kernel_device: torch.device) -> None:
    wide = torch.randint(0, 9, (12, 8), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    part = wide.to(kernel_device)[:, 1:7]
    for found, expected in zip(sort_by_expert(part, 9), sort_by_expert(part.contiguous(), 9), strict=True):
        assert torch.equal(found, expected)


def test_sinks_are_the_last_experts_of_every_token(kernel_device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(11, 258, generator=generator).to(kernel_device)
    bias, scale = torch.zeros(256, device=kernel_device), torch.tensor([2.0], device=kernel_device)
    chosen, weights, sinks = routing(logits, bias, scale, top_k=6, route_scale=8.0)
    ids, all_weights = routing_with_sinks(logits, bias, scale, top_k=6, route_scale=8.0)
    assert ids.tolist() == [[*row, 256, 257] for row in chosen.tolist()]
    assert torch.equal(all_weights, torch.cat([weights, sinks], 1))
    _, offsets = sort_by_expert(ids, 258)
    assert offsets[-3:].tolist() == [66, 77, 88]


def test_a_plan_follows_from_shapes_and_stays_small() -> None:
    for pairs in (0, 1, 384, 49_152, 6 * 10**6):
        plan = sort_plan(pairs, 256)
        assert plan.sorters * plan.share >= pairs
        assert plan.sorters <= 256
        assert plan.share % plan.block_p == 0
        assert plan.workspace_bytes <= 256 * 512 * 4
    for target in TARGETS:
        assert not ExpertSortConfig().problems(target)
    assert len(ExpertSortConfig(pairs=24, sorters=0).problems(TARGETS[0])) == 2


def test_bad_arguments(kernel_device: torch.device) -> None:
    ids = torch.zeros(2, 2, dtype=torch.int32, device=kernel_device)
    with pytest.raises(TypeError, match=r"ids is torch\.int64; expected torch\.int32"):
        sort_by_expert(ids.long(), 4)
    with pytest.raises(ValueError, match=r"ids has shape \[4\]; expected \[any, any\]"):
        sort_by_expert(ids.flatten(), 4)
    for count in (-1, 2000):
        with pytest.raises(ValueError, match=f"num_experts is {count}; expected 0 to 1024"):
            sort_by_expert(ids, count)
    with pytest.raises(TypeError, match=r"expert_map is torch\.int64"):
        sort_by_expert(ids, 4, expert_map=torch.zeros(4, dtype=torch.int64, device=kernel_device))
