"""Convolution state kept in pages behind a block table, as vLLM allocates it, against the ring."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from on_device import on_device

from inkling_kernels.kv_cache import qkvr_prep, qkvr_prep_ref
from inkling_kernels.short_conv import short_conv, short_conv_ref

Impl = Callable[..., torch.Tensor]
NAN = float("nan")
WIDTH = 4


@pytest.fixture(scope="module", params=["torch", "triton"])
def impls(request: pytest.FixtureRequest, kernel_device: torch.device) -> tuple[Impl, Callable[..., object]]:
    if request.param == "torch":
        return short_conv_ref, qkvr_prep_ref
    return on_device(short_conv, kernel_device), on_device(qkvr_prep, kernel_device)


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@settings(max_examples=15, deadline=None)
@given(data=st.data(), block=st.sampled_from([1, 3, 4, 16, 64]), seed=st.integers(0, 2**32 - 1))
def test_ragged_steps_through_a_block_table(
    impls: tuple[Impl, object], data: st.DataObject, block: int, seed: int
) -> None:
    """Sequences advance by any number of rows; outputs are those of whole sequences, every input row is kept in its
    place, and blocks of nobody stay as they were."""
    rng, channels = np.random.default_rng(seed), 3
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    xs = [torch.from_numpy(rng.standard_normal((n, channels)).astype(np.float32)) for n in lengths]
    weight = torch.from_numpy(rng.standard_normal((channels, WIDTH)).astype(np.float32))
    wide = -(-max(lengths) // block)
    free = rng.permutation(3 * wide + 2)
    tables = torch.full((len(xs), wide + 1), 1 << 20, dtype=torch.int32)
    for b, n in enumerate(lengths):
        used = -(-n // block)
        tables[b, :used] = torch.from_numpy(free[b * wide : b * wide + used].copy()).int()
    state = torch.full((3 * wide + 2, block, channels * 2), NAN)[..., ::2]
    done, outs = [0] * len(xs), [[] for _ in xs]
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        rows = [int(rng.integers(0, min(20, n - d) + 1)) for d, n in zip(done, lengths, strict=True)]
        x = torch.cat([x[d : d + n] for x, d, n in zip(xs, done, rows, strict=True)])
        done = [d + n for d, n in zip(done, rows, strict=True)]
        # Entries behind a sequence's last block are junk in the engine's tables; the check of the launcher reads them.
        live = tables.clamp(max=len(state) - 1)
        y = impls[0](x, weight, state, live, int32([0, *np.cumsum(rows)]), int32(done))
        for out, piece in zip(outs, y.split(rows), strict=True):
            out.append(piece)
    kept = set()
    for b, (x, out) in enumerate(zip(xs, outs, strict=True)):
        whole = short_conv_ref(x, weight, None, int32([0]), int32([0, len(x)]), int32([len(x)]))
        torch.testing.assert_close(torch.cat(out), whole, rtol=1e-5, atol=1e-5)
        for p in range(len(x)):
            torch.testing.assert_close(state[int(tables[b, p // block]), p % block], x[p], rtol=0, atol=0)
            kept.add((int(tables[b, p // block]), p % block))
    others = [state[s, r] for s in range(len(state)) for r in range(block) if (s, r) not in kept]
    assert all(row.isnan().all() for row in others), "wrote where no position lives"


@pytest.mark.parametrize("block", [4, 32])
def test_preparation_with_a_paged_state(impls: tuple[object, Callable[..., object]], block: int) -> None:
    """q, r and the cache are bit for bit those of a ring, in three steps of two sequences."""
    generator = torch.Generator().manual_seed(5)
    heads, kv_heads, dim, d_rel = 2, 1, 32, 16
    columns = (heads + 2 * kv_heads) * dim + heads * d_rel
    weight = torch.randn(2 * kv_heads * dim, WIDTH, generator=generator)
    norms = torch.rand(dim, generator=generator), torch.rand(dim, generator=generator)
    ring, pages = torch.full((2, 3, 2 * kv_heads * dim), NAN), torch.full((20, block, 2 * kv_heads * dim), NAN)
    table = torch.randperm(20, generator=generator)[:16].view(2, 8).int()
    caches = [(torch.zeros(8, 16, kv_heads, dim), torch.zeros(8, 16, kv_heads, dim)) for _ in range(2)]
    done = [0, 0]
    for rows in ([13, 1], [1, 9], [2, 2]):
        x = torch.randn(sum(rows), columns, generator=generator)
        slots = torch.cat([b * 64 + torch.arange(d, d + n) for b, (d, n) in enumerate(zip(done, rows, strict=True))])
        done = [d + n for d, n in zip(done, rows, strict=True)]
        results = [
            impls[1](
                x, weight, *norms, 1e-6, state, owner, int32([0, rows[0], sum(rows)]), int32(done), cache, slots,
                num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, d_rel=d_rel, log_scaling_n_floor=8,
                log_scaling_alpha=0.1,
            )
            for state, owner, cache in ((ring, int32([1, 0]), caches[0]), (pages, table, caches[1]))
        ]  # fmt: skip
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs)


def test_a_block_table_is_checked(impls: tuple[Impl, object]) -> None:
    x, weight, state = torch.zeros(2, 3), torch.zeros(3, WIDTH), torch.zeros(2, 4, 3)
    if impls[0] is short_conv_ref:
        return
    with pytest.raises(ValueError, match="slots has 2; expected rows of state below 2"):
        impls[0](x, weight, state, int32([[0, 2]]), int32([0, 2]), int32([2]))
    with pytest.raises(ValueError, match=r"slots has shape \[2, 1\]; expected \[1, any\]"):
        impls[0](x, weight, state, int32([[0], [1]]), int32([0, 2]), int32([2]))
