"""The routed experts by AMD's AITER on an MI355X: MXFP4 weights, and activations that AITER rounds to MXFP4 as well.

    out[t] = sum_k weights[t, k] * W2[e] silu_mul(W13[e] x[t]),   e = ids[t, k]

The operation and its arguments are those of `inkling_kernels.moe_gemm`; the sinks are not part of it. AITER's
`fused_moe` with `QuantType.per_1x32` rounds `x` and the gated values to MXFP4 too, multiplies codes in hardware and
adds a token's experts with atomics in bfloat16, so bits may differ between runs.

What AITER wants of the weights (`prepare`, once, at load):

* w13: all gate rows, then all up rows (`torch_moe_stage1` in its fused_moe.py splits the product in the middle), where
  the checkpoint has them in turn;
* codes: uint8 seen as `float4_e2m1fn_x2` `[E, N, K/2]`, low nibble first, each 16 rows by 32 bytes stored as two runs
  of 16 bytes of the 16 rows (`shuffle_weight`, layout (16, 16)), the tensor marked `is_shuffled`;
* scales: `[E * N, K/32]` E8M0, each 32 rows by 8 blocks stored so that a lane finds its four together
  (`e8m0_shuffle`).

AITER's own functions do the shuffling, so that it suits the version installed. Its masks for experts of other ranks
mean different things in different versions, so there are none here: an id that names no expert held is computed as
expert 0 with weight 0, which is right and wasteful; the table has other rows for expert parallelism.

Sources: amd-aiter 0.1.7.post2.dev18, aiter/fused_moe.py, aiter/ops/shuffle.py, aiter/utility/fp4_utils.py; ROCm/aiter
issues 5233 and 4176 for the widths that are silently wrong.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from aiter import ActivationType, QuantType, dtypes
from aiter.fused_moe import fused_moe
from aiter.ops.shuffle import shuffle_weight
from aiter.utility.fp4_utils import e8m0_shuffle

from inkling_kernels.moe_check import QUANTISED_TOLERANCE
from inkling_kernels.numerics import ExpertWeight, Layout
from inkling_rocm.aiter_support import version

#: What is passed by name; its first five parameters are passed by position.
KEYWORDS = ("activation", "quant_type", "w1_scale", "w2_scale")

if _absent := [name for name in KEYWORDS if name not in inspect.signature(fused_moe).parameters]:
    raise ImportError(f"aiter.fused_moe.fused_moe of AITER {version()} has no parameter {', '.join(_absent)}")


@dataclass(frozen=True, eq=False)
class AiterWeight(ExpertWeight):
    """An MXFP4 weight as AITER reads it, its `layout` being that of the weight it was made of.

    Every other implementation, and `dequant`, refuses it.
    """

    def require_layout(self, layout: Layout, argument: str = "weight") -> None:
        raise ValueError(f"{argument}: is in AITER's layout, which AITER alone reads; this operation needs {layout!r}")

    def dequant(self, expert: int, dtype: torch.dtype = torch.float32, rows: slice | None = None) -> torch.Tensor:
        raise ValueError("weight: is in AITER's layout; dequantise it before `prepare`")


def prepare(weight: ExpertWeight) -> AiterWeight:
    """`weight` (MXFP4, w13 or w2 by its layout) rearranged for AITER. Needs its size once more while it works.

    Raises ValueError for another format, or a width or number of rows that is no multiple of 256.
    """
    if weight.format != "mxfp4" or weight.scale is None:
        raise ValueError(f"weight: format is {weight.format!r}, AITER's experts need 'mxfp4'")
    if weight.cols % 256 or weight.rows % 256:
        raise ValueError(f"weight: {weight.rows} rows of {weight.cols}, AITER's experts need multiples of 256")
    weight.require_order("pairs")
    data, scale = weight.data, weight.scale
    if weight.layout == "interleaved":
        data, scale = _halves(data), _halves(scale)
    shuffled = shuffle_weight(data.contiguous(), layout=(16, 16))
    scales = e8m0_shuffle(scale.reshape(-1, scale.shape[-1]))
    return AiterWeight("mxfp4", shuffled, scales.view(scale.shape), layout=weight.layout)


def _halves(rows: torch.Tensor) -> torch.Tensor:
    """`[E, N, C]` with rows gate0, up0, gate1, ... -> all gate rows and then all up rows of each expert."""
    return torch.cat([rows[:, 0::2], rows[:, 1::2]], dim=1)


def moe_experts(
    x: torch.Tensor, w13: ExpertWeight, w2: ExpertWeight, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Apply each token's experts; see the module. `x` bfloat16 `[T, H]`, weights from `prepare`, `ids` int32 and
    `weights` float32 `[T, k]`. Returns `[T, H]` in bfloat16.

    Raises TypeError or ValueError, naming the argument, for a weight that `prepare` did not make, or another dtype or
    shape.
    """
    for name, weight, layout in (("w13", w13, "interleaved"), ("w2", w2, "plain")):
        if not isinstance(weight, AiterWeight):
            raise TypeError(f"moe_experts: {name} is in layout {weight.layout!r}; pass what `prepare` makes of it")
        if weight.layout != layout:
            raise ValueError(f"moe_experts: {name} was made of a weight in layout {weight.layout!r}, not {layout!r}")
    if x.dtype != torch.bfloat16:
        raise TypeError(f"moe_experts: x is {x.dtype}; AITER's experts take torch.bfloat16")
    hidden, width, experts = w13.cols, w13.rows // 2, w13.num_experts
    if (w2.num_experts, w2.rows, w2.cols) != (experts, hidden, width):
        raise ValueError(
            f"moe_experts: w2 is {[w2.num_experts, w2.rows, w2.cols]}; expected {[experts, hidden, width]}, as w13 is "
            f"{[experts, w13.rows, hidden]}"
        )
    if x.dim() != 2 or x.shape[1] != hidden:
        raise ValueError(f"moe_experts: x has shape {list(x.shape)}; expected [tokens, {hidden}]")
    if ids.dtype != torch.int32 or weights.dtype != torch.float32:
        raise TypeError(f"moe_experts: ids are {ids.dtype} and weights {weights.dtype}; expected int32 and float32")
    if ids.dim() != 2 or len(ids) != len(x) or weights.shape != ids.shape:
        raise ValueError(
            f"moe_experts: ids {list(ids.shape)} and weights {list(weights.shape)}; expected [{len(x)}, k] both"
        )
    if x.numel() == 0 or ids.numel() == 0:
        return torch.zeros_like(x)
    held = (ids >= 0) & (ids < experts)
    found: torch.Tensor = fused_moe(
        x.contiguous(),
        _codes(w13),
        _codes(w2),
        torch.where(held, weights, 0.0),
        torch.where(held, ids, 0),
        activation=ActivationType.Silu,
        quant_type=QuantType.per_1x32,
        w1_scale=_scales(w13),
        w2_scale=_scales(w2),
    )
    return found


moe_experts.check_tolerance = QUANTISED_TOLERANCE  # type: ignore[attr-defined]


def _codes(weight: ExpertWeight) -> torch.Tensor:
    # A view is a new object, so the mark that AITER looks for is set on each.
    codes = weight.data.view(dtypes.fp4x2)
    codes.is_shuffled = True  # type: ignore[attr-defined]
    return codes


def _scales(weight: ExpertWeight) -> torch.Tensor | None:
    return None if weight.scale is None else weight.scale.view(-1, weight.scale.shape[-1]).view(dtypes.fp8_e8m0)
