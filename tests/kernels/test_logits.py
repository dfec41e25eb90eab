"""The end of the head: scaled float32 logits of the real vocabulary, and which rows are finite."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from on_device import on_device

from inkling_kernels.logits import LogitsConfig, logits, logits_plan, logits_ref
from inkling_kernels.target import Target

Impl = Callable[..., tuple[torch.Tensor, torch.Tensor]]
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module", params=[logits_ref, logits], ids=["torch", "triton"])
def impl(request: pytest.FixtureRequest, kernel_device: torch.device) -> Impl:
    return request.param if request.param is logits_ref else on_device(request.param, kernel_device)


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(0, 5), vocabulary=st.integers(1, 70), padding=st.integers(0, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), seed=st.integers(0, 999),
)  # fmt: skip
def test_any_shape(impl: Impl, rows: int, vocabulary: int, padding: int, dtype: torch.dtype, seed: int) -> None:
    """The padding is NaN, and the rows are a strided view into NaN."""
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.full((rows + 2, vocabulary + padding + 3), NAN, dtype=dtype)
    y = buffer[1 : 1 + rows, : vocabulary + padding]
    y[:, :vocabulary] = (torch.randn(rows, vocabulary, generator=generator) * 50).to(dtype)
    found, finite = impl(y, vocabulary=vocabulary, divisor=24.0)
    assert (found.dtype, found.shape, finite.dtype) == (torch.float32, (rows, vocabulary), torch.bool)
    np.testing.assert_allclose(found.numpy(), y[:, :vocabulary].double().numpy() / 24, rtol=1e-7)
    assert finite.all()


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("column", [0, 15, 16, 36])
def test_a_row_that_is_not_finite_is_named(impl: Impl, value: float, column: int) -> None:
    y = torch.randn(4, 40, generator=torch.Generator().manual_seed(1))
    y[2, column] = value
    more = {} if impl is logits_ref else {"config": LogitsConfig(block=16)}
    found, finite = impl(y, vocabulary=37, divisor=2.0, **more)
    assert finite.tolist() == [True, True, False, True]
    np.testing.assert_array_equal(found.numpy(), y[:, :37].numpy() / 2)


def test_what_overflows_by_the_scale_is_not_finite(impl: Impl) -> None:
    assert impl(torch.tensor([[1.0, -3e38], [1.0, 2.0]]), vocabulary=2, divisor=0.5)[1].tolist() == [False, True]


def test_gradients() -> None:
    y = torch.randn(3, 9, dtype=torch.float32, requires_grad=True)
    found, _ = logits_ref(y, vocabulary=7, divisor=4.0)
    (grad,) = torch.autograd.grad(found.sum(), y)
    assert grad[:, :7].eq(0.25).all()
    assert grad[:, 7:].eq(0).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"y": torch.zeros(2, 9, dtype=torch.float64)}, TypeError, "y is torch.float64"),
        ({"y": torch.zeros(9)}, ValueError, r"y has shape \[9\]"),
        ({"vocabulary": 10}, ValueError, "vocabulary is 10; expected 1 to the 9 columns of y"),
        ({"vocabulary": True}, ValueError, "vocabulary is True"),
        ({"divisor": 0.0}, ValueError, "divisor is 0.0; expected a positive finite number"),
        ({"divisor": NAN}, ValueError, "divisor is nan"),
        ({"config": LogitsConfig(block=100)}, ValueError, "block is 100"),
    ],
)
def test_a_bad_argument_is_named(change: dict, error: type[Exception], message: str) -> None:
    arguments = {"y": torch.zeros(2, 9, device="meta"), "vocabulary": 9, "divisor": 24.0} | change
    with pytest.raises(error, match=f"logits: .*{message}"):
        logits(arguments.pop("y"), **arguments, target=Target.parse("sm90"))


def test_a_plan_is_a_program_a_row() -> None:
    assert logits_plan(7, 200_058).grid == (7,)
    assert logits_plan(7, 20).block == 32
