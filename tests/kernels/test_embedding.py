"""Normed embedding lookup against numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from on_device import on_device

from inkling_kernels.embedding import embedding, embedding_ref

Impl = Callable[..., torch.Tensor]


@pytest.fixture(scope="module", params=[embedding_ref, embedding], ids=["torch", "triton"])
def impl(request: pytest.FixtureRequest, kernel_device: torch.device) -> Impl:
    """The reference, and the kernel on the tests' device."""
    return request.param if request.param is embedding_ref else on_device(request.param, kernel_device)


def oracle(ids: np.ndarray, weight: np.ndarray, norm: np.ndarray, eps: float) -> np.ndarray:
    rows = weight.astype(np.float64)[ids]
    return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + eps) * norm


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(0, 40),
    vocabulary=st.integers(1, 50),
    hidden=st.integers(1, 130),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(impl: Impl, tokens: int, vocabulary: int, hidden: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((vocabulary, hidden)).astype(np.float32)
    norm = rng.uniform(0.5, 1.5, hidden).astype(np.float32)
    ids = rng.integers(0, vocabulary, tokens)
    out = impl(torch.from_numpy(ids), torch.from_numpy(weight), torch.from_numpy(norm), 1e-6)
    assert out.dtype == torch.float32
    assert out.shape == (tokens, hidden)
    np.testing.assert_allclose(out.numpy(), oracle(ids, weight, norm, 1e-6), rtol=2e-6, atol=1e-30)


def test_rows_that_no_token_names_are_not_read(impl: Impl) -> None:
    weight = torch.full((9, 16), float("nan"), dtype=torch.bfloat16)
    weight[[2, 8]] = torch.arange(32, dtype=torch.bfloat16).view(2, 16)
    out = impl(torch.tensor([8, 2, 2]), weight, torch.ones(16, dtype=torch.bfloat16), 1e-6)
    assert out.dtype == torch.bfloat16
    assert out.isfinite().all()
    assert torch.equal(out[1], out[2])


@pytest.mark.parametrize("bad", [-1, 9, 2**40])
def test_an_id_outside_the_table_is_an_error(impl: Impl, bad: int) -> None:
    with pytest.raises(IndexError):
        impl(torch.tensor([0, bad]), torch.ones(9, 16), torch.ones(16), 1e-6)


@pytest.mark.parametrize("impl", [embedding_ref])
def test_gradients_add_up_over_repeated_tokens(impl: Impl) -> None:
    generator = torch.Generator().manual_seed(3)
    weight, norm, seed = (torch.randn(*shape, generator=generator) for shape in ((6, 8), (8,), (4, 8)))
    weight.requires_grad_()
    norm.requires_grad_()
    ids = torch.tensor([1, 4, 1, 5])
    found = torch.autograd.grad(impl(ids, weight, norm, 1e-5), (weight, norm), seed)
    rows = weight.double()[ids]
    exact = rows * (rows.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.double()
    expected = torch.autograd.grad(exact, (weight, norm), seed.double())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
