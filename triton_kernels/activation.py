"""Gated activation of a fused gate/up product whose columns are interleaved.

    silu_mul(x)[t, i] = silu(x[t, 2i]) * x[t, 2i + 1] * scale[t, i]

Every w13 of an Inkling checkpoint stores its rows as gate0, up0, gate1, up1, ...; the product therefore arrives as
`[T, 2I]` with gates in the even columns. Splitting it in halves gives fluent, wrong text. Computed in float32,
rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul_ref(x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Apply the interleaved SiLU gate: `x` `[T, 2I]` -> `[T, I]` in `x.dtype`; differentiable.

    `scale`, broadcastable to `[T, I]`, multiplies the float32 value before rounding: a shared expert's weight rides
    on its activation this way, one column block per expert.
    """
    if x.shape[-1] % 2:
        raise ValueError(
            f"silu_mul: x has {x.shape[-1]} columns; gate and up columns alternate, so their number is even"
        )
    gate, up = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    y = F.silu(gate) * up
    return (y if scale is None else y * scale).to(x.dtype)
