"""The fused experts in float64, from shuffled MXFP4 weights."""

from __future__ import annotations

import numpy as np
import torch

from aiter import ActivationType, QuantType, dtypes
from aiter.ops import shuffle
from aiter.utility import fp4_utils

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def values(codes: torch.Tensor, scale: torch.Tensor) -> np.ndarray:
    """float64 `[E, N, K]` of codes `[E, N, K/2]` and scales `[E * N, K/32]`, both as AITER stores them."""
    assert codes.dtype == dtypes.fp4x2
    assert scale.dtype == dtypes.fp8_e8m0
    raw = codes.view(torch.uint8).numpy()
    experts, rows, half = raw.shape
    if getattr(codes, "is_shuffled", False):
        raw = raw.reshape(experts, -1)[:, shuffle.place(rows, half)]
    power = scale.view(torch.uint8).numpy().reshape(-1)
    power = power[fp4_utils.place(experts * rows, half // 16)].reshape(experts, rows, half // 16)
    pairs = np.stack([raw & 15, raw >> 4], -1).reshape(experts, rows, 2 * half)
    return E2M1[pairs] * (2.0 ** (power.astype(np.float64) - 127)).repeat(32, -1)


def fused_moe(
    hidden_states,
    w1,
    w2,
    topk_weight,
    topk_ids,
    expert_mask=None,
    activation=ActivationType.Silu,
    quant_type=QuantType.No,
    doweight_stage1=False,
    w1_scale=None,
    w2_scale=None,
    a1_scale=None,
    a2_scale=None,
    block_size_M=None,
    num_local_tokens=None,
    moe_sorting_dispatch_policy=0,
    dtype=None,
    hidden_pad=0,
    intermediate_pad=0,
    bias1=None,
    bias2=None,
):
    assert activation is ActivationType.Silu
    assert quant_type is QuantType.per_1x32
    assert not doweight_stage1
    assert hidden_states.dtype == torch.bfloat16
    assert hidden_states.is_contiguous()
    assert topk_weight.dtype == torch.float32
    assert topk_ids.dtype == torch.int32
    assert topk_ids.is_contiguous()
    first, second = values(w1, w1_scale), values(w2, w2_scale)
    x, width = hidden_states.double().numpy(), first.shape[1] // 2
    out = np.zeros_like(x)
    for t, row in enumerate(topk_ids.tolist()):
        for k, e in enumerate(row):
            # An index that names no expert is out of bounds, as it would be on the device.
            assert 0 <= e < len(first)
            product = first[e] @ x[t]
            gate, up = product[:width], product[width:]
            out[t] += float(topk_weight[t, k]) * (second[e] @ (gate / (1 + np.exp(-gate)) * up))
    return torch.from_numpy(out).to(dtype or hidden_states.dtype)
