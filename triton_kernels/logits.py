"""What is left to do behind the head's product: muP scale, cut of the padded vocabulary, float32, and a look at it all.

    logits(y; vocabulary, divisor)[n, v] = float32(y[n, v]) / divisor      for v < vocabulary
    finite[n]                            = every logits[n, v] is finite

`y` `[N, V]` is the product of the normed hidden states with the head, of any float dtype and row stride; columns from
`vocabulary` on are the padding of the head, are never read and give nothing. The published formula divides the hidden
states instead; divided here, the quotient is float32 and rounds nothing that the product has not rounded.

One program takes a row, a piece of it after the other, so the flag of a row needs neither a second launch nor an
atomic. A product of the head reads hundreds of times as many bytes as this does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inkling_kernels.compile_case import NO_MATRIX, CompileCase
from inkling_kernels.ragged import FLOATS, check_config, check_tensor, not_powers_of_two
from inkling_kernels.target import Target


@dataclass(frozen=True, slots=True)
class LogitsConfig:
    """Columns that a program takes at a time."""

    block: int = 4096
    num_warps: int = 8

    def problems(self, target: Target) -> tuple[str, ...]:
        """Why this configuration cannot run there; empty where it can."""
        return tuple(not_powers_of_two(self, block=(16, 16384), num_warps=(1, 8)))


DEFAULT = LogitsConfig()


@triton.jit(do_not_specialize=["divisor"])
def _logits_kernel(out_ptr, finite_ptr, y_ptr, vocabulary, divisor, y_row, y_col, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lost = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocabulary, BLOCK):
        col = first + tl.arange(0, BLOCK).to(tl.int64)
        live = col < vocabulary
        y = tl.load(y_ptr + row * y_row + col * y_col, mask=live, other=0.0).to(tl.float32)
        y = tl.div_rn(y, tl.zeros([BLOCK], tl.float32) + divisor)
        lost |= tl.where(tl.abs(y) < float("inf"), 0, 1)
        tl.store(out_ptr + row * vocabulary + col, y, mask=live)
    tl.store(finite_ptr + row, (tl.max(lost, 0) == 0).to(finite_ptr.dtype.element_ty))


@dataclass(frozen=True, slots=True)
class LogitsPlan:
    """A launch: a program a row, columns at a time, warps."""

    grid: tuple[int]
    block: int
    num_warps: int


def logits_plan(
    rows: int, vocabulary: int, target: Target | None = None, config: LogitsConfig | None = None
) -> LogitsPlan:
    """Plan `rows` rows of `vocabulary` columns; pure. Every target takes the same plan so far."""
    config = config or DEFAULT
    return LogitsPlan((rows,), min(config.block, max(16, triton.next_power_of_2(vocabulary))), config.num_warps)


def logits(
    y: torch.Tensor,
    *,
    vocabulary: int,
    divisor: float,
    target: Target | None = None,
    config: LogitsConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Finish the head's product `y` `[N, V]` with the Triton kernel; returns logits `[N, vocabulary]` float32 and
    `finite` `[N]` bool; forward only.

    bfloat16, float32 or (in tests) float16, any strides. Raises TypeError or ValueError naming the argument, before
    anything is allocated or launched.
    """
    _check(y, vocabulary, divisor)
    config = config or DEFAULT
    if target is not None:
        check_config("logits", config.problems(target))
    rows = len(y)
    out = torch.empty(rows, vocabulary, dtype=torch.float32, device=y.device)
    finite = torch.empty(rows, dtype=torch.bool, device=y.device)
    if rows == 0:
        return out, finite
    plan = logits_plan(rows, vocabulary, target, config)
    _logits_kernel[plan.grid](
        out, finite.view(torch.uint8), y, vocabulary, float(divisor), *y.stride(), BLOCK=plan.block,
        num_warps=plan.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
    return out, finite


def _check(y: torch.Tensor, vocabulary: int, divisor: float) -> None:
    check_tensor("logits", "y", y, (None, None), FLOATS)
    if isinstance(vocabulary, bool) or not isinstance(vocabulary, int) or not 1 <= vocabulary <= y.shape[1]:
        raise ValueError(f"logits: vocabulary is {vocabulary!r}; expected 1 to the {y.shape[1]} columns of y")
    if not isinstance(divisor, (int, float)) or not 0 < divisor < float("inf"):
        raise ValueError(f"logits: divisor is {divisor!r}; expected a positive finite number")


def _case(name: str, rows: int, dtype: torch.dtype) -> CompileCase:
    def launch(target: Target) -> object:
        y = torch.empty(rows, 201_024, dtype=dtype, device="meta")
        return logits(y, vocabulary=200_058, divisor=24.0, target=target)

    return CompileCase(name, "logits=triton", launch, instruction=NO_MATRIX)


COMPILE_CASES = (
    _case("Inkling's vocabulary", 64, torch.bfloat16),
    _case("Inkling's vocabulary, float32", 64, torch.float32),
)


def logits_ref(y: torch.Tensor, *, vocabulary: int, divisor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Finish the head's product `y` `[N, V]`: logits `[N, vocabulary]` float32, differentiable, and `finite` `[N]`
    bool. Raises ValueError for a vocabulary that `y` does not have.
    """
    if not 1 <= vocabulary <= y.shape[1]:
        raise ValueError(f"logits: vocabulary is {vocabulary}; expected 1 to the {y.shape[1]} columns of y")
    scaled = y[:, :vocabulary].float() / divisor
    return scaled, scaled.detach().isfinite().all(-1)
