"""The reference attention against numpy in float64, a row at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inkling_kernels.rel_attention import rel_attention_ref
from inkling_portable.cpu.attention import rel_attention

pytestmark = pytest.mark.parametrize("impl", [rel_attention_ref, rel_attention], ids=["torch", "numba"])
Impl = Callable[..., torch.Tensor]
NAN = float("nan")


@dataclass
class Case:
    """Sequences with their own keys and values by position; `paged` lays them out as the operation wants them."""

    q: torch.Tensor
    r: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    proj: torch.Tensor
    q_lens: list[int]
    window: int | None

    @property
    def kv_lens(self) -> list[int]:
        return [len(k) for k in self.keys]


def case(
    lengths: Sequence[tuple[int, int]], *, heads: int = 4, kv_heads: int = 2, dim: int = 16, extent: int = 16,
    window: int | None = None, seed: int = 0, dtype: torch.dtype = torch.float32, d_rel: int = 16,
) -> Case:  # fmt: skip
    """`lengths` are (rows, keys) of each sequence."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    rows = sum(n for n, _ in lengths)
    return Case(
        normal(rows, heads, dim) * 4, normal(rows, heads, d_rel), [normal(n, kv_heads, dim) for _, n in lengths],
        [normal(n, kv_heads, dim) for _, n in lengths], normal(d_rel, extent), [n for n, _ in lengths], window,
    )  # fmt: skip


def run(
    impl: Impl, c: Case, *, page: int = 16, seed: int = 0, heads_first: bool = True, spare: int = 3
) -> torch.Tensor:
    """Run `c` over pages full of NaN, shuffled (with an odd seed in order); table entries that no row may need hold a
    page that does not exist."""
    counts = [-(-n // page) for n in c.kv_lens]
    total = sum(counts) + spare
    ids = np.arange(total) if seed % 2 else np.random.default_rng(seed).permutation(total)
    kv_heads, dim = c.keys[0].shape[1:]
    if heads_first:
        pools = [torch.full((kv_heads, len(ids), page, dim), NAN, dtype=c.q.dtype).permute(1, 2, 0, 3) for _ in "kv"]
    else:
        pools = [torch.full((len(ids), page, kv_heads, 2 * dim), NAN, dtype=c.q.dtype)[..., ::2] for _ in "kv"]
    table = torch.full((len(counts), max(counts, default=0) + 2), 10**6, dtype=torch.int32)
    used = 0
    for b, (count, n, rows) in enumerate(zip(counts, c.kv_lens, c.q_lens, strict=True)):
        first = 0 if c.window is None else max(0, n - rows - c.window + 1)
        hidden = first // page
        table[b, :hidden:2] = -1
        table[b, hidden:count] = torch.from_numpy(ids[used + hidden : used + count])
        position = np.arange(first, n)
        at = ids[used + position // page], position % page
        pools[0][at], pools[1][at] = c.keys[b][first:], c.values[b][first:]
        used += count
    cu = torch.tensor([0, *np.cumsum(c.q_lens).tolist()], dtype=torch.int32)
    lens = torch.tensor(c.kv_lens, dtype=torch.int32)
    return impl(c.q, c.r, *pools, c.proj, table, cu, lens, window=c.window, scale=1 / dim)


def oracle(
    c: Case, *, shift: int = 0, wider: int = 0, longer: int = 0, scale: float | None = None, bias: bool = True
) -> np.ndarray:
    """Float64 attention, a row at a time. The keyword arguments break it."""
    q, r, proj = (t.double().numpy() for t in (c.q, c.r, c.proj))
    heads, dim, extent = q.shape[1], q.shape[2], proj.shape[1] + longer
    out, row = np.zeros_like(q), 0
    for rows, keys, values in zip(c.q_lens, c.keys, c.values, strict=True):
        of_head = np.arange(heads) // (heads // keys.shape[1])
        k, v = (t.double().numpy()[:, of_head].swapaxes(0, 1) for t in (keys, values))
        for i in range(rows):
            position = len(keys) - rows + i
            low = 0 if c.window is None else max(0, position - c.window - wider + 1)
            if position >= low:
                score = np.einsum("hjd,hd->hj", k[:, low : position + 1], q[row]) * (
                    1 / dim if scale is None else scale
                )
                distance = position - np.arange(low, position + 1) + shift
                near = (distance >= 0) & (distance < extent)
                if bias:
                    score[:, near] += r[row] @ proj[:, np.minimum(distance[near], proj.shape[1] - 1)]
                p = np.exp(score - score.max(1, keepdims=True))
                out[row] = np.einsum("hj,hjd->hd", p / p.sum(1, keepdims=True), v[:, low : position + 1])
            row += 1
    return out


def check(impl: Impl, c: Case, atol: float = 2e-5, **layout: int | bool) -> None:
    out = run(impl, c, **layout)
    assert out.dtype == c.q.dtype
    np.testing.assert_allclose(out.double().numpy(), oracle(c), rtol=0, atol=atol)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 70)), min_size=1, max_size=4),
    group=st.sampled_from([1, 2, 4, 8, 16]),
    kv_heads=st.integers(1, 2),
    window=st.sampled_from([None, 1, 2, 16, 33]),
    extent=st.sampled_from([1, 7, 16, 64]),
    page=st.sampled_from([1, 5, 16, 64]),
    heads_first=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_ragged_batches(
    impl: Impl, lengths: list[tuple[int, int]], group: int, kv_heads: int, window: int | None, extent: int, page: int,
    heads_first: bool, seed: int,
) -> None:  # fmt: skip
    """Prefill, extension, decoding, verification and padding together; A7: all that may not be read is NaN."""
    lengths = [(rows, rows + before if before else rows) for rows, before in lengths]
    c = case(lengths, heads=group * kv_heads, kv_heads=kv_heads, window=window, extent=extent, seed=seed, dim=8)
    check(impl, c, page=page, seed=seed, heads_first=heads_first)


@pytest.mark.parametrize("window", [None, 1, 128, 200])
@pytest.mark.parametrize("before", [0, 1, 127, 300])
def test_more_rows_than_a_tile(impl: Impl, before: int, window: int | None) -> None:
    c = case([(300, 300 + before), (130, 130)], heads=2, kv_heads=1, dim=8, extent=150, window=window, seed=before)
    check(impl, c, page=32)


@pytest.mark.parametrize("lengths", [[6, 512], [1, 127], [129, 1, 1], [0, 5]])
def test_a_batch_equals_its_sequences_alone(impl: Impl, lengths: list[int]) -> None:
    c = case([(n, n) for n in lengths], heads=16, kv_heads=2, dim=8, extent=256)
    out, row = run(impl, c), 0
    for b, n in enumerate(lengths):
        alone = replace(
            c,
            q=c.q[row : row + n],
            r=c.r[row : row + n],
            keys=c.keys[b : b + 1],
            values=c.values[b : b + 1],
            q_lens=[n],
        )
        torch.testing.assert_close(run(impl, alone), out[row : row + n], rtol=0, atol=2e-6)
        row += n


DISTANCES = [0, 1, 511, 512, 1022, 1023]


@pytest.mark.parametrize(("rows", "keys"), [(1, 1100), (1, 65_536), (300, 556), (9, 1400), (1, 1)])
def test_the_bias_lands_at_its_distance(impl: Impl, rows: int, keys: int) -> None:
    """Head h looks `DISTANCES[h]` back by a bias of 30, and the value it finds tells where it looked.

    The last head's bias would be at distance 1024, outside the extent: it must see the mean of everything.
    """
    heads = len(DISTANCES) + 1
    c = case([(rows, keys)], heads=heads, kv_heads=1, dim=2, extent=1024, d_rel=heads)
    c.q.zero_()
    c.r[:] = torch.eye(heads)
    c.proj.zero_()
    for h, d in enumerate(DISTANCES):
        c.proj[h, d] = 30.0
    c.values[0][:, 0, 0] = torch.arange(keys)
    out = run(impl, c, page=64)[:, :, 0].double().numpy()
    for i in range(rows):
        position = keys - rows + i
        for h, d in enumerate(DISTANCES):
            if d <= position:
                assert out[i, h] == pytest.approx(position - d, abs=1e-4 * max(position, 1))
        np.testing.assert_allclose(out[i, -1], position / 2, rtol=1e-4)


def test_rows_without_keys_are_zero_and_change_nothing(impl: Impl) -> None:
    """Also for rows behind the last sequence."""
    c = case([(1, 40), (3, 9)], window=20)
    alone = run(impl, c)
    padded = case([(1, 40), (1, 0), (3, 9), (2, 0), (0, 0), (0, 7)], window=20)
    rows = [0, 2, 3, 4]
    padded.q[:], padded.r[:] = NAN, NAN
    padded.q[rows], padded.r[rows], padded.proj = c.q, c.r, c.proj
    for at, b in ((0, 0), (2, 1)):
        padded.keys[at], padded.values[at] = c.keys[b], c.values[b]
    out = run(impl, padded)
    assert torch.equal(out[rows], alone)
    assert (out[[1, 5, 6]] == 0).all()
    behind = replace(padded, q_lens=[1, 0, 0, 0, 0, 0])
    out = run(impl, behind)
    assert torch.equal(out[:1], alone[:1])
    assert out.shape == padded.q.shape
    empty = replace(c, q=c.q[:0], r=c.r[:0], q_lens=[0, 0])
    assert run(impl, empty).shape == (0, 4, 16)


@pytest.mark.parametrize("what", ["keys", "values", "q", "r"])
@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("window", [None, 50])
def test_a_poisoned_token_reaches_only_the_rows_that_see_it(
    impl: Impl, what: str, bad: float, window: int | None
) -> None:
    """0 * NaN must not carry it to earlier rows of the step, nor to rows whose window has left it behind."""
    c = case([(200, 200)], heads=2, kv_heads=2, dim=8, window=window, extent=40)
    clean = run(impl, c)
    tensor = getattr(c, what)
    (tensor[0] if isinstance(tensor, list) else tensor)[90, 1] = bad
    out = run(impl, c)
    last = 91 if what in ("q", "r") else 200 if window is None else 90 + window
    untouched = [i for i in range(200) if not 90 <= i < last]
    torch.testing.assert_close(out[untouched], clean[untouched], rtol=0, atol=1e-6)
    torch.testing.assert_close(out[:, 0], clean[:, 0], rtol=0, atol=1e-6)
    if what != "keys":
        assert not out[90:last, 1].isfinite().any()


@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("keys", [514, 1026])
def test_the_seams_of_window_and_extent(impl: Impl, window: int | None, keys: int) -> None:
    """Distances 510..514 and 1022..1026, at the sizes of the released models."""
    check(impl, case([(5, keys)], heads=2, kv_heads=1, dim=8, extent=window or 1024, window=window, seed=keys), page=64)


def test_broken_copies_are_far_from_the_tolerance(impl: Impl) -> None:
    """Each mistake moves the result by many times what the tests above allow."""
    c = case([(40, 90)], heads=4, kv_heads=2, window=32, extent=32)
    full = replace(c, window=None)
    out, out_full = run(impl, c).double().numpy(), run(impl, full).double().numpy()
    signals = {
        "no bias": np.abs(oracle(c, bias=False) - out).max(),
        "bias + 1": np.abs(oracle(c, shift=1) - out).max(),
        "bias - 1": np.abs(oracle(c, shift=-1) - out).max(),
        "window + 1": np.abs(oracle(c, wider=1) - out).max(),
        "window - 1": np.abs(oracle(c, wider=-1) - out).max(),
        "extent + 1": np.abs(oracle(full, longer=1) - out_full).max(),
        "extent - 1": np.abs(oracle(full, longer=-1) - out_full).max(),
        "1 / sqrt(d)": np.abs(oracle(c, scale=0.25) - out).max(),
    }
    for name, signal in signals.items():
        print(f"{name}: signal / tolerance {signal / 2e-5:.0f}")
        assert signal > 100 * 2e-5, name


def test_bfloat16_accumulates_in_float32(impl: Impl) -> None:
    c = case([(30, 200), (1, 150)], dtype=torch.bfloat16, extent=64)
    check(impl, c, atol=2.0**-8 * 2)


@pytest.mark.parametrize("window", [None, 5])
def test_gradients(impl: Impl, window: int | None) -> None:
    """Training: each sequence's own keys are its only page."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(14, 4, 8), (14, 4, 3), (2, 7, 2, 8), (2, 7, 2, 8), (3, 6)]
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    q, r, k, v, proj = leaves
    table, lens = torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([7, 7], dtype=torch.int32)
    cu = torch.tensor([0, 7, 14], dtype=torch.int32)
    out = impl(q, r, k, v, proj, table, cu, lens, window=window, scale=1 / 8)
    seed = torch.randn(out.shape, generator=generator)
    found = torch.autograd.grad(out, leaves, seed)

    q, r, k, v, proj = (leaf.double() for leaf in leaves)
    k, v = (t.repeat_interleave(2, 2) for t in (k, v))
    distance = torch.arange(7)[:, None] - torch.arange(7)
    near = (distance >= 0) & (distance < 6)
    bias = (r.view(2, 7, 4, 3) @ proj).transpose(1, 2).gather(-1, distance.clamp(0, 5).expand(2, 4, 7, 7)) * near
    score = torch.einsum("bihd,bjhd->bhij", q.view(2, 7, 4, 8), k) / 8 + bias
    allowed = (distance >= 0) & (distance < (window or 7))
    p = score.masked_fill(~allowed, -torch.inf).softmax(-1)
    exact = torch.einsum("bhij,bjhd->bihd", p, v).flatten(0, 1)
    torch.testing.assert_close(out, exact.float(), rtol=1e-5, atol=1e-6)
    for a, b in zip(found, torch.autograd.grad(exact, leaves, seed.double()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
