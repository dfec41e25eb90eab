"""Preparation of q, k, v and r, and the cache write, against numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from on_device import on_device

from inkling_kernels.kv_cache import kv_write_ref, qkvr_prep, qkvr_prep_ref
from inkling_portable.cpu.conv import qkvr_prep as cpu_qkvr_prep

writers = pytest.mark.parametrize("impl", [kv_write_ref])
Impl = Callable[..., Any]
NAN = float("nan")
HEADS, KV_HEADS, DIM, D_REL, EPS = 4, 2, 8, 3, 1e-5
Q, KV, R = HEADS * DIM, KV_HEADS * DIM, HEADS * D_REL


@pytest.fixture(scope="module", params=[qkvr_prep_ref, cpu_qkvr_prep, qkvr_prep], ids=["torch", "numba", "triton"])
def impl(request: pytest.FixtureRequest, kernel_device: torch.device) -> Impl:
    """The reference, the CPU's kernel, and the kernel on the tests' device."""
    return on_device(request.param, kernel_device) if request.param is qkvr_prep else request.param


@dataclass
class Weights:
    conv: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor


@dataclass
class Expected:
    """What a whole sequence prepares to, by position."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    r: np.ndarray


def weights_of(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    norms = [torch.rand(DIM, generator=generator) + 0.5 for _ in range(2)]
    return Weights(torch.randn(2 * KV, 4, generator=generator), *norms)


def oracle(qkvr: np.ndarray, weights: Weights, n_floor: int | None, alpha: float, first: int = 0) -> Expected:
    """Float64, position by position; row 0 is at position `first` and nothing lies before it."""
    qkvr = qkvr.astype(np.float64)
    tokens = len(qkvr)

    def convolved(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        past = np.concatenate([np.zeros((3, x.shape[1])), x])
        return x + sum(past[j : j + tokens] * weight[:, j] for j in range(4))

    def normed(x: np.ndarray, weight: torch.Tensor) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight.detach().double().numpy()

    conv = weights.conv.detach().double().numpy()
    q = normed(qkvr[:, :Q].reshape(tokens, HEADS, DIM), weights.q_norm)
    k = normed(convolved(qkvr[:, Q : Q + KV], conv[:KV]).reshape(tokens, KV_HEADS, DIM), weights.k_norm)
    v = convolved(qkvr[:, Q + KV : Q + 2 * KV], conv[KV:]).reshape(tokens, KV_HEADS, DIM)
    r = qkvr[:, Q + 2 * KV :].reshape(tokens, HEADS, D_REL)
    if n_floor is not None:
        position = np.arange(first, first + tokens)
        tau = 1 + alpha * np.log(np.maximum((position + 1) / n_floor, 1))
        q, r = q * tau[:, None, None], r * tau[:, None, None]
    return Expected(q, k, v, r)


def int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts(lens: Sequence[int]) -> torch.Tensor:
    return int32([0, *np.cumsum(lens).tolist()])


def prepare(
    impl: Impl, qkvr: torch.Tensor, weights: Weights, *where: Any, n_floor: int | None = None, alpha: float = 0.1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`where`: state, slots, cu_seqlens, kv_lens, kv_cache, slot_mapping."""
    return impl(
        qkvr, weights.conv, weights.q_norm, weights.k_norm, EPS, *where, num_heads=HEADS, num_kv_heads=KV_HEADS,
        head_dim=DIM, d_rel=D_REL, log_scaling_n_floor=n_floor, log_scaling_alpha=alpha,
    )  # fmt: skip


def pages(count: int, page: int, heads_first: bool) -> torch.Tensor:
    """A poisoned cache, `[P, page, Hkv, D]` seen through one of two memory orders."""
    if heads_first:
        return torch.full((KV_HEADS, count, page, DIM), NAN).permute(1, 2, 0, 3)
    return torch.full((count, page, KV_HEADS, DIM), NAN)


def close(found: torch.Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=2e-5, atol=2e-5)


@settings(max_examples=10, deadline=None)
@given(
    data=st.data(),
    page=st.sampled_from([1, 3, 8, 16]),
    n_floor=st.sampled_from([None, 1, 7, 100]),
    heads_first=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_ragged_steps_into_shuffled_pages(
    impl: Impl, data: st.DataObject, page: int, n_floor: int | None, heads_first: bool, seed: int
) -> None:
    """Every position lands in its own slot with its own position's scaling, and no other slot is written."""
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    rng, weights = np.random.default_rng(seed), weights_of(seed % 97)
    width = Q + 2 * KV + R
    rows_of = [rng.standard_normal((n, width)).astype(np.float32) for n in lengths]
    expected = [oracle(rows, weights, n_floor, 0.3) for rows in rows_of]
    per_sequence = [-(-n // page) for n in lengths]
    ids = rng.permutation(sum(per_sequence) + 2)
    tables = np.split(ids[: sum(per_sequence)], np.cumsum(per_sequence)[:-1])
    cache = tuple(pages(len(ids), page, heads_first) for _ in range(2))
    state = torch.full((5, 3, 2 * KV), NAN)
    slots, done = rng.permutation(5)[: len(lengths)].tolist(), [0] * len(lengths)
    while done != lengths:
        rows = [int(rng.integers(0, min(6, n - d) + 1)) for n, d in zip(lengths, done, strict=True)]
        step = np.concatenate([x[d : d + n] for x, d, n in zip(rows_of, done, rows, strict=True)])
        at = [
            int(table[p // page]) * page + p % page
            for table, d, n in zip(tables, done, rows, strict=True)
            for p in range(d, d + n)
        ]
        # Rows of another producer around the projection, which nobody may read.
        fused = torch.full((len(step), width + 5), NAN)
        fused[:, 2 : 2 + width] = torch.from_numpy(step)
        before = done
        done = [d + n for d, n in zip(done, rows, strict=True)]
        q, r, *_ = prepare(
            impl, fused[:, 2 : 2 + width], weights, state, int32(slots), starts(rows), int32(done), cache,
            torch.tensor(at, dtype=torch.int64), n_floor=n_floor, alpha=0.3,
        )  # fmt: skip
        close(q, np.concatenate([e.q[d:n] for e, d, n in zip(expected, before, done, strict=True)]))
        close(r, np.concatenate([e.r[d:n] for e, d, n in zip(expected, before, done, strict=True)]))
    for table, n, e in zip(tables, lengths, expected, strict=True):
        for p in range(n):
            close(cache[0][int(table[p // page]), p % page], e.k[p])
            close(cache[1][int(table[p // page]), p % page], e.v[p])
    for half in cache:
        assert int(half.isfinite().sum()) == sum(lengths) * KV, "a slot of nobody was written"


@pytest.mark.parametrize("last", [127_998, 127_999, 128_000, 128_001, 999_999])
@pytest.mark.parametrize("rows", [1, 3])
def test_log_scaling_at_its_seam(impl: Impl, last: int, rows: int) -> None:
    """The row's own position decides, and both q and r are scaled; without a floor neither is."""
    weights = weights_of(0)
    qkvr = torch.randn(rows, Q + 2 * KV + R, generator=torch.Generator().manual_seed(1))
    where = (
        torch.zeros(1, 3, 2 * KV), int32([0]), starts([rows]), int32([last + 1]),
        (pages(1, 4, False), pages(1, 4, False)), torch.arange(rows),
    )  # fmt: skip
    q, r, *_ = prepare(impl, qkvr, weights, *where, n_floor=128_000)
    expected = oracle(qkvr.numpy(), weights, 128_000, 0.1, first=last + 1 - rows)
    np.testing.assert_allclose(q.numpy(), expected.q, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(r.numpy(), expected.r, rtol=1e-6)
    plain_q, plain_r, *_ = prepare(impl, qkvr, weights, *where)
    tau = (r[-1] / plain_r[-1]).mean().item()
    assert tau == pytest.approx({127_998: 1, 127_999: 1, 999_999: 1.2056}.get(last, 1), abs=1e-4)
    if last <= 127_999:
        assert torch.equal(q, plain_q)
        assert torch.equal(r, plain_r)
    if last >= 128_000:
        assert not torch.equal(r[-1], plain_r[-1])


@pytest.mark.parametrize("accepted", [0, 1, 2, 5, 8])
def test_rejected_drafts_leave_no_trace(impl: Impl, accepted: int) -> None:
    """Nine rows are verified and some stand; later rows prepare, and the cache holds, as if only those had been."""
    weights = weights_of(8)
    rows = torch.randn(22, Q + 2 * KV + R, generator=torch.Generator().manual_seed(9))
    expected = oracle(rows.numpy(), weights, 7, 0.1)
    cache, state = (pages(8, 4, True), pages(8, 4, True)), torch.full((1, 3 + 8, 2 * KV), NAN)
    wrong = rows[6:15].clone()
    wrong[accepted + 1 :] = NAN
    at = 7 + accepted
    for step, first in ((rows[:6], 0), (wrong, 6), (rows[at : at + 1], at), (rows[at + 1 : at + 4], at + 1)):
        end = first + len(step)
        q, r, *_ = prepare(
            impl, step, weights, state, int32([0]), starts([len(step)]), int32([end]), cache,
            torch.arange(first, end), n_floor=7,
        )  # fmt: skip
        right = min(end, at) - first if step is wrong else len(step)
        close(q[:right], expected.q[first : first + right])
        close(r[:right], expected.r[first : first + right])
    for half, exact in zip(cache, (expected.k, expected.v), strict=True):
        close(half.flatten(0, 1)[: at + 4], exact[: at + 4])


def test_padding_rows_change_nothing(impl: Impl) -> None:
    """Rows of a captured batch beside a live sequence, some behind the last sequence, with slot -1."""
    weights, generator = weights_of(2), torch.Generator().manual_seed(3)
    qkvr = torch.randn(4, Q + 2 * KV + R, generator=generator)
    results = []
    for padded in (False, True):
        cache, state = (pages(2, 4, True), pages(2, 4, True)), torch.full((2, 3, 2 * KV), NAN)
        step = torch.cat([qkvr, torch.full((3, qkvr.shape[1]), NAN)]) if padded else qkvr
        slots, lens, kv_lens = ([1, 0, 0], [4, 1, 0], [4, 0, 0]) if padded else ([1], [4], [4])
        mapping = torch.tensor([5, 6, 7, 0] + [-1] * (len(step) - 4))
        q, r, *_ = prepare(
            impl, step, weights, state, int32(slots), starts(lens), int32(kv_lens), cache, mapping, n_floor=2
        )
        results.append((q[:4], r[:4], *(half.nan_to_num(-7.0) for half in cache), state.nan_to_num(-7.0)))
    for alone, beside in zip(*results, strict=True):
        assert torch.equal(alone, beside)


def test_no_tokens(impl: Impl) -> None:
    cache = (pages(1, 4, False), pages(1, 4, False))
    q, r, *_ = prepare(
        impl, torch.zeros(0, Q + 2 * KV + R), weights_of(0), torch.zeros(1, 3, 2 * KV), int32([0]), starts([0]),
        int32([9]), cache, torch.zeros(0, dtype=torch.int64), n_floor=2,
    )  # fmt: skip
    assert (q.shape, r.shape) == ((0, HEADS, DIM), (0, HEADS, D_REL))
    assert cache[0].isnan().all()


def test_bfloat16_keeps_its_type_and_rounds_where_the_formula_does(impl: Impl) -> None:
    weights = weights_of(4)
    weights.q_norm, weights.k_norm = weights.q_norm.bfloat16(), weights.k_norm.bfloat16()
    qkvr = torch.randn(50, Q + 2 * KV + R, generator=torch.Generator().manual_seed(5)).bfloat16()
    cache = tuple(pages(4, 16, True).bfloat16() for _ in range(2))
    state = torch.zeros(1, 3, 2 * KV, dtype=torch.bfloat16)
    q, r, k, v = prepare(
        impl, qkvr, weights, state, int32([0]), starts([50]), int32([50]), cache, torch.arange(50), n_floor=10
    )
    expected = oracle(qkvr.float().numpy(), weights, 10, 0.1)
    flat = [half.flatten(0, 1)[:50] for half in (k, v)]
    for found, exact, roundings in (
        (q, expected.q, 3),
        (r, expected.r, 1),
        (flat[0], expected.k, 3),
        (flat[1], expected.v, 1),
    ):
        assert found.dtype == torch.bfloat16
        relative = (found.double() - torch.from_numpy(exact)).abs() / torch.from_numpy(np.abs(exact) + 1e-6)
        assert relative.max() <= roundings * 2.0**-8


@pytest.mark.parametrize("impl", [qkvr_prep_ref])
def test_without_a_cache_gradients_flow_through_what_comes_back(impl: Impl) -> None:
    weights, generator = weights_of(6), torch.Generator().manual_seed(7)
    qkvr = torch.randn(2 * 6, Q + 2 * KV + R, generator=generator)
    leaves = [t.requires_grad_() for t in (qkvr, weights.conv, weights.q_norm, weights.k_norm)]
    q, r, k, v = prepare(impl, qkvr, weights, None, int32([0, 1]), starts([6, 6]), int32([6, 6]), None, None, n_floor=3)
    assert k.shape == v.shape == (2, 6, KV_HEADS, DIM)
    for b in range(2):
        expected = oracle(qkvr[b * 6 : b * 6 + 6].detach().numpy(), weights, 3, 0.1)
        for found, exact in (
            (q[b * 6 :][:6], expected.q),
            (r[b * 6 :][:6], expected.r),
            (k[b], expected.k),
            (v[b], expected.v),
        ):
            close(found.detach(), exact)
    seeds = [torch.randn(out.shape, generator=generator) for out in (q, r, k, v)]
    found = torch.autograd.grad((q, r, k, v), leaves, seeds)

    x, conv, q_norm, k_norm = (t.double() for t in leaves)
    x = x.view(2, 6, -1)
    past = torch.cat([x.new_zeros(2, 3, 2 * KV), x[..., Q : Q + 2 * KV]], 1)
    kv = x[..., Q : Q + 2 * KV] + sum(past[:, j : j + 6] * conv[:, j] for j in range(4))

    def normed(y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return y * (y.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight

    tau = (1 + 0.1 * torch.log((torch.arange(1, 7) / 3).clamp(min=1))).double().view(6, 1, 1)
    outs = (
        (normed(x[..., :Q].unflatten(-1, (HEADS, DIM)), q_norm) * tau).flatten(0, 1),
        (x[..., Q + 2 * KV :].unflatten(-1, (HEADS, D_REL)) * tau).flatten(0, 1),
        normed(kv[..., :KV].unflatten(-1, (KV_HEADS, DIM)), k_norm),
        kv[..., KV:].unflatten(-1, (KV_HEADS, DIM)),
    )
    for a, b in zip(found, torch.autograd.grad(outs, leaves, [s.double() for s in seeds]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_projection_of_another_width_is_refused(impl: Impl) -> None:
    where = (None, int32([0]), starts([2]), int32([2]), None, None)
    with pytest.raises(ValueError, match=f"has 75 columns.*need {Q + 2 * KV + R}"):
        prepare(impl, torch.zeros(2, 75), weights_of(0), *where)


@writers
@pytest.mark.parametrize("heads_first", [False, True])
def test_write_follows_the_mapping(impl: Impl, heads_first: bool) -> None:
    x = torch.arange(4 * KV, dtype=torch.float32).view(4, KV_HEADS, DIM)
    cache = pages(3, 4, heads_first)
    impl(x, cache, torch.tensor([11, -1, 0, 6]))
    for row, (page, offset) in ((0, (2, 3)), (2, (0, 0)), (3, (1, 2))):
        assert torch.equal(cache[page, offset], x[row])
    assert int(cache.isfinite().sum()) == 3 * KV
    impl(x[:0], cache, torch.zeros(0, dtype=torch.int64))
    impl(x, cache, torch.full((4,), -1))
    assert int(cache.isfinite().sum()) == 3 * KV
