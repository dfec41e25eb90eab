"""Activations in block formats, against scales and codes chosen in numpy by search."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_oracle import E2M1
from on_device import on_device

from inkling_kernels.act_quant import BLOCKS, quantise_activations
from inkling_kernels.testing import guarded

E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The code of the nearest value of `table`, the even one of two as near; signs of zero kept, saturating."""
    positive = table[: len(table) // 2]
    positive = positive[np.isfinite(positive)]
    distance = np.abs(np.abs(values)[..., None] - positive)
    least = distance.min(-1, keepdims=True)
    tied = distance == least
    first = tied.argmax(-1)
    code = np.where((tied.sum(-1) > 1) & (first % 2 == 1), first + 1, first)
    return (code + np.signbit(values) * (len(table) // 2)).astype(np.uint8)


def expected(x: np.ndarray, kind: str, scale2: float) -> tuple[np.ndarray, np.ndarray]:
    blocks = x.reshape(len(x), -1, BLOCKS[kind])
    amax = np.abs(blocks).max(-1)
    if kind == "nvfp4":
        scales = nearest(amax / np.float32(6 * np.float32(scale2)), E4M3)
        step = E4M3[scales] * np.float32(scale2)
    else:
        top, edge = (2, 1.75) if kind == "mxfp4" else (8, 1.75)
        with np.errstate(divide="ignore"):
            exponent = np.floor(np.log2(amax))
        mantissa = amax / 2.0**exponent
        up = mantissa >= edge if kind == "mxfp4" else mantissa > edge
        scales = np.where(amax == 0, 127, np.clip(exponent - top + up + 127, 0, 254)).astype(np.uint8)
        step = 2.0 ** (scales.astype(np.float64) - 127)
    with np.errstate(divide="ignore", invalid="ignore"):
        wanted = np.where(step[..., None] > 0, blocks / step[..., None], 0.0)
    codes = nearest(wanted.reshape(x.shape), E4M3 if kind == "mxfp8" else E2M1)
    return codes if kind == "mxfp8" else codes[:, 0::2] | codes[:, 1::2] << 4, scales


@settings(max_examples=12, deadline=None)
@given(
    kind=st.sampled_from(sorted(BLOCKS)),
    rows=st.integers(1, 9),
    columns=st.sampled_from([32, 96, 192]),
    scale2=st.sampled_from([1.0, 2.0**-7, 0.25]),
    seed=st.integers(0, 2**31),
)
def test_codes_and_scales(
    kernel_device: torch.device, kind: str, rows: int, columns: int, scale2: float, seed: int
) -> None:
    """Magnitudes over many binades, zeros, whole blocks of zeros, and ties between codes."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns)) * 2.0 ** rng.integers(-12, 8, (rows, columns // 16)).repeat(16, 1)
    x[rng.random(x.shape) < 0.2] = 0
    x[:, :32] *= rng.random() < 0.7
    x[0, -16:] = np.arange(16) / 4 * 2.0 ** rng.integers(-3, 3)
    x = torch.from_numpy(x).bfloat16().float()
    run = on_device(quantise_activations, kernel_device)
    second = torch.tensor([scale2]) if kind == "nvfp4" else None
    codes, scales = run(guarded(x), kind, second)
    wanted = expected(x.double().numpy(), kind, scale2)
    np.testing.assert_array_equal(scales.numpy(), wanted[1])
    np.testing.assert_array_equal(codes.numpy() & 0x77, wanted[0] & 0x77)
    np.testing.assert_array_equal(codes.numpy(), wanted[0])


@pytest.mark.parametrize("kind", sorted(BLOCKS))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_spoils_its_block_alone(kernel_device: torch.device, kind: str, bad: float) -> None:
    x = torch.ones(2, 64)
    x[1, 40] = bad
    _, scales = on_device(quantise_activations, kernel_device)(x, kind)
    nan = scales == (0x7F if kind == "nvfp4" else 0xFF)
    assert nan[1, 40 // BLOCKS[kind]]
    assert int(nan.sum()) == 1


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="kind is 'fp4'; expected one of nvfp4, mxfp4, mxfp8"):
        quantise_activations(torch.zeros(1, 32), "fp4")
    with pytest.raises(ValueError, match="x has 48 columns; expected a multiple of 32"):
        quantise_activations(torch.zeros(1, 48), "nvfp4")
    with pytest.raises(ValueError, match="scale2 is given for mxfp4"):
        quantise_activations(torch.zeros(1, 32), "mxfp4", torch.ones(1))
    with pytest.raises(TypeError, match=r"x is torch\.float16"):
        quantise_activations(torch.zeros(1, 32).half(), "mxfp4")
    assert quantise_activations(torch.zeros(0, 32), "mxfp8")[0].shape == (0, 32)
