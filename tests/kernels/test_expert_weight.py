"""What an expert weight refuses, and how it says so."""

from __future__ import annotations

import math

import pytest
import torch

import inkling_kernels.numerics as numerics


def u8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


BAD_WEIGHTS = {
    "format": (("int4", u8(1, 2, 8)), ValueError, "format: 'int4'.*bf16, nvfp4, mxfp4"),
    "layout": (("bf16", torch.zeros(1, 2, 8), None, None, "contiguous"), ValueError, "layout: 'contiguous'"),
    "odd rows": (("bf16", torch.zeros(1, 3, 8), None, None, "interleaved"), ValueError, "3 rows"),
    "rank": (("bf16", torch.zeros(2, 8)), ValueError, r"shape \[2, 8\].*three dimensions"),
    "codes as float": (("nvfp4", torch.zeros(1, 2, 8), u8(1, 2, 1), torch.ones(1)), TypeError, "data: dtype"),
    "float as codes": (("bf16", u8(1, 2, 8)), TypeError, "data: dtype torch.uint8"),
    "scaled bf16": (("bf16", torch.zeros(1, 2, 8), u8(1, 2, 1)), ValueError, "scale: given"),
    "width": (("nvfp4", u8(1, 2, 12), u8(1, 2, 1), torch.ones(1)), ValueError, "width 24 .* block of 16"),
    "no scale": (("mxfp4", u8(1, 2, 16)), ValueError, "scale: missing"),
    "flat scale": (("mxfp4", u8(2, 2, 16), u8(4, 1)), ValueError, r"scale: shape \[4, 1\], expected \[2, 2, 1\]"),
    "wrong block": (("nvfp4", u8(1, 2, 16), u8(1, 2, 1), torch.ones(1)), ValueError, r"expected \[1, 2, 2\]"),
    "scale dtype": (("mxfp4", u8(1, 2, 16), torch.ones(1, 2, 1)), TypeError, "scale: dtype torch.float32"),
    "no scale2": (("nvfp4", u8(1, 2, 8), u8(1, 2, 1)), ValueError, "scale2: missing"),
    "scale2 of mxfp4": (("mxfp4", u8(1, 2, 16), u8(1, 2, 1), torch.ones(1)), ValueError, "no second scale"),
    "scale2 count": (
        ("nvfp4", u8(2, 2, 8), u8(2, 2, 1), torch.ones(1)),
        ValueError,
        r"scale2: shape \[1\], expected \[2\]",
    ),
    "scale2 halves": (("nvfp4", u8(1, 2, 8), u8(1, 2, 1), torch.ones(1, 2)), ValueError, r"expected \[1\] for layout"),
    "scale2 dtype": (("nvfp4", u8(1, 2, 8), u8(1, 2, 1), torch.ones(1).double()), TypeError, "scale2: dtype"),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_construction_names_what_is_wrong(case: str) -> None:
    arguments, kind, message = BAD_WEIGHTS[case]
    with pytest.raises(kind, match=message):
        numerics.ExpertWeight(*arguments)


def test_uses_of_a_weight_name_what_is_wrong() -> None:
    weight = numerics.ExpertWeight("bf16", torch.zeros(2, 4, 8), layout="interleaved")
    with pytest.raises(ValueError, match="w2: layout is 'interleaved', this operation needs 'plain'"):
        weight.require_layout("plain", "w2")
    weight.require_layout("interleaved")
    with pytest.raises(ValueError, match=r"expert: 2 is out of range.*0\.\.1"):
        weight.dequant(2)
    with pytest.raises(ValueError, match="expert: -1"):
        weight.dequant(-1)
    with pytest.raises(ValueError, match="rows: step 2"):
        weight.dequant(0, rows=slice(None, None, 2))
    with pytest.raises(ValueError, match="scale2: missing"):
        numerics.dequantize(u8(2, 8), u8(2, 1), None, format="nvfp4")
    with pytest.raises(ValueError, match=r"scale2: shape \[3\], expected \[2\]"):
        numerics.quantize_nvfp4(torch.ones(2, 2, 16), scale2=torch.ones(3))
    with pytest.raises(ValueError, match="scale2: holds"):
        numerics.quantize_nvfp4(torch.ones(2, 2, 16), scale2=torch.tensor([1.0, 0.0]))
    with pytest.raises(ValueError, match="3 rows cannot be gate and up"):
        numerics.quantize_nvfp4(torch.ones(2, 3, 16), separate_gate_up=True)
    with pytest.raises(TypeError, match="weight: dtype torch"):
        numerics.quantize_mxfp4(torch.ones(1, 1, 32, dtype=torch.int32))


@pytest.mark.parametrize(("format", "byte", "block"), [("nvfp4", 0x7F, 16), ("nvfp4", 0xFF, 16), ("mxfp4", 255, 32)])
def test_nan_scales_are_named_by_expert_and_row(format: str, byte: int, block: int) -> None:
    scale = torch.full((3, 4, 2), 0x38, dtype=torch.uint8)
    scale2 = torch.ones(3) if format == "nvfp4" else None
    weight = numerics.ExpertWeight(format, u8(3, 4, block), scale, scale2)
    weight.check_values()
    scale[2, 1, 1] = byte
    with pytest.raises(ValueError, match="scale: NaN at expert 2, row 1, block 1"):
        weight.check_values()


def test_second_scales_that_are_no_numbers_are_named() -> None:
    scale2 = torch.ones(2, 2)
    scale2[1, 1] = math.inf
    weight = numerics.ExpertWeight("nvfp4", u8(2, 4, 8), u8(2, 4, 1), scale2, "interleaved")
    with pytest.raises(ValueError, match=r"scale2: inf at expert 1 \(up rows\)"):
        weight.check_values()
