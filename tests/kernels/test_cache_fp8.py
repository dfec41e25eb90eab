"""What the preparation kernel writes into an fp8 cache, against the definition of the codes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from inkling_kernels.kv_cache import qkvr_prep

KINDS = [torch.float8_e4m3fn, torch.float8_e4m3fnuz]
D = 16


def table(kind: torch.dtype) -> np.ndarray:
    """The finite values of codes 0, 1, ... in ascending order."""
    fnuz = kind == torch.float8_e4m3fnuz
    bias, codes = (8, 128) if fnuz else (7, 127)
    exponent, mantissa = np.arange(codes) >> 3, np.arange(codes) & 7
    return np.where(
        exponent == 0, mantissa * 2.0 ** (1 - bias - 3), (1 + mantissa / 8) * 2.0 ** (exponent - float(bias))
    )


def encoded(x: np.ndarray, kind: torch.dtype) -> np.ndarray:
    """Nearest code, ties to the even one, saturating; NaN has a code of its own."""
    values = table(kind)
    size = np.minimum(np.abs(np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=1e9, neginf=-1e9)), values[-1])
    above = np.searchsorted(values, size)
    below = np.maximum(above - 1, 0)
    up, down = values[above] - size, size - values[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    if kind == torch.float8_e4m3fnuz:
        code = np.where(np.isnan(x), 0x80, np.where(code == 0, 0, code | np.signbit(x) * 0x80))
        return code.astype(np.uint8)
    return np.where(np.isnan(x), 0x7F, code | np.signbit(x) * 0x80).astype(np.uint8)


def prepare(
    qkvr: torch.Tensor, pages: torch.Tensor, scales: list[float] | None, device: torch.device, kv_heads: int = 1
) -> tuple[torch.Tensor, ...]:
    """One query head and `kv_heads` others, a convolution that passes its input on, no state."""
    rows = len(qkvr)
    cache = (pages.to(device), pages.clone().to(device))
    options: dict[str, Any] = {"num_heads": 1, "num_kv_heads": kv_heads, "head_dim": D, "d_rel": 16}
    factors = None if scales is None else torch.tensor(scales, device=device)
    out = qkvr_prep(
        qkvr.to(device), torch.zeros(2 * kv_heads * D, 1, device=device),
        *(torch.ones(D, dtype=qkvr.dtype, device=device) for _ in range(2)), 1e-6, None,
        *(torch.tensor(values, dtype=torch.int32, device=device) for values in ([0], [0, rows], [rows])), cache,
        torch.arange(rows, device=device), **options, log_scaling_n_floor=None, log_scaling_alpha=0.1,
        kv_scales=None if factors is None else (factors, factors),
    )  # fmt: skip
    return tuple(x.cpu() for x in out)


def values_as_v(values: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A projection whose V rows hold `values`, sixteen a row."""
    rows = len(values) // D
    qkvr = torch.ones(rows, 4 * D, dtype=dtype)
    qkvr[:, 2 * D : 3 * D] = torch.from_numpy(values.astype(np.float32)).view(rows, D).to(dtype)
    return qkvr


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_core_every_boundary_between_codes(kernel_device: torch.device, kind: torch.dtype) -> None:
    """Codes, midpoints and their float32 neighbours, of either sign; what is far too small or too large; NaN."""
    codes = table(kind)
    marks = np.concatenate([codes, (codes[1:] + codes[:-1]) / 2, [codes[-1] * 1.03, codes[-1] * 1.07]]).astype(
        np.float32
    )
    marks = np.concatenate([marks, np.nextafter(marks, np.float32(1e9)), np.nextafter(marks, np.float32(-1e9))])
    marks = np.concatenate([marks, [1e-45, 1e-30, 1e30, np.nan], np.ones(-(len(marks) + 4) % 8)])
    x = np.concatenate([marks, -marks]).astype(np.float32) + np.float32(0)  # the convolution has no -0
    pages = torch.zeros(len(x) // D, 1, 1, D, dtype=torch.uint8).view(kind)
    _, _, _, v = prepare(values_as_v(x), pages, [1.0], kernel_device)
    np.testing.assert_array_equal(v.view(torch.uint8).numpy().ravel(), encoded(x, kind))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_bfloat16_numbers_of_every_size(kernel_device: torch.device, kind: torch.dtype) -> None:
    bits = np.arange(64, 65536, 64)[:1008].astype(np.uint16)
    x = bits.view(ml_dtypes.bfloat16).astype(np.float32)
    # The convolution that comes first makes NaN of an infinity, and has no -0.
    x = np.where(np.isinf(x), 1.0, x).astype(np.float32) + np.float32(0)
    pages = torch.zeros(len(x) // D, 1, 1, D, dtype=torch.uint8).view(kind)
    _, _, _, v = prepare(values_as_v(x, torch.bfloat16), pages, [1.0], kernel_device)
    np.testing.assert_array_equal(v.view(torch.uint8).numpy().ravel(), encoded(x, kind))


def test_scales_saturation_and_q(kernel_device: torch.device) -> None:
    """V of 1272 needs a scale; without a fitting one it saturates; q is what it is beside a bfloat16 cache."""
    x = torch.zeros(2, 6 * D, dtype=torch.bfloat16)
    x[:, :D] = torch.tensor([300.0, 1e-3] * (D // 2))
    x[:, D : 3 * D] = 73.5
    x[:, 3 * D : 4 * D], x[:, 4 * D : 5 * D], x[1, 3 * D] = 1272.0, 1e-3, float("nan")
    pages = torch.zeros(2, 1, 2, D, dtype=torch.bfloat16)
    plain = prepare(x, pages, None, kernel_device, kv_heads=2)
    for scales, expected in (([1.0], (448.0, 2.0**-9)), ([4.0, 2.0**-7], (1280.0, 2.0**-10))):
        q, r, k, v = prepare(x, pages.to(torch.float8_e4m3fn), scales, kernel_device, kv_heads=2)
        assert q.dtype == torch.bfloat16
        assert torch.equal(q, plain[0])
        assert torch.equal(r, plain[1])
        assert plain[2].tolist() == torch.ones(2, 1, 2, D).tolist()
        factors = torch.tensor(scales).view(-1, 1)
        assert (k.float() * factors == 1).all()
        found = v.float() * factors
        assert (found[0, 0, 0] == expected[0]).all()
        assert (found[0, 0, 1] - 1e-3).abs().max() <= 1e-3
        assert v[1, 0, 0, 0].float().isnan()
        assert int(v.float().isnan().sum()) == 1


def test_scales_divide_with_one_rounding(kernel_device: torch.device) -> None:
    """A scale that is no power of two: the quotient is the float32 one, so a tie stays where float32 puts it."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(64 * D) * 50).astype(np.float32)
    pages = torch.zeros(64, 1, 1, D, dtype=torch.float8_e4m3fn)
    _, _, _, v = prepare(values_as_v(x), pages, [0.3], kernel_device)
    expected = encoded(x / np.float32(0.3), torch.float8_e4m3fn)
    np.testing.assert_array_equal(v.view(torch.uint8).numpy().ravel(), expected)


def test_bytes_are_taken_as_e4m3fn(kernel_device: torch.device) -> None:
    x = values_as_v(np.linspace(-500, 500, 8 * D))
    pages = torch.zeros(8, 1, 1, D, dtype=torch.uint8)
    found = prepare(x, pages, [1.0], kernel_device)
    expected = prepare(x, pages.view(torch.float8_e4m3fn), [1.0], kernel_device)
    for a, b in zip(found[2:], expected[2:], strict=True):
        assert torch.equal(a, b.view(torch.uint8))


def test_minus_zero_is_not_nan_in_fnuz(kernel_device: torch.device) -> None:
    pages = torch.zeros(1, 1, 1, D, dtype=torch.uint8).view(torch.float8_e4m3fnuz)
    _, _, _, v = prepare(values_as_v(np.full(D, -1e-9)), pages, [1.0], kernel_device)
    assert (v.float() == 0).all()


def test_scales_and_type_belong_together(kernel_device: torch.device) -> None:
    x = values_as_v(np.zeros(D))
    with pytest.raises(TypeError, match=r"k_pages is torch\.float32; expected torch\.float8_e4m3fn"):
        prepare(x, torch.zeros(1, 1, 1, D), [1.0], kernel_device)
    with pytest.raises(TypeError, match=r"k_pages is torch\.float8_e4m3fn; expected torch\.float32"):
        prepare(x, torch.zeros(1, 1, 1, D, dtype=torch.float8_e4m3fn), None, kernel_device)
    with pytest.raises(ValueError, match=r"k_scale is torch\.float32 \(3,\); expected float32 \[1\]"):
        prepare(x, torch.zeros(1, 1, 1, D, dtype=torch.float8_e4m3fn), [1.0, 1.0, 1.0], kernel_device)
