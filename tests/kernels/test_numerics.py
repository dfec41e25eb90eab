"""The 4-bit formats against numpy, ml_dtypes and arithmetic written here, and what breaks them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import inkling_kernels.numerics as numerics

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
ALL_BYTES = np.arange(256, dtype=np.uint8)
NAMED_E8M0 = (0, 1, 126, 127, 128, 254, 255)
NAMED_E4M3 = (0x00, 0x01, 0x7E, 0x7F, 0x80, 0xFF)


def value_of(code: int) -> float:
    return math.copysign(VALUES[code & 7], -1.0 if code & 8 else 1.0)


def e4m3_of(byte: int) -> float:
    """OCP 8-bit floating point: bias 7, exponent 0 subnormal, S.1111.111 NaN, no infinities."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return math.copysign(mantissa * 2.0**-9, sign)
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def e8m0_of(byte: int) -> float:
    return math.nan if byte == 255 else math.ldexp(1.0, byte - 127)


def unpack_by_hand(packed: np.ndarray) -> np.ndarray:
    """Bytes [..., K/2] -> float64 values [..., K], the even k in the low nibble."""
    table = np.array([value_of(code) for code in range(16)])
    out = np.empty((*packed.shape[:-1], packed.shape[-1] * 2))
    out[..., 0::2] = table[packed & 15]
    out[..., 1::2] = table[packed >> 4]
    return out


def by_hand(weight: object, expert: int) -> np.ndarray:
    """The value of one expert by the formulas of the formats, in float64 and rounded to float32 where they round."""
    data = weight.data.numpy()[expert]
    block = {"nvfp4": 16, "mxfp4": 32}[weight.format]
    decode = e4m3_of if weight.format == "nvfp4" else e8m0_of
    table = np.array([decode(byte) for byte in range(256)])
    scale = np.repeat(table[weight.scale.view(torch.uint8).numpy()[expert]], block, axis=-1)
    with np.errstate(over="ignore", invalid="ignore"):
        out = (unpack_by_hand(data) * scale).astype(np.float32)
        if weight.scale2 is None:
            return out
        second = weight.scale2.numpy()[expert]
        rows = np.array([second if second.ndim == 0 else second[row % 2] for row in range(len(out))], dtype=np.float32)
        return out * rows[:, None]


def same_bits(got: torch.Tensor, want: np.ndarray) -> None:
    """Equal bit for bit, any NaN standing for any other."""
    have = got.numpy()
    assert have.shape == want.shape
    assert have.dtype == want.dtype == np.float32
    nan = np.isnan(want)
    assert (np.isnan(have) == nan).all()
    assert (have.view(np.uint32)[~nan] == want.view(np.uint32)[~nan]).all()


def random_nvfp4(module: ModuleType, seed: int, experts: int, rows: int, blocks: int, apart: bool) -> object:
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, (experts, rows, blocks * 8), dtype=np.uint8)
    scale = generator.integers(0, 0x7F, (experts, rows, blocks), dtype=np.uint8)
    scale2 = generator.uniform(1e-4, 3.0, (experts, 2) if apart else (experts,)).astype(np.float32)
    return module.ExpertWeight(
        "nvfp4",
        torch.from_numpy(data),
        torch.from_numpy(scale).view(torch.float8_e4m3fn),
        torch.from_numpy(scale2),
        "interleaved" if apart else "plain",
    )


def test_e2m1_codes() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    same_bits(numerics.decode_e2m1(codes), np.array([value_of(code) for code in range(16)], dtype=np.float32))
    same_bits(
        numerics.decode_e2m1(codes), np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    )


def test_encoding_e2m1_takes_the_nearest_code_and_the_even_one_of_two() -> None:
    values = np.arange(-8 * 64, 8 * 64 + 1, dtype=np.float32) / 64
    got = numerics.encode_e2m1(torch.from_numpy(values)).numpy()
    for value, code in zip(values, got, strict=True):
        distance = [abs(abs(value) - v) for v in VALUES]
        nearest = [c for c in range(8) if distance[c] == min(distance)]
        expected = next(c for c in nearest if len(nearest) == 1 or c % 2 == 0)
        assert code == expected | (8 if np.signbit(value) else 0), value
    assert numerics.encode_e2m1(torch.tensor([0.0, -0.0, 1e30, -1e30])).tolist() == [0, 8, 7, 15]


def test_encoding_and_decoding_e2m1_are_inverse() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(numerics.encode_e2m1(numerics.decode_e2m1(codes)), codes)


def test_packing_puts_the_even_position_in_the_low_nibble() -> None:
    assert numerics.pack_e2m1(torch.tensor([[0x1, 0xE, 0x0, 0x8]], dtype=torch.uint8)).tolist() == [[0xE1, 0x80]]
    packed = torch.from_numpy(ALL_BYTES.copy()).view(4, 64)
    codes = numerics.unpack_e2m1(packed)
    assert torch.equal(numerics.pack_e2m1(codes), packed)
    assert codes[0, 2 * 0x2B % 128 :].tolist() == [c for b in range(0x2B, 64) for c in (b % 16, b // 16)]


def test_e8m0_of_every_byte() -> None:
    got = numerics.decode_e8m0(torch.from_numpy(ALL_BYTES.copy()))
    same_bits(got, np.array([e8m0_of(byte) for byte in range(256)], dtype=np.float32))
    same_bits(got, ALL_BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    named = [float(got[byte]) for byte in NAMED_E8M0]
    assert named[:-1] == [2.0**-127, 2.0**-126, 0.5, 1.0, 2.0, 2.0**127]
    assert math.isnan(named[-1])


def test_e4m3_of_every_byte() -> None:
    raw = torch.from_numpy(ALL_BYTES.copy())
    for scale in (raw, raw.view(torch.float8_e4m3fn)):
        same_bits(numerics.decode_e4m3(scale), np.array([e4m3_of(byte) for byte in range(256)], dtype=np.float32))
    got = [float(numerics.decode_e4m3(raw)[byte]) for byte in NAMED_E4M3]
    assert got[:3] == [0.0, 2.0**-9, 448.0]
    assert math.isnan(got[3])
    assert math.copysign(1, got[4]) == -1
    assert got[4] == 0
    assert math.isnan(got[5])


def test_encoding_e4m3_rounds_to_nearest_even_and_saturates() -> None:
    grid = np.unique(np.concatenate([np.geomspace(2.0**-12, 440, 4001), np.arange(0, 33) * 2.0**-10])).astype(
        np.float32
    )
    got = numerics.encode_e4m3(torch.from_numpy(grid)).view(torch.uint8).numpy()
    assert (got == grid.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)).all()
    wide = numerics.encode_e4m3(torch.tensor([449.0, 1e9, -1e9])).float()
    assert wide.tolist() == [448.0, 448.0, -448.0]


@pytest.mark.parametrize("columns", [16, 32, 48, 64])
@pytest.mark.parametrize("scale2", [1.0, 0.0012345, 3.4e5])
def test_nvfp4_of_every_code_and_scale(columns: int, scale2: float) -> None:
    scale = torch.from_numpy(ALL_BYTES.copy()).view(256, 1).repeat(1, columns // 16)
    data = torch.from_numpy(np.resize(ALL_BYTES.reshape(16, 16).T, (256, columns // 2)).copy())
    weight = numerics.ExpertWeight("nvfp4", data[None], scale[None], torch.tensor([scale2]), "plain")
    same_bits(weight.dequant(0), by_hand(weight, 0))
    assert {0, 7, 8, 15} <= set(numerics.unpack_e2m1(data).flatten().tolist())


@pytest.mark.parametrize("columns", [32, 64])
def test_mxfp4_of_every_code_and_scale(columns: int) -> None:
    scale = torch.from_numpy(ALL_BYTES.copy()).view(256, 1).repeat(1, columns // 32)
    data = torch.from_numpy(np.resize(np.arange(16, dtype=np.uint8) * 17, (256, columns // 2)).copy())
    weight = numerics.ExpertWeight("mxfp4", data[None], scale[None], None, "plain")
    same_bits(weight.dequant(0), by_hand(weight, 0))
    assert float(weight.dequant(0)[0, 2]) == 2.0**-128, "byte 0 is a subnormal power, not zero"


@pytest.mark.parametrize("columns", [16, 48])
def test_mxfp4_refuses_a_width_that_is_no_multiple_of_32(columns: int) -> None:
    with pytest.raises(ValueError, match=rf"width {columns} is not a multiple of mxfp4's block of 32"):
        numerics.quantize_mxfp4(torch.zeros(1, 2, columns))
    data, scale = torch.zeros(1, 2, columns // 2, dtype=torch.uint8), torch.zeros(1, 2, 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match=rf"width {columns} is not a multiple"):
        numerics.ExpertWeight("mxfp4", data, scale)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    experts=st.integers(1, 3),
    pairs=st.integers(1, 4),
    blocks=st.integers(1, 5),
    apart=st.booleans(),
    start=st.integers(0, 8),
    stop=st.integers(0, 8),
)
def test_any_slice_of_any_weight(
    seed: int, experts: int, pairs: int, blocks: int, apart: bool, start: int, stop: int
) -> None:
    weight = random_nvfp4(numerics, seed, experts, 2 * pairs, blocks, apart)
    assert (weight.num_experts, weight.rows, weight.cols) == (experts, 2 * pairs, 16 * blocks)
    for expert in range(experts):
        want = by_hand(weight, expert)
        same_bits(weight.dequant(expert), want)
        same_bits(weight.dequant(expert, rows=slice(start, stop)), want[start:stop])
        narrow = weight.dequant(expert, torch.bfloat16)
        assert narrow.dtype == torch.bfloat16
        assert torch.equal(narrow, torch.from_numpy(want).to(torch.bfloat16))


def test_unquantised_weights_are_cast_only_and_stay_differentiable() -> None:
    data = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    weight = numerics.ExpertWeight("bf16", data, layout="interleaved")
    assert weight.dequant(1).data_ptr() == data[1].data_ptr()
    weight.dequant(1, torch.bfloat16).sum().backward()
    assert data.grad is not None
    assert data.grad[0].eq(0).all()
    assert data.grad[1].eq(1).all()
    assert weight.nbytes == data.numel() * 4


def step_nvfp4(scale: torch.Tensor, scale2: torch.Tensor, rows: int) -> np.ndarray:
    second = scale2.numpy().astype(np.float64)
    per_row = second[:, None] if second.ndim == 1 else np.tile(second, (1, rows // 2))
    return np.repeat(scale.float().numpy().astype(np.float64) * per_row[:, :, None], 16, axis=-1)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), power=st.integers(-20, 20), apart=st.booleans(), blocks=st.integers(1, 4))
def test_nvfp4_error_is_within_a_step(seed: int, power: int, apart: bool, blocks: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    source = torch.randn(2, 6, 16 * blocks, generator=generator) * 2.0**power
    data, scale, scale2 = numerics.quantize_nvfp4(source, separate_gate_up=apart)
    assert tuple(scale2.shape) == ((2, 2) if apart else (2,))
    weight = numerics.ExpertWeight("nvfp4", data, scale, scale2, "interleaved")
    weight.check_values()
    got = np.stack([by_hand(weight, expert) for expert in range(2)]).astype(np.float64)
    error = np.abs(got - source.double().numpy())
    assert (error <= step_nvfp4(scale, scale2, 6) * (1 + 1e-6)).all()
    signed = np.sign(got) == np.sign(source.numpy())
    assert (signed | (got == 0)).all()


def test_the_second_scale_follows_the_largest_magnitude_of_its_rows() -> None:
    source = torch.full((2, 4, 32), 0.01)
    source[0, 0, 3], source[0, 1, 7] = -2688.0, 26.88
    _, _, together = numerics.quantize_nvfp4(source)
    _, _, apart = numerics.quantize_nvfp4(source, separate_gate_up=True)
    assert together.tolist() == pytest.approx([1.0, 0.01 / 2688])
    assert apart[0].tolist() == pytest.approx([1.0, 0.01])
    assert apart[1].tolist() == pytest.approx([0.01 / 2688] * 2)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), power=st.integers(-140, 120), blocks=st.integers(1, 3))
def test_mxfp4_error_is_within_a_step(seed: int, power: int, blocks: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    source = torch.randn(2, 3, 32 * blocks, generator=generator).double().mul(2.0**power).float()
    data, scale = numerics.quantize_mxfp4(source)
    weight = numerics.ExpertWeight("mxfp4", data, scale)
    got = np.stack([by_hand(weight, expert) for expert in range(2)]).astype(np.float64)
    step = np.repeat(np.ldexp(1.0, scale.numpy().astype(np.int64) - 127), 32, axis=-1)
    assert (np.abs(got - source.double().numpy()) <= step).all()
    largest = np.abs(source.double().numpy()).reshape(2, 3, blocks, 32).max(axis=-1) / step[..., ::32]
    smallest_scale = scale.numpy() == 0
    assert (((largest >= 3.5) & (largest < 7)) | smallest_scale).all()


@pytest.mark.parametrize("seed", range(3))
def test_quantising_what_was_quantised_changes_nothing(seed: int) -> None:
    source = torch.randn(2, 8, 96, generator=torch.Generator().manual_seed(seed))
    source[0, 0] = 0
    data, scale = numerics.quantize_mxfp4(source)
    weight = numerics.ExpertWeight("mxfp4", data, scale)
    again = numerics.quantize_mxfp4(torch.stack([weight.dequant(0), weight.dequant(1)]))
    assert torch.equal(again[0], data)
    assert torch.equal(again[1], scale)

    packed = numerics.quantize_nvfp4(source, separate_gate_up=True)
    weight = numerics.ExpertWeight("nvfp4", *packed, "interleaved")
    values = torch.stack([weight.dequant(0), weight.dequant(1)])
    again = numerics.quantize_nvfp4(values, scale2=packed[2])
    assert torch.equal(again[0], packed[0])
    assert torch.equal(again[1].view(torch.uint8), packed[1].view(torch.uint8))


def test_zeros_and_extremes() -> None:
    for value in (0.0, 1e-42, 2.0**-126, 3e38):
        source = torch.full((1, 2, 32), value)
        source[0, 0, 1] *= -1
        for weight in (
            numerics.ExpertWeight("nvfp4", *numerics.quantize_nvfp4(source)),
            numerics.ExpertWeight("mxfp4", *numerics.quantize_mxfp4(source)),
        ):
            weight.check_values()
            got = weight.dequant(0)
            assert torch.isfinite(got).all(), (value, weight.format)
            if value == 0.0 or value > 1:
                assert torch.allclose(got, source[0], rtol=0.2), (value, weight.format)


@pytest.mark.parametrize("quantize", [numerics.quantize_nvfp4, numerics.quantize_mxfp4])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_quantising_names_the_expert_and_row_of_a_bad_value(quantize: Callable[..., object], bad: float) -> None:
    source = torch.ones(3, 4, 32)
    source[2, 1, 5] = bad
    with pytest.raises(ValueError, match="expert 2, row 1"):
        quantize(source)
    with pytest.raises(ValueError, match="expert 12, row 1"):
        quantize(source, first_expert=10)


# Broken copies: a piece of the source replaced by a plausible mistake. `checks` must fail on each.
MUTANTS = {
    "nibbles swapped": ("(packed & 0xF, packed >> 4)", "(packed >> 4, packed & 0xF)"),
    "second scale dropped": ("    if scale2 is not None:\n        values *= scale2\n", ""),
    "gate's scale used for up": ("scale2.repeat(1, rows // 2).unsqueeze", "scale2[:, :1].unsqueeze"),
    "gate and up as halves": ("scale2.repeat(1, rows // 2)", "scale2.repeat_interleave(rows // 2, 1)"),
    "E8M0 0 is zero": ("torch.where(scale == 0, 0x0040_0000, bits)", "torch.where(scale == 0, 0, bits)"),
    "E8M0 255 is infinity": ("    bits = torch.where(scale == 255, 0x7FC0_0000, bits)\n", ""),
    "-0 is lost": ("(torch.signbit(values).to(torch.uint8) << 3)", "((values < 0).to(torch.uint8) << 3)"),
    "E2M1 5 is 2.5": ("2.0, 3.0, 4.0, 6.0, -0.0", "2.0, 2.5, 4.0, 6.0, -0.0"),
    "sign bit ignored": ("-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0", "0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0"),
    "ties away from zero": ("> midpoint if index % 2 == 0 else magnitude >= midpoint", ">= midpoint"),
    "block of 32 for NVFP4": ('"nvfp4": 16, "mxfp4": 32', '"nvfp4": 32, "mxfp4": 32'),
    "E8M0 floor instead of even": (" + (mantissa >= 0.875).int()", ""),
}  # fmt: skip


def checks(module: ModuleType) -> None:
    """A short pass over everything above, on any copy of the module."""
    raw = torch.from_numpy(ALL_BYTES.copy())
    same_bits(module.decode_e8m0(raw), np.array([e8m0_of(byte) for byte in range(256)], dtype=np.float32))
    same_bits(module.decode_e2m1(raw[:16]), np.array([value_of(code) for code in range(16)], dtype=np.float32))
    ties = torch.tensor([-0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert module.encode_e2m1(ties).tolist() == [8, 0, 2, 2, 4, 4, 6, 6]
    assert module.encode_e4m3(torch.tensor([1e9])).float().tolist() == [448.0]
    for apart in (False, True):
        weight = random_nvfp4(module, 3, 2, 4, 3, apart)
        same_bits(weight.dequant(1), by_hand(weight, 1))
    source = torch.linspace(-7.9, 7.9, 64).view(1, 2, 32)
    data, scale = module.quantize_mxfp4(source)
    weight = module.ExpertWeight("mxfp4", data, scale)
    assert (np.abs(by_hand(weight, 0) - source[0].numpy()) <= 2.0 ** (int(scale.max()) - 127)).all()


@pytest.mark.parametrize("mistake", [None, *MUTANTS])
def test_broken_copies_are_caught(mistake: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(numerics.__file__).read_text()
    if mistake is not None:
        old, new = MUTANTS[mistake]
        assert source.count(old) == 1, "the source has changed: adapt the mutant"
        source = source.replace(old, new)
    module = ModuleType("numerics_copy")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, module.__name__, "exec"), module.__dict__)
    if mistake is None:
        checks(module)
        return
    with pytest.raises((AssertionError, ValueError)):
        checks(module)
