"""What the launchers of the kernels around attention and experts refuse, before anything is allocated or launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from inkling_kernels.activation import SiluMulConfig, silu_mul, silu_mul_plan
from inkling_kernels.embedding import EmbeddingConfig, embedding
from inkling_kernels.kv_cache import QkvrPrepConfig, qkvr_prep, qkvr_prep_plan
from inkling_kernels.norm import RmsNormConfig, rms_norm, rms_norm_plan
from inkling_kernels.routing import RoutingConfig, routing, routing_plan
from inkling_kernels.short_conv import ShortConvConfig, short_conv, short_conv_plan
from inkling_kernels.target import TARGETS, Target

H200 = Target.parse("sm90")
META = "meta"


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def int32(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int32)


FP8 = meta(2, 16, 2, 16, dtype=torch.float8_e4m3fn)
E5M2 = meta(2, 16, 2, 16, dtype=torch.float8_e5m2)


def arguments(op: Callable[..., Any]) -> dict[str, Any]:
    """What the launcher takes, on the meta device, where reading a value or launching would be an error of its own."""
    where = {"slots": int32(2), "cu_seqlens": int32(3), "kv_lens": int32(2)}
    return {
        rms_norm: {"x": meta(4, 32), "weight": meta(32), "eps": 1e-6},
        embedding: {
            "ids": meta(4, dtype=torch.int64), "weight": meta(9, 32), "norm_weight": meta(32), "eps": 1e-6,
        },
        silu_mul: {"x": meta(4, 32), "scale": meta(4, 16)},
        short_conv: {
            "x": meta(4, 32), "weight": meta(32, 4), "state": meta(3, 11, 32), **where, "residual": meta(4, 32),
        },
        qkvr_prep: {
            "qkvr": meta(4, 160), "conv_weight": meta(64, 4), "q_norm": meta(16), "k_norm": meta(16), "eps": 1e-6,
            "state": meta(3, 11, 64), **where, "kv_cache": (meta(2, 16, 2, 16), meta(2, 16, 2, 16)),
            "slot_mapping": meta(4, dtype=torch.int64), "num_heads": 3, "num_kv_heads": 2, "head_dim": 16, "d_rel": 16,
            "log_scaling_n_floor": None, "log_scaling_alpha": 0.1,
        },
        routing: {"logits": meta(4, 18), "bias": meta(16), "global_scale": meta(1), "top_k": 6, "route_scale": 8.0},
    }[op]  # fmt: skip


BAD = [
    (rms_norm, {"x": [1.0]}, TypeError, "x is list; expected a torch.Tensor"),
    (rms_norm, {"x": meta(4, 32, dtype=torch.float64)}, TypeError, "x is torch.float64; expected torch.bfloat16 or"),
    (rms_norm, {"weight": meta(31)}, ValueError, "weight has 31 channels, x has 32"),
    (rms_norm, {"weight": meta(32, dtype=torch.bfloat16)}, TypeError,
     "weight is torch.bfloat16; expected torch.float32"),
    (rms_norm, {"weight": torch.ones(32)}, ValueError, "weight is on cpu; expected meta"),
    (rms_norm, {"eps": -1.0}, ValueError, "eps is -1.0; expected 0 or more"),
    (rms_norm, {"eps": float("nan")}, ValueError, "eps is nan"),
    (embedding, {"ids": meta(4)}, TypeError, "ids is torch.float32; expected torch.int64"),
    (embedding, {"norm_weight": meta(33)}, ValueError, r"norm_weight has shape \[33\]; expected \[32\]"),
    (embedding, {"weight": meta(9)}, ValueError, r"weight has shape \[9\]; expected \[any, any\]"),
    (silu_mul, {"x": meta(4, 31)}, ValueError, "x has 31 columns; gate and up columns alternate"),
    (silu_mul, {"x": meta(32)}, ValueError, r"x has shape \[32\]"),
    (silu_mul, {"scale": meta(4, 15)}, ValueError,
     r"scale has shape \[4, 15\]; expected one that spreads to \[4, 16\]"),
    (silu_mul, {"scale": meta(2, 4, 16)}, ValueError, r"scale has shape \[2, 4, 16\]"),
    (short_conv, {"x": meta(4, 32, dtype=torch.int8)}, TypeError, "x is torch.int8"),
    (short_conv, {"weight": meta(32, 4, dtype=torch.bfloat16)}, TypeError,
     "weight is torch.bfloat16; expected torch.float32"),
    (short_conv, {"weight": meta(32, 9)}, ValueError, "weight has a width of 9; expected 1 to 8"),
    (short_conv, {"state": meta(3, 2, 32)}, ValueError, "state keeps 2 rows a sequence; a width of 4 needs 3"),
    (short_conv, {"state": meta(3, 3, 31)}, ValueError, r"state has shape \[3, 3, 31\]; expected \[any, any, 32\]"),
    (short_conv, {"slots": int32(3)}, ValueError, r"slots has shape \[3\]; expected \[2\]"),
    (short_conv, {"slots": meta(2, dtype=torch.int64)}, TypeError, "slots is torch.int64; expected torch.int32"),
    (short_conv, {"cu_seqlens": int32(2)}, ValueError, r"cu_seqlens has shape \[2\]; expected \[3\]"),
    (short_conv, {"kv_lens": int32(4)[::2]}, ValueError, "kv_lens has stride 2; expected a contiguous tensor"),
    (short_conv, {"residual": meta(4, 31)}, ValueError, r"residual has shape \[4, 31\]; expected \[4, 32\]"),
    (short_conv, {"norm_weight": meta(31)}, ValueError, r"norm_weight has shape \[31\]; expected \[32\]"),
    (short_conv, {"norm_weight": meta(32, dtype=torch.bfloat16)}, TypeError, "norm_weight is torch.bfloat16"),
    (short_conv, {"norm_weight": meta(32), "eps": -1.0}, ValueError, "eps is -1.0; expected 0 or more"),
    (qkvr_prep, {"qkvr": meta(4, 161)}, ValueError,
     "qkvr has 161 columns; 3 query and 2 key heads of 16 with d_rel 16 need 160"),
    (qkvr_prep, {"head_dim": 24}, ValueError, "head_dim is 24; expected a power of two up to 256"),
    (qkvr_prep, {"num_heads": 0}, ValueError, "num_heads is 0; expected a positive int"),
    (qkvr_prep, {"q_norm": meta(32)[::2]}, ValueError, "q_norm has stride 2"),
    (qkvr_prep, {"slot_mapping": None}, ValueError, "kv_cache and slot_mapping are given together"),
    (qkvr_prep, {"slot_mapping": int32(4)}, TypeError, "slot_mapping is torch.int32; expected torch.int64"),
    (qkvr_prep, {"kv_cache": (meta(2, 16, 2, 16), meta(2, 16, 1, 16))}, ValueError, "v_pages has shape"),
    (qkvr_prep, {"kv_cache": (meta(2, 16, 2, 16, dtype=torch.float16),) * 2}, TypeError, "k_pages is torch.float16"),
    (qkvr_prep, {"log_scaling_n_floor": 0}, ValueError, "log_scaling_n_floor is 0"),
    (qkvr_prep, {"kv_cache": [meta(2, 16, 2, 16)] * 2}, TypeError, "kv_cache is list; expected a tuple"),
    (qkvr_prep, {"kv_cache": (FP8, FP8)}, TypeError, "k_pages is torch.float8_e4m3fn; expected torch.float32"),
    (qkvr_prep, {"kv_cache": (E5M2, E5M2), "kv_scales": (meta(2), meta(2))}, TypeError, "k_pages is torch.float8_e5m2"),
    (qkvr_prep, {"kv_cache": (FP8, FP8), "kv_scales": (1.0, 1.0)}, TypeError, "k_scale is float; expected a torch.T"),
    (qkvr_prep, {"kv_cache": (FP8, FP8), "kv_scales": (meta(3), meta(3))}, ValueError,
     r"k_scale is torch.float32 \(3,\); expected float32 \[1\] or \[2\]"),
    (qkvr_prep, {"kv_cache": (FP8, FP8), "kv_scales": (meta(2), meta(1))}, ValueError, "v_scale has 1 entries"),
    (qkvr_prep, {"kv_cache": (FP8, FP8), "kv_scales": (meta(4)[::2], meta(2))}, ValueError, "k_scale has stride 2"),
    (qkvr_prep, {"kv_scales": (meta(2), meta(2))}, TypeError, "k_pages is torch.float32; expected torch.float8_e4m3fn"),
    (routing, {"logits": meta(4, 18, dtype=torch.bfloat16)}, TypeError,
     "logits are torch.bfloat16; the router computes in float32"),
    (routing, {"bias": meta(19)}, ValueError, "bias is for 19 experts; expected at most 1024 and 18"),
    (routing, {"top_k": 17}, ValueError, "top_k is 17; it must lie between 1 and the 16 routed experts"),
    (routing, {"global_scale": meta(2)}, ValueError, r"global_scale has shape \[2\]; expected \[1\]"),
    (routing, {"route_scale": float("nan")}, ValueError, "route_scale is nan"),
    (rms_norm, {"config": RmsNormConfig(elements=100)}, ValueError,
     "config cannot be used: elements is 100; expected a power of two"),
    (embedding, {"config": EmbeddingConfig(per_warp=3)}, ValueError, "per_warp is 3"),
    (silu_mul, {"config": SiluMulConfig(block=8)}, ValueError, "block is 8"),
    (short_conv, {"config": ShortConvConfig(num_warps=3)}, ValueError, "num_warps is 3"),
    (qkvr_prep, {"config": QkvrPrepConfig(rows=2)}, ValueError,
     "rows is 2; the first tile of a sequence must hold the 3 that reach back"),
    (routing, {"config": RoutingConfig(tokens=5)}, ValueError, "tokens is 5"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "change", "error", "message"), BAD, ids=lambda x: getattr(x, "__name__", None) or "")
def test_a_bad_argument_is_named_with_its_value(
    op: Callable[..., Any], change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"{op.__name__}: .*{message}"):
        op(**{**arguments(op), **change}, target=H200)


def test_lengths_are_checked_where_they_lie_in_host_memory() -> None:
    def call(slots: list[int], starts: list[int], lens: list[int]) -> None:
        ints = (torch.tensor(values, dtype=torch.int32) for values in (slots, starts, lens))
        short_conv(torch.zeros(4, 16), torch.zeros(16, 4), torch.zeros(2, 3, 16), *ints)

    for slots, starts, lens, message in (
        ([0], [0, 5], [5], "cu_seqlens is [0, 5]; expected a rise from 0 to at most the 4 rows of x"),
        ([0, 1], [0, 3, 2], [3, 1], "cu_seqlens is [0, 3, 2]"),
        ([0], [1, 4], [4], "cu_seqlens is [1, 4]"),
        ([0], [0, 4], [-1], "kv_lens has -1; expected numbers of tokens"),
        ([2], [0, 4], [4], "slots has 2; expected rows of state below 2, or -1"),
        ([], [0], [], "kv_lens is empty and x has 4 rows"),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            call(slots, starts, lens)
        assert message in str(caught.value)


@pytest.mark.parametrize("target", [target for target in TARGETS if target.arch != "cpu"], ids=str)
def test_default_configurations_hold_on_every_target(target: Target) -> None:
    assert not RmsNormConfig().problems(target, channels=6144)
    assert not EmbeddingConfig().problems(target, channels=6144)
    assert not SiluMulConfig().problems(target)
    assert not ShortConvConfig().problems(target)
    assert not QkvrPrepConfig().problems(target, width=4)
    assert not RoutingConfig().problems(target)
    assert RmsNormConfig().problems(target, channels=40_000)


def test_plans_cover_their_rows_and_follow_from_shapes() -> None:
    for rows, channels in ((1, 6144), (8192, 6144), (7, 128), (0, 64), (5, 1)):
        plan = rms_norm_plan(rows, channels)
        assert plan.grid[0] * plan.block_r >= rows
        assert plan.block_c >= channels
        assert plan.num_warps <= 8
        # A row's bits must not depend on how many rows there are.
        assert (plan.block_r, plan.num_warps) == (
            rms_norm_plan(1, channels).block_r,
            rms_norm_plan(1, channels).num_warps,
        )
    for rows, width in ((1, 1), (9, 3072), (2, 24576)):
        plan = silu_mul_plan(rows, width)
        assert plan.grid[1] * plan.block >= width
    for rows, batch, width in ((8192, 4, 4), (64, 64, 4), (5, 9, 8), (1, 1, 1)):
        plan = short_conv_plan(rows, 6144, batch, width)
        assert plan.block_t >= width - 1
        assert plan.grid[0] * plan.block_t >= rows
        assert plan.grid[0] >= batch
        assert plan.grid[1] * plan.block_c >= 6144
        norm = short_conv_plan(rows, 6144, batch, width, norm=True)
        assert norm.grid[0] * norm.block_t >= rows
        # The order of a row's sum of squares must not depend on how many rows there are.
        assert (norm.block_t, norm.block_c) == (max(4, plan.block_t if width == 8 else 4), 1024)
    sizes = {"num_heads": 64, "num_kv_heads": 8, "head_dim": 128, "d_rel": 16}
    assert qkvr_prep_plan(8192, 4, **sizes, tau=True).grid == (1028, 64 + 16 + 8)
    assert qkvr_prep_plan(8192, 4, **sizes, tau=False).grid == (1028, 64 + 16)
    plan = routing_plan(9, 256, 8)
    assert (plan.block_e, plan.block_k, plan.grid[0] * plan.block_t >= 9) == (256, 8, True)
