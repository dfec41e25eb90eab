"""The interleaved SiLU gate against numpy in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from on_device import on_device

from inkling_kernels.activation import silu_mul, silu_mul_ref
from inkling_portable.cpu.rows import silu_mul as cpu_silu_mul

Impl = Callable[..., torch.Tensor]


@pytest.fixture(scope="module", params=[silu_mul_ref, cpu_silu_mul, silu_mul], ids=["torch", "numba", "triton"])
def impl(request: pytest.FixtureRequest, kernel_device: torch.device) -> Impl:
    """The reference, the CPU's kernel, and the kernel on the tests' device."""
    return on_device(request.param, kernel_device) if request.param is silu_mul else request.param


def oracle(x: np.ndarray) -> np.ndarray:
    """Column 2i gates column 2i + 1, one at a time."""
    out = np.empty((len(x), x.shape[1] // 2))
    for i in range(out.shape[1]):
        gate, up = x[:, 2 * i].astype(np.float64), x[:, 2 * i + 1].astype(np.float64)
        out[:, i] = gate / (1 + np.exp(-gate)) * up
    return out


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(0, 9),
    width=st.integers(1, 65),
    scaled=st.sampled_from([None, "token", "column", "both"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape_and_scale(impl: Impl, tokens: int, width: int, scaled: str | None, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((tokens, 2 * width)) * 4).astype(np.float32)
    shapes = {"token": (tokens, 1), "column": (width,), "both": (tokens, width)}
    scale = None if scaled is None else rng.standard_normal(shapes[scaled]).astype(np.float32)
    out = impl(torch.from_numpy(x), None if scale is None else torch.from_numpy(scale))
    assert out.dtype == torch.float32
    np.testing.assert_allclose(out.numpy(), oracle(x) * (1 if scale is None else scale), rtol=3e-6, atol=1e-9)


def test_columns_that_tell_their_index(impl: Impl) -> None:
    """Up columns hold their index and gates pass it on: a contiguous split would give other numbers."""
    width = 12
    x = torch.full((2, 2 * width), 30.0)
    x[:, 1::2] = torch.arange(width, dtype=torch.float32)
    out = impl(x)
    torch.testing.assert_close(out, (torch.arange(width) * 30.0).expand(2, -1))


def test_a_scale_for_each_block_of_columns(impl: Impl) -> None:
    """Shared experts: each expert's weight rides on its own columns."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2 * 8, generator=generator)
    gamma = torch.tensor([[1.0, 2.0], [0.0, -1.0], [0.25, 3.0]])
    out = impl(x, gamma.repeat_interleave(4, 1))
    expected = oracle(x.numpy())
    expected[:, :4] *= gamma[:, :1].numpy()
    expected[:, 4:] *= gamma[:, 1:].numpy()
    np.testing.assert_allclose(out.numpy(), expected, rtol=3e-6, atol=1e-9)


def test_the_range_of_float16_is_left_unharmed(impl: Impl) -> None:
    x = torch.tensor([[400.0, 300.0, -1e4, 7e4, 0.0, 7e4]], dtype=torch.bfloat16)
    out = impl(x)
    assert out.dtype == torch.bfloat16
    assert out.tolist() == [[119808.0, 0.0, 0.0]]
    assert impl(x, torch.tensor([[0.5]])).tolist() == [[59904.0, 0.0, 0.0]]


def test_strided_rows(impl: Impl) -> None:
    generator = torch.Generator().manual_seed(1)
    wide = torch.full((5, 40), float("nan"))
    wide[:, 6:26] = torch.randn(5, 20, generator=generator)
    assert torch.equal(impl(wide[:, 6:26]), impl(wide[:, 6:26].contiguous()))


@pytest.mark.parametrize("impl", [silu_mul_ref])
def test_gradients(impl: Impl) -> None:
    generator = torch.Generator().manual_seed(2)
    x, scale, seed = (torch.randn(*shape, generator=generator) for shape in ((4, 12), (4, 6), (4, 6)))
    x.requires_grad_()
    scale.requires_grad_()
    found = torch.autograd.grad(impl(x, scale), (x, scale), seed)
    gate, up = x.double()[:, 0::2], x.double()[:, 1::2]
    expected = torch.autograd.grad(gate * torch.sigmoid(gate) * up * scale.double(), (x, scale), seed.double())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_an_odd_number_of_columns_is_refused(impl: Impl) -> None:
    with pytest.raises(ValueError, match="7 columns"):
        impl(torch.ones(2, 7))
