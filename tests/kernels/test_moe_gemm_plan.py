"""Plans of the grouped products: limits hold on every chip, tiles are enough for any routing and not many more."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from inkling_kernels.moe_gemm_plan import (
    FULL_BATCH,
    LARGE_BATCH,
    NARROW_BATCH,
    SMALL_BATCH,
    SMALL_BATCH_WMMA,
    MoeConfig,
    moe_config,
    moe_experts_plan,
)
from inkling_kernels.target import TARGETS, Target

GPUS = [target for target in TARGETS if "gpu" in target.families]


def test_the_default_tiles_fit_every_chip_in_every_type() -> None:
    for target, format, itemsize in product(GPUS, ("bf16", "nvfp4", "mxfp4"), (2, 4)):
        for config in (SMALL_BATCH, LARGE_BATCH):
            assert config.problems(target, format=format, itemsize=itemsize) == ()
        for pairs in (6, 256 * 32, 256 * 96):
            chosen = moe_config(pairs, 256, target, format=format, itemsize=itemsize)
            assert chosen.problems(target, format=format, itemsize=itemsize) == ()


def test_chips_take_full_tiles_long_rows_and_narrow_tiles_where_they_can() -> None:
    for format in ("bf16", "nvfp4", "mxfp4"):
        large = {t.arch for t in GPUS if moe_config(256 * 96, 256, t, format=format) is not FULL_BATCH}
        assert large == {t.arch for t in GPUS if t.shared_memory_bytes <= 64 * 1024}
    long = {t.arch for t in GPUS if moe_config(6, 256, t, format="mxfp4") is SMALL_BATCH_WMMA}
    assert long == {"gfx1100", "gfx1151", "gfx1201"}
    narrow = {t.arch for t in GPUS if moe_config(6, 256, t) is NARROW_BATCH}
    assert narrow == {"sm80", "sm86", "sm89", "sm120", "sm121"}
    assert narrow == {t.arch for t in GPUS if not NARROW_BATCH.problems(t)}
    assert all(moe_config(6, 256, t) is SMALL_BATCH for t in GPUS if t.arch not in narrow)
    assert all(moe_config(2 * 256, 256, t) is SMALL_BATCH for t in GPUS)


def test_what_does_not_fit_is_said_before_a_launch() -> None:
    wide = MoeConfig(block_m=128, block_n=256, num_stages=3)
    gfx942, sm90 = Target.parse("gfx942"), Target.parse("sm90")
    assert "bytes of shared memory; hip:gfx942 has 65536" in wide.problems(gfx942)[0]
    assert wide.problems(sm90) == ()
    with pytest.raises(ValueError, match=r"moe_experts: config cannot be used: needs .* hip:gfx942"):
        moe_experts_plan(8, 6, 256, 6144, 768, target=gfx942, config=wide)
    found = MoeConfig(block_m=24, block_k=16, num_warps=16, num_stages=9).problems(sm90)
    assert len(found) == 4


def test_few_and_many_pairs_are_planned_apart() -> None:
    """Inkling's 256 experts and 6 choices."""
    chosen = {tokens: moe_config(6 * tokens, 256) for tokens in (1, 8, 64, 512, 2048, 8192)}
    assert [chosen[n] is SMALL_BATCH for n in chosen] == [True, True, True, True, False, False]
    for tokens in (1, 8, 64):
        plan = moe_experts_plan(tokens, 6, 256, 6144, 768)
        assert plan.tiles <= 6 * tokens
        assert plan.up_grid == (plan.tiles * 12,)
        assert plan.down_grid == (plan.tiles * 48,)
    assert moe_experts_plan(0, 6, 256, 6144, 768).tiles == 0
    assert moe_experts_plan(8192, 6, 256, 6144, 768, dtype=torch.float32).block_k == 32


@pytest.mark.parametrize("experts", [1, 3, 256])
def test_tiles_are_enough(experts: int) -> None:
    rng = np.random.default_rng(experts)
    for tokens, config in product((1, 2, 17, 300), (SMALL_BATCH, LARGE_BATCH)):
        plan = moe_experts_plan(tokens, 6, experts, 64, 64, config=config)
        for share in (rng.dirichlet(np.full(experts, 0.1)), np.eye(experts)[0], np.full(experts, 1 / experts)):
            counts = rng.multinomial(6 * tokens, share)
            assert np.ceil(counts / config.block_m).sum() <= plan.tiles
