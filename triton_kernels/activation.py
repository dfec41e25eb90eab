"""Gated activation of a fused gate/up product whose columns are interleaved.

    silu_mul(x)[t, i] = silu(x[t, 2i]) * x[t, 2i + 1] * scale[t, i]

Every w13 of an Inkling checkpoint stores its rows as gate0, up0, gate1, up1, ...; the product therefore arrives as `[T,
2I]` with gates in the even columns. Splitting it in halves gives fluent, wrong text. Computed in float32, rounded once.
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
class SiluMulConfig:
    """`block` columns of the result a program."""

    block: int = 1024
    num_warps: int = 4

    def problems(self, target: Target) -> tuple[str, ...]:
        """Why this configuration cannot run there; empty where it can."""
        return tuple(not_powers_of_two(self, block=(16, 8192), num_warps=(1, 8)))


DEFAULT = SiluMulConfig()


@triton.jit
def silu_mul_fn(gate, up):
    """`silu(gate) * up` of float32 values."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _silu_mul_kernel(
    out_ptr, x_ptr, scale_ptr, width, x_row, x_col, scale_row, scale_col, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    pair = first * 2 + tl.arange(0, 2 * BLOCK).to(tl.int64)
    x = tl.load(x_ptr + row * x_row + pair * x_col, mask=pair < 2 * width, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(x, [BLOCK, 2]))
    y = silu_mul_fn(gate, up)
    col = first + tl.arange(0, BLOCK).to(tl.int64)
    if scale_ptr is not None:
        y *= tl.load(scale_ptr + row * scale_row + col * scale_col, mask=col < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + col, y.to(out_ptr.dtype.element_ty), mask=col < width)


@dataclass(frozen=True, slots=True)
class SiluMulPlan:
    """A launch: (rows, blocks of columns) and columns a block."""

    grid: tuple[int, int]
    block: int
    num_warps: int


def silu_mul_plan(
    rows: int, width: int, target: Target | None = None, config: SiluMulConfig | None = None
) -> SiluMulPlan:
    """Plan `rows` results of `width` columns; pure. Every target takes the same plan so far."""
    config = config or DEFAULT
    block = min(config.block, max(16, triton.next_power_of_2(width)))
    return SiluMulPlan((rows, triton.cdiv(width, block)), block, config.num_warps)


def silu_mul(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    target: Target | None = None,
    config: SiluMulConfig | None = None,
) -> torch.Tensor:
    """Apply the interleaved SiLU gate with the Triton kernel: `x` `[T, 2I]` -> `[T, I]` in `x.dtype`; forward only.

    bfloat16, float32 or (in tests) float16, any strides. `scale`, broadcastable to `[T, I]` and of any of these types,
    multiplies the float32 value before rounding. Raises TypeError or ValueError naming the argument, before anything is
    allocated or launched.
    """
    check_tensor("silu_mul", "x", x, (None, None), FLOATS)
    rows, columns = x.shape
    if columns % 2:
        raise ValueError(f"silu_mul: x has {columns} columns; gate and up columns alternate, so their number is even")
    width = columns // 2
    config = config or DEFAULT
    if target is not None:
        check_config("silu_mul", config.problems(target))
    if scale is not None:
        check_tensor("silu_mul", "scale", scale, tuple(scale.shape), FLOATS, x.device)
        sizes = (1, 1, *scale.shape)[-max(2, scale.dim()) :]
        if scale.dim() > 2 or sizes[0] not in (1, rows) or sizes[1] not in (1, width):
            raise ValueError(
                f"silu_mul: scale has shape {list(scale.shape)}; expected one that spreads to [{rows}, {width}]"
            )
        scale = scale.expand(rows, width)
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    plan = silu_mul_plan(rows, width, target, config)
    _silu_mul_kernel[plan.grid](
        out, x, scale, width, *x.stride(), *(scale.stride() if scale is not None else (0, 0)),
        BLOCK=plan.block, num_warps=plan.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def _case(name: str, width: int, scaled: bool, dtype: torch.dtype = torch.bfloat16) -> CompileCase:
    def launch(target: Target) -> torch.Tensor:
        x = torch.empty(8192, 2 * width, dtype=dtype, device="meta")
        scale = torch.empty(8192, width, dtype=torch.float32, device="meta") if scaled else None
        return silu_mul(x, scale, target=target)

    return CompileCase(name, "silu_mul=triton", launch, instruction=NO_MATRIX)


COMPILE_CASES = (
    _case("dense", 24576, False),
    _case("shared experts, scaled", 6144, True),
    _case("shared experts, scaled, float32", 6144, True, torch.float32),
)


def silu_mul_ref(x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Apply the interleaved SiLU gate: `x` `[T, 2I]` -> `[T, I]` in `x.dtype`; differentiable.

    `scale`, broadcastable to `[T, I]`, multiplies the float32 value before rounding: a shared expert's weight rides on
    its activation this way, one column block per expert.
    """
    if x.shape[-1] % 2:
        raise ValueError(
            f"silu_mul: x has {x.shape[-1]} columns; gate and up columns alternate, so their number is even"
        )
    wide = x.float().contiguous()
    # SiLU of every column, half of them for nothing: on contiguous memory that is the faster way.
    y = F.silu(wide)[..., 0::2] * wide[..., 1::2]
    return (y if scale is None else y * scale).to(x.dtype)
