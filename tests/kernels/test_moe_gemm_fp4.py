"""Packed experts through the kernels: codes, scales and layouts made here, against numpy in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_oracle import experts_on_device, kernel_target, oracle, random_packed, stored, values

from inkling_kernels.moe_gemm import moe_experts
from inkling_kernels.moe_gemm_plan import LARGE_BATCH, NARROW_BATCH, SMALL_BATCH, MoeConfig
from inkling_kernels.numerics import ExpertWeight
from inkling_kernels.testing import guarded

Impl = Callable[..., torch.Tensor]
FORMATS = ("nvfp4", "mxfp4")
ORDERS = ("pairs", "words")
UNIT = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}


@pytest.fixture(scope="module")
def impl(kernel_device: torch.device) -> Impl:
    return experts_on_device(moe_experts, kernel_device)


def packed(
    rng: np.random.Generator, format: str, experts: int, hidden: int, width: int, padding: int = 0, order: str = "words"
) -> tuple[list[ExpertWeight], list[np.ndarray]]:
    """w13 and w2 as they are stored, and their values."""
    w13 = random_packed(rng, format, experts, 2 * width, hidden, "interleaved", padding=padding, order=order)
    w2 = random_packed(rng, format, experts, hidden, width, "plain", padding=padding, order=order)
    return [w13[0], w2[0]], [w13[1], w2[1]]


def compare(out: torch.Tensor, expected: np.ndarray) -> None:
    """Errors are measured by the largest result: sums of many terms."""
    assert not out.isnan().any()
    scale = max(np.abs(expected).max(initial=0), 1e-6)
    np.testing.assert_allclose(out.double().numpy(), expected, rtol=0, atol=UNIT[out.dtype] * scale)


@settings(max_examples=8, deadline=None)
@given(
    tokens=st.integers(0, 24),
    top_k=st.integers(1, 3),
    format=st.sampled_from(FORMATS),
    order=st.sampled_from(ORDERS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    routing=st.sampled_from(["uniform", "one-hot", "mostly absent", "absent"]),
    seed=st.integers(0, 2**31),
)
def test_any_routing(
    impl: Impl, tokens: int, top_k: int, format: str, order: str, dtype: torch.dtype, routing: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    weights, exact = packed(rng, format, 3, 32, 32, order=order)
    x = guarded(torch.from_numpy(rng.standard_normal((tokens, 32))).to(dtype))
    ids = rng.integers(0, 3, (tokens, top_k)).astype(np.int32)
    if routing == "one-hot":
        ids[:] = 2
    elif routing != "uniform":
        ids[rng.random(ids.shape) < (1 if routing == "absent" else 0.8)] = -1
    gammas = torch.from_numpy(rng.standard_normal((tokens, top_k))).float()
    out = impl(x, *weights, torch.from_numpy(ids), gammas)
    compare(out, oracle(x.double().numpy(), *exact, ids, gammas.numpy()))


@pytest.mark.parametrize("width", [32, 96, 128, 160, 192, 224, 320, 384, 640])
def test_widths_and_padding(impl: Impl, width: int) -> None:
    """Multiples of 32 that no tile divides; rows, blocks and tokens beside the slice are NaN."""
    rng = np.random.default_rng(width)
    format, dtype = FORMATS[width // 32 % 2], (torch.float32, torch.bfloat16)[width // 64 % 2]
    weights, exact = packed(rng, format, 2, 96, width, padding=2, order=ORDERS[width // 32 % 3 % 2])
    x = guarded(torch.from_numpy(rng.standard_normal((3, 96))).to(dtype))
    ids = np.array([[0, 1], [1, -1], [1, 0]], np.int32)
    gammas = torch.tensor([[0.5, 2.0], [1.0, 3.0], [-1.0, 0.25]])
    out = impl(x, *weights, torch.from_numpy(ids), gammas, config=MoeConfig(block_k=128))
    compare(out, oracle(x.double().numpy(), *exact, ids, gammas.numpy()))


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("format", FORMATS)
def test_every_code_with_telling_scales(impl: Impl, format: str, order: str, dtype: torch.dtype) -> None:
    """Token j reaches unit j alone, so its results are column j of w2 times one number: all sixteen codes, a scale
    byte a row. NaN and overflow spoil their own row and no other."""
    telling = {
        "nvfp4": [0x00, 0x01, 0x07, 0x08, 0x38, 0x7E, 0x7F, 0x80, 0x81, 0xB8, 0xFE, 0xFF],
        "mxfp4": [0, 1, 2, 64, 126, 127, 128, 129, 200, 251, 254, 255],
    }[format]
    one, unit = {"nvfp4": (0x38, np.ones(1, np.float32)), "mxfp4": (127, None)}[format]
    codes13 = np.zeros((1, 64, 32), np.uint8)
    codes13[0, 0::2][np.diag_indices(32)] = 7
    codes13[0, 1::2][np.diag_indices(32)] = 2
    scale13 = np.full((1, 64, 32 // (16 if format == "nvfp4" else 32)), one, np.uint8)
    codes2 = np.tile(np.arange(16, dtype=np.uint8), (1, 32, 2))
    rows = np.array((telling * 3)[:32], np.uint8)
    scale2 = np.broadcast_to(rows[None, :, None], (1, 32, scale13.shape[2])).copy()
    w13 = stored(format, codes13, scale13, unit, "interleaved", order=order)
    w2 = stored(format, codes2, scale2, unit, "plain", order=order)
    out = impl(torch.eye(32).to(dtype), w13, w2, torch.zeros(32, 1, dtype=torch.int32), torch.ones(32, 1))
    with np.errstate(invalid="ignore", over="ignore"):
        inner = np.float64(torch.tensor(6 / (1 + np.exp(-6.0))).to(dtype).item())
        exact = values(format, codes2, scale2, unit)[0].T
        expected = (np.eye(32) * inner @ exact).astype(np.float32)
    assert np.isnan(expected).any()
    np.testing.assert_allclose(
        out.float().numpy(), expected, rtol=1e-6 if dtype == torch.float32 else 2.0**-8, atol=2.0**-132
    )


@pytest.mark.parametrize("format", FORMATS)
def test_parts_of_the_width_add_up(impl: Impl, format: str) -> None:
    """Tensor-parallel slices at 32, whole gate and up pairs, as views of one weight."""
    rng = np.random.default_rng(7)
    (w13, w2), _ = packed(rng, format, 2, 64, 128)
    block = 16 if format == "nvfp4" else 32
    x = torch.from_numpy(rng.standard_normal((5, 64))).float()
    ids, gammas = torch.arange(10).view(5, 2).int() % 2, torch.ones(5, 2)
    assert w13.scale is not None
    assert w2.scale is not None
    parts = []
    for a, b in ((0, 32), (32, 128)):
        rows, cut = slice(2 * a, 2 * b), slice(a // block, b // block)
        local = replace(w13, data=w13.data[:, rows], scale=w13.scale[:, rows])
        other = replace(w2, data=w2.data[..., a // 2 : b // 2], scale=w2.scale[..., cut])
        parts.append(impl(x, local, other, ids, gammas))
    compare(parts[0] + parts[1], impl(x, w13, w2, ids, gammas).double().numpy())


@pytest.mark.parametrize("format", ["bf16", *FORMATS])
def test_tile_shapes_agree_and_neighbours_change_nothing(impl: Impl, format: str, kernel_device: torch.device) -> None:
    """The batches' configurations, tiles of 8 pairs where the device has them, and small ones; several tiles of one
    expert; a token alone has the same bits."""
    rng = np.random.default_rng(8)
    if format == "bf16":
        w13, w2 = (torch.from_numpy(rng.standard_normal(shape)).float() for shape in ((2, 128, 64), (2, 64, 64)))
        weights = [ExpertWeight("bf16", w13, layout="interleaved"), ExpertWeight("bf16", w2)]
    else:
        weights, _ = packed(rng, format, 2, 64, 64)
    x = torch.from_numpy(rng.standard_normal((40, 64))).float()
    ids = torch.from_numpy(rng.integers(-1, 2, (40, 2))).int()
    gammas = torch.from_numpy(rng.standard_normal((40, 2))).float()
    configs = [SMALL_BATCH, LARGE_BATCH, MoeConfig(block_n=32, block_k=32, group_m=2)]
    target = kernel_target(kernel_device)
    if target is None or not NARROW_BATCH.problems(target, format=format):
        configs.append(NARROW_BATCH)
    outs = [impl(x, *weights, ids, gammas, config=config) for config in configs]
    for other in outs[1:]:
        compare(other, outs[0].double().numpy())
    assert torch.equal(impl(x[7:8], *weights, ids[7:8], gammas[7:8], config=SMALL_BATCH)[0], outs[0][7])


def test_bad_arguments(impl: Impl) -> None:
    rng = np.random.default_rng(9)
    (w13, w2), _ = packed(rng, "nvfp4", 2, 64, 64)
    (other, _), _ = packed(rng, "mxfp4", 2, 64, 64)
    x, ids, gammas = torch.zeros(2, 64), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 2)
    with pytest.raises(ValueError, match="w13 is mxfp4 and w2 nvfp4"):
        impl(x, other, w2, ids, gammas)
    with pytest.raises(ValueError, match=r"x has shape \[2, 32\]; expected \[any, 64\]"):
        impl(x[:, :32], w13, w2, ids, gammas)
    with pytest.raises(TypeError, match=r"x is torch\.float16"):
        impl(x.half(), w13, w2, ids, gammas)
    with pytest.raises(TypeError, match=r"ids is torch\.int64"):
        impl(x, w13, w2, ids.long(), gammas)
    with pytest.raises(ValueError, match=r"weights has shape \[2, 1\]; expected \[2, 2\]"):
        impl(x, w13, w2, ids, gammas[:, :1])
    assert w2.scale is not None
    with pytest.raises(ValueError, match=r"w2 is \[1, 64, 64\]; expected \[2, 64, 64\]"):
        impl(x, w13, ExpertWeight("nvfp4", w2.data[:1], w2.scale[:1], w2.scale2[:1]), ids, gammas)  # type: ignore[index]
    shifted = torch.zeros(2, 64, 33, dtype=torch.uint8)[..., 1:]
    with pytest.raises(ValueError, match=r"w2's codes have strides .* make it contiguous"):
        impl(x, w13, ExpertWeight("nvfp4", shifted, w2.scale, w2.scale2), ids, gammas)
    narrow, _ = packed(rng, "nvfp4", 2, 64, 48)
    with pytest.raises(ValueError, match="w2 has 48 columns; expected a multiple of 32"):
        impl(x, *narrow, ids, gammas)
