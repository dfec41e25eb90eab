"""Expert-sink routing against numpy in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from on_device import on_device

from inkling_kernels.routing import routing, routing_ref
from inkling_portable.cpu.rows import routing as cpu_routing

Impl = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module", params=[routing_ref, cpu_routing, routing], ids=["torch", "numba", "triton"])
def impl(request: pytest.FixtureRequest, kernel_device: torch.device) -> Impl:
    """The reference, the CPU's kernel, and the kernel on the tests' device."""
    return on_device(request.param, kernel_device) if request.param is routing else request.param


def oracle_weights(z: np.ndarray, ids: np.ndarray, experts: int, scale: float) -> np.ndarray:
    """Weights `[T, k + S]` of chosen experts and sinks, float64."""
    z = z.astype(np.float64)
    chosen = np.concatenate([np.take_along_axis(z, ids, 1), z[:, experts:]], 1)
    log_sigmoid = -np.logaddexp(0, -chosen)
    p = np.exp(log_sigmoid - log_sigmoid.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True) * scale


def route(
    impl: Impl, routed: torch.Tensor, sinks: torch.Tensor, bias: torch.Tensor | None = None, top_k: int = 6,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    bias = torch.zeros(routed.shape[1]) if bias is None else bias
    return impl(torch.cat([routed, sinks], 1), bias, torch.tensor([scale]), top_k=top_k, route_scale=1.0)


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(0, 20),
    experts=st.integers(1, 260),
    sinks=st.integers(0, 3),
    data=st.data(),
    spread=st.sampled_from([0.1, 1.0, 8.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_choice_and_weights(
    impl: Impl, tokens: int, experts: int, sinks: int, data: st.DataObject, spread: float, seed: int
) -> None:
    top_k = data.draw(st.integers(1, min(8, experts)))
    rng = np.random.default_rng(seed)
    z = (rng.standard_normal((tokens, experts + sinks)) * spread).astype(np.float32)
    bias = rng.uniform(-0.3, 0.3, experts).astype(np.float32)
    ids, weights, sink_weights = impl(
        torch.from_numpy(z), torch.from_numpy(bias), torch.tensor([1.7]), top_k=top_k, route_scale=8.0
    )
    assert (ids.dtype, weights.dtype, sink_weights.dtype) == (torch.int32, torch.float32, torch.float32)
    assert (ids.shape, weights.shape, sink_weights.shape) == ((tokens, top_k), (tokens, top_k), (tokens, sinks))
    score = 1 / (1 + np.exp(-z[:, :experts].astype(np.float64))) + bias
    chosen = np.take_along_axis(score, ids.numpy().astype(np.int64), 1)
    # Best first, each once, and none left out that is better by more than float32 can tell.
    assert (np.diff(chosen, axis=1) <= 1e-6).all()
    assert all(len(set(row)) == top_k for row in ids.tolist())
    np.testing.assert_allclose(chosen, -np.sort(-score, axis=1)[:, :top_k], rtol=0, atol=1e-6)
    expected = oracle_weights(z, ids.numpy().astype(np.int64), experts, 8 * 1.7)
    np.testing.assert_allclose(torch.cat([weights, sink_weights], 1).numpy(), expected, rtol=2e-5, atol=1e-6)


def test_equal_scores_take_the_lowest_index(impl: Impl) -> None:
    """All 256 equal, zeros of either sign, and sigmoids that have saturated."""
    sinks = torch.zeros(4, 2)
    routed = torch.zeros(4, 256)
    routed[1] = torch.where(torch.arange(256) % 3 == 0, -0.0, 0.0)
    routed[2] = torch.arange(256) + 80.0
    routed[3] = -INF
    ids, weights, _ = route(impl, routed, sinks)
    assert ids.tolist() == [list(range(6))] * 4
    assert (weights[3] == 0).all()


def test_a_tie_at_the_last_rank(impl: Impl) -> None:
    """Ranks 6 and 7 are equal; the lower index gets in, also where it is the bias that makes them equal."""
    routed = torch.full((2, 256), -4.0)
    routed[0, [200, 150, 100, 50, 30]] = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0])
    routed[0, [77, 210]] = 0.5
    routed[1] = routed[0]
    bias = torch.zeros(256)
    assert route(impl, routed, torch.zeros(2, 2), bias)[0][0].tolist() == [200, 150, 100, 50, 30, 77]
    routed[1, 20] = 0.0
    bias[20] = float(torch.sigmoid(torch.tensor(0.5)) - torch.sigmoid(torch.tensor(0.0)))
    assert route(impl, routed, torch.zeros(2, 2), bias)[0][1].tolist() == [200, 150, 100, 50, 30, 20]


@pytest.mark.parametrize("better", [3, 250])
def test_one_unit_in_the_last_place_decides(impl: Impl, better: int) -> None:
    """In bfloat16, or in any sum that is not float32's, these two would be equal."""
    routed, bias = torch.full((1, 256), -20.0), torch.zeros(256)
    routed[0, [3, 250]] = 0.0
    bias[better] = 2.0**-24
    ids, weights, _ = route(impl, routed, torch.zeros(1, 2), bias, top_k=1)
    assert ids.tolist() == [[better]]
    torch.testing.assert_close(weights, torch.full((1, 1), 1 / 3))


def test_the_bias_chooses_and_never_weighs(impl: Impl) -> None:
    routed = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    sinks = torch.tensor([[0.5]])
    ids, weights, sink = route(impl, routed, sinks, torch.tensor([0.0, 0.0, 0.0, 1.0]), top_k=2)
    assert ids.tolist() == [[3, 0]]
    expected = oracle_weights(torch.cat([routed, sinks], 1).numpy(), ids.numpy().astype(np.int64), 4, 1.0)
    np.testing.assert_allclose(torch.cat([weights, sink], 1).numpy(), expected, rtol=1e-6)
    assert weights[0, 0] < weights[0, 1]


@pytest.mark.parametrize("low", [-200.0, -INF])
def test_sinks_may_take_everything_or_nothing(impl: Impl, low: float) -> None:
    ids, weights, sinks = route(impl, torch.full((1, 8), low), torch.zeros(1, 2), scale=5.0)
    assert (weights.sum().item(), sinks.tolist()) == (0.0, [[2.5, 2.5]])
    _, weights, sinks = route(impl, torch.zeros(1, 8), torch.full((1, 2), low), scale=5.0)
    torch.testing.assert_close(weights, torch.full((1, 6), 5 / 6))
    assert sinks.tolist() == [[0.0, 0.0]]
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_large_scores_do_not_overflow(impl: Impl) -> None:
    """+80 and beyond, where exp() of a float32 is infinite."""
    z = torch.tensor([[80.0, 1000.0, -1000.0, 3e38, 80.0]])
    ids, weights, sinks = route(impl, z[:, :4], z[:, 4:], top_k=3)
    assert ids.tolist() == [[0, 1, 3]]
    torch.testing.assert_close(torch.cat([weights, sinks], 1), torch.full((1, 4), 0.25))


def test_a_nan_token_stays_alone(impl: Impl) -> None:
    """Its own weights are NaN, its ids can still be looked up, other rows are unchanged."""
    z = torch.randn(5, 18, generator=torch.Generator().manual_seed(0))
    clean = route(impl, z[:, :16], z[:, 16:])
    z[2] = NAN
    found = route(impl, z[:, :16], z[:, 16:])
    keep = [0, 1, 3, 4]
    for a, b in zip(found, clean, strict=True):
        assert torch.equal(a[keep], b[keep])
    assert found[1][2].isnan().all()
    assert ((found[0] >= 0) & (found[0] < 16)).all()


@pytest.mark.parametrize("impl", [routing_ref])
def test_gradients(impl: Impl) -> None:
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(6, 14, generator=generator).requires_grad_()
    bias, scale = torch.rand(12, generator=generator) - 0.5, torch.tensor([1.5], requires_grad=True)
    ids, weights, sinks = impl(z, bias, scale, top_k=4, route_scale=2.0)
    seed = torch.randn(6, 6, generator=generator)
    found = torch.autograd.grad(torch.cat([weights, sinks], 1), (z, scale), seed)
    chosen = torch.cat([z.double().gather(1, ids.long()), z.double()[:, 12:]], 1)
    odds = torch.sigmoid(chosen)
    exact = odds / odds.sum(1, keepdim=True) * 2 * scale.double()
    for a, b in zip(found, torch.autograd.grad(exact, (z, scale), seed.double()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_bad_arguments(impl: Impl) -> None:
    z, bias, scale = torch.zeros(1, 10), torch.zeros(8), torch.ones(1)
    with pytest.raises(TypeError, match=r"logits are torch\.bfloat16"):
        impl(z.bfloat16(), bias, scale, top_k=2, route_scale=1.0)
    for top_k in (0, 9):
        with pytest.raises(ValueError, match=rf"top_k is {top_k}.* 8 routed experts"):
            impl(z, bias, scale, top_k=top_k, route_scale=1.0)
