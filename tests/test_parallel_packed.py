"""Packed experts over ranks: codes and scales bit by bit, sums of ranks in float64, and that nothing else is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_oracle import BLOCK, NAN_SCALE, experts_on_device, oracle, random_packed

from inkling_kernels.moe_gemm import moe_experts, moe_experts_ref
from inkling_kernels.numerics import ExpertWeight
from inkling_kernels.target import Target
from inkling_portable.config import QuantizationConfig, preset
from inkling_portable.dispatch import UnsupportedOnTarget, resolve
from inkling_portable.facts import Facts
from inkling_portable.parallel import ExpertRank, Rank

PACKED = ("nvfp4", "mxfp4")
# Local widths of the released models and others that no tile divides.
WIDTHS = (96, 128, 192, 224, 256, 320, 384, 640, 768)
W13, W2 = "llm.layers.2.mlp.experts.w13", "llm.layers.2.mlp.experts.w2"


def codes_of(weight: ExpertWeight) -> np.ndarray:
    raw = weight.data.numpy()
    return np.stack([raw & 15, raw >> 4], -1).reshape(*raw.shape[:2], -1)


def scales_of(weight: ExpertWeight) -> np.ndarray:
    assert weight.scale is not None
    return weight.scale.view(torch.uint8).numpy()


def cut(rank: Rank, width: int, name: str, weight: ExpertWeight) -> ExpertWeight:
    found = rank.tensor(preset("inkling").replace(moe_intermediate_size=width), name, weight)
    assert isinstance(found, ExpertWeight)
    return found


def layer(rng: np.random.Generator, format: str, experts: int, hidden: int, width: int) -> Any:
    w13, exact13 = random_packed(rng, format, experts, 2 * width, hidden, "interleaved")
    w2, exact2 = random_packed(rng, format, experts, hidden, width, "plain")
    return w13, w2, exact13, exact2


def tokens(rng: np.random.Generator, count: int, hidden: int, experts: int, top_k: int = 2) -> Any:
    x, gammas = rng.standard_normal((count, hidden)), rng.uniform(0.1, 2, (count, top_k)).astype(np.float32)
    return x, rng.integers(0, experts, (count, top_k)).astype(np.int32), gammas


@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("local", WIDTHS)
def test_a_ranks_codes_and_scales_bit_by_bit(format: str, size: int, local: int) -> None:
    rng = np.random.default_rng(local)
    w13, w2, _, _ = layer(rng, format, 2, 64, local * size)
    block = BLOCK[format]
    for index in range(size):
        rank, first, last = Rank(size, index), index * local, (index + 1) * local
        part = cut(rank, local * size, W13, w13)
        assert np.array_equal(codes_of(part), codes_of(w13)[:, 2 * first : 2 * last])
        assert np.array_equal(scales_of(part), scales_of(w13)[:, 2 * first : 2 * last])
        part = cut(rank, local * size, W2, w2)
        assert np.array_equal(codes_of(part), codes_of(w2)[:, :, first:last])
        assert np.array_equal(scales_of(part), scales_of(w2)[:, :, first // block : last // block])
        for whole, name in ((w13, W13), (w2, W2)):
            # Second scales belong to experts and to gate or up, of which every rank has its share.
            assert cut(rank, local * size, name, whole).scale2 is whole.scale2


@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("local", WIDTHS)
def test_the_ranks_add_up_to_the_whole(format: str, local: int) -> None:
    size, rng = 4, np.random.default_rng(local + 1)
    w13, w2, exact13, exact2 = layer(rng, format, 3, 64, local * size)
    x, ids, gammas = tokens(rng, 4, 64, 3)
    args = torch.from_numpy(x).float(), torch.from_numpy(ids), torch.from_numpy(gammas)
    found = torch.zeros(4, 64, dtype=torch.float64)
    for index in range(size):
        parts = (cut(Rank(size, index), local * size, name, w) for name, w in ((W13, w13), (W2, w2)))
        found += moe_experts_ref(args[0], *parts, *args[1:])
    exact = oracle(x, exact13, exact2, ids, gammas)
    np.testing.assert_allclose(found.numpy(), exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


@pytest.fixture(scope="module")
def kernel(kernel_device: torch.device) -> Callable[..., torch.Tensor]:
    return experts_on_device(moe_experts, kernel_device)


def poisoned(weight: ExpertWeight, rank: Rank, width: int, name: str) -> ExpertWeight:
    """The rank's part of a copy in which the other ranks' scales are NaN."""
    copy = weight.clone()
    assert copy.scale is not None
    scale = copy.scale.view(torch.uint8)
    mine = cut(rank, width, name, ExpertWeight(weight.format, copy.data, scale, copy.scale2, weight.layout))
    assert mine.scale is not None
    kept = mine.scale.clone()
    scale.fill_(NAN_SCALE[weight.format])
    mine.scale.copy_(kept)
    return mine


@pytest.mark.parametrize(("format", "local"), list(zip(PACKED * 5, (*WIDTHS[:8], 96, 640), strict=True)))
def test_the_kernel_reads_nothing_of_other_ranks(kernel: Any, format: str, local: int) -> None:
    rng = np.random.default_rng(local + 2)
    rank = Rank(3, 1)
    w13, w2, exact13, exact2 = layer(rng, format, 2, 32, 3 * local)
    x, ids, gammas = tokens(rng, 3, 32, 2)
    parts = [poisoned(w, rank, 3 * local, name) for name, w in ((W13, w13), (W2, w2))]
    found = kernel(torch.from_numpy(x).float(), *parts, torch.from_numpy(ids), torch.from_numpy(gammas))
    mine = slice(local, 2 * local)
    exact = oracle(x, exact13[:, 2 * local : 4 * local], exact2[:, :, mine], ids, gammas)
    np.testing.assert_allclose(found.numpy(), exact, rtol=1e-4, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize(("format", "size", "left"), [("nvfp4", 384, 8), ("mxfp4", 64, 48), ("mxfp4", 192, 16)])
def test_ranks_that_would_cut_a_block(format: str, size: int, left: int) -> None:
    config = preset("inkling").replace(quantization=QuantizationConfig(format=format))
    wide = config.replace(num_attention_heads=size, swa_num_attention_heads=size, intermediate_size=size)
    wide = wide.replace(num_key_value_heads=1, swa_num_key_value_heads=1, moe_intermediate_size=size * left)
    with pytest.raises(ValueError, match=f"leave {left} of the experts' width .* multiple of the format's block"):
        Rank(size, 0).config(wide)


def test_a_width_of_half_a_word_block_is_refused_before_loading() -> None:
    """48 is three NVFP4 blocks; the kernels unpack 32 columns at a time."""
    with pytest.raises(UnsupportedOnTarget, match="multiples of 32, not 6144 by 48"):
        resolve("moe_experts", Target.parse("sm90"), Facts(format="nvfp4", expert_width=48))


# Expert parallelism.


@given(total=st.integers(1, 9), size=st.integers(1, 12), seed=st.integers(0, 99), kind=st.sampled_from(["any", "one"]))
@settings(max_examples=25, deadline=None)
def test_every_expert_is_on_one_rank(total: int, size: int, seed: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    format = PACKED[seed % 2]
    w13, w2, exact13, exact2 = layer(rng, format, total, 32, 32)
    x, ids, gammas = tokens(rng, 5, 32, total)
    if kind == "one":
        ids[:] = total - 1
    held, found = [], torch.zeros(5, 32, dtype=torch.float64)
    for index in range(size):
        rank = ExpertRank(size, index)
        own = rank.held(total)
        assert abs(len(own) - total / size) < 1
        held += own
        local = rank.ids(torch.from_numpy(ids), total)
        expected = [[own.index(e) if e in own else -1 for e in row] for row in ids.tolist()]
        assert local.tolist() == expected
        assert local.dtype == torch.int32
        args = rank.weight(w13), rank.weight(w2), local, torch.from_numpy(gammas)
        assert args[0].num_experts == len(own)
        part = moe_experts_ref(torch.from_numpy(x).float(), *args)
        assert len(own) or not part.any()
        found += part
    assert held == list(range(total))
    exact = oracle(x, exact13, exact2, ids, gammas)
    np.testing.assert_allclose(found.numpy(), exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max() + 1e-12)


@pytest.mark.parametrize("format", PACKED)
def test_the_kernel_on_every_rank_of_more_than_there_are_experts(kernel: Any, format: str) -> None:
    """Rank 2 holds an expert that no token has chosen, ranks 3 and 4 none at all."""
    rng = np.random.default_rng(3)
    w13, w2, exact13, exact2 = layer(rng, format, 3, 32, 32)
    x, ids, gammas = tokens(rng, 6, 32, 2)
    found = torch.zeros(6, 32)
    for index in range(5):
        rank = ExpertRank(5, index)
        local = rank.ids(torch.from_numpy(ids), 3)
        part = kernel(torch.from_numpy(x).float(), rank.weight(w13), rank.weight(w2), local, torch.from_numpy(gammas))
        assert part.any() == (index < 2)
        found += part
    exact = oracle(x, exact13, exact2, ids, gammas)
    np.testing.assert_allclose(found.numpy(), exact, rtol=1e-4, atol=1e-5 * np.abs(exact).max())


def test_no_rank() -> None:
    with pytest.raises(ValueError, match="rank is 2 of 2"):
        ExpertRank(2, 2)
