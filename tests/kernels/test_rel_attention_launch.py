"""What the launchers of relative attention plan for a chip, and what they refuse, before anything runs."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from inkling_kernels.rel_attention import rel_attention
from inkling_kernels.rel_attention_plan import (
    DEFAULT,
    RelAttentionConfig,
    RelAttentionDecodeConfig,
    decode_tile,
    rel_attention_config,
    rel_attention_decode_config,
    rel_attention_decode_plan,
    rel_attention_plan,
)
from inkling_kernels.rel_attention_tile import meta_case
from inkling_kernels.target import TARGETS, Target
from inkling_kernels.testing import PagedBatch, paged_batch

SIZES = [(64, 8, None, 1024), (64, 16, 512, 512), (32, 8, None, 1024), (32, 8, 512, 512)]


@pytest.mark.parametrize(("heads", "kv_heads", "window", "extent"), SIZES)
@pytest.mark.parametrize("target", [target for target in TARGETS if target.vendor != "cpu"], ids=str)
def test_the_plan_visits_few_tiles(heads: int, kv_heads: int, window: int | None, extent: int, target: Target) -> None:
    plan = rel_attention_plan(8192, 1, heads, kv_heads, 128, extent, window, target=target)
    work = plan.work([8192], [8192])
    assert work.tiles <= 1.15 * work.tiles_least
    assert plan.workspace_bytes == 0
    assert plan.grid == (8192 // plan.tokens + 1, kv_heads)


@pytest.mark.parametrize("target", [target for target in TARGETS if target.vendor != "cpu"], ids=str)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_chosen_tile_fits_every_chip(target: Target, itemsize: int) -> None:
    for group in range(1, 17):
        for head_dim in (16, 32, 64, 128):
            facts = {"group": group, "head_dim": head_dim, "itemsize": itemsize}
            assert rel_attention_config(target, **facts).problems(target, **facts) == ()
            assert DEFAULT.problems(target, **facts) == ()


def test_what_does_not_fit_is_refused() -> None:
    large = RelAttentionConfig(block_m=128, block_n=128, tokens=16, num_stages=3)
    for name in ("sm86", "sm120", "gfx942", "gfx1100", "gfx950"):
        (problem,) = large.problems(Target.parse(name), group=8, head_dim=128)
        assert "bytes of shared memory" in problem
    with pytest.raises(ValueError, match="shared memory"):
        rel_attention_plan(64, 1, 64, 8, 128, 1024, None, target=Target.parse("gfx942"), config=large)
    odd = RelAttentionConfig(block_m=48, block_n=8, tokens=32, num_warps=3, num_stages=0)
    assert len(odd.problems(Target.parse("sm90"), group=4, head_dim=64)) == 5


def batch_for_errors() -> PagedBatch:
    return paged_batch([(3, 5), (1, 4)], heads=4, kv_heads=2)


def int64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.long()


BAD = {
    "q": [(lambda x: x.double(), TypeError, "float64"), (lambda x: x[0], ValueError, "3 dimensions"),
          (lambda x: x[:, :3], ValueError, "3 heads over 2"), (lambda x: x[..., :24], ValueError, "head_dim 24")],
    "r": [(lambda x: x.bfloat16(), TypeError, "cast r"), (lambda x: x[:2], ValueError, r"expected \[4, 4, 16\]")],
    "k_pages": [(lambda x: x[:, :8], ValueError, "k_pages"), (lambda x: x.bfloat16(), TypeError, "like q")],
    "v_pages": [(lambda x: x[..., :16], ValueError, "v_pages"), (lambda x: x.half(), TypeError, "v_pages")],
    "proj": [(lambda x: x[:8], ValueError, "d_rel|as q and proj say"), (lambda x: x[:, :0], ValueError, "extent")],
    "block_table": [(int64, TypeError, "int32"), (lambda x: x[:1], ValueError, "1 rows of block_table"),
                    (lambda x: x[:, :0], ValueError, "room for 0 to 0"),
                    (lambda x: x.repeat(1, 2)[:, ::2], ValueError, "stride 2")],
    "cu_seqlens": [(int64, TypeError, "int32"), (lambda x: x[:2], ValueError, "2 cu_seqlens"),
                   (lambda x: x - 1, ValueError, "rise from 0"), (lambda x: x.flip(0), ValueError, "rise from 0"),
                   (lambda x: x + torch.tensor([0, 3, 0], dtype=torch.int32), ValueError, "rise from 0"),
                   (lambda x: x + torch.tensor([0, 0, 1], dtype=torch.int32), ValueError, "at most 4")],
    "kv_lens": [(int64, TypeError, "int32"), (lambda x: -x, ValueError, "negative"),
                (lambda x: x + 2**30, ValueError, "too long"), (lambda x: x[:0], ValueError, "0 kv_lens, 3 cu_seqlens"),
                (lambda x: x.tolist(), TypeError, "torch.Tensor"), (lambda x: x[None], ValueError, "1 dimensions")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "error", "message"), [(n, *rest) for n, rows in BAD.items() for rest in rows]
)
def test_bad_arguments_are_named(name: str, change, error: type[Exception], message: str) -> None:
    batch = batch_for_errors()
    setattr(batch, name, change(getattr(batch, name)))
    with pytest.raises(error, match=f"rel_attention: .*({message})"):
        rel_attention(*batch.args, **batch.options)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"window": 0}, "window is 0"), ({"window": True}, "window is True"), ({"scale": 0.0}, "scale is 0"),
     ({"scale": float("nan")}, "scale is nan"), ({"kv_scales": (torch.ones(1), torch.ones(1))}, "expected None"),
     ({"max_query_len": 2}, "max_query_len is 2 and a sequence has 3"), ({"max_query_len": -1}, "max_query_len is -1"),
     ({"max_kv_len": 33}, "block_table has 2 pages of 16 tokens a sequence; max_kv_len 33 needs 3"),
     ({"kv_scales": (1.0, 1.0)}, "expected None"),
     ({"max_kv_len": 4}, "max_kv_len is 4 and a sequence has 5"), ({"max_kv_len": 8.0}, "max_kv_len is 8.0"),
     ({"decode_query_len": 10}, "decode_query_len is 10; expected 1 to 9"),
     ({"decode_query_len": 0}, "decode_query_len is 0")],
)  # fmt: skip
def test_bad_options_are_named(options: dict, message: str) -> None:
    batch = batch_for_errors()
    with pytest.raises(ValueError, match=f"rel_attention: .*{message}"):
        rel_attention(*batch.args, **batch.options | options)


def test_rows_of_no_sequence_are_refused() -> None:
    batch = batch_for_errors()
    none = dataclasses.replace(
        batch, block_table=batch.block_table[:0], cu_seqlens=batch.cu_seqlens[:1], kv_lens=batch.kv_lens[:0]
    )
    with pytest.raises(ValueError, match="kv_lens is empty and q has 4 rows; expected at least one sequence"):
        rel_attention(*none.args, **none.options)


@pytest.mark.parametrize(
    ("kind", "scales", "error", "message"),
    [(torch.float8_e5m2, (torch.ones(1), torch.ones(1)), TypeError, "k_pages is torch.float8_e5m2"),
     (torch.float8_e4m3fn, None, ValueError, r"expected \(k_scale, v_scale\)"),
     (torch.float8_e4m3fn, torch.ones(2), TypeError, "expected a tuple"),
     (torch.float8_e4m3fn, (1.0, 1.0), TypeError, "k_scale is float"),
     (torch.float8_e4m3fn, (torch.ones(3), torch.ones(3)), ValueError, r"expected float32 \[1\] or \[2\]"),
     (torch.float8_e4m3fn, (torch.ones(4)[::2], torch.ones(2)), ValueError, "k_scale has stride 2")],
)  # fmt: skip
def test_bad_fp8_caches_are_named(kind: torch.dtype, scales: object, error: type[Exception], message: str) -> None:
    batch = batch_for_errors()
    batch.k_pages, batch.v_pages = batch.k_pages.to(kind), batch.v_pages.to(kind)
    with pytest.raises(error, match=f"rel_attention: .*{message}"):
        rel_attention(*batch.args, **batch.options, kv_scales=scales)


def test_checks_read_no_tensor_of_a_device() -> None:
    """On the meta device reading a length would be an error of its own."""
    tensors, scales = meta_case(64, 8, 1024, 64, fp8=True)
    options = {"window": None, "scale": 1 / 128, "kv_scales": scales, "target": Target.parse("sm90")}
    with pytest.raises(ValueError, match="max_kv_len 16384 needs 1024"):
        rel_attention(*tensors, **options, max_kv_len=16_384)
    with pytest.raises(ValueError, match="window is -1"):
        rel_attention(*tensors, **options | {"window": -1})


@pytest.mark.parametrize("target", [target for target in TARGETS if target.vendor != "cpu"], ids=str)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_planned_decode_tile_fits_every_chip(target: Target, itemsize: int) -> None:
    for group, head_dim, rows in itertools.product(range(1, 17), (16, 32, 64, 128), range(1, 10)):
        facts = {"group": group, "head_dim": head_dim, "rows": rows, "itemsize": itemsize}
        for window in (None, 512):
            assert rel_attention_decode_config(target, window=window, **facts).problems(target, **facts) == ()
        anywhere = rel_attention_decode_config(None, window=None, **facts)
        assert anywhere.problems(target, **facts) == ()
        heads, tile = decode_tile(rows, group, itemsize)
        assert group % heads == 0
        assert max(16, rows * heads) <= tile <= (128 if itemsize == 2 else 32)


def test_a_decode_config_that_does_not_fit_is_refused_before_the_launch() -> None:
    """Nine float32 rows in two stages take more than a block of sm120 or a workgroup of gfx950 may have."""
    options = {"max_query_len": 9, "max_kv_len": 64, "dtype": torch.float32}
    deep = RelAttentionDecodeConfig(num_stages=4)
    for name in ("sm86", "sm120", "gfx942", "gfx950"):
        with pytest.raises(ValueError, match="bytes of shared memory"):
            rel_attention_decode_plan(1, 32, 8, 128, 64, None, **options, target=Target.parse(name), config=deep)
