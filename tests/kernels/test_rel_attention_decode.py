"""The decode and verify kernel of relative attention against a float64 oracle, split and unsplit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from attention_oracle import Exact, count_products, exact_attention, signal
from hypothesis import given, settings
from hypothesis import strategies as st

from inkling_kernels.rel_attention import rel_attention
from inkling_kernels.rel_attention_decode import rel_attention_decode
from inkling_kernels.rel_attention_plan import DECODE_DEFAULT, RelAttentionDecodeConfig, rel_attention_decode_plan
from inkling_kernels.target import TARGETS, Target
from inkling_kernels.testing import BOGUS_PAGE, PagedBatch, paged_batch


@pytest.fixture(autouse=True, scope="module")
def unwritten_outputs_are_nan() -> Iterator[None]:
    """What `torch.empty` returns, so a row that no program writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


# Splits of one key tile, so that short contexts are split too.
SPLIT = RelAttentionDecodeConfig(min_keys=32)


def run(batch: PagedBatch, **options) -> torch.Tensor:
    options = {"max_query_len": max(batch.q_lens), "config": SPLIT} | options
    return rel_attention_decode(*batch.args, **batch.options, **options)


def check(batch: PagedBatch, **options) -> torch.Tensor:
    out = run(batch, **options)
    exact = exact_attention(batch)
    assert out.dtype == batch.q.dtype
    assert signal(out, exact) <= 1, f"error {signal(out, exact):.2f} of the tolerance"
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("rows", [1, 9])
def test_core_split_and_unsplit(kernel_device: torch.device, dtype: torch.dtype, window: int | None, rows: int) -> None:
    lengths = [(rows, rows + 61), (1, 130), (0, 17), (rows, rows)]
    batch = paged_batch(lengths, heads=8, kv_heads=2, window=window, dtype=dtype, device=kernel_device, seed=rows)
    check(batch)
    check(batch, split_keys=64)
    check(batch, config=DECODE_DEFAULT)


@pytest.mark.parametrize("group", [1, 2, 4, 8, 15, 16])
@pytest.mark.parametrize("rows", [1, 3, 8, 9])
def test_every_group_and_number_of_rows(kernel_device: torch.device, group: int, rows: int) -> None:
    options = {"heads": group, "kv_heads": 1, "window": 33, "extent": 33, "dtype": torch.bfloat16}
    check(paged_batch([(rows, 50)], **options, device=kernel_device, seed=group))


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 90)), min_size=1, max_size=4),
    window=st.one_of(st.none(), st.integers(1, 70)),
    extent=st.integers(1, 80),
    group=st.sampled_from([1, 4, 6]),
    page=st.sampled_from([16, 64]),
    split_keys=st.sampled_from([None, 32, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_any_batch(kernel_device: torch.device, lengths, window, extent, group, page, split_keys, dtype, seed) -> None:
    lengths = [(q, q + past) for q, past in lengths]
    batch = paged_batch(
        lengths, heads=group, kv_heads=1, page=page, extent=extent, window=window, dtype=dtype, device=kernel_device,
        seed=seed, head_major=bool(seed % 2),
    )  # fmt: skip
    check(batch, split_keys=split_keys, max_query_len=max(1, *batch.q_lens))


def test_core_agrees_with_prefill(kernel_device: torch.device) -> None:
    """A verify step equals the same rows of a prefill, up to the rounding of one more sum."""
    batch = paged_batch([(9, 80), (2, 70)], heads=8, kv_heads=1, dtype=torch.float32, device=kernel_device, seed=2)
    torch.testing.assert_close(run(batch), rel_attention(*batch.args, **batch.options), rtol=2e-6, atol=2e-6)


def test_long_context_reads_the_right_key(kernel_device: torch.device) -> None:
    """One query after 65,535 others: head h has a bias of 30 at one distance, V holds each key's number in binary."""
    kv_len, extent = 65_536, 1024
    distances = [0, 1, 511, 512, 1022, 1023, 1024, 1025]
    pages = kv_len // 256
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(3))
    v_pages = torch.empty(pages, 256, 1, 16)
    key = torch.arange(kv_len).view(pages, 256)
    v_pages[order, :, 0] = (key[..., None] >> torch.arange(16) & 1).float()
    r, proj = torch.zeros(1, 8, 16), torch.zeros(16, extent)
    for head, distance in enumerate(distances):
        r[0, head, head] = 1
        if distance < extent:
            proj[head, distance] = 30
    tensors = [torch.zeros(1, 8, 16), r, torch.zeros_like(v_pages), v_pages, proj, order[None].int()]
    tensors += [torch.tensor([0, 1], dtype=torch.int32), torch.tensor([kv_len], dtype=torch.int32)]
    tensors = [x.to(kernel_device) for x in tensors]
    config = RelAttentionDecodeConfig(block_n=128)
    out = rel_attention_decode(*tensors, window=None, scale=1 / 16, max_query_len=1, config=config).cpu()
    for head, distance in enumerate(distances):
        if distance < extent:
            assert sum(int(bit > 0.5) << place for place, bit in enumerate(out[0, head])) == kv_len - 1 - distance
        else:
            torch.testing.assert_close(out[0, head], torch.full((16,), 0.5), rtol=0, atol=1e-4)


@pytest.mark.parametrize("window", [None, 20, 50])
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_visits_what_the_plan_says(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch, window: int | None, rows: int
) -> None:
    """In the interpreter the products are counted: two a tile, one more where there is a bias, two for nine rows."""
    lengths = [(rows, 150), (1, 70), (rows, rows), (0, 40)]
    batch = paged_batch(lengths, heads=4, kv_heads=2, window=window, extent=24, device=kernel_device, seed=rows)
    products = count_products(monkeypatch)
    check(batch)
    plan = rel_attention_decode_plan(
        4, 4, 2, 32, 24, window, max_query_len=rows, max_kv_len=batch.block_table.shape[1] * 16, dtype=torch.float32,
        config=SPLIT,
    )  # fmt: skip
    work = plan.work(batch.q_lens, batch.kv_lens.tolist())
    biases = 2 if plan.extra else 1
    assert products is None or len(products) == 2 * work.tiles + biases * work.bias_tiles


def test_core_padded_rows_are_zero_and_change_nothing(kernel_device: torch.device) -> None:
    """A captured batch of four with two live sequences, the others of one row and no keys, or of no rows."""
    batch = paged_batch(
        [(1, 70), (1, 40), (1, 0), (0, 0)], heads=4, kv_heads=1, dtype=torch.bfloat16, device=kernel_device
    )
    for split_keys in (None, 32):
        out = run(batch, split_keys=split_keys)
        assert not out[2].any()
        for index in (0, 1):
            alone = run(batch.alone(index), split_keys=32)
            if split_keys:
                torch.testing.assert_close(out[index : index + 1], alone, rtol=0, atol=0)
    assert run(paged_batch([(0, 0)], heads=4, kv_heads=1, device=kernel_device), max_query_len=1).shape == (0, 4, 32)


@pytest.mark.parametrize("split_keys", [None, 32])
def test_core_padding_behind_the_last_sequence_is_zero(kernel_device: torch.device, split_keys: int | None) -> None:
    batch = paged_batch([(1, 70), (4, 40)], heads=4, kv_heads=1, device=kernel_device, seed=6)
    config = SPLIT if split_keys else DECODE_DEFAULT
    expected = check(batch, split_keys=split_keys, config=config)
    batch.cu_seqlens = torch.tensor([0, 1, 2], dtype=torch.int32, device=kernel_device)
    batch.kv_lens[1] = 37
    out = run(batch, split_keys=split_keys, config=config, max_query_len=3)
    torch.testing.assert_close(out[:2], expected[:2], rtol=1e-5, atol=1e-6)
    assert out[2:].eq(0).all()


def test_core_poison_stays_out(kernel_device: torch.device) -> None:
    batch = paged_batch([(9, 75), (1, 33)], heads=4, kv_heads=1, window=37, dtype=torch.bfloat16, device=kernel_device)
    first = check(batch)
    poisoned = [cache.isnan() for cache in (batch.k_pages, batch.v_pages)]
    for poison in (float("inf"), 7.0):
        for cache, where in zip((batch.k_pages, batch.v_pages), poisoned, strict=True):
            cache[where] = poison
        torch.testing.assert_close(run(batch), first, rtol=0, atol=0)


def test_nan_in_a_row_stays_in_the_row(kernel_device: torch.device) -> None:
    batch = paged_batch([(3, 70), (1, 80)], heads=4, kv_heads=1, device=kernel_device, seed=8)
    batch.q[1, 2, 0] = float("nan")
    assert run(batch).isnan().any(-1).nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("split_keys", [None, 32])
def test_core_a_spoilt_value_reaches_the_rows_that_see_it_and_no_other(
    kernel_device: torch.device, window: int | None, split_keys: int | None
) -> None:
    """A draft whose value overflows says nothing of the rows before it."""
    batch = paged_batch(
        [(9, 60)], heads=4, kv_heads=1, window=window, dtype=torch.bfloat16, device=kernel_device, seed=3
    )
    clean = run(batch, split_keys=split_keys)
    for position, poison in ((55, float("nan")), (42, float("inf")), (59, -float("inf"))):
        at = int(batch.block_table[0, position // 16]), position % 16, 0, 5
        kept = batch.v_pages[at].clone()
        batch.v_pages[at] = poison
        out = run(batch, split_keys=split_keys)
        batch.v_pages[at] = kept
        rows = torch.arange(51, 60)
        sees = (rows >= position) & (rows - position < (window or 60))
        assert torch.equal(out[~sees], clean[~sees])
        assert not out[sees].isfinite().all(-1).any()


def test_one_split_or_many(kernel_device: torch.device) -> None:
    """A short sequence, alone without a combination and beside a long one with it: equal bits."""
    batch = paged_batch([(2, 40), (1, 200)], heads=2, kv_heads=1, dtype=torch.bfloat16, device=kernel_device, seed=5)
    together = run(batch, split_keys=64, max_query_len=3)[:2]
    alone = run(batch.alone(0), split_keys=64, max_query_len=3, max_kv_len=40)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("size", [2, 8, 33])
@pytest.mark.parametrize("window", [None, 40])
def test_fixed_splits_do_not_see_the_neighbours(kernel_device: torch.device, size: int, window: int | None) -> None:
    """The same sequence alone and last of a batch, with wider tables and other lengths: equal bits."""
    lengths = [(1, 1 + 7 * index) for index in range(size - 1)] + [(1, 100)]
    options = {"heads": 2, "kv_heads": 1, "window": window, "dtype": torch.bfloat16, "device": kernel_device}
    batch = paged_batch([*lengths[:-1], (1, 100)], **options, seed=11)
    together = run(batch, split_keys=64)[-1:]
    alone = batch.alone(size - 1)
    alone.block_table = alone.block_table[:, :7]
    torch.testing.assert_close(run(alone, split_keys=64), together, rtol=0, atol=0)


def test_core_a_captured_launch_serves_other_lengths(kernel_device: torch.device) -> None:
    """The plan follows from shapes and bounds, so one plan serves a batch before and after it has grown."""
    short, long = (
        paged_batch([(1, n), (2, n + 3)], heads=4, kv_heads=1, device=kernel_device, seed=n) for n in (5, 120)
    )
    plans = [
        rel_attention_decode_plan(2, 4, 1, 32, 24, None, max_query_len=2, max_kv_len=160, config=SPLIT)
        for _ in range(2)
    ]
    assert plans[0] == plans[1]
    for batch in (short, long):
        table = torch.full((2, 10), BOGUS_PAGE, dtype=torch.int32, device=kernel_device)
        table[:, : batch.block_table.shape[1]] = batch.block_table
        batch.block_table = table
        check(batch, max_kv_len=160)


@pytest.mark.parametrize(("window", "extent"), [(None, 1024), (512, 512)])
def test_the_seams_of_bias_and_window(kernel_device: torch.device, window: int | None, extent: int) -> None:
    for rows, kv_len in ((1, 512), (1, 513), (2, 1024), (9, 1030)):
        batch = paged_batch(
            [(rows, kv_len)], heads=4, kv_heads=1, window=window, extent=extent, device=kernel_device, seed=kv_len
        )
        check(batch, config=DECODE_DEFAULT)


@pytest.mark.parametrize("target", [target for target in TARGETS if target.vendor != "cpu"], ids=str)
def test_the_plan_fills_the_chip_and_bounds_sliding_layers(target: Target) -> None:
    def plan(batch: int, keys: int, window: int | None = None, rows: int = 1):
        return rel_attention_decode_plan(
            batch, 64, 8, 128, 1024, window, max_query_len=rows, max_kv_len=keys, target=target
        )  # fmt: skip

    long = plan(1, 65_536)
    assert long.num_splits * 8 >= min(2 * target.compute_units, 128 * 8)
    assert long.work([1], [65_536]).tiles == 8 * 65_536 // long.config.block_n
    assert plan(64, 8192).num_splits <= -(-2 * target.compute_units // 512)
    assert plan(1, 200).num_splits == 1
    sliding = plan(1, 1 << 20, window=512, rows=9)
    work = sliding.work([9], [1 << 20])
    assert sliding.num_splits <= 3
    assert work.tiles * DECODE_DEFAULT.block_n <= 8 * (512 + 8 + 2 * DECODE_DEFAULT.block_n)
    assert sliding.workspace_bytes == 4 * sliding.num_splits * 9 * 64 * 130 * (sliding.num_splits > 1)
    for rows in range(1, 10):
        verify = plan(8, 8192, rows=rows)
        assert verify.tokens + verify.extra >= rows
        assert verify.block_m <= 128
        for group in (1, 4, 8, 16):
            assert DECODE_DEFAULT.problems(target, group=group, head_dim=128, rows=rows) == ()


def fp8(batch: PagedBatch, scale: float) -> tuple[PagedBatch, Exact]:
    """The cache rounded to e4m3 at `scale`, and the exact result over the rounded cache."""
    narrow = [(pages / scale).to(torch.float8_e4m3fn) for pages in (batch.k_pages, batch.v_pages)]
    back = [[(x / scale).to(torch.float8_e4m3fn).double() * scale for x in xs] for xs in (batch.keys, batch.values)]
    exact = exact_attention(dataclasses.replace(batch, keys=back[0], values=back[1]))
    return dataclasses.replace(batch, k_pages=narrow[0], v_pages=narrow[1]), exact


@pytest.mark.parametrize("split_keys", [None, 32])
def test_core_fp8_cache_is_scaled_in_registers(kernel_device: torch.device, split_keys: int | None) -> None:
    batch = paged_batch([(1, 70), (4, 33)], heads=4, kv_heads=2, dtype=torch.bfloat16, device=kernel_device, seed=9)
    batch, exact = fp8(batch, 0.5)
    scales = tuple(torch.full((1,), 0.5, device=kernel_device) for _ in range(2))
    assert signal(run(batch, kv_scales=scales, split_keys=split_keys), exact) <= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [({"max_query_len": 10}, "max_query_len is 10; expected 1 to 9"), ({"max_query_len": 0}, "max_query_len is 0"),
     ({"split_keys": 48}, "split_keys is 48; expected a multiple of 32"), ({"split_keys": 0}, "split_keys is 0"),
     ({"target": Target.parse("sm90"), "config": RelAttentionDecodeConfig(block_n=48)}, "block_n is 48"),
     ({"target": Target.parse("sm90"), "config": RelAttentionDecodeConfig(num_stages=9)}, "num_stages is 9")],
)  # fmt: skip
def test_bad_options_are_named(options: dict, message: str) -> None:
    batch = paged_batch([(1, 4)], heads=4, kv_heads=2)
    with pytest.raises(ValueError, match=f"rel_attention_decode: .*{message}"):
        run(batch, **options)


def test_bad_arguments_name_this_operation() -> None:
    batch = paged_batch([(1, 4)], heads=4, kv_heads=2)
    with pytest.raises(ValueError, match="rel_attention_decode: kv_lens is empty and q has 1 rows"):
        run(
            dataclasses.replace(
                batch, block_table=batch.block_table[:0], cu_seqlens=batch.cu_seqlens[:1] * 0, kv_lens=batch.kv_lens[:0]
            )
        )
    batch.kv_lens = batch.kv_lens.long()
    with pytest.raises(TypeError, match=r"rel_attention_decode: kv_lens is torch\.int64"):
        run(batch)
