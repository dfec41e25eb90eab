"""RMS normalisation.

    rms_norm(x; w, eps) = cast(x / sqrt(mean(x^2, last) + eps)) * w

`x` is `[..., C]` of any float dtype, `w` is `[C]` of the same dtype. The mean and the quotient are float32; the
quotient is rounded to `x.dtype` once, then multiplied by `w` in `x.dtype`. This is the rounding order of the published
checkpoints (the weight multiplies a rounded value), so a bf16 model agrees with other implementations to the last bit
but one.

The kernel keeps a row in registers, so it is read once. How rows are cut into programs follows from `C` alone: a row's
bits do not depend on how many rows there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from inkling_kernels.compile_case import NO_MATRIX, CompileCase
from inkling_kernels.ragged import FLOATS, check_config, check_tensor, not_powers_of_two
from inkling_kernels.target import Target


@dataclass(frozen=True, slots=True)
class RmsNormConfig:
    """How much a program takes: `elements` of whole rows, or one longer row; `per_warp` elements a warp, up to 8
    warps."""

    elements: int = 1024
    per_warp: int = 512

    def problems(self, target: Target, *, channels: int) -> tuple[str, ...]:
        """Why this configuration cannot run there; empty where it can."""
        found = not_powers_of_two(self, elements=(64, 8192), per_warp=(64, 8192))
        if channels > 32768:
            found.append(f"a row of {channels} channels does not fit the registers of 8 warps; expected at most 32768")
        return tuple(found)


DEFAULT = RmsNormConfig()


@triton.jit
def normed_fn(x, weight, channels, eps, dtype: tl.constexpr):
    """RMS norm of float32 rows `x` `[rows, C]`, 0 past `channels`, by a float32 `weight` `[C]`; returns `dtype`."""
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / channels + eps)
    return ((x * scale[:, None]).to(dtype).to(tl.float32) * weight[None, :]).to(dtype)


@triton.jit(do_not_specialize=["rows", "eps"])
def _rms_norm_kernel(
    out_ptr, x_ptr, weight_ptr, rows, channels, eps, x_row, x_col, weight_col,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.arange(0, BLOCK_C).to(tl.int64)
    live = (row < rows)[:, None] & (col < channels)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_row + col[None, :] * x_col, mask=live, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + col * weight_col, mask=col < channels, other=0.0).to(tl.float32)
    y = normed_fn(x, weight, channels, eps, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * channels + col[None, :], y, mask=live)


@dataclass(frozen=True, slots=True)
class RmsNormPlan:
    """A launch: programs, rows and channels of a program's tile, warps."""

    grid: tuple[int]
    block_r: int
    block_c: int
    num_warps: int


def rms_norm_plan(
    rows: int, channels: int, target: Target | None = None, config: RmsNormConfig | None = None
) -> RmsNormPlan:
    """Plan `rows` rows of `channels`; pure. Every target takes the same plan so far."""
    config = config or DEFAULT
    block_c = triton.next_power_of_2(channels)
    block_r = max(1, config.elements // block_c)
    warps = min(8, max(1, block_r * block_c // config.per_warp))
    return RmsNormPlan((triton.cdiv(rows, block_r),), block_r, block_c, warps)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    target: Target | None = None,
    config: RmsNormConfig | None = None,
) -> torch.Tensor:
    """Normalise the last axis of `x` `[..., C]` and scale it by `weight` `[C]`, with the Triton kernel; forward only.

    bfloat16, float32 or (in tests) float16, `weight` of the same type; any strides. Returns a contiguous tensor like
    `x`. Raises TypeError or ValueError naming the argument, before anything is allocated or launched.
    """
    shape = tuple(x.shape) if isinstance(x, torch.Tensor) and x.dim() else (None,)
    check_tensor("rms_norm", "x", x, shape, FLOATS)
    check_tensor("rms_norm", "weight", weight, (None,), (x.dtype,), x.device)
    if len(weight) != shape[-1]:
        raise ValueError(f"rms_norm: weight has {len(weight)} channels, x has {shape[-1]}; they must be equal")
    if not eps >= 0:
        raise ValueError(f"rms_norm: eps is {eps!r}; expected 0 or more")
    config = config or DEFAULT
    if target is not None:
        check_config("rms_norm", config.problems(target, channels=x.shape[-1]))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    flat = x.reshape(-1, x.shape[-1])
    plan = rms_norm_plan(len(flat), flat.shape[1], target, config)
    _rms_norm_kernel[plan.grid](
        out, flat, weight, *flat.shape, float(eps), *flat.stride(), weight.stride(0),
        BLOCK_R=plan.block_r, BLOCK_C=plan.block_c, num_warps=plan.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def _case(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> CompileCase:
    def launch(target: Target) -> torch.Tensor:
        x = torch.empty(shape, dtype=dtype, device="meta")
        return rms_norm(x, x.new_empty(shape[-1]), 1e-6, target=target)

    return CompileCase(name, "rms_norm=triton", launch, instruction=NO_MATRIX)


COMPILE_CASES = (
    _case("Inkling's rows", 8192, 6144),
    _case("Inkling's rows, float32", 8192, 6144, dtype=torch.float32),
    _case("Small's rows", 8192, 4096),
    _case("short rows", 512, 192),
)


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last axis of `x` `[..., C]` and scale it by `weight` `[C]`; differentiable. Returns a tensor like
    `x`."""
    if x.shape[-1] != weight.shape[0]:
        raise ValueError(f"rms_norm: weight has {weight.shape[0]} channels, x has {x.shape[-1]}; they must be equal")
    return F.rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype) * weight
