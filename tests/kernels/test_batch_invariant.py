"""Products whose bits for a row do not depend on the other rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import broken
from on_device import on_device

from inkling_kernels import batch_invariant
from inkling_kernels.batch_invariant import SPLIT_KEYS
from inkling_kernels.linear import DEFAULT, LinearConfig, linear, linear_plan, linear_ref
from inkling_kernels.numerics import ExpertWeight
from inkling_kernels.rel_attention_decode import rel_attention_decode
from inkling_kernels.rel_attention_plan import rel_attention_decode_plan
from inkling_kernels.target import TARGETS, Target
from inkling_kernels.testing import guarded, paged_batch, tolerance

Impl = Callable[..., torch.Tensor]


@pytest.fixture(scope="module", params=[linear_ref, linear], ids=["torch", "triton"])
def impl(request: pytest.FixtureRequest, kernel_device: torch.device) -> Impl:
    return request.param if request.param is linear_ref else on_device(request.param, kernel_device)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(0, 70), outs=st.integers(1, 130), columns=st.integers(1, 150),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), seed=st.integers(0, 999),
)  # fmt: skip
def test_core_any_shape(impl: Impl, rows: int, outs: int, columns: int, dtype: torch.dtype, seed: int) -> None:
    """Against float64; what lies around both operands is NaN."""
    x, weight = (guarded(normal(seed + i, n, columns).to(dtype)) for i, n in enumerate((rows, outs)))
    found = impl(x, weight)
    exact, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    assert found.dtype == dtype
    assert ((found.double() - exact).abs() <= tolerance(dtype, size)).all()


def test_core_a_row_has_its_bits_in_any_company(kernel_device: torch.device) -> None:
    """A row alone, first, last and in the middle of 1 to 130 others."""
    run = on_device(linear, kernel_device)
    x, weight = normal(1, 130, 200).bfloat16(), normal(2, 70, 200).bfloat16()
    whole = run(x, weight)
    for begin, end in ((0, 1), (64, 65), (129, 130), (3, 20), (60, 130), (1, 66)):
        assert torch.equal(run(x[begin:end], weight), whole[begin:end])


def test_core_attention_has_splits_of_one_size(kernel_device: torch.device) -> None:
    """The operation takes `SPLIT_KEYS` whatever the bounds, and gives a sequence its bits alone and in a batch."""
    batch = paged_batch(
        [(1, 1100), (2, 40), (1, 2100)], heads=2, kv_heads=1, page=64, dtype=torch.bfloat16, device=kernel_device
    )
    together = batch_invariant.rel_attention(*batch.args, **batch.options, max_query_len=3, max_kv_len=2100)
    expected = rel_attention_decode(*batch.args, **batch.options, max_query_len=3, split_keys=SPLIT_KEYS)
    assert torch.equal(together, expected)
    for index, rows in enumerate((slice(0, 1), slice(1, 3), slice(3, 4))):
        alone = batch.alone(index)
        out = batch_invariant.rel_attention(*alone.args, **alone.options, max_query_len=3)
        assert torch.equal(out, together[rows])
    plan = rel_attention_decode_plan(
        1, 64, 8, 128, 1024, None, max_query_len=1, max_kv_len=65_536, split_keys=SPLIT_KEYS
    )  # fmt: skip
    assert plan.num_splits == 64


def test_experts_have_one_tile_shape(kernel_device: torch.device) -> None:
    """A token among so many that the ordinary plan takes larger tiles, and alone."""
    experts, hidden, width = 2, 32, 32
    w13 = ExpertWeight("bf16", normal(1, experts, 2 * width, hidden).to(kernel_device), layout="interleaved")
    w2 = ExpertWeight("bf16", normal(2, experts, hidden, width).to(kernel_device), layout="plain")
    x, weights = normal(3, 70, hidden).to(kernel_device), normal(4, 70, 1).to(kernel_device)
    ids = torch.arange(70, dtype=torch.int32, device=kernel_device).view(-1, 1) % experts
    whole = batch_invariant.moe_experts(x, w13, w2, ids, weights)
    for row in (0, 17, 69):
        part = slice(row, row + 1)
        assert torch.equal(batch_invariant.moe_experts(x[part], w13, w2, ids[part], weights[part]), whole[part])


@pytest.mark.parametrize("target", [target for target in TARGETS if target.arch != "cpu"], ids=str)
def test_the_tiles_fit_every_chip(target: Target) -> None:
    assert [DEFAULT.problems(target, itemsize=size) for size in (2, 4)] == [(), ()]
    assert "bytes of shared memory" in LinearConfig(256, 256, 256, num_stages=4).problems(target)[0]
    assert len(LinearConfig(block_m=48, block_k=16, num_stages=9).problems(target)) == 3


def test_a_plan_covers_every_tile() -> None:
    assert linear_plan(65, 130).grid == (2 * 3,)
    assert linear_plan(1, 1, dtype=torch.float32).block_k == 32


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(2, 9, dtype=torch.float64)}, TypeError, "x is torch.float64"),
        ({"weight": torch.zeros(2, 8, device="meta")}, ValueError, r"weight has shape \[2, 8\]; expected \[any, 9\]"),
        ({"weight": torch.zeros(2, 9)}, ValueError, "weight is on cpu; expected meta"),
        ({"config": LinearConfig(block_n=48)}, ValueError, "block_n is 48"),
    ],
)
def test_a_bad_argument_is_named(change: dict, error: type[Exception], message: str) -> None:
    arguments = {"x": torch.zeros(2, 9, device="meta"), "weight": torch.zeros(3, 9, device="meta")} | change
    with pytest.raises(error, match=f"linear: .*{message}"):
        linear(**arguments, target=Target.parse("sm90"))


FILES = ("target", "compile_case", "ragged", "linear")
BROKEN = [
    ("the last columns lost", "range(0, columns, BLOCK_K)", "range(0, columns - BLOCK_K, BLOCK_K)"),
    ("columns past the end read", "held = column < columns", "held = column < columns + 1"),
    ("not summed", "tl.dot(x, w, total,", "tl.dot(x, w, total * 0,"),
    ("tiles exchanged", "place % size", "place // size % size"),
    ("the first group alone", "group * GROUP_M + place % size", "place % size"),
]  # fmt: skip


def test_every_broken_copy_is_caught(
    kernel_device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x, weight = guarded(normal(1, 40, 70), 120), guarded(normal(2, 40, 70), 120)
    exact, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    caught = []
    for number, (name, text, instead) in enumerate([("unbroken", "tl.dot", "tl.dot"), *BROKEN]):
        module = broken(tmp_path, f"broken_linear_{number}", FILES, "linear", text, instead)["linear"]
        config = module.LinearConfig(block_m=16, block_n=16, block_k=32, group_m=2)
        found = on_device(module.linear, kernel_device)(x, weight, config=config)
        if not ((found.double() - exact).abs() <= tolerance(found.dtype, size)).all():
            caught.append(name)
    with capsys.disabled():
        print(f"\n{len(caught)} of {len(BROKEN)} broken copies of the fixed product caught")
    assert caught == [name for name, *_ in BROKEN]
