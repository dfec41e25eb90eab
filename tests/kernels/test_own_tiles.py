"""Attention with the tile that is planned for the chip at hand, whose matrix instructions the smallest tile does not
reach: wgmma on sm90, tcgen05 on sm100."""

from __future__ import annotations

import os

import pytest
import torch
from attention_oracle import exact_attention, signal

from inkling_kernels.rel_attention import rel_attention
from inkling_kernels.rel_attention_decode import rel_attention_decode
from inkling_kernels.target import Target, current_target
from inkling_kernels.testing import PagedBatch, paged_batch


@pytest.fixture
def target(kernel_device: torch.device) -> Target:
    """The chip that executes the kernels: the GPU, or the one that a test driver is named for. The interpreter has no
    tile of its own and takes sm90's."""
    if kernel_device.type == "cuda":
        return current_target()
    return Target.parse(os.environ.get("INKLING_TEST_DRIVER", "").partition(":")[2] or "sm90")


def batch(lengths: list[tuple[int, int]], window: int | None, device: torch.device, group: int = 4) -> PagedBatch:
    return paged_batch(
        lengths, heads=2 * group, kv_heads=2, head_dim=128, extent=50, window=window, dtype=torch.bfloat16,
        device=device, seed=len(lengths),
    )  # fmt: skip


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("group", [4, 8])
def test_core_prefill(kernel_device: torch.device, target: Target, window: int | None, group: int) -> None:
    given = batch([(70, 70), (12, 90), (1, 33)], window, kernel_device, group)
    assert signal(rel_attention(*given.args, **given.options, target=target), exact_attention(given)) <= 1


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("rows", [1, 9])
def test_core_few_rows(kernel_device: torch.device, target: Target, window: int | None, rows: int) -> None:
    given = batch([(rows, 300), (rows, 21)], window, kernel_device)
    out = rel_attention_decode(*given.args, **given.options, max_query_len=rows, target=target)
    assert signal(out, exact_attention(given)) <= 1
