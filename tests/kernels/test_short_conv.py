"""The ragged short convolution against a numpy loop over whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from on_device import on_device

from inkling_kernels.short_conv import ShortConvConfig, short_conv, short_conv_ref
from inkling_kernels.testing import guarded
from inkling_portable.cpu.conv import short_conv as cpu_short_conv

Impl = Callable[..., torch.Tensor]
NAN = float("nan")


@pytest.fixture(scope="module", params=[short_conv_ref, cpu_short_conv, short_conv], ids=["torch", "numba", "triton"])
def impl(request: pytest.FixtureRequest, kernel_device: torch.device) -> Impl:
    """The reference, the CPU's kernel, and the kernel on the tests' device."""
    return on_device(request.param, kernel_device) if request.param is short_conv else request.param


def oracle(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """One whole sequence `[T, C]` in float64, term by term."""
    x, weight, width = x.astype(np.float64), weight.astype(np.float64), weight.shape[1]
    out = x.copy()
    for t in range(len(x)):
        for j in range(width):
            if (at := t - (width - 1) + j) >= 0:
                out[t] += weight[:, j] * x[at]
    return out


def int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts(lens: Sequence[int]) -> torch.Tensor:
    return int32([0, *np.cumsum(lens).tolist()])


def inputs(seed: int, tokens: int, channels: int = 5, width: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, channels, generator=generator), torch.randn(channels, width, generator=generator)


def poisoned(slots: int, ring: int, channels: int = 5) -> torch.Tensor:
    """State as the allocator hands it out: whatever another sequence left behind."""
    return torch.full((slots, ring, channels), NAN)


def in_pieces(
    impl: Impl, x: torch.Tensor, weight: torch.Tensor, pieces: Sequence[int], state: torch.Tensor, slot: int = 0
) -> torch.Tensor:
    """One sequence, `pieces[i]` rows in step i."""
    outs, at = [], 0
    for n in pieces:
        outs.append(impl(x[at : at + n], weight, state, int32([slot]), starts([n]), int32([at + n])))
        at += n
    return torch.cat(outs)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), width=st.integers(1, 5), extra=st.integers(0, 8), seed=st.integers(0, 2**32 - 1))
def test_ragged_steps_of_any_kind(impl: Impl, data: st.DataObject, width: int, extra: int, seed: int) -> None:
    """Sequences that start, extend, decode and pause together, in shuffled slots of a poisoned state."""
    lengths = data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=4))
    rng = np.random.default_rng(seed)
    channels = 3
    xs = [rng.standard_normal((n, channels)).astype(np.float32) for n in lengths]
    weight = rng.standard_normal((channels, width)).astype(np.float32)
    ring = max(width - 1 + extra, 1)
    state, slots = poisoned(6, ring, channels), rng.permutation(6)[: len(lengths)]
    done, outs = [0] * len(xs), [[] for _ in xs]
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        active = data.draw(st.permutations(range(len(xs))))
        rows = [int(rng.integers(0, min(9, lengths[b] - done[b]) + 1)) for b in active]
        x = np.concatenate([xs[b][done[b] : done[b] + n] for b, n in zip(active, rows, strict=True)])
        done = [d + dict(zip(active, rows, strict=True))[b] for b, d in enumerate(done)]
        y = impl(
            torch.from_numpy(x), torch.from_numpy(weight), state, int32([int(slots[b]) for b in active]), starts(rows),
            int32([done[b] for b in active]),
        )  # fmt: skip
        for b, piece in zip(active, y.split(rows), strict=True):
            outs[b].append(piece.numpy())
    for x, out in zip(xs, outs, strict=True):
        np.testing.assert_allclose(np.concatenate(out), oracle(x, weight), rtol=1e-5, atol=1e-5)
    assert state[[s for s in range(6) if s not in slots]].isnan().all(), "wrote into a slot of nobody"


@pytest.mark.parametrize("ring", [3, 4, 8, 16, 32])
def test_the_ring_is_as_long_as_its_allocation_says(impl: Impl, ring: int) -> None:
    """40 tokens of prompt, then decoding, whatever the block size of the state."""
    x, weight = inputs(0, 60)
    whole = impl(x, weight, None, int32([0]), starts([60]), int32([60]))
    np.testing.assert_allclose(whole.numpy(), oracle(x.numpy(), weight.numpy()), rtol=1e-5, atol=1e-5)
    assert torch.equal(in_pieces(impl, x, weight, [40] + [1] * 20, poisoned(2, ring), 1), whole)


@pytest.mark.parametrize("pieces", [[1030], [1029, 1], [3, 1027], [512, 512, 6], [1] * 8 + [1022]], ids=str)
def test_any_chunking_gives_the_same_bits(impl: Impl, pieces: list[int]) -> None:
    x, weight = inputs(1, 1030)
    whole = impl(x, weight, None, int32([0]), starts([1030]), int32([1030]))
    assert torch.equal(in_pieces(impl, x, weight, pieces, poisoned(1, 3)), whole)


NORM = {"norm_weight": torch.linspace(0.5, 2.0, 40), "eps": 1e-3}


def small(impl: Impl) -> dict[str, Any]:
    """Runs of 16 channels, of which 40 take three, where the implementation cuts channels."""
    return {} if impl in (short_conv_ref, cpu_short_conv) else {"config": ShortConvConfig(norm_channels=16)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_behind_is_that_of_the_sum(impl: Impl, dtype: torch.dtype) -> None:
    """Of the rounded sum, and the sum is what it is without the norm; in a ragged batch on strided views of NaN."""
    x, weight = inputs(12, 31, 40)
    x, residual = guarded(x.to(dtype)), guarded(torch.randn(31, 40).to(dtype))
    norm = {"norm_weight": guarded(NORM["norm_weight"].to(dtype)[:, None])[:, 0], "eps": 1e-3}
    where = int32([2, 0, -1, 1]), starts([1, 9, 20, 0]), int32([1, 30, 20, 0])
    state = torch.randn(3, 11, 40, generator=torch.Generator().manual_seed(13)).to(dtype)
    plain = impl(x, weight, state.clone(), *where, residual)
    kept = state.clone()
    y, normed = impl(x, weight, kept, *where, residual, **norm, **small(impl))
    assert torch.equal(y[:30], plain[:30])
    exact = y.double() / (y.double().square().mean(1, keepdim=True) + 1e-3).sqrt()
    rounded = exact.to(dtype).double() * norm["norm_weight"].double()
    torch.testing.assert_close(normed.double(), rounded, rtol=2e-5 if dtype == torch.float32 else 1.6e-2, atol=0)
    assert (normed.double() == rounded.to(dtype).double()).double().mean() > (0.1 if dtype == torch.float32 else 0.99)
    again = state.clone()
    impl(x, weight, again, *where, residual)
    assert torch.equal(kept, again)


@pytest.mark.parametrize("pieces", [[63, 1], [3, 61], [20, 20, 24], [1] * 8 + [56]], ids=str)
def test_any_chunking_gives_the_same_norm(impl: Impl, pieces: list[int]) -> None:
    x, weight = inputs(14, 64, 40)
    residual = torch.randn(64, 40, generator=torch.Generator().manual_seed(15))
    more = NORM | small(impl)
    whole = impl(x, weight, None, int32([0]), starts([64]), int32([64]), residual, **more)
    state, at = poisoned(1, 3, 40), 0
    for n in pieces:
        rows = slice(at, at + n)
        found = impl(x[rows], weight, state, int32([0]), starts([n]), int32([at + n]), residual[rows], **more)
        assert torch.equal(found[0], whole[0][rows])
        # The CPU's kernel leaves the norm of many rows to torch.
        torch.testing.assert_close(found[1], whole[1][rows], rtol=1e-6 if impl is cpu_short_conv else 0, atol=0)
        at += n


@pytest.mark.parametrize("accepted", range(9))
@pytest.mark.parametrize("prompt", [1, 2, 12])
def test_rejected_drafts_leave_no_trace(impl: Impl, accepted: int, prompt: int) -> None:
    """Nine rows are verified, some drafts stand, and decoding goes on; no row is rolled back."""
    x, weight = inputs(2, prompt + 9 + 12)
    whole = impl(x, weight, None, int32([0]), starts([len(x)]), int32([len(x)]))
    state = poisoned(1, 3 + 8)
    in_pieces(impl, x[:prompt], weight, [prompt], state)
    wrong = x[prompt : prompt + 9].clone()
    wrong[accepted + 1 :] = NAN
    y = impl(wrong, weight, state, int32([0]), starts([9]), int32([prompt + 9]))
    at = prompt + 1 + accepted
    assert torch.equal(y[: 1 + accepted], whole[prompt:at])
    for n in (1, 3, 1, 1):
        y = impl(x[at : at + n], weight, state, int32([0]), starts([n]), int32([at + n]))
        assert torch.equal(y, whole[at : at + n])
        at += n


def test_neighbours_of_other_lengths_change_nothing(impl: Impl) -> None:
    """5 and 40 rows in one batch, an idle sequence between them, against each alone."""
    x, weight = inputs(3, 45)
    state = poisoned(3, 3)
    y = impl(x, weight, state, int32([2, 1, 0]), starts([5, 0, 40]), int32([5, 7, 40]))
    for part, slot in ((x[:5], 2), (x[5:], 0)):
        alone = poisoned(3, 3)
        out = impl(part, weight, alone, int32([slot]), starts([len(part)]), int32([len(part)]))
        assert torch.equal(out, y[:5] if slot == 2 else y[5:])
        assert torch.equal(alone[slot], state[slot])
    assert state[1].isnan().all()


@pytest.mark.parametrize("slot", [-1, 0, 1])
def test_padding_rows_neither_disturb_nor_enter_a_state(impl: Impl, slot: int) -> None:
    """Rows of a captured batch that belong to no token (`kv_len` 0), whatever slot they name."""
    x, weight = inputs(4, 8)
    state = poisoned(2, 3)
    impl(x[:5], weight, state, int32([0]), starts([5]), int32([5]))
    alone = state.clone()
    expected = impl(x[5:6], weight, alone, int32([0]), starts([1]), int32([6]))
    padded = torch.cat([x[5:6], torch.full((2, 5), NAN)])
    y = impl(padded, weight, state, int32([0, slot, slot]), starts([1, 1, 1]), int32([6, 0, 0]))
    assert y.shape == padded.shape
    assert torch.equal(y[:1], expected)
    assert torch.equal(state[0], alone[0])
    assert state[1].isnan().all()


def test_slot_minus_one_and_rows_behind_the_last_sequence(impl: Impl) -> None:
    """A sequence without state starts from nothing and leaves nothing; rows of no sequence disturb nobody."""
    x, weight = inputs(5, 9)
    x[7:] = NAN
    state = torch.zeros(1, 3, 5)
    y = impl(x, weight, state, int32([-1]), starts([7]), int32([30]), residual=torch.ones(9, 5))
    assert y.shape == (9, 5)
    np.testing.assert_allclose(y[:7].numpy(), oracle(x[:7].numpy(), weight.numpy()) + 1, rtol=1e-5, atol=1e-5)
    assert (state == 0).all()


def test_no_tokens_at_all(impl: Impl) -> None:
    x, weight = inputs(5, 0)
    state = torch.zeros(1, 3, 5)
    assert impl(x, weight, state, int32([0]), starts([0]), int32([4])).shape == (0, 5)
    assert impl(x, weight, None, int32([]), starts([]), int32([]), residual=x).shape == (0, 5)
    assert (state == 0).all()


@settings(max_examples=25, deadline=None)
@given(tokens=st.integers(1, 300), seed=st.integers(0, 2**32 - 1))
def test_the_residual_may_be_the_input_itself(impl: Impl, tokens: int, seed: int) -> None:
    """Nothing is read after it was written, and the operands stay as they were."""
    x, weight = inputs(seed, tokens)
    apart = impl(x.clone(), weight, poisoned(1, 3), int32([0]), starts([tokens]), int32([tokens]), residual=x.clone())
    before = x.clone()
    assert torch.equal(impl(x, weight, poisoned(1, 3), int32([0]), starts([tokens]), int32([tokens]), x), apart)
    assert torch.equal(x, before)
    np.testing.assert_allclose(
        apart.numpy(), oracle(x.numpy(), weight.numpy()) + x.double().numpy(), rtol=1e-5, atol=1e-5
    )


def test_a_slice_of_the_fused_product_into_a_slice_of_a_larger_state(impl: Impl) -> None:
    """Neither `x` nor the state need be contiguous, and what lies around them is neither read nor written."""
    x, weight = inputs(6, 20)
    fused, large = torch.full((20, 13), NAN), torch.full((4, 9, 11), NAN)
    fused[:, 4:9] = x
    state = large[1:3, 2:7, 3:8]
    whole = impl(x, weight, None, int32([0]), starts([20]), int32([20]))
    outs = [impl(fused[at : at + 10, 4:9], weight, state, int32([1]), starts([10]), int32([at + 10])) for at in (0, 10)]
    assert torch.equal(torch.cat(outs), whole)
    assert torch.equal(state[1].sort(0).values, x[15:].sort(0).values)
    assert int(large.isfinite().sum()) == 5 * 5
    assert fused[:, :4].isnan().all()


def test_the_state_does_not_grow_with_the_batch(impl: Impl) -> None:
    """Three rows a sequence are enough for any number of rows in a step."""
    x, weight = inputs(7, 700)
    state = poisoned(2, 3)
    y = impl(x, weight, state, int32([1, 0]), starts([300, 400]), int32([300, 400]))
    assert torch.equal(torch.roll(state[1], -(300 % 3), 0), x[297:300])
    assert torch.equal(torch.roll(state[0], -(400 % 3), 0), x[697:])
    np.testing.assert_allclose(y[300:].numpy(), oracle(x[300:].numpy(), weight.numpy()), rtol=1e-5, atol=1e-5)


def test_bfloat16_rounds_once_before_the_residual(impl: Impl) -> None:
    x, weight = inputs(8, 64, 16)
    x = x.bfloat16()
    residual = torch.randn(64, 16, generator=torch.Generator().manual_seed(9)).bfloat16()
    state = torch.full((1, 3, 16), NAN, dtype=torch.bfloat16)
    y = impl(x, weight, state, int32([0]), starts([64]), int32([64]), residual)
    exact = torch.from_numpy(oracle(x.double().numpy(), weight.numpy()))
    expected = (exact.bfloat16().double() + residual.double()).bfloat16()
    assert y.dtype == torch.bfloat16
    # The float32 sum may fall on the other side of a rounding boundary than the float64 one, rarely.
    assert (y == expected).double().mean() > 0.995
    assert (y == (exact + residual.double()).bfloat16()).double().mean() < 0.95
    decoded = impl(x[:1], weight, state, int32([0]), starts([1]), int32([65]))
    tail = torch.cat([x[-3:], x[:1]]).double().numpy()
    torch.testing.assert_close(
        decoded[0].double(), torch.from_numpy(oracle(tail, weight.numpy())[3]), rtol=8e-3, atol=0
    )


@pytest.mark.parametrize("impl", [short_conv_ref])
def test_gradients(impl: Impl) -> None:
    x, weight = inputs(10, 12)
    residual, seed = torch.randn_like(x), torch.randn_like(x)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, residual)]
    found = torch.autograd.grad(
        impl(x, weight, None, int32([0, 1]), starts([6, 6]), int32([6, 6]), residual), leaves, seed
    )
    rows = x.double().view(2, 6, 5)
    past = torch.cat([rows.new_zeros(2, 3, 5), rows], 1)
    exact = rows + sum(past[:, j : j + 6] * weight.double()[:, j] for j in range(4))
    expected = torch.autograd.grad(exact.view(12, 5) + residual.double(), leaves, seed.double())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_ring_that_is_too_short_is_refused(impl: Impl) -> None:
    x, weight = inputs(11, 2)
    with pytest.raises(ValueError, match="keeps 2 rows a sequence; a width of 4 needs 3"):
        impl(x, weight, poisoned(1, 2), int32([0]), starts([2]), int32([2]))
