"""The references with an fp8 cache: the bytes that ml_dtypes gives, those that the kernel writes, and what is read."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import torch
from attention_oracle import exact_attention, signal
from on_device import on_device

from inkling_kernels.fp8 import fp8_ref
from inkling_kernels.kv_cache import qkvr_prep, qkvr_prep_ref
from inkling_kernels.rel_attention import rel_attention_ref
from inkling_kernels.testing import PagedBatch, paged_batch

KINDS = {torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn, torch.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_rounding_of_bfloat16_and_between(kind: torch.dtype) -> None:
    bits = np.arange(0, 1 << 32, 40_503, dtype=np.uint64).astype(np.uint32)
    x = np.concatenate([bits.view(np.float32), (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)])
    largest = float(ml_dtypes.finfo(KINDS[kind]).max)
    nan = np.isnan(x)
    expected = np.where(nan, 0, np.clip(x, -largest, largest)).astype(np.float32).astype(KINDS[kind]).view(np.uint8)
    found = fp8_ref(torch.from_numpy(x), kind).numpy()
    np.testing.assert_array_equal(found[~nan], expected[~nan])
    assert (found[nan] == (0x7F if kind == torch.float8_e4m3fn else 0x80)).all()


def prepared(impl, kind: torch.dtype, scales: torch.Tensor) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    heads, kv_heads, dim = 2, 2, 16
    qkvr = torch.randn(13, (heads + 2 * kv_heads) * dim + heads * 16, generator=generator).bfloat16()
    qkvr[:, (heads + kv_heads) * dim :] *= 400
    qkvr[4, (heads + kv_heads) * dim + 3] = float("nan")
    pages = [torch.full((4, 4, kv_heads, dim), 7, dtype=torch.uint8).view(kind) for _ in range(2)]
    taps = torch.randn(2 * kv_heads * dim, 4, generator=generator)
    where = (torch.tensor(values, dtype=torch.int32) for values in ([0, 1], [0, 9, 12], [9, 5]))
    slots = torch.tensor([0, 1, 2, 3, 9, 8, -1, 10, 11, 4, 5, 6, -1])
    return impl(
        qkvr, taps, torch.ones(dim).bfloat16(), torch.ones(dim).bfloat16(), 1e-6,
        torch.zeros(2, 3, 2 * kv_heads * dim).bfloat16(), *where, tuple(pages), slots, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=dim, d_rel=16, log_scaling_n_floor=None, log_scaling_alpha=0.1,
        kv_scales=(scales, 3 * scales),
    )  # fmt: skip


@pytest.mark.parametrize("scales", [[0.7], [0.01, 2.0]], ids=["tensor", "head"])
@pytest.mark.parametrize("kind", [*KINDS, torch.uint8], ids=str)
def test_the_kernel_writes_the_same_bytes(kernel_device: torch.device, kind: torch.dtype, scales: list[float]) -> None:
    ours = prepared(qkvr_prep_ref, kind, torch.tensor(scales))
    theirs = prepared(on_device(qkvr_prep, kernel_device), kind, torch.tensor(scales))
    for mine, other in zip(ours[2:], theirs[2:], strict=True):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))
    assert (ours[3].view(torch.uint8) != 7).any()


def packed(batch: PagedBatch, kind: torch.dtype, scale: torch.Tensor) -> tuple[PagedBatch, PagedBatch]:
    """A batch whose pages are fp8, and one with the values that they stand for."""
    stored = [fp8_ref(pages / scale[:, None], kind).view(kind) for pages in (batch.k_pages, batch.v_pages)]
    known = [[fp8_ref(x / scale[:, None], kind).view(kind).float() * scale[:, None] for x in each]
             for each in (batch.keys, batch.values)]  # fmt: skip
    narrow = dataclasses.replace(batch, k_pages=stored[0], v_pages=stored[1])
    return narrow, dataclasses.replace(batch, keys=known[0], values=known[1])


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("lengths", [[(7, 20), (1, 33)], [(1, 20), (1, 33)]], ids=["rows", "single"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_attention_reads_what_the_bytes_stand_for(
    kind: torch.dtype, lengths: list[tuple[int, int]], window: int | None
) -> None:
    scale = torch.tensor([0.05, 0.25])
    batch = paged_batch(lengths, heads=4, kv_heads=2, window=window, seed=5, unused_pages=(0, 0))
    narrow, exact = packed(batch, kind, scale)
    out = rel_attention_ref(*narrow.args, **narrow.options, kv_scales=(scale, scale))
    assert signal(out, exact_attention(exact)) <= 1


def test_scales_without_a_cache_are_refused() -> None:
    index = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="kv_scales is given without kv_cache"):
        qkvr_prep_ref(
            torch.zeros(1, 80), torch.zeros(32, 4), torch.ones(16), torch.ones(16), 1e-6, None, index[:1], index,
            index[1:], None, None, num_heads=1, num_kv_heads=1, head_dim=16, d_rel=32, log_scaling_n_floor=None,
            log_scaling_alpha=0.1, kv_scales=(torch.ones(1), torch.ones(1)),
        )  # fmt: skip
