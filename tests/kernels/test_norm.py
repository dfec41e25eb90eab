"""RMS normalisation against numpy in float64."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from on_device import on_device

from inkling_kernels.norm import rms_norm, rms_norm_ref
from inkling_portable.cpu.rows import rms_norm as cpu_rms_norm

Impl = Callable[..., torch.Tensor]


@pytest.fixture(scope="module", params=[rms_norm_ref, cpu_rms_norm, rms_norm], ids=["torch", "numba", "triton"])
def impl(request: pytest.FixtureRequest, kernel_device: torch.device) -> Impl:
    """The reference, the CPU's kernel, and the kernel on the tests' device."""
    return on_device(request.param, kernel_device) if request.param is rms_norm else request.param


def oracle(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight.astype(np.float64)


@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), max_size=2),
    channels=st.integers(1, 300),
    power=st.integers(-12, 12),
    eps=st.sampled_from([1e-6, 1e-5, 1e-2]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape_and_magnitude(
    impl: Impl, shape: list[int], channels: int, power: int, eps: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((*shape, channels)) * 10.0**power).astype(np.float32)
    weight = rng.uniform(-2, 2, channels).astype(np.float32)
    out = impl(torch.from_numpy(x), torch.from_numpy(weight), eps)
    assert out.dtype == torch.float32
    assert out.shape == x.shape
    np.testing.assert_allclose(out.numpy(), oracle(x, weight, eps), rtol=2e-6, atol=1e-30)


def test_bfloat16_rounds_the_quotient_and_then_the_product(impl: Impl) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 96)).astype(ml_dtypes.bfloat16)
    weight = rng.uniform(0.5, 2, 96).astype(ml_dtypes.bfloat16)
    quotient = oracle(x.astype(np.float32), np.ones(96), 1e-6)
    twice = quotient.astype(ml_dtypes.bfloat16).astype(np.float32) * weight.astype(np.float32)
    once = quotient * weight.astype(np.float64)
    out = impl(*(torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) for a in (x, weight)), 1e-6)
    bits = out.view(torch.int16).numpy()
    equal_twice = bits == twice.astype(ml_dtypes.bfloat16).view(np.int16)
    assert out.dtype == torch.bfloat16
    # A float32 quotient may fall on the other side of a rounding boundary than the float64 one, rarely.
    assert equal_twice.mean() > 0.999
    assert (bits == once.astype(ml_dtypes.bfloat16).view(np.int16)).mean() < 0.95


def test_a_strided_view_of_a_fused_product_and_its_neighbours(impl: Impl) -> None:
    """Heads inside one buffer: NaN lies on both sides of what is normed."""
    generator = torch.Generator().manual_seed(1)
    fused = torch.full((7, 5 * 16 + 24), float("nan"))
    fused[:, 8:72] = torch.randn(7, 64, generator=generator)
    before = fused.clone()
    weight = torch.rand(16, generator=generator) + 0.5
    out = impl(fused[:, 8:72].unflatten(-1, (4, 16)), weight, 1e-6)
    expected = oracle(fused[:, 8:72].reshape(7, 4, 16).numpy(), weight.numpy(), 1e-6)
    np.testing.assert_allclose(out.numpy(), expected, rtol=2e-6)
    assert torch.equal(fused.nan_to_num(7.0), before.nan_to_num(7.0))


def test_zeros_stay_zeros_and_a_nan_row_stays_alone(impl: Impl) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(4, 32, generator=generator)
    x[1] = 0
    clean = impl(x, torch.ones(32), 1e-6)
    assert (clean[1] == 0).all()
    x[2, 5] = float("nan")
    out = impl(x, torch.ones(32), 1e-6)
    assert out[2].isnan().all()
    assert torch.equal(out[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("impl", [rms_norm_ref])
def test_gradients(impl: Impl) -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight, seed = (torch.randn(*shape, generator=generator) for shape in ((5, 24), (24,), (5, 24)))
    x.requires_grad_()
    weight.requires_grad_()
    found = torch.autograd.grad(impl(x, weight, 1e-5), (x, weight), seed)
    x64, weight64 = x.double(), weight.double()
    exact = x64 * (x64.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight64
    expected = torch.autograd.grad(exact, (x, weight), seed.double())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_another_number_of_channels_is_refused(impl: Impl) -> None:
    with pytest.raises(ValueError, match="31 channels, x has 32"):
        impl(torch.ones(2, 32), torch.ones(31), 1e-6)
