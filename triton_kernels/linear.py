"""The projection `y[t] = W x[t]`, which a GPU leaves to the matrix products of torch (cuBLAS, rocBLAS)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def linear_ref(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` `[T, K]` times `weight` `[N, K]`, both of one type: `[T, N]` of it; differentiable."""
    return F.linear(x, weight)
