"""The projection `y[t] = W x[t]`, which a GPU leaves to the matrix products of torch (cuBLAS, hipBLASLt) where it may.

Those choose the order of a sum by the size of the batch. The kernel here has one tile shape and takes the columns in
one order, so a row's bits do not depend on its neighbours; sums are float32, rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from inkling_kernels.compile_case import CompileCase
from inkling_kernels.ragged import FLOATS, check_config, check_tensor, not_powers_of_two
from inkling_kernels.target import TARGETS, Target


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """`block_m` rows of x by `block_n` of the weight, `block_k` columns at a time (half as many in float32); `group_m`
    tiles of rows are taken before the next rows of the weight. The defaults fit every chip."""

    block_m: int = 64
    block_n: int = 64
    block_k: int = 64
    group_m: int = 8
    num_warps: int = 4
    num_stages: int = 2

    def shared_bytes(self, itemsize: int) -> int:
        """Shared memory that a program needs at most: the tiles of each stage, and the result on its way out."""
        tiles = (self.block_m + self.block_n) * self.block_k * 2 * self.num_stages
        return max(tiles, self.block_m * self.block_n * itemsize) + 1024

    def problems(self, target: Target, *, itemsize: int = 2) -> tuple[str, ...]:
        """Why this configuration cannot run there; empty where it can."""
        found = not_powers_of_two(
            self, block_m=(16, 256), block_n=(16, 256), block_k=(32, 256), group_m=(1, 64), num_warps=(1, 8)
        )
        if self.num_stages not in (1, 2, 3, 4, 5):
            found.append(f"num_stages is {self.num_stages}; expected 1 to 5")
        if not found and (need := self.shared_bytes(itemsize)) > target.shared_memory_bytes:
            found.append(f"needs {need} bytes of shared memory; {target} has {target.shared_memory_bytes}")
        return tuple(found)


DEFAULT = LinearConfig()


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    out_ptr, x_ptr, w_ptr, rows, outs, columns, x_strides, w_strides,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    # Programs that follow one another share rows of the weight, and then the rows of x.
    tiles_m, tiles_n = (rows + BLOCK_M - 1) // BLOCK_M, (outs + BLOCK_N - 1) // BLOCK_N
    group = tl.program_id(0) // (GROUP_M * tiles_n)
    size = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    place = tl.program_id(0) % (GROUP_M * tiles_n)
    row = (group * GROUP_M + place % size).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    out = (place // size).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_at, w_at = x_ptr + (row * x_strides[0])[:, None], w_ptr + (out * w_strides[0])[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, columns, BLOCK_K):
        column = first + tl.arange(0, BLOCK_K).to(tl.int64)
        held = column < columns
        x = tl.load(x_at + (column * x_strides[1])[None, :], mask=(row < rows)[:, None] & held[None, :], other=0.0)
        w = tl.load(w_at + (column * w_strides[1])[:, None], mask=(out < outs)[None, :] & held[:, None], other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
    at = (row * outs)[:, None] + out[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None] & (out < outs)[None, :])


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """A launch: programs, and columns at a time. Only the number of programs follows the rows."""

    grid: tuple[int]
    block_k: int
    config: LinearConfig


def linear_plan(
    rows: int, outs: int, *, dtype: torch.dtype = torch.bfloat16, target: Target | None = None,
    config: LinearConfig | None = None,
) -> LinearPlan:  # fmt: skip
    """Plan `rows` rows by `outs` rows of a weight; pure. Raises ValueError for a `config` that `target` cannot run."""
    chosen = config or DEFAULT
    if target is not None:
        check_config("linear", chosen.problems(target, itemsize=dtype.itemsize))
    grid = triton.cdiv(rows, chosen.block_m) * triton.cdiv(outs, chosen.block_n)
    return LinearPlan((grid,), max(32, chosen.block_k * 2 // dtype.itemsize), chosen)


def linear(
    x: torch.Tensor, weight: torch.Tensor, *, target: Target | None = None, config: LinearConfig | None = None
) -> torch.Tensor:
    """`x` `[T, C]` times the transpose of `weight` `[N, C]` with the Triton kernel; returns `[T, N]`; forward only.

    Both bfloat16, float32 or (in tests) float16 and of one type; any strides. Sums are float32, rounded once to the
    type. Raises TypeError or ValueError naming the argument, before anything is allocated or launched.
    """
    check_tensor("linear", "x", x, (None, None), FLOATS)
    check_tensor("linear", "weight", weight, (None, x.shape[1]), (x.dtype,), x.device)
    plan = linear_plan(len(x), len(weight), dtype=x.dtype, target=target, config=config)
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    _linear_kernel[plan.grid](
        out, x, weight, *out.shape, x.shape[1], x.stride(), weight.stride(), BLOCK_M=plan.config.block_m,
        BLOCK_N=plan.config.block_n, BLOCK_K=plan.block_k, GROUP_M=plan.config.group_m,
        num_warps=plan.config.num_warps, num_stages=plan.config.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def linear_ref(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` `[T, C]` times the transpose of `weight` `[N, C]`, both of one type, as the library multiplies;
    differentiable."""
    return F.linear(x, weight)


def _case(name: str, rows: int, outs: int, columns: int, dtype: torch.dtype) -> CompileCase:
    def launch(target: Target) -> torch.Tensor:
        x, weight = (torch.empty(n, columns, dtype=dtype, device="meta") for n in (rows, outs))
        return linear(x, weight, target=target)

    # Exact float32 products have no matrix instruction on NVIDIA's chips and on RDNA.
    exact = {} if dtype != torch.float32 else {t.arch: "" for t in TARGETS if "mfma" not in t.capabilities}
    # RDNA has 256 registers a thread at most.
    spills = {} if dtype != torch.float32 else dict.fromkeys(("gfx1100", "gfx1151", "gfx1201"), 512)
    return CompileCase(name, "linear=fixed_tiles", launch, spills, exact)


COMPILE_CASES = (
    _case("fused projection", 64, 11_264, 6144, torch.bfloat16),
    _case("router, float32", 64, 258, 6144, torch.float32),
)
