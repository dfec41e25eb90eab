"""Token embedding followed by its RMS norm: `embedding(ids) = rms_norm(weight[ids]; norm_weight, eps)`.

`ids` is int64 `[T]`, `weight` `[V, H]`, `norm_weight` `[H]`. The padded rows of the vocabulary are ordinary rows
here: no valid id names one, and an id outside `[0, V)` is an error rather than a read of foreign memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from inkling_kernels.norm import rms_norm_ref


def embedding_ref(ids: torch.Tensor, weight: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Gather and normalise embedding rows: `[T]` int64 -> `[T, H]` in `weight.dtype`; differentiable in both weights.

    Raises `IndexError` for an id outside `[0, V)`.
    """
    return rms_norm_ref(F.embedding(ids, weight), norm_weight, eps)
