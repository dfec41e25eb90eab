"""The repaired interpreter against torch: what it computes in bfloat16 is what a GPU would.

One operation a line, on values that include ties of the rounding, subnormals, infinities and NaN.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

SIZE = 256


@triton.jit
def _elementwise_kernel(x_ptr, y_ptr, out_ptr, wide_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + at)
    y = tl.load(y_ptr + at, mask=at < SIZE, other=1.0)
    wide = tl.load(wide_ptr + at)
    tl.store(out_ptr + at, x + y)
    tl.store(out_ptr + SIZE + at, x * y)
    tl.store(out_ptr + 2 * SIZE + at, tl.maximum(x, y))
    tl.store(out_ptr + 3 * SIZE + at, wide.to(tl.bfloat16))
    tl.store(out_ptr + 4 * SIZE + at, tl.where(x < y, x, -y))
    tl.store(out_ptr + 5 * SIZE + at, tl.abs(x))
    tl.store(out_ptr + 6 * SIZE + at, x.to(tl.int16, bitcast=True).to(tl.bfloat16, bitcast=True))


@triton.jit
def _product_kernel(a_ptr, b_ptr, out_ptr, max_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    a = tl.load(a_ptr + at)
    tl.store(out_ptr + at, tl.dot(a, tl.load(b_ptr + at)))
    tl.store(max_ptr + tl.arange(0, SIZE), tl.max(a, 1))


def _values(seed: int, device: torch.device) -> torch.Tensor:
    bits = torch.randint(0, 1 << 16, (SIZE,), generator=torch.Generator().manual_seed(seed)).to(torch.int16)
    x = bits.view(torch.bfloat16).clone()
    x[:4] = torch.tensor([float("inf"), float("-inf"), 1e-40, -0.0])
    return x.nan_to_num(1.5, float("inf"), float("-inf")).to(device)


@pytest.mark.parametrize("seed", range(4))
def test_elementwise_operations_round_to_nearest_even(kernel_device: torch.device, seed: int) -> None:
    x, y = _values(seed, kernel_device), _values(seed + 100, kernel_device)
    wide = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)).to(kernel_device)
    wide[0], wide[1] = 1 + 2**-8, 1 + 3 * 2**-8
    out = torch.empty(7, SIZE, dtype=torch.bfloat16, device=kernel_device)
    _elementwise_kernel[(1,)](x, y, out, wide, SIZE=SIZE)
    expected = [x + y, x * y, torch.maximum(x, y), wide.bfloat16(), torch.where(x < y, x, -y), x.abs(), x]
    torch.testing.assert_close(out, torch.stack(expected), rtol=0, atol=0, equal_nan=True)


def test_products_are_exact_and_summed_in_float32(kernel_device: torch.device) -> None:
    size = 32
    generator = torch.Generator().manual_seed(7)
    a, b = (torch.randn(size, size, generator=generator).bfloat16().to(kernel_device) for _ in range(2))
    out, top = torch.empty(size, size, device=kernel_device), torch.empty(size, device=kernel_device).bfloat16()
    _product_kernel[(1,)](a, b, out, top, SIZE=size)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(top, a.max(1).values, rtol=0, atol=0)
