"""The routed experts against numpy in float64, an expert and a token at a time."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_oracle import E2M1, experts_on_device, oracle

from inkling_kernels.moe_gemm import moe_experts, moe_experts_ref
from inkling_kernels.numerics import ExpertWeight
from inkling_portable.cpu.experts import moe_experts as cpu_moe_experts

Impl = Callable[..., torch.Tensor]
NAN = float("nan")


@pytest.fixture(
    scope="module", params=[moe_experts_ref, cpu_moe_experts, moe_experts], ids=["torch", "numba", "triton"]
)
def impl(request: pytest.FixtureRequest, kernel_device: torch.device) -> Impl:
    """The reference, the CPU's kernels, and the kernels on the tests' device."""
    return experts_on_device(request.param, kernel_device) if request.param is moe_experts else request.param


def plain(w13: torch.Tensor, w2: torch.Tensor) -> tuple[ExpertWeight, ExpertWeight]:
    return ExpertWeight("bf16", w13, layout="interleaved"), ExpertWeight("bf16", w2, layout="plain")


def normal(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(0, 30),
    experts=st.integers(1, 9),
    top_k=st.integers(1, 4),
    hidden=st.integers(1, 20),
    width=st.integers(1, 20),
    routing=st.sampled_from(["uniform", "one-hot", "mostly absent", "absent"]),
    seed=st.integers(0, 2**31),
)
def test_any_routing(
    impl: Impl, tokens: int, experts: int, top_k: int, hidden: int, width: int, routing: str, seed: int
) -> None:
    """No tokens, idle experts, all tokens to one expert (twice over), and experts that another rank holds."""
    x, w13, w2, weights = normal(
        seed, (tokens, hidden), (experts, 2 * width, hidden), (experts, hidden, width), (tokens, top_k)
    )
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, experts, (tokens, top_k))
    if routing == "one-hot":
        ids[:] = experts - 1
    elif routing != "uniform":
        ids[rng.random(ids.shape) < (1 if routing == "absent" else 0.8)] = -1
    idle = sorted(set(range(experts)) - set(ids.flatten().tolist()))
    expected = oracle(x.numpy(), w13.numpy(), w2.numpy(), ids, weights.numpy())
    # What nobody was sent to is not read.
    w13[idle], w2[idle] = NAN, NAN
    out = impl(x, *plain(w13, w2), torch.from_numpy(ids).int(), weights)
    assert out.shape == x.shape
    assert out.dtype == torch.float32
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-4, atol=1e-4 * max(1.0, np.abs(expected).max(initial=0)))


@pytest.mark.parametrize("tokens", [15, 16, 17, 64, 65, 255, 256, 257, 600])
def test_block_boundaries(impl: Impl, tokens: int) -> None:
    """One row more than a block, for one expert alone and for all."""
    x, w13, w2, weights = normal(0, (tokens, 4), (3, 4, 4), (3, 4, 2), (tokens, 2))
    for ids in (torch.ones(tokens, 2, dtype=torch.int32), torch.arange(2 * tokens).view(tokens, 2).int() % 3):
        out = impl(x, *plain(w13, w2), ids, weights)
        pick = [0, 1, tokens // 2, tokens - 1]
        expected = oracle(*(a[pick].numpy() if len(a) == tokens else a.numpy() for a in (x, w13, w2, ids, weights)))
        np.testing.assert_allclose(out[pick].numpy(), expected, rtol=1e-4, atol=1e-5)


def indexed(width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One expert whose unit i passes on i: gates are 30, ups are i, and output i reads unit i alone."""
    w13 = torch.zeros(1, 2 * width, 2)
    w13[0, 0::2, 0] = 30.0
    w13[0, 1::2, 1] = torch.arange(width, dtype=torch.float32)
    return torch.tensor([[1.0, 1.0]]), w13, torch.eye(width)[None]


def test_rows_that_tell_their_index(impl: Impl) -> None:
    """A contiguous split of w13 would multiply other rows."""
    x, w13, w2 = indexed(8)
    w2 = w2[:, :2] + w2[:, 6:]
    out = impl(x, *plain(w13, w2), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1))
    torch.testing.assert_close(out, torch.tensor([[30 * (0.0 + 6), 30 * (1.0 + 7)]]))


def test_halves_of_the_width_add_up(impl: Impl) -> None:
    """Two tensor-parallel ranks, each with whole gate and up pairs."""
    x, w13, w2, weights = normal(1, (7, 6), (4, 16, 6), (4, 6, 8), (7, 2))
    ids = torch.arange(14).view(7, 2).int() % 4
    halves = [impl(x, *plain(w13[:, a : a + 8], w2[:, :, a // 2 : a // 2 + 4]), ids, weights) for a in (0, 8)]
    torch.testing.assert_close(sum(halves), impl(x, *plain(w13, w2), ids, weights), rtol=1e-5, atol=1e-5)


def test_ranks_of_experts_add_up(impl: Impl) -> None:
    x, w13, w2, weights = normal(2, (9, 6), (4, 10, 6), (4, 6, 5), (9, 3))
    ids = torch.randint(0, 4, (9, 3), generator=torch.Generator().manual_seed(3)).int()
    parts = []
    for held in ([0, 1], [2, 3], []):
        local = torch.full_like(ids, -1)
        for i, e in enumerate(held):
            local[ids == e] = i
        parts.append(impl(x, *plain(w13[held or [0]], w2[held or [0]]), local, weights))
    assert (parts[2] == 0).all()
    torch.testing.assert_close(sum(parts), impl(x, *plain(w13, w2), ids, weights), rtol=1e-5, atol=1e-5)


def test_neighbours_change_nothing(impl: Impl) -> None:
    """One NaN token beside others, and any token alone."""
    x, w13, w2, weights = normal(4, (12, 8), (5, 12, 8), (5, 8, 6), (12, 2))
    ids = torch.randint(0, 5, (12, 2), generator=torch.Generator().manual_seed(5)).int()
    clean = impl(x, *plain(w13, w2), ids, weights)
    poisoned = x.clone()
    poisoned[3] = NAN
    out = impl(poisoned, *plain(w13, w2), ids, weights)
    others = [t for t in range(12) if t != 3]
    assert torch.equal(out[others], clean[others])
    assert out[3].isnan().all()
    for t in range(12):
        alone = impl(x[t : t + 1], *plain(w13, w2), ids[t : t + 1], weights[t : t + 1])
        torch.testing.assert_close(alone[0], clean[t], rtol=1e-6, atol=1e-5)


def test_bfloat16_leaves_the_range_of_float16_unharmed(impl: Impl) -> None:
    """An expert whose output is 7e4."""
    x, w13, w2 = indexed(8)
    w2 = w2[:, 6:] * 400
    out = impl(
        *(t.bfloat16() for t in (x,)), *plain(w13.bfloat16(), w2.bfloat16()), torch.zeros(1, 1).int(), torch.ones(1, 1)
    )
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), torch.tensor([[72000.0, 84000.0]]), rtol=2**-8, atol=0)


@pytest.mark.parametrize(("format", "apart"), [("nvfp4", False), ("nvfp4", True), ("mxfp4", False)])
def test_packed_weights(impl: Impl, format: str, apart: bool) -> None:
    """Codes and scales made and unpacked here; NVFP4 also with second scales of gate and up apart."""
    experts, hidden, width, tokens = 3, 96, 32, 10
    rng = np.random.default_rng(6)
    block = 16 if format == "nvfp4" else 32
    packed, values = [], []
    for rows, columns in ((2 * width, hidden), (hidden, width)):
        codes = rng.integers(0, 16, (experts, rows, columns)).astype(np.uint8)
        data = torch.from_numpy(codes[..., 0::2] | codes[..., 1::2] << 4)
        if format == "nvfp4":
            scale = rng.uniform(0.2, 2, (experts, rows, columns // block)).astype(ml_dtypes.float8_e4m3fn)
            second = rng.uniform(0.05, 0.1, (experts, 2) if apart and rows == 2 * width else experts).astype(np.float32)
            by_row = second[:, np.arange(rows) % 2] if second.ndim == 2 else np.repeat(second[:, None], rows, 1)
            factor = scale.astype(np.float64) * by_row[..., None]
            stored = torch.from_numpy(scale.view(np.uint8)).view(torch.float8_e4m3fn), torch.from_numpy(second)
        else:
            exponent = rng.integers(121, 126, (experts, rows, columns // block)).astype(np.uint8)
            factor = 2.0 ** (exponent.astype(np.float64) - 127)
            stored = torch.from_numpy(exponent), None
        packed.append(ExpertWeight(format, data, *stored, layout="plain" if packed else "interleaved"))
        values.append(E2M1[codes] * factor.repeat(block, -1))
    x, weights = normal(7, (tokens, hidden), (tokens, 2))
    ids = torch.arange(2 * tokens).view(tokens, 2).int() % experts
    out = impl(x, *packed, ids, weights)
    np.testing.assert_allclose(
        out.numpy(), oracle(x.numpy(), *values, ids.numpy(), weights.numpy()), rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("impl", [moe_experts_ref])
def test_gradients(impl: Impl) -> None:
    x, w13, w2, weights = leaves = normal(8, (6, 5), (3, 8, 5), (3, 5, 4), (6, 2))
    for leaf in leaves:
        leaf.requires_grad_()
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [1, 1], [-1, 0], [2, -1]], dtype=torch.int32)
    seed = torch.randn(6, 5, generator=torch.Generator().manual_seed(9))
    found = torch.autograd.grad(impl(x, *plain(w13, w2), ids, weights), leaves, seed)
    x64, w13_64, w2_64, weights64 = (leaf.double() for leaf in leaves)
    rows = []
    for t, row in enumerate(ids.tolist()):
        total = x64[t] * 0
        for k, e in enumerate(row):
            if e >= 0:
                gate, up = w13_64[e, 0::2] @ x64[t], w13_64[e, 1::2] @ x64[t]
                total = total + weights64[t, k] * (w2_64[e] @ (gate * torch.sigmoid(gate) * up))
        rows.append(total)
    for a, b in zip(found, torch.autograd.grad(torch.stack(rows), leaves, seed.double()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [-2, 3, 256])
def test_an_id_of_no_expert_is_an_error(impl: Impl, bad: int, kernel_device: torch.device) -> None:
    """The kernels' launcher reads ids where it need not wait for them."""
    if impl is not moe_experts_ref and kernel_device.type != "cpu":
        return
    x, w13, w2, weights = normal(10, (2, 4), (3, 4, 4), (3, 4, 2), (2, 1))
    with pytest.raises(ValueError, match=rf"{bad}.*0\.\.2"):
        impl(x, *plain(w13, w2), torch.tensor([[0], [bad]], dtype=torch.int32), weights)


def test_a_weight_in_another_layout_is_refused(impl: Impl) -> None:
    x, w13, w2, weights = normal(11, (2, 4), (3, 4, 4), (3, 4, 2), (2, 1))
    good, ids = plain(w13, w2), torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="w13"):
        impl(x, ExpertWeight("bf16", w13, layout="plain"), good[1], ids, weights)
    with pytest.raises(ValueError, match="w2"):
        impl(x, good[0], ExpertWeight("bf16", w2, layout="interleaved"), ids, weights)
