"""Token embedding followed by its RMS norm: `embedding(ids) = rms_norm(weight[ids]; norm_weight, eps)`.

`ids` is int64 `[T]`, `weight` `[V, H]`, `norm_weight` `[H]`. The padded rows of the vocabulary are ordinary rows here:
no valid id names one, and an id outside `[0, V)` is an error rather than a read of foreign memory. The kernel gathers
and normalises in one launch, one program a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from inkling_kernels.compile_case import NO_MATRIX, CompileCase
from inkling_kernels.norm import normed_fn, rms_norm_ref
from inkling_kernels.ragged import FLOATS, check_config, check_tensor, not_powers_of_two
from inkling_kernels.target import Target


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """`per_warp` elements of a row a warp, up to 8 warps."""

    per_warp: int = 512

    def problems(self, target: Target, *, channels: int) -> tuple[str, ...]:
        """Why this configuration cannot run there; empty where it can."""
        found = not_powers_of_two(self, per_warp=(64, 8192))
        if channels > 32768:
            found.append(f"a row of {channels} channels does not fit the registers of 8 warps; expected at most 32768")
        return tuple(found)


DEFAULT = EmbeddingConfig()


@triton.jit(do_not_specialize=["vocabulary", "eps"])
def _embedding_kernel(
    out_ptr, ids_ptr, weight_ptr, norm_ptr, vocabulary, channels, eps, ids_stride, weight_row, weight_col, norm_col,
    BLOCK_C: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    row = tl.load(ids_ptr + token * ids_stride).to(tl.int64)[:, None]
    col = tl.arange(0, BLOCK_C).to(tl.int64)
    live = (col < channels)[None, :]
    # A foreign id reads nothing and gives a row of NaN, which no later step mistakes for a token.
    known = (row >= 0) & (row < vocabulary)
    at = row * weight_row + (col * weight_col)[None, :]
    x = tl.load(weight_ptr + at, mask=live & known, other=float("nan")).to(tl.float32)
    norm = tl.load(norm_ptr + col * norm_col, mask=col < channels, other=0.0).to(tl.float32)
    y = normed_fn(tl.where(live, x, 0.0), norm, channels, eps, out_ptr.dtype.element_ty)
    tl.store(out_ptr + (token * channels)[:, None] + col[None, :], y, mask=live)


@dataclass(frozen=True, slots=True)
class EmbeddingPlan:
    """A launch: programs, channels of a program's row, warps."""

    grid: tuple[int]
    block_c: int
    num_warps: int


def embedding_plan(
    tokens: int, channels: int, target: Target | None = None, config: EmbeddingConfig | None = None
) -> EmbeddingPlan:
    """Plan `tokens` rows of `channels`; pure. Every target takes the same plan so far."""
    block_c = triton.next_power_of_2(channels)
    return EmbeddingPlan((tokens,), block_c, min(8, max(1, block_c // (config or DEFAULT).per_warp)))


def embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    *,
    target: Target | None = None,
    config: EmbeddingConfig | None = None,
) -> torch.Tensor:
    """Gather and normalise embedding rows with the Triton kernel: `[T]` int64 -> `[T, H]` in `weight.dtype`; forward
    only.

    `weight` and `norm_weight` are bfloat16, float32 or (in tests) float16, both the same, of any strides. Raises
    TypeError or ValueError naming the argument, and IndexError for an id outside `[0, V)` where ids are in host memory;
    on a GPU, where reading them would wait, such an id gives a row of NaN and reads nothing.
    """
    check_tensor("embedding", "weight", weight, (None, None), FLOATS)
    check_tensor("embedding", "norm_weight", norm_weight, (weight.shape[1],), (weight.dtype,), weight.device)
    check_tensor("embedding", "ids", ids, (None,), (torch.int64, torch.int32), weight.device)
    if not eps >= 0:
        raise ValueError(f"embedding: eps is {eps!r}; expected 0 or more")
    if ids.device.type == "cpu" and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(weight):
        raise IndexError(f"embedding: ids run from {int(ids.min())} to {int(ids.max())}; expected 0..{len(weight) - 1}")
    config = config or DEFAULT
    if target is not None:
        check_config("embedding", config.problems(target, channels=weight.shape[1]))
    out = torch.empty(len(ids), weight.shape[1], dtype=weight.dtype, device=weight.device)
    if out.numel() == 0:
        return out
    plan = embedding_plan(len(ids), weight.shape[1], target, config)
    _embedding_kernel[plan.grid](
        out, ids, weight, norm_weight, *weight.shape, float(eps), ids.stride(0), *weight.stride(),
        norm_weight.stride(0), BLOCK_C=plan.block_c, num_warps=plan.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def _case(name: str, hidden: int, dtype: torch.dtype) -> CompileCase:
    def launch(target: Target) -> torch.Tensor:
        weight = torch.empty(201024, hidden, dtype=dtype, device="meta")
        ids = torch.empty(8192, dtype=torch.int64, device="meta")
        return embedding(ids, weight, weight.new_empty(hidden), 1e-6, target=target)

    return CompileCase(name, "embedding=triton", launch, instruction=NO_MATRIX)


COMPILE_CASES = (
    _case("Inkling's table", 6144, torch.bfloat16),
    _case("Small's table, float32", 4096, torch.float32),
)


def embedding_ref(ids: torch.Tensor, weight: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Gather and normalise embedding rows: `[T]` int64 -> `[T, H]` in `weight.dtype`; differentiable in both weights.

    Raises `IndexError` for an id outside `[0, V)`.
    """
    return rms_norm_ref(F.embedding(ids, weight), norm_weight, eps)
