"""Rows, pages and slots more than 2**31 elements from where their tensor begins.

The buffers are as large as they look, but memory that is never touched is never given out.
"""

from __future__ import annotations

import torch

from inkling_kernels.activation import silu_mul
from inkling_kernels.kv_cache import qkvr_prep
from inkling_kernels.norm import rms_norm
from inkling_kernels.short_conv import short_conv

FAR = 2**31 + 64


def two_rows(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """`[2, *shape]`, the second row `FAR` elements behind the first."""
    one = torch.empty(shape, dtype=dtype, device="meta")
    buffer = torch.empty(FAR + one.numel(), dtype=dtype, device=device)
    return buffer.as_strided((2, *shape), (FAR, *one.stride()))


def test_rows(kernel_device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    near = torch.randn(2, 32, generator=generator).bfloat16().to(kernel_device)
    far = two_rows(kernel_device, 32)
    far.copy_(near)
    weight = torch.ones(32, dtype=torch.bfloat16, device=kernel_device)
    assert torch.equal(rms_norm(far, weight, 1e-6), rms_norm(near, weight, 1e-6))
    assert torch.equal(silu_mul(far), silu_mul(near))


def test_pages_and_slots(kernel_device: torch.device) -> None:
    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=kernel_device)

    generator = torch.Generator().manual_seed(1)
    qkvr = torch.randn(5, 64, generator=generator).to(kernel_device)
    weight = torch.randn(32, 4, generator=generator).to(kernel_device)
    norm, scale = torch.ones(16, device=kernel_device), torch.ones(1, device=kernel_device)
    where = int32(1), int32(0, 5), int32(5)
    found = []
    for far in (False, True):
        pages = torch.zeros(2, 16, 1, 16, dtype=torch.uint8, device=kernel_device)
        state = torch.zeros(2, 3, 32, dtype=torch.bfloat16, device=kernel_device)
        unused = torch.zeros_like(pages)
        if far:
            pages = two_rows(kernel_device, 16, 1, 16, dtype=torch.uint8).zero_()
            state = two_rows(kernel_device, 3, 32).zero_()
        qkvr_prep(
            qkvr, weight, norm, norm, 1e-6, None, *where, (unused, pages), torch.arange(14, 19, device=kernel_device),
            num_heads=1, num_kv_heads=1, head_dim=16, d_rel=16, log_scaling_n_floor=None, log_scaling_alpha=0.1,
            kv_scales=(scale, scale),
        )  # fmt: skip
        short_conv(qkvr[:, :32], weight, state, *where)
        found.append([row.cpu().float() for row in (*pages, *state)])
    assert found[0][1][:3].any()
    assert found[0][3].any()
    assert all(torch.equal(near, far) for near, far in zip(*found, strict=True))
