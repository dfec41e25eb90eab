"""The routed experts: two grouped products with a SiLU gate between, weighted and summed over the chosen experts.

    out[t] = sum_k weights[t, k] * W2[e] silu_mul(W13[e] x[t]),   e = ids[t, k]

`x` `[T, H]`, `w13` an `ExpertWeight` of logical `[E, 2I, H]` with rows gate0, up0, gate1, up1, ..., `w2` of `[E, H,
I]`, `ids` `[T, k]` int32, `weights` `[T, k]` float32. An id of -1 names an expert that another rank holds and adds
nothing; any other id outside `[0, E)` is an error. Products accumulate in float32; the sum over k is float32 in the
order of `ids`, so the result does not depend on the batch around a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from inkling_kernels.activation import silu_mul_ref
from inkling_kernels.numerics import ExpertWeight

# Tokens sorted and multiplied at a time: bounds the sorted copies at k * 2048 rows.
_TOKENS = 2048


def moe_experts_ref(
    x: torch.Tensor, w13: ExpertWeight, w2: ExpertWeight, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Apply each token's experts; see the module. Packed weights are unpacked one expert at a time. Differentiable in
    `x`, `weights` and unquantised expert weights. Returns `[T, H]` in `x.dtype`; raises `ValueError` for an id out of
    range.
    """
    w13.require_layout("interleaved", "w13")
    w2.require_layout("plain", "w2")
    if ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < w13.num_experts:
        raise ValueError(
            f"moe_experts: ids run from {int(ids.min())} to {int(ids.max())}; expected 0..{w13.num_experts - 1}, "
            "or -1 for an expert that is held elsewhere"
        )
    parts = [
        _experts_of(x[t : t + _TOKENS], w13, w2, ids[t : t + _TOKENS], weights[t : t + _TOKENS])
        for t in range(0, len(x), _TOKENS)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else x.clone()


def _experts_of(
    x: torch.Tensor, w13: ExpertWeight, w2: ExpertWeight, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    top_k = ids.shape[1]
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat + 1, minlength=w13.num_experts + 1).tolist()
    rows = x.index_select(0, order[counts[0] :] // top_k).split([c for c in counts[1:] if c])
    hit = [e for e, c in enumerate(counts[1:]) if c]
    if not hit:
        return torch.zeros_like(x)
    gate_up = torch.cat([F.linear(part, w13.dequant(e, x.dtype)) for e, part in zip(hit, rows, strict=True)])
    hidden = silu_mul_ref(gate_up).split([len(part) for part in rows])
    out = torch.cat([F.linear(part, w2.dequant(e, x.dtype)) for e, part in zip(hit, hidden, strict=True)])
    if counts[0]:
        out = torch.cat([out.new_zeros(counts[0], out.shape[1]), out])
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    chosen = out.index_select(0, back).view(len(x), top_k, -1)
    return torch.bmm(weights.unsqueeze(1), chosen.float()).squeeze(1).to(x.dtype)
