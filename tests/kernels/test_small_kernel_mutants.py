"""Broken copies of the kernels around attention and experts, each of which a comparison with the reference must catch.

Memory is filled with NaN where torch would leave it as it is, so that what a broken kernel does not write shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from mutants import broken

from inkling_kernels.testing import guarded

FILES = ("target", "compile_case", "ragged", "norm", "embedding", "activation", "short_conv_tile", "short_conv",
         "rel_attention_tile", "fp8", "kv_cache", "routing", "expert_sort", "logits")  # fmt: skip
Modules = dict[str, ModuleType]

# op, name, file, text, what stands there instead
BROKEN = [
    ("norm", "mean over the tile", "norm", "/ channels + eps", "/ x.shape[1] + eps"),
    ("norm", "no eps", "norm", "/ channels + eps", "/ channels"),
    ("norm", "rounds once", "norm", ".to(dtype).to(tl.float32) * weight", " * weight"),
    ("norm", "reads the next channel", "norm",
     "mask=live, other=0.0).to", "mask=(row < rows)[:, None] & (col <= channels)[None, :], other=0.0).to"),
    ("embedding", "the next token's row", "embedding", "at = row * weight_row", "at = (row + 1) * weight_row"),
    ("silu_mul", "halves", "activation", "tl.reshape(x, [BLOCK, 2])", "tl.trans(tl.reshape(x, [2, BLOCK]))"),
    ("silu_mul", "up gates", "activation", "gate, up = tl.split", "up, gate = tl.split"),
    ("silu_mul", "sigmoid mirrored", "activation", "tl.exp(-gate)", "tl.exp(gate)"),
    ("silu_mul", "no scale", "activation", "y *= tl.load(scale_ptr", "y *= 1 + 0 * tl.load(scale_ptr"),
    ("short_conv", "taps reversed", "short_conv_tile", "source = index - (WIDTH - 1 - j)", "source = index - j"),
    ("short_conv", "no inner residual", "short_conv_tile", "return total + tap", "return total"),
    ("short_conv", "no outer residual", "short_conv",
     "residual.to(tl.float32) + y", "0 * residual.to(tl.float32) + y"),
    ("short_conv", "reads before the start", "short_conv_tile",
     "old = live & (source < 0) & (position >= 0)", "old = live & (source < 0)"),
    ("short_conv", "forgets the past", "short_conv_tile",
     "old = live & (source < 0) & (position >= 0)", "old = live & (source < 0) & (position < 0)"),
    ("short_conv", "position of the step", "short_conv_tile",
     "tl.where(slot >= 0, start + source, -1)", "tl.where(slot >= 0, source + 64, -1)"),
    ("short_conv", "keeps too little", "short_conv_tile", "tl.minimum(length, ring)", "tl.minimum(length, 3)"),
    ("short_conv", "keeps the first rows", "short_conv_tile", "newest = length - kept", "newest = 0"),
    ("short_conv", "pages as a ring", "short_conv_tile",
     "slots_ptr + (position // ring)", "slots_ptr + 0 * (position // ring)"),
    ("short_conv", "block size of the window", "short_conv_tile",
     "(position // ring).to(tl.int64)", "(position // 4).to(tl.int64)"),
    ("short_conv", "table of another sequence", "short_conv_tile",
     "seq.to(tl.int64) * slots_strides[0]", "0 * slots_strides[0]"),
    ("short_conv", "pages keep too little", "short_conv_tile",
     "tl.minimum(length - local, BLOCK_T)", "tl.where(local == 0, BLOCK_T, 0)"),
    ("short_conv", "keeps what is padding", "short_conv_tile",
     "live = (index < length) & (position >= 0)", "live = ((index < length) & (position >= -1))"),
    ("short_conv", "slot -1 is a slot", "short_conv_tile", "tl.where(slot >= 0, start", "tl.where(slot >= -1, start"),
    ("short_conv", "padding left as it was", "ragged", "tl.where(low == batch - 1, rows - begin, length)", "length"),
    ("short_conv", "tiles one sequence off", "ragged", "+ middle <= tile", "+ middle < tile"),
    ("short_conv_norm", "squares of the last run of channels", "short_conv",
     "scale += tl.sum(y * y, 1)", "scale = tl.sum(y * y, 1)"),
    ("short_conv_norm", "mean over the runs", "short_conv",
     "tl.sqrt(scale / channels + eps)", "tl.sqrt(scale / (channels + BLOCK_C) + eps)"),
    ("short_conv_norm", "no eps", "short_conv", "scale / channels + eps", "scale / channels"),
    ("short_conv_norm", "squares without the residual", "short_conv",
     "            ).to(tl.float32)  # fmt: skip\n", "            ).to(tl.float32) * 0 + 1  # fmt: skip\n"),
    ("short_conv_norm", "weight of the first run", "short_conv",
     "norm_ptr + channel * norm_stride", "norm_ptr + (channel % channel.shape[0]) * norm_stride"),
    ("short_conv_norm", "rounds once", "short_conv",
     "(y.to(tl.float32) * scale[:, None]).to(y.dtype).to(tl.float32)", "(y.to(tl.float32) * scale[:, None])"),
    ("logits", "no scale", "logits", "tl.zeros([BLOCK], tl.float32) + divisor", "tl.zeros([BLOCK], tl.float32) + 1"),
    ("logits", "the padding is looked at", "logits", "live = col < vocabulary", "live = col < vocabulary + 1"),
    ("logits", "the first piece alone is looked at", "logits", "lost |= ", "lost |= (first == 0) & "),
    ("logits", "infinity is a number", "logits", '< float("inf")', '<= float("inf")'),
    ("logits", "NaN is a number", "logits",
     'tl.where(tl.abs(y) < float("inf"), 0, 1)', 'tl.where(tl.abs(y) == float("inf"), 1, 0)'),
    ("logits", "flags turned round", "logits", "(tl.max(lost, 0) == 0)", "(tl.max(lost, 0) != 0)"),
    ("qkvr_prep", "k by q's weight", "kv_cache", "tl.load(k_norm_ptr + dim)", "tl.load(q_norm_ptr + dim)"),
    ("qkvr_prep", "tau one late", "kv_cache", "n = (position + 1)", "n = position"),
    ("qkvr_prep", "no tau on r", "kv_cache", "if TAU:\n            x = ", "if TAU and is_q:\n            x = "),
    ("qkvr_prep", "tau of the first row", "kv_cache", "_tau_fn(start + index", "_tau_fn(start + index * 0"),
    ("qkvr_prep", "page and offset exchanged", "kv_cache",
     "(slot // page) * strides[0] + (slot % page) * strides[1]",
     "(slot % page) * strides[0] + (slot // page) * strides[1]"),
    ("qkvr_prep", "slot -1 written", "kv_cache", "kept = (slot >= 0)", "kept = (slot >= -1)"),
    ("qkvr_prep", "one head of v", "kv_cache", "at, page, head - KV_HEADS", "at, page, head * 0"),
    ("qkvr_prep", "v from k's columns", "kv_cache",
     "x_at, state_at, every = column *", "x_at, state_at, every = (HEADS * D + channel % (KV_HEADS * D)) *"),
    ("cache_fp8", "not scaled", "kv_cache",
     "tl.div_rn(y.to(tl.float32), tl.zeros(y.shape, tl.float32) + scale)", "y.to(tl.float32)"),
    ("cache_fp8", "one scale for all heads", "kv_cache", "scale_ptr + head * scale_stride", "scale_ptr"),
    ("cache_fp8", "wraps", "fp8", "tl.minimum(tl.abs(x), LARGEST)", "tl.abs(x)"),
    ("cache_fp8", "truncates", "fp8", "bits + 0x7FFFF + ((bits >> 20) & 1)", "bits"),
    ("cache_fp8", "ties away from zero", "fp8", "0x7FFFF + ((bits >> 20) & 1)", "0x80000"),
    ("cache_fp8", "small numbers lost", "fp8", "(size + STEP).to(tl.int32, bitcast=True) - STEP_BITS", "0"),
    ("cache_fp8", "NaN lost", "fp8", "tl.where(x == x, code | sign, 0x7F)", "code | sign"),
    ("cache_fp8", "-0 in FNUZ", "fp8", "tl.where(code == 0, 0, code | sign)", "code | sign"),
    ("cache_fp8", "FNUZ as OCP", "fp8", "(127 - 8) << 3", "(127 - 7) << 3"),
    ("routing", "highest index", "routing", "(0x7FFFFFFF - expert).to", "expert.to"),
    ("routing", "bias weighs", "routing", "tl.where(hit, z, 0.0)", "tl.where(hit, z + bias[None, :], 0.0)"),
    ("routing", "bias does not choose", "routing", "+ bias[None, :]", "+ 0 * bias[None, :]"),
    ("routing", "one expert over again", "routing",
     "key = tl.where(hit, tl.full(key.shape, LOWEST, tl.int64) << 32, key)", "key = key"),
    ("routing", "sinks do not share", "routing", "used = (slot < TOP_K + SINKS)", "used = (slot < TOP_K)"),
    ("routing", "sinks of the wrong columns", "routing",
     "sink_at = ((EXPERTS - TOP_K + slot)", "sink_at = ((slot - TOP_K)"),
    ("routing", "softmax of logits", "routing",
     "tl.minimum(chosen, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(chosen)))", "chosen"),
    ("routing", "no global scale", "routing", "(tl.load(global_scale_ptr) * route_scale)", "route_scale"),
    ("expert_sort", "rounds on one another", "expert_sort", "place += tl.histogram", "place += 0 * tl.histogram"),
    ("expert_sort", "programs on one another", "expert_sort", "before += tl.sum", "before += 0 * tl.sum"),
]  # fmt: skip


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Each check gives pairs of what a kernel's module made and what it should have made.


def norm(m: Modules) -> Iterator[tuple[Any, Any]]:
    x, weight = guarded(normal(0, 6, 40, dtype=torch.bfloat16)), normal(1, 40, dtype=torch.bfloat16)
    yield m["norm"].rms_norm(x, weight, 1e-2), m["norm"].rms_norm_ref(x, weight, 1e-2)


def embedding(m: Modules) -> Iterator[tuple[Any, Any]]:
    args = torch.tensor([3, 0, 3]), guarded(normal(0, 5, 24)), normal(1, 24), 1e-6
    yield m["embedding"].embedding(*args), m["embedding"].embedding_ref(*args)


def silu_mul(m: Modules) -> Iterator[tuple[Any, Any]]:
    args = guarded(normal(0, 3, 36)), normal(1, 3, 18)
    yield m["activation"].silu_mul(*args), m["activation"].silu_mul_ref(*args)


def short_conv(m: Modules) -> Iterator[tuple[Any, Any]]:
    """A fresh prompt, a verify step, a decode step, an idle and a stateless sequence, padding within and behind."""
    x, weight, residual = guarded(normal(0, 40, 20)), normal(1, 20, 4), normal(2, 40, 20)
    where = int32(2, 4, 1, 3, -1, 3), int32(0, 20, 29, 30, 30, 37, 38), int32(20, 15, 9, 4, 12, 0)
    results = []
    for name in ("short_conv", "short_conv_ref"):
        large = torch.full((9, 11, 20), float("nan"))  # a row before slot -1 is still ours: broken copies write there
        state = large[2:8]
        state[[4, 1]] = normal(3, 2, 11, 20)
        y = getattr(m["short_conv"], name)(x, weight, state, *where, residual)
        results.append((y, large))
    yield from zip(*results, strict=True)
    tables, states = torch.randperm(24, generator=torch.Generator().manual_seed(4)).view(6, 4).int(), []
    for name in ("short_conv", "short_conv_ref"):
        pages = normal(5, 24, 8, 20)
        states.append((getattr(m["short_conv"], name)(x, weight, pages, tables, *where[1:], residual), pages))
    yield from zip(*states, strict=True)


def short_conv_norm(m: Modules) -> Iterator[tuple[Any, Any]]:
    """Three runs of channels, in the type in which the order of roundings shows."""
    x, residual, norm_weight = (
        normal(i, *shape, dtype=torch.bfloat16) for i, shape in enumerate([(9, 40)] * 2 + [(40,)])
    )
    where = None, int32(0, 1), int32(0, 4, 9), int32(4, 5)
    config = m["short_conv"].ShortConvConfig(norm_channels=16)
    weight = normal(3, 40, 4)
    found = m["short_conv"].short_conv(
        x, weight, *where, residual, norm_weight=norm_weight, eps=0.1, config=config
    )  # fmt: skip
    y = m["short_conv"].short_conv(x, weight, *where, residual)
    yield from zip(found, (y, m["norm"].rms_norm_ref(y, norm_weight, 0.1)), strict=True)


def logits(m: Modules) -> Iterator[tuple[Any, Any]]:
    y = guarded(normal(0, 6, 40))
    y[1, 38:] = float("nan")
    y[2, 0], y[3, 37], y[4, 20] = float("nan"), float("inf"), -float("inf")
    config = m["logits"].LogitsConfig(block=16)
    found = m["logits"].logits(y, vocabulary=38, divisor=3.0, config=config)
    yield from zip(found, m["logits"].logits_ref(y, vocabulary=38, divisor=3.0), strict=True)


def prepared(m: Modules, name: str, fp8: torch.dtype | None = None) -> tuple[torch.Tensor, ...]:
    heads, kv_heads, dim, rows = 2, 2, 16, 14
    qkvr = guarded(normal(0, rows, (heads + 2 * kv_heads) * dim + heads * 16))
    kind = fp8 or torch.float32
    large = [torch.full((18, 16, kv_heads, dim), 3, dtype=torch.uint8 if fp8 else torch.float32) for _ in range(2)]
    cache = tuple(half[1:17].view(kind) for half in large)
    state = normal(1, 4, 11, 2 * kv_heads * dim)
    mapping = torch.randperm(256, generator=torch.Generator().manual_seed(2))[:rows]
    mapping[[5, 12]] = -1
    options: dict[str, Any] = {}
    if fp8:
        options["kv_scales"] = (torch.tensor([0.004, 0.7]), torch.tensor([3e-3, 30.0]))
    q, r, *_ = getattr(m["kv_cache"], name)(
        qkvr, normal(3, 2 * kv_heads * dim, 4), normal(4, dim), normal(5, dim), 1e-6, state, int32(3, 0, 2),
        int32(0, 9, 13, 14), int32(9, 30, 9), cache, mapping, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
        d_rel=16, log_scaling_n_floor=8, log_scaling_alpha=0.3, **options,
    )  # fmt: skip
    return q, r, *large, state


def qkvr_prep(m: Modules) -> Iterator[tuple[Any, Any]]:
    yield from zip(prepared(m, "qkvr_prep"), prepared(m, "qkvr_prep_ref"), strict=True)


def cache_fp8(m: Modules) -> Iterator[tuple[Any, Any]]:
    """Against torch's own casts, of what the same kernel writes without fp8."""
    plain = prepared(m, "qkvr_prep")
    for kind, largest in ((torch.float8_e4m3fn, 448.0), (torch.float8_e4m3fnuz, 240.0)):
        found = prepared(m, "qkvr_prep", kind)
        for i, scales in ((2, (0.004, 0.7)), (3, (3e-3, 30.0))):
            written = plain[i] != 3
            exact = plain[i] / torch.tensor(scales).view(2, 1)
            yield found[i][written], exact.clamp(-largest, largest).to(kind).view(torch.uint8)[written]
    x = torch.tensor([[0.0, 1.0, 1.0625, 1.1875, -1e-9, float("nan")] + [0.013] * 10])
    for kind in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        pages = torch.zeros(1, 1, 1, 16, dtype=kind)
        ones = torch.ones(1)
        m["kv_cache"].qkvr_prep(
            torch.cat([x] * 4, 1), torch.zeros(32, 1), torch.ones(16), torch.ones(16), 1e-6, None, int32(0),
            int32(0, 1), int32(1), (pages.clone(), pages), torch.tensor([0]), num_heads=1, num_kv_heads=1, head_dim=16,
            d_rel=16, log_scaling_n_floor=None, log_scaling_alpha=0.1, kv_scales=(ones, ones),
        )  # fmt: skip
        yield pages.view(torch.uint8).flatten()[:6], x.to(kind).view(torch.uint8).flatten()[:6]


def routing(m: Modules) -> Iterator[tuple[Any, Any]]:
    logits = normal(0, 7, 22) * 3
    logits[1, :20] = 0.5
    args = logits, normal(1, 20) * 0.2, torch.tensor([1.7])
    found, expected = (
        getattr(m["routing"], name)(*args, top_k=6, route_scale=8.0) for name in ("routing", "routing_ref")
    )
    yield from zip(found, expected, strict=True)


def expert_sort(m: Modules) -> Iterator[tuple[Any, Any]]:
    ids = torch.randint(0, 5, (30, 3), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    config = m["expert_sort"].ExpertSortConfig(pairs=16, sorters=2)
    order, offsets = m["expert_sort"].sort_by_expert(ids, 5, config=config)
    yield order, torch.argsort(ids.flatten(), stable=True).int()
    yield offsets[1:], torch.bincount(ids.flatten(), minlength=5).cumsum(0).int()


CHECKS: dict[str, Callable[[Modules], Iterator[tuple[Any, Any]]]] = {
    check.__name__: check
    for check in (
        norm,
        embedding,
        silu_mul,
        short_conv,
        short_conv_norm,
        logits,
        qkvr_prep,
        cache_fp8,
        routing,
        expert_sort,
    )
}


def passes(modules: Modules, op: str) -> bool:
    for found, expected in CHECKS[op](modules):
        exact = not found.is_floating_point() or found.dtype == torch.bfloat16
        tolerance = 0.0 if exact else 1e-5
        if not torch.allclose(found.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True):
            return False
    return True


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("poisoned_memory")
def test_the_unbroken_copy_passes(kernel_device: torch.device, tmp_path: Path) -> None:
    if kernel_device.type != "cpu":
        pytest.skip(
            "tensors of this test are in host memory: the interpreter and drivers of INKLING_TEST_DRIVER run it"
        )
    modules = broken(tmp_path, "unbroken_small", FILES, "norm", "tl.sqrt", "tl.sqrt")
    assert [op for op in CHECKS if not passes(modules, op)] == []


@pytest.mark.usefixtures("poisoned_memory")
def test_every_broken_copy_is_caught(
    kernel_device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kernel_device.type != "cpu":
        pytest.skip(
            "tensors of this test are in host memory: the interpreter and drivers of INKLING_TEST_DRIVER run it"
        )
    missed = []
    for number, (op, name, file, text, instead) in enumerate(BROKEN):
        if passes(broken(tmp_path, f"broken_small_{number}", FILES, file, text, instead), op):
            missed.append(f"{op}: {name}")
    with capsys.disabled():
        print(f"\n{len(BROKEN) - len(missed)} of {len(BROKEN)} broken copies of the other kernels caught")
    assert missed == []
    assert len(BROKEN) >= 20
