"""The self-check passes what is right and refuses what is wrong, by name and by how much."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from moe_oracle import random_packed

from inkling_kernels.moe_check import SelfCheckFailed, self_check
from inkling_kernels.moe_gemm import moe_experts, moe_experts_ref
from inkling_kernels.numerics import ExpertWeight


def weights(format: str) -> tuple[ExpertWeight, ExpertWeight]:
    rng = np.random.default_rng(3)
    if format == "bf16":
        w13, w2 = (torch.from_numpy(rng.standard_normal(n)).bfloat16() / 8 for n in ((2, 128, 64), (2, 64, 64)))
        return ExpertWeight("bf16", w13, layout="interleaved"), ExpertWeight("bf16", w2)
    w13 = random_packed(rng, format, 2, 128, 64, "interleaved")[0]
    return w13, random_packed(rng, format, 2, 64, 64, "plain")[0]


@pytest.mark.parametrize("format", ["bf16", "nvfp4", "mxfp4"])
def test_what_is_right_passes(format: str, kernel_device: torch.device) -> None:
    w13, w2 = (each.to(kernel_device) for each in weights(format))
    for implementation in (moe_experts_ref, moe_experts):
        assert 0 <= self_check(implementation, w13, w2) < 2**-6


def broken_nibbles(x, w13, w2, ids, gammas):
    swapped = ((w13.data & 0xF) << 4) | (w13.data >> 4)
    return moe_experts_ref(x, replace(w13, data=swapped), w2, ids, gammas)


def broken_scale(x, w13, w2, ids, gammas):
    return moe_experts_ref(x, w13, w2, ids, gammas) * 1.05


def broken_nan(x, w13, w2, ids, gammas):
    return moe_experts_ref(x, w13, w2, ids, gammas) * float("nan")


@pytest.mark.parametrize("wrong", [broken_nibbles, broken_scale, broken_nan])
def test_what_is_wrong_is_named(wrong) -> None:
    with pytest.raises(SelfCheckFailed, match=rf"{wrong.__name__} on cpu in nvfp4 .* relative error of .* above"):
        self_check(wrong, *weights("nvfp4"))


def test_a_tolerance_of_ones_own() -> None:
    assert self_check(broken_scale, *weights("mxfp4"), tolerance=0.1) == pytest.approx(0.05, abs=0.01)
    empty = ExpertWeight("bf16", torch.zeros(0, 4, 4), layout="interleaved")
    with pytest.raises(ValueError, match="no expert"):
        self_check(moe_experts_ref, empty, ExpertWeight("bf16", torch.zeros(0, 4, 2)))
