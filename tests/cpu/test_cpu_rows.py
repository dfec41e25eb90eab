"""What the CPU kernels promise beside being right: bits that depend on a token alone, and who runs what."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cpu_cases import CASES, int32, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from inkling_kernels.numerics import ExpertWeight
from inkling_kernels.testing import paged_batch
from inkling_portable import LLM, SamplingParams
from inkling_portable.cpu import attention, conv, experts, packed, rows, tiles
from inkling_portable.llm import default_model

MODULES = {module.__name__.rpartition(".")[2]: module for module in (tiles, packed, rows, conv, attention, experts)}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
Op = Callable[[torch.Tensor], torch.Tensor]


def row_ops(dtype: torch.dtype) -> dict[str, Op]:
    """Operations on rows `[T, 48]`, their other arguments fixed."""
    weight, scale = normal(1, 30, 48).to(dtype), normal(2, 48).to(dtype)
    router = normal(5, 10), torch.ones(1)
    gated = (ExpertWeight("bf16", normal(3, 10, 22, 48).to(dtype), layout="interleaved"),
             ExpertWeight("bf16", normal(4, 10, 48, 11).to(dtype)))  # fmt: skip

    def routed(x: torch.Tensor) -> torch.Tensor:
        return torch.cat(rows.routing(x.float()[:, :12], *router, top_k=3, route_scale=2.0), 1)

    def expert(x: torch.Tensor) -> torch.Tensor:
        ids, weights, _ = rows.routing(x.float()[:, :12], *router, top_k=3, route_scale=2.0)
        return experts.moe_experts(x, *gated, ids, weights)

    return {
        "linear": lambda x: rows.linear(x, weight),
        "rms_norm": lambda x: rows.rms_norm(x, scale, 1e-5),
        "silu_mul": rows.silu_mul,
        "routing": routed,
        "moe_experts": expert,
    }


@DTYPES
@pytest.mark.parametrize("op", ["linear", "rms_norm", "silu_mul", "routing", "moe_experts"])
def test_a_token_has_the_same_bits_in_any_company_and_keeps_its_nan_to_itself(op: str, dtype: torch.dtype) -> None:
    call = row_ops(dtype)[op]
    x = normal(8, 11, 48).to(dtype)
    together, alone = call(x), torch.cat([call(row[None]) for row in x])
    assert torch.equal(together, alone)
    for bad in (float("nan"), float("inf")):
        x[4] = bad
        spoilt = call(x)
        others = torch.arange(11) != 4
        assert torch.equal(spoilt[others], together[others])
        # Routing has weights for infinite logits: a sigmoid of 1.
        assert not spoilt[4].isfinite().all() or (op == "routing" and bad == float("inf"))


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 70)), min_size=1, max_size=5),
    group=st.sampled_from([1, 4, 5]), window=st.sampled_from([None, 1, 30]), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_sequence_attends_with_the_same_bits_alone(
    lengths: list[tuple[int, int]], group: int, window: int | None, seed: int
) -> None:
    sizes: dict[str, Any] = {"heads": 2 * group, "kv_heads": 2, "head_dim": 16, "extent": 20, "window": window}
    batch = paged_batch(lengths, **sizes, seed=seed)
    out = attention.rel_attention(*batch.args, **batch.options)
    assert out.isfinite().all()
    for index, part in enumerate(out.split(batch.q_lens)):
        one = batch.alone(index)
        assert torch.equal(attention.rel_attention(*one.args, **one.options), part)


@pytest.mark.parametrize("op", ["linear", "rel_attention", "moe_experts"])
def test_threads_change_no_bit(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same case with the work in one part and in several."""
    found: list[list[torch.Tensor]] = []
    name = {"linear": "rows", "rel_attention": "attention", "moe_experts": "experts"}[op]
    call = getattr(MODULES[name], op)
    for parts in (1, 3):
        outs: list[torch.Tensor] = []

        def kept(*args: Any, outs: list[torch.Tensor] = outs, **options: Any) -> torch.Tensor:
            outs.append(call(*args, **options))
            return outs[-1]

        monkeypatch.setattr(MODULES[name], "parts_of", lambda size, least, parts=parts: parts)
        holder = type("Holder", (), {op: staticmethod(kept)})
        assert CASES[op]({**MODULES, name: holder}) < 1  # type: ignore[dict-item]
        found.append(outs)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_parts_follow_torchs_threads_and_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_most_threads", lambda: 2)
    monkeypatch.setattr(tiles.numba, "set_num_threads", lambda parts: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert [tiles.parts_of(size, 100) for size in (0, 150, 250, 900)] == [1, 1, 2, 2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert tiles.parts_of(900, 100) == 1


@njit
def _each(function, out, values):
    for i in range(values.size):
        out[i] = function(values[i])


def test_the_exponential() -> None:
    exp = tiles.exp_fn
    x = np.concatenate([np.linspace(-87.2, 88.2, 200_001), [0, -0.0, 1e-30]]).astype(np.float32)
    out = np.empty_like(x)
    _each(exp, out, x)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(out - exact) / np.spacing(exact.astype(np.float32))).max() < 2
    edges = np.array([-np.inf, -200, 200, np.inf, np.nan], np.float32)
    out = np.empty_like(edges)
    _each(exp, out, edges)
    np.testing.assert_array_equal(out, [0, 0, np.inf, np.inf, np.nan])


def test_bfloat16_rounds_as_torch_does() -> None:
    """Through a projection by 1 and a norm's weight of 1: every kind of float32 at the edges of rounding."""
    bits = np.concatenate([np.arange(0, 1 << 32, 65_521, dtype=np.uint32), np.arange(0x7F7F0000, 0x7F810000, 127)])
    values = torch.from_numpy(bits.astype(np.uint32).view(np.float32))
    out = torch.empty(len(values), dtype=torch.bfloat16)
    _store(tiles.LIKE[torch.bfloat16], out.data_ptr(), values.numpy())
    torch.testing.assert_close(out, values.bfloat16(), rtol=0, atol=0, equal_nan=True)
    back = np.empty(len(values), np.float32)
    _load(back, tiles.LIKE[torch.bfloat16], out.data_ptr())
    np.testing.assert_array_equal(back, out.float().numpy())


_WRITE, _READ = tiles.write_fn, tiles.read_fn


@njit
def _store(like, address, values):
    _WRITE(like, address, values)


@njit
def _load(to, like, address):
    _READ(to, like, address)


def test_the_largest_of_an_array() -> None:
    largest, x = tiles.largest_fn, normal(1, 100).numpy()

    @njit
    def find(values):
        return largest(values)

    assert find(x) == x.max()
    assert find(-np.abs(x)) == -np.abs(x).min()
    assert find(np.full(5, -np.inf, np.float32)) == -np.inf
    x[30] = np.nan
    assert np.isnan(find(x))


# Who runs what.


@DTYPES
def test_decoding_calls_no_reference(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LLM(default_model(), dtype=str(dtype).removeprefix("torch."), max_model_len=128)
    for module in (rows, conv, attention, experts):
        for name in [name for name in vars(module) if name.endswith("_ref")]:
            monkeypatch.setattr(module, name, lambda *args, **options: pytest.fail("a reference was called"))
    output = model.generate("def f(x):", SamplingParams(max_tokens=6, temperature=0))[0]
    assert len(output.outputs[0].token_ids) == 6


def test_many_rows_are_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    for name in ("linear", "rms_norm", "silu_mul", "routing"):
        real = getattr(rows, f"{name}_ref")
        monkeypatch.setattr(
            rows, f"{name}_ref", lambda *a, real=real, name=name, **o: (called.append(name), real(*a, **o))[1]
        )
    ops = row_ops(torch.float32)
    for count in (tiles.FEW, tiles.FEW + 1):
        called.clear()
        for name in ("linear", "rms_norm", "silu_mul", "routing"):
            ops[name](normal(1, count, 48))
        assert called == ([] if count == tiles.FEW else ["linear", "rms_norm", "silu_mul", "routing"])


def test_gradients_flow() -> None:
    """With and without recording the values agree, and what is recorded has the gradient of the formula."""
    x, weight = normal(1, 3, 48).requires_grad_(), normal(2, 5, 48)
    y = rows.linear(x, weight)
    y.sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, -1))
    torch.testing.assert_close(y.detach(), rows.linear(x.detach(), weight))
    for name, op in row_ops(torch.float32).items():
        recorded = op(x)
        assert recorded.requires_grad, name
        with torch.no_grad():
            torch.testing.assert_close(op(x), recorded.detach(), rtol=1e-4, atol=1e-4)
    kernel = normal(3, 48, 4).requires_grad_()
    assert conv.short_conv(x.detach(), kernel, None, int32(0), int32(0, 3), int32(3)).requires_grad


def test_a_page_that_does_not_exist_is_an_error() -> None:
    batch = paged_batch([(1, 40)], heads=2, kv_heads=2, head_dim=16)
    batch.block_table[0, 1] = 10**6
    with pytest.raises(IndexError):
        attention.rel_attention(*batch.args, **batch.options)


@pytest.mark.parametrize("bound", [{"max_query_len": 1}, {"max_kv_len": 39}])
def test_a_bound_that_does_not_hold_is_an_error(bound: dict[str, int]) -> None:
    batch = paged_batch([(2, 40)], heads=2, kv_heads=2, head_dim=16)
    (name,) = bound
    with pytest.raises(ValueError, match=f"{name} is {bound[name]} and a sequence has {bound[name] + 1}"):
        attention.rel_attention(*batch.args, **batch.options, **bound)
    attention.rel_attention(*batch.args, **batch.options, **{name: bound[name] + 1})


def test_ids_and_slots_out_of_range_are_errors() -> None:
    gated = ExpertWeight("bf16", normal(1, 4, 6, 8), layout="interleaved"), ExpertWeight("bf16", normal(2, 4, 8, 3))
    for bad in (-2, 4):
        with pytest.raises(ValueError, match=r"ids run from .* expected 0\.\.3"):
            experts.moe_experts(normal(3, 1, 8), *gated, int32(1, bad)[None], torch.ones(1, 2))
    with pytest.raises(IndexError):
        conv.short_conv(normal(1, 1, 8), normal(2, 8, 4), torch.zeros(2, 3, 8), int32(2), int32(0, 1), int32(1))


def test_code_is_kept_only_where_a_folder_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(function: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(function, **options)

    monkeypatch.setattr(tiles, "njit", refusing)

    @tiles.kernel
    def doubled(x):
        return 2 * x

    assert doubled(4) == 8


def test_the_name_of_kept_code_changes_with_the_sources() -> None:
    """numba looks at the file of a kernel alone; a change in `tiles` must not leave the others as they were."""
    for module in (rows, conv, attention, experts):
        for name, value in vars(importlib.import_module(module.__name__)).items():
            if hasattr(value, "py_func") and not name.endswith("_fn"):
                assert value.py_func.__qualname__.endswith(f"_{tiles._SOURCES:08x}"), name
