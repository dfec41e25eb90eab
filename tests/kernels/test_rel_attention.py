"""The prefill kernel of relative attention against a float64 oracle, and against the faults that others had."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from attention_oracle import Exact, count_products, exact_attention, signal
from hypothesis import given, settings
from hypothesis import strategies as st

from inkling_kernels.rel_attention import rel_attention
from inkling_kernels.rel_attention_decode import rel_attention_decode
from inkling_kernels.rel_attention_plan import (
    RelAttentionConfig,
    rel_attention_plan,
)
from inkling_kernels.rel_attention_tile import _widen_fn
from inkling_kernels.testing import BOGUS_PAGE, PagedBatch, paged_batch


@pytest.fixture(autouse=True, scope="module")
def unwritten_outputs_are_nan() -> Iterator[None]:
    """What `torch.empty` returns, so a row that no program writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check(batch: PagedBatch, config: RelAttentionConfig | None = None) -> torch.Tensor:
    out = rel_attention(*batch.args, **batch.options, config=config)
    exact = exact_attention(batch)
    assert out.dtype == batch.q.dtype
    assert signal(out, exact) <= 1, f"error {signal(out, exact):.2f} of the tolerance"
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 20])
def test_core_mixed_batch(kernel_device: torch.device, dtype: torch.dtype, window: int | None) -> None:
    """Prefill, extension, decode, verify and idle sequences in one launch."""
    lengths = [(37, 37), (9, 50), (1, 70), (0, 33), (4, 4)]
    check(paged_batch(lengths, heads=8, kv_heads=2, window=window, dtype=dtype, device=kernel_device, seed=1))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 16])
def test_every_group_size(kernel_device: torch.device, group: int) -> None:
    lengths = [(q, q + 7) for q in range(1, 10, 4)]
    batch = paged_batch(lengths, heads=2 * group, kv_heads=2, dtype=torch.bfloat16, device=kernel_device, seed=group)
    check(batch)
    check(batch, RelAttentionConfig(block_m=64, tokens=16))


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("page", [16, 32, 256])
def test_head_sizes_and_pages(kernel_device: torch.device, head_dim: int, page: int) -> None:
    options = {"heads": 4, "kv_heads": 1, "head_dim": head_dim, "page": page, "window": 30, "extent": 30}
    for head_major in (False, True):
        check(paged_batch([(21, 60)], **options, device=kernel_device, seed=page, head_major=head_major))


LENGTHS = st.one_of(
    st.integers(1, 40).map(lambda n: (n, n)),
    st.tuples(st.integers(1, 30), st.integers(0, 60)).map(lambda x: (x[0], x[0] + x[1])),
    st.integers(1, 60).map(lambda n: (1, n)),
    st.tuples(st.integers(2, 9), st.integers(0, 60)).map(lambda x: (x[0], x[0] + x[1])),
    st.just((0, 5)),
)


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=4),
    window=st.one_of(st.none(), st.integers(1, 70)),
    extent=st.integers(1, 80),
    group=st.sampled_from([1, 2, 4, 6]),
    page=st.sampled_from([16, 64]),
    dtype=st.sampled_from(DTYPES[:2]),
    seed=st.integers(0, 1000),
)
def test_any_ragged_batch(kernel_device: torch.device, lengths, window, extent, group, page, dtype, seed) -> None:
    check(
        paged_batch(
            lengths, heads=group, kv_heads=1, page=page, extent=extent, window=window, dtype=dtype,
            device=kernel_device, seed=seed, head_major=bool(seed % 2),
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    "lengths", [[(6, 6), (40, 40)], [(1, 1), (30, 30)], [(33, 33), (1, 1), (1, 1)], [(0, 0), (5, 5)]]
)
def test_core_a_batch_equals_its_sequences_alone(kernel_device: torch.device, lengths: list[tuple[int, int]]) -> None:
    """NaN lies right behind every tensor, so a row read past the last one would show."""
    batch = paged_batch(lengths, heads=8, kv_heads=1, dtype=torch.bfloat16, device=kernel_device, seed=3)
    out = check(batch)
    for index, (q_len, _) in enumerate(lengths):
        begin = sum(batch.q_lens[:index])
        alone = batch.alone(index)
        torch.testing.assert_close(
            rel_attention(*alone.args, **alone.options), out[begin : begin + q_len], rtol=0, atol=0
        )


@pytest.mark.parametrize(("q_len", "kv_len"), [(20, 20), (30, 56), (1, 600)])
def test_the_bias_sits_at_its_distance(kernel_device: torch.device, q_len: int, kv_len: int) -> None:
    """Head h has a bias of 30 at one distance alone; V holds each key's number in binary, so the output reads as a
    key."""
    distances, extent = [0, 1, 7, 31, 32, 511, 512, 513], 512
    batch = paged_batch([(q_len, kv_len)], heads=8, kv_heads=1, extent=extent, device=kernel_device, seed=4)
    batch.q.zero_()
    batch.r.zero_()
    batch.proj.zero_()
    for head, distance in enumerate(distances):
        batch.r[:, head, head] = 1
        if distance < extent:
            batch.proj[head, distance] = 30
    for position in range(kv_len):
        page, slot = int(batch.block_table[0, position // 16]), position % 16
        bits = [float(position >> bit & 1) for bit in range(32)]
        batch.v_pages[page, slot, 0] = torch.tensor(bits, device=kernel_device)
    out = rel_attention(*batch.args, **batch.options).double().cpu()
    for row in range(q_len):
        position = kv_len - q_len + row
        for head, distance in enumerate(distances):
            if distance < extent and distance <= position:
                read = sum(int(bit > 0.5) << place for place, bit in enumerate(out[row, head]))
                assert read == position - distance, f"row {row}, distance {distance}"
            else:
                counts = torch.tensor([[float(n >> bit & 1) for bit in range(32)] for n in range(position + 1)]).mean(0)
                torch.testing.assert_close(out[row, head], counts.double(), rtol=1e-5, atol=1e-5)


def test_core_visits_what_the_plan_says(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries outside the window name pages that do not exist. In the interpreter the products are counted too: two a
    tile, three where there is a bias."""
    for window, lengths in ((20, [(40, 90), (1, 70)]), (None, [(40, 90), (1, 70)]), (50, [(5, 64)])):
        batch = paged_batch(lengths, heads=4, kv_heads=2, window=window, extent=24, device=kernel_device, seed=5)
        assert window is None or set(batch.block_table[0].tolist()) & {BOGUS_PAGE, -1}
        products = count_products(monkeypatch)
        check(batch)
        plan = rel_attention_plan(len(batch.q), len(lengths), 4, 2, 32, 24, window, dtype=torch.float32)
        work = plan.work(batch.q_lens, batch.kv_lens.tolist())
        assert products is None or len(products) == 2 * work.tiles + work.bias_tiles


def test_core_rows_without_keys_are_zero(kernel_device: torch.device) -> None:
    live = paged_batch([(5, 9)], heads=4, kv_heads=1, dtype=torch.bfloat16, device=kernel_device, seed=6)
    padded = paged_batch(
        [(5, 9), (1, 0), (0, 0), (3, 1)], heads=4, kv_heads=1, dtype=torch.bfloat16, device=kernel_device
    )
    padded.q[:5], padded.r[:5], padded.proj[:] = live.q, live.r, live.proj
    table = torch.zeros_like(padded.block_table)
    table[:, : live.block_table.shape[1]] = live.block_table
    batch = dataclasses.replace(padded, k_pages=live.k_pages, v_pages=live.v_pages, block_table=table)
    out = rel_attention(*batch.args, **batch.options)
    torch.testing.assert_close(out[:5], rel_attention(*live.args, **live.options), rtol=0, atol=0)
    assert not out[5:8].any()
    assert out[8].isfinite().logical_or(out[8].isnan()).all()
    empty = paged_batch([(0, 0)], heads=4, kv_heads=1, device=kernel_device)
    assert rel_attention(*empty.args, **empty.options).shape == (0, 4, 32)


def test_core_padding_behind_the_last_sequence_is_zero(kernel_device: torch.device) -> None:
    batch = paged_batch([(5, 9), (20, 20)], heads=4, kv_heads=1, device=kernel_device, seed=6)
    expected = check(batch)
    batch.cu_seqlens = torch.tensor([0, 5, 7], dtype=torch.int32, device=kernel_device)
    batch.kv_lens[1] = 2
    out = rel_attention(*batch.args, **batch.options)
    torch.testing.assert_close(out[:7], expected[:7], rtol=0, atol=0)
    assert out[7:].eq(0).all()


def test_core_poison_stays_out(kernel_device: torch.device) -> None:
    """All that `paged_batch` leaves NaN is turned into another poison: no bit of the result may follow."""
    batch = paged_batch([(20, 43), (1, 33)], heads=4, kv_heads=1, window=18, dtype=torch.bfloat16, device=kernel_device)
    first = check(batch)
    poisoned = [cache.isnan() for cache in (batch.k_pages, batch.v_pages)]
    for poison in (float("inf"), 7.0):
        for cache, where in zip((batch.k_pages, batch.v_pages), poisoned, strict=True):
            cache[where] = poison
        torch.testing.assert_close(rel_attention(*batch.args, **batch.options), first, rtol=0, atol=0)


def test_nan_in_a_row_stays_in_the_row(kernel_device: torch.device) -> None:
    batch = paged_batch([(20, 20)], heads=4, kv_heads=1, device=kernel_device, seed=8)
    clean = rel_attention(*batch.args, **batch.options)
    batch.q[7, 2, 0] = batch.r[9, 1, 3] = float("nan")
    out = rel_attention(*batch.args, **batch.options)
    hit = out.isnan().any(-1).nonzero().tolist()
    assert hit == [[7, 2], [9, 1]]
    torch.testing.assert_close(out[10:], clean[10:], rtol=0, atol=0)


@pytest.mark.parametrize("window", [None, 20])
def test_core_a_spoilt_value_reaches_the_rows_that_see_it_and_no_other(
    kernel_device: torch.device, window: int | None
) -> None:
    """Rows of one tile, before the value and where it has left the window: 0 * NaN is not theirs."""
    q_len, kv_len = 30, 43
    batch = paged_batch(
        [(q_len, kv_len)], heads=4, kv_heads=1, window=window, dtype=torch.bfloat16, device=kernel_device, seed=3
    )
    clean = rel_attention(*batch.args, **batch.options)
    for position, poison in ((17, float("nan")), (10, float("inf")), (41, -float("inf"))):
        at = int(batch.block_table[0, position // 16]), position % 16, 0, 5
        kept = batch.v_pages[at].clone()
        batch.v_pages[at] = poison
        out = rel_attention(*batch.args, **batch.options)
        batch.v_pages[at] = kept
        rows = torch.arange(kv_len - q_len, kv_len)
        sees = (rows >= position) & (rows - position < (window or kv_len))
        assert torch.equal(out[~sees], clean[~sees])
        assert not out[sees].isfinite().all(-1).any()


def test_the_longest_query_chooses_the_kernel(kernel_device: torch.device) -> None:
    """1 to 9 rows a sequence go to the decode kernel, whatever the lengths on the device; more, or an unknown number,
    to the tiles of prompts. Padding behind the last sequence is 0 either way."""
    batch = paged_batch([(9, 70), (2, 40)], heads=4, kv_heads=1, dtype=torch.bfloat16, device=kernel_device, seed=2)
    tiles, exact = rel_attention(*batch.args, **batch.options), exact_attention(batch)
    decode = rel_attention_decode(*batch.args, **batch.options, max_query_len=9)
    for bound, expected in ((9, decode), (None, tiles), (10, tiles), (64, tiles)):
        out = rel_attention(*batch.args, **batch.options, max_query_len=bound, max_kv_len=70)
        assert torch.equal(out, expected)
        assert signal(out, exact) <= 1
    batch.cu_seqlens = torch.tensor([0, 9, 10], dtype=torch.int32, device=kernel_device)
    assert rel_attention(*batch.args, **batch.options, max_query_len=9)[10:].eq(0).all()
    few = paged_batch([(1, 5), (20, 20)], heads=4, kv_heads=1, device=kernel_device)
    few.cu_seqlens = torch.tensor([0, 1, 2], dtype=torch.int32, device=kernel_device)
    assert rel_attention(*few.args, **few.options, max_query_len=1)[2:].eq(0).all()


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("last", [(2, 700), (20, 50)], ids=["ends generating", "ends reading"])
def test_core_prompts_and_generated_tokens_in_one_step(
    kernel_device: torch.device, window: int | None, last: tuple[int, int]
) -> None:
    """Each sequence is attended by the kernel for as many rows as it has, and only by that; padding is 0."""
    lengths = [(1, 70), (17, 40), (3, 600), (0, 9), (4, 30), last]
    batch = paged_batch(lengths, heads=4, kv_heads=1, window=window, dtype=torch.bfloat16, device=kernel_device, seed=3)
    for tensor in ("q", "r"):
        rows = getattr(batch, tensor)
        setattr(batch, tensor, torch.cat([rows, torch.full_like(rows[:19], torch.nan)]))
    out = rel_attention(*batch.args, **batch.options, decode_query_len=3)
    tiles, few = rel_attention(*batch.args, **batch.options), torch.full_like(out, 7.0)
    rel_attention_decode(*batch.args, **batch.options, max_query_len=3, out=few)
    starts = batch.cu_seqlens.tolist()
    for begin, end in itertools.pairwise(starts):
        assert torch.equal(out[begin:end], (few if end - begin <= 3 else tiles)[begin:end])
        assert end - begin <= 3 or few[begin:end].eq(7).all()
    assert out[starts[-1] :].eq(0).all()
    assert signal(out, exact_attention(batch)) <= 1


@pytest.mark.parametrize(("window", "extent"), [(None, 1024), (512, 512)])
def test_the_seams_of_bias_and_window(kernel_device: torch.device, window: int | None, extent: int) -> None:
    """The last query of a long context: its window and extent end inside key tiles."""
    for kv_len in (510, 513, 514, 1025) if window else (1023, 1026):
        check(
            paged_batch(
                [(2, kv_len)], heads=4, kv_heads=1, window=window, extent=extent, device=kernel_device, seed=kv_len
            )
        )


def fp8(
    batch: PagedBatch, dtype: torch.dtype, per_head: bool
) -> tuple[PagedBatch, tuple[torch.Tensor, torch.Tensor], Exact]:
    """The batch with its cache rounded to fp8 by torch, its scales, and the exact result over the rounded cache."""
    heads = batch.k_pages.shape[2]
    scales = torch.linspace(0.5, 3.0, heads) if per_head else torch.tensor([0.75])
    narrow = [(pages / scales[:, None].to(pages)).to(dtype) for pages in (batch.k_pages, batch.v_pages)]
    back = [
        [(x / scales[:, None].to(x)).to(dtype).double() * scales[:, None] for x in xs]
        for xs in (batch.keys, batch.values)
    ]
    exact = exact_attention(dataclasses.replace(batch, keys=back[0], values=back[1]))
    scales = scales.to(batch.q.device)
    return dataclasses.replace(batch, k_pages=narrow[0], v_pages=narrow[1]), (scales, 2 * scales), exact


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.uint8])
@pytest.mark.parametrize("per_head", [False, True])
def test_core_fp8_cache_is_scaled_in_registers(kernel_device: torch.device, kind: torch.dtype, per_head: bool) -> None:
    batch = paged_batch([(9, 20), (1, 33)], heads=4, kv_heads=2, dtype=torch.bfloat16, device=kernel_device, seed=9)
    stored = torch.float8_e4m3fn if kind == torch.uint8 else kind
    batch, scales, exact = fp8(batch, stored, per_head)
    if kind == torch.uint8:
        batch.k_pages, batch.v_pages = batch.k_pages.view(torch.uint8), batch.v_pages.view(torch.uint8)
    out = rel_attention(*batch.args, **batch.options, kv_scales=scales)
    assert signal(out, Exact(2 * exact.out, 2 * exact.magnitude)) <= 1


@triton.jit
def _widen_kernel(codes_ptr, out_ptr, KIND: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out_ptr + at, _widen_fn(tl.load(codes_ptr + at), KIND, tl.bfloat16))


@pytest.mark.parametrize(("kind", "dtype"), [(1, torch.float8_e4m3fn), (2, torch.float8_e4m3fnuz)])
def test_core_every_fp8_code(kernel_device: torch.device, kind: int, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    out = torch.full((256,), 7.0, dtype=torch.bfloat16, device=kernel_device)
    _widen_kernel[(1,)](codes.to(kernel_device), out, KIND=kind)
    torch.testing.assert_close(out.cpu(), codes.view(dtype).to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)
