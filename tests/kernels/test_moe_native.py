"""Experts on hardware block scales, against numpy in float64 on the activations as they are quantised: exact where
nothing but the last rounding rounds, else by what flipped codes may change."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_oracle import experts_on_device, kernel_target, native_oracle, oracle, random_packed, stored, values

from inkling_kernels.moe_check import self_check
from inkling_kernels.moe_gemm_plan import MoeConfig
from inkling_kernels.moe_native import moe_experts_native, prepare_native, token_kind
from inkling_kernels.numerics import ExpertWeight
from inkling_kernels.target import TARGETS, Target
from inkling_kernels.testing import guarded

Impl = Callable[..., torch.Tensor]
FORMATS = ("nvfp4", "mxfp4")
# The interpreter pays for rows that are masked and multiplies tiles of any size; None is what the hardware is given.
TILES = None if "INKLING_TEST_DRIVER" in os.environ or torch.cuda.is_available() else MoeConfig(block_n=64, block_k=64)


@pytest.fixture(scope="module")
def impl(kernel_device: torch.device) -> Impl:
    return experts_on_device(moe_experts_native, kernel_device)


@pytest.fixture(scope="module")
def formats(kernel_device: torch.device) -> tuple[str, ...]:
    """What the chip that is there, or stood in for, multiplies natively; all in the interpreter."""
    target = kernel_target(kernel_device)
    if target is None:
        return FORMATS
    return tuple(f for f in FORMATS if f"native_{f}" in target.capabilities)


def kind_of(format: str, device: torch.device) -> str:
    return token_kind(format, kernel_target(device))


@settings(max_examples=6, deadline=None)
@given(
    tokens=st.integers(0, 20),
    format=st.sampled_from(FORMATS),
    width=st.sampled_from([32, 96, 160]),
    routing=st.sampled_from(["uniform", "one-hot", "mostly absent", "absent"]),
    seed=st.integers(0, 2**31),
)
def test_any_routing(
    impl: Impl, formats: tuple[str, ...], kernel_device: torch.device, tokens: int, format: str, width: int,
    routing: str, seed: int,
) -> None:  # fmt: skip
    """Widths that no tile divides; rows, blocks and tokens beside them are NaN."""
    format = format if format in formats else formats[-1]
    rng = np.random.default_rng(seed)
    parts = [
        random_packed(rng, format, 3, rows, columns, layout, padding=2)
        for rows, columns, layout in ((2 * width, 64, "interleaved"), (64, width, "plain"))
    ]
    inputs = [torch.tensor([0.01]), torch.tensor([0.25])] if format == "nvfp4" else [None, None]
    weights = [prepare_native(replace(part[0], input_scale=given)) for part, given in zip(parts, inputs, strict=True)]
    x = rng.standard_normal((tokens, 64))
    ids = rng.integers(0, 3, (tokens, 2)).astype(np.int32)
    if routing == "one-hot":
        ids[:] = 2
    elif routing != "uniform":
        ids[rng.random(ids.shape) < (1 if routing == "absent" else 0.8)] = -1
    gammas = rng.standard_normal((tokens, 2)).astype(np.float32)
    given_x = guarded(torch.from_numpy(x).bfloat16())
    out = impl(given_x, *weights, torch.from_numpy(ids), torch.from_numpy(gammas), config=TILES).double().numpy()
    exact = native_oracle(x, [p[1] for p in parts], ids, gammas, kind_of(format, kernel_device), inputs)
    scale = max(np.abs(exact).max(initial=0), 1e-6)
    np.testing.assert_allclose(out, exact, rtol=0, atol=0.02 * scale)
    if routing in ("uniform", "one-hot") and tokens > 4:
        plain = oracle(x, *(p[1] for p in parts), ids, gammas)
        # What quantising the tokens costs is well above what is allowed here, and it is no more than it should be.
        assert np.abs(out - plain).max() < 0.5 * np.abs(plain).max()


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("format", FORMATS)
def test_every_code_with_telling_scales(impl: Impl, formats: tuple[str, ...], format: str) -> None:
    """Exact: token j reaches unit j alone with a value that every kind of activation has, so its results are
    column j of w2 times one number: all sixteen codes, a scale byte a row, NVFP4's negative ones too."""
    if format not in formats:
        return
    nvfp4, emulated = format == "nvfp4", bool(os.environ.get("INKLING_TEST_DRIVER"))
    telling = (
        [0x00, 0x01, 0x07, 0x08, 0x38, 0x7E, 0x7F, 0x80, 0x81, 0xB8, 0xFE, 0xFF]
        if nvfp4
        # The emulator takes 255 for 2**128; PTX ISA 8.8 (`ue8m0`) and OCP MX, which CDNA4 follows, say NaN.
        else [0, 1, 2, 64, 126, 127, 128, 129, 200, 240, 250 if emulated else 255]
    )
    one, two, unit = (0x38, 0x40, np.ones(1, np.float32)) if nvfp4 else (127, 128, None)
    codes13 = np.zeros((1, 64, 32), np.uint8)
    codes13[0, 0::2][np.diag_indices(32)] = 6
    codes13[0, 1::2][np.diag_indices(32)] = 2
    scale13 = np.full((1, 64, 32 // (16 if nvfp4 else 32)), one, np.uint8)
    scale13[0, 0::2] = two
    codes2 = np.tile(np.arange(16, dtype=np.uint8), (1, 32, 2))
    rows = np.array((telling * 3)[:32], np.uint8)
    scale2 = np.broadcast_to(rows[None, :, None], (1, 32, scale13.shape[2])).copy()
    w13 = prepare_native(stored(format, codes13, scale13, unit, "interleaved"))
    w2 = prepare_native(stored(format, codes2, scale2, unit, "plain"))
    value = 6.0 if nvfp4 else 4.0
    x = (torch.eye(32) * value).bfloat16()
    out = impl(x, w13, w2, torch.zeros(32, 1, dtype=torch.int32), torch.ones(32, 1), config=TILES)
    with np.errstate(invalid="ignore", over="ignore"):
        exact = np.eye(32) * (8 * value * value) @ values(format, codes2, scale2, unit)[0].T
    assert np.isnan(exact).any() or (emulated and not nvfp4)
    np.testing.assert_allclose(out.float().numpy(), exact.astype(np.float32), rtol=2.0**-8, atol=2.0**-120)


@pytest.mark.parametrize("format", FORMATS)
def test_a_token_that_is_no_number_spoils_itself_alone(
    impl: Impl, formats: tuple[str, ...], kernel_device: torch.device, format: str
) -> None:
    if format not in formats:
        return
    rng = np.random.default_rng(4)
    w13 = prepare_native(random_packed(rng, format, 2, 64, 64, "interleaved")[0])
    w2 = prepare_native(random_packed(rng, format, 2, 64, 32, "plain")[0])
    x = torch.from_numpy(rng.standard_normal((5, 64))).bfloat16()
    ids, gammas = torch.tensor([[0, 1]] * 5, dtype=torch.int32), torch.ones(5, 2)
    clean = impl(x, w13, w2, ids, gammas, config=TILES)
    x[3, 40] = float("nan")
    out = impl(x, w13, w2, ids, gammas, config=TILES)
    # The emulator takes an E8M0 scale of 255 for 2**128; where tokens have eight bits, their codes are NaN too.
    if not (os.environ.get("INKLING_TEST_DRIVER") and kind_of(format, kernel_device) == "mxfp4"):
        assert out[3].isnan().all()
    others = [0, 1, 2, 4]
    assert torch.equal(out[others], clean[others])


def test_signs_of_scales_move_to_the_codes() -> None:
    weight, _ = random_packed(np.random.default_rng(0), "nvfp4", 2, 8, 64, "plain")
    moved = prepare_native(weight)
    assert moved.scale is not None
    assert not bool((moved.scale.view(torch.uint8) & 0x80).any())
    assert torch.equal(moved.dequant(1), weight.dequant(1))
    assert prepare_native(moved) is moved


def test_what_tokens_are_quantised_to_is_by_target() -> None:
    kinds = {t.arch: token_kind("mxfp4", t) for t in TARGETS if "native_mxfp4" in t.capabilities}
    assert kinds == {
        "sm100": "mxfp8", "sm103": "mxfp8", "gfx950": "mxfp8", "sm120": "mxfp4", "sm121": "mxfp4",
    }  # fmt: skip
    assert token_kind("nvfp4", Target.parse("sm120")) == "nvfp4"


def test_the_self_check_takes_its_own_tolerance(impl: Impl, formats: tuple[str, ...]) -> None:
    """W4A4 and W4A8 pass at theirs; a scale read in the wrong place does not."""
    assert moe_experts_native.check_tolerance == 0.3  # type: ignore[attr-defined]
    for format in formats:
        rng = np.random.default_rng(1)
        w13 = prepare_native(random_packed(rng, format, 1, 128, 64, "interleaved")[0])
        w2 = prepare_native(random_packed(rng, format, 1, 64, 64, "plain")[0])
        assert 2**-8 < self_check(impl, w13, w2, tolerance=0.3) < 0.3


def test_bad_arguments() -> None:
    x, ids, gammas = torch.zeros(2, 64), torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, 1)
    w13 = ExpertWeight("bf16", torch.zeros(1, 64, 64), layout="interleaved")
    with pytest.raises(ValueError, match="w13 is bf16; expected nvfp4 or mxfp4"):
        moe_experts_native(x, w13, ExpertWeight("bf16", torch.zeros(1, 64, 32)), ids, gammas)
    rng = np.random.default_rng(2)
    w13 = random_packed(rng, "mxfp4", 1, 64, 64, "interleaved", order="words")[0]
    w2 = random_packed(rng, "mxfp4", 1, 64, 32, "plain")[0]
    with pytest.raises(ValueError, match="w13: codes are in the order 'words', this operation needs 'pairs'"):
        moe_experts_native(x, w13, w2, ids, gammas)
