"""RMS normalisation.

    rms_norm(x; w, eps) = cast(x / sqrt(mean(x^2, last) + eps)) * w

`x` is `[..., C]` of any float dtype, `w` is `[C]` of the same dtype. The mean and the quotient are float32; the
quotient is rounded to `x.dtype` once, then multiplied by `w` in `x.dtype`. This is the rounding order of the
published checkpoints (the weight multiplies a rounded value), so a bf16 model agrees with other implementations to
the last bit but one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last axis of `x` `[..., C]` and scale it by `weight` `[C]`; differentiable. Returns a tensor like
    `x`.
    """
    if x.shape[-1] != weight.shape[0]:
        raise ValueError(f"rms_norm: weight has {weight.shape[0]} channels, x has {x.shape[-1]}; they must be equal")
    return F.rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype) * weight
