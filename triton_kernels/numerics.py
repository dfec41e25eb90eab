"""The 4-bit formats of Inkling's routed experts: E2M1 codes, E8M0 and E4M3 scales, and the weights made of them.

    NVFP4:  w[n, k] = e2m1(code[n, k]) * e4m3(scale[n, k // 16]) * scale2          (scale2: one float32 per expert,
                                                                                    or one for gate and one for up)
    MXFP4:  w[n, k] = e2m1(code[n, k]) * 2 ** (scale[n, k // 32] - 127)

Codes are packed two to a byte along K, the even k in the low nibble. E2M1 codes 0..7 are 0, .5, 1, 1.5, 2, 3, 4, 6 and
bit 3 is the sign (8 is -0). E8M0 byte 0 is 2**-127 (a float32 subnormal, not zero), 255 is NaN. E4M3 is the finite
kind (`float8_e4m3fn`): 0x7F and 0xFF are NaN, 0x7E is 448, 0x80 is -0, 0x01 is 2**-9.

Everything here is plain torch and exact: a code times an E4M3 or E8M0 scale is exact in float32 (up to overflow, which
gives inf: 2 * 2**127), so dequantising NVFP4 rounds once, at the product with `scale2`. Quantising rounds codes and
E4M3 scales to nearest, ties to even, and saturates.

Sources: OCP Microscaling Formats (MX) v1.0, sections 5.3 and 6.3; NVIDIA ModelOpt (`scale2 = amax / (6 * 448)`, block
scale `block_amax / (6 * scale2)`); AMD Quark's "even" rule for the E8M0 scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from inkling_kernels.moe_words import to_pairs

Format = Literal["bf16", "nvfp4", "mxfp4"]
Layout = Literal["interleaved", "plain"]
Order = Literal["pairs", "words"]

FORMATS: tuple[str, ...] = get_args(Format)
LAYOUTS: tuple[str, ...] = get_args(Layout)
ORDERS: tuple[str, ...] = get_args(Order)
BLOCK: dict[str, int] = {"nvfp4": 16, "mxfp4": 32}
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_TINY = 2.0**-9

# Midpoints between neighbouring magnitudes; a magnitude on a midpoint goes to the even code, so the midpoints
# above an even code (index 0, 2, 4, 6) belong to the code below them and the others to the code above.
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def decode_e2m1(codes: Tensor) -> Tensor:
    """uint8 codes 0..15 (any shape) -> float32 values. The upper four bits must be zero."""
    _expect_dtype("codes", codes, torch.uint8)
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=codes.device)
    return table[codes.int()]


def encode_e2m1(values: Tensor) -> Tensor:
    """float values -> uint8 codes, nearest with ties to the even code, magnitudes above 6 saturating; the sign of
    zero is kept. NaN has no code and must not be passed."""
    values = values.float()
    magnitude = values.abs()
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for index, midpoint in enumerate(_E2M1_MIDPOINTS):
        codes += magnitude > midpoint if index % 2 == 0 else magnitude >= midpoint
    return codes | (torch.signbit(values).to(torch.uint8) << 3)


def pack_e2m1(codes: Tensor) -> Tensor:
    """uint8 codes [..., K] -> packed bytes [..., K/2]: code 2i in the low nibble of byte i, code 2i+1 in the high."""
    _expect_dtype("codes", codes, torch.uint8)
    if codes.shape[-1] % 2:
        raise ValueError(f"codes: the last dimension is {codes.shape[-1]}, expected an even number (two codes a byte)")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """packed bytes [..., K/2] -> uint8 codes [..., K]; the inverse of `pack_e2m1`."""
    _expect_dtype("packed", packed, torch.uint8)
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def decode_e8m0(scale: Tensor) -> Tensor:
    """E8M0 bytes -> float32 `2 ** (byte - 127)`; byte 0 is the subnormal 2**-127 and byte 255 is NaN."""
    _expect_dtype("scale", scale, torch.uint8)
    bits = scale.to(torch.int32) << 23
    # The exponent field cannot express the two ends: field 0 means subnormal, field 255 with no mantissa means inf.
    bits = torch.where(scale == 0, 0x0040_0000, bits)
    bits = torch.where(scale == 255, 0x7FC0_0000, bits)
    return bits.to(torch.int32).view(torch.float32)


def decode_e4m3(scale: Tensor) -> Tensor:
    """E4M3 scales, as `float8_e4m3fn` or its uint8 bytes -> float32."""
    return as_e4m3(scale).float()


def encode_e4m3(values: Tensor) -> Tensor:
    """float values -> `float8_e4m3fn`, nearest with ties to even, magnitudes above 448 saturating (where versions of
    torch disagree about the cast alone)."""
    return values.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def as_e4m3(scale: Tensor) -> Tensor:
    """The same bytes as `float8_e4m3fn`."""
    if scale.dtype == torch.uint8:
        return scale.view(torch.float8_e4m3fn)
    _expect_dtype("scale", scale, torch.float8_e4m3fn)
    return scale


def dequantize(data: Tensor, scale: Tensor | None, scale2: Tensor | float | None, *, format: Format) -> Tensor:
    """Packed codes `data` [..., N, K/2] and block scales `scale` [..., N, K/block] -> float32 [..., N, K].

    `scale2` (NVFP4 only) is a number or a tensor that broadcasts against [..., N, 1]. Any slice of rows or experts may
    be passed, so a caller can stream. Value order: (code * scale) * scale2, the first product exact.
    """
    block = _block(format)
    columns = data.shape[-1] * 2
    if scale is None:
        raise ValueError(f"scale: missing, {format} needs its block scales")
    _check_blocks(columns, data.shape[:-1], scale.shape, format)
    if (scale2 is None) == (format == "nvfp4"):
        raise ValueError(
            f"scale2: {'missing' if scale2 is None else 'given'} for format {format!r}; NVFP4 has one, MXFP4 has none"
        )
    pairs = _byte_values(data.device)
    values = torch.index_select(pairs, 0, data.reshape(-1).int()).view(*data.shape[:-1], columns // block, block)
    values *= (decode_e4m3(scale) if format == "nvfp4" else decode_e8m0(scale)).unsqueeze(-1)
    values = values.flatten(-2)
    if scale2 is not None:
        values *= scale2
    return values


def quantize_nvfp4(
    weight: Tensor, *, separate_gate_up: bool = False, scale2: Tensor | None = None, first_expert: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """float weights [E, N, K] -> (packed uint8 [E, N, K/2], scale float8_e4m3fn [E, N, K/16], scale2 float32).

    `scale2 = amax / (6 * 448)` per expert ([E]), or with `separate_gate_up` per expert and for the even (gate) and odd
    (up) rows apart ([E, 2]; N must be even); pass `scale2` of either shape to use yours. A block scale is
    `e4m3(block_amax / (6 * scale2))`, at least 2**-9 so that no block with values collapses to zero by its scale alone.
    No value is off by more than its block's step `scale * scale2`, half the gap between codes 4 and 6; only in blocks
    with amax below 2**-14.8 of the expert's, where E4M3 is subnormal, can saturation cost three steps.

    Raises ValueError for a K that is no multiple of 16 or for NaN or inf, named by expert (counted from `first_expert`,
    for callers that stream) and row.
    """
    _check_source(weight, "nvfp4", first_expert)
    experts, rows, columns = weight.shape
    if separate_gate_up and rows % 2:
        raise ValueError(f"weight: {rows} rows cannot be gate and up rows in turn; pass separate_gate_up=False")
    wide = weight.float()
    if scale2 is None:
        amax = wide.abs().amax(dim=-1)
        amax = amax.view(experts, rows // 2, 2).amax(dim=1) if separate_gate_up else amax.amax(dim=1)
        scale2 = amax / (E2M1_MAX * E4M3_MAX)
        # All zeros, or so small that a block's step would underflow float32: any scale gives zeros.
        scale2 = torch.where(scale2 * E4M3_TINY >= torch.finfo(torch.float32).tiny, scale2, 1.0)
    elif tuple(scale2.shape) not in ((experts,), (experts, 2)) or (scale2.dim() == 2 and rows % 2):
        raise ValueError(f"scale2: shape {list(scale2.shape)}, expected [{experts}], or [{experts}, 2] for w13")
    elif not bool(((scale2 * E4M3_TINY > 0) & torch.isfinite(scale2)).all()):
        raise ValueError("scale2: holds a value that is not a positive number that float32 can scale by")
    per_row = expand_scale2(scale2, rows)
    blocks = wide.reshape(experts, rows, columns // 16, 16)
    wanted = blocks.abs().amax(dim=-1) / (E2M1_MAX * per_row)
    scale = encode_e4m3(wanted.clamp(min=E4M3_TINY))
    step = (scale.float() * per_row).unsqueeze(-1)
    return pack_e2m1(encode_e2m1(blocks / step).flatten(-2)), scale, scale2.float()


def quantize_mxfp4(weight: Tensor, *, first_expert: int = 0) -> tuple[Tensor, Tensor]:
    """float weights [E, N, K] -> (packed uint8 [E, N, K/2], scale uint8 E8M0 [E, N, K/32]).

    The scale is the power of two that puts the block's largest magnitude into [3.5, 7): OCP's
    `2 ** (floor(log2(amax)) - 2)`, one step larger when amax rounds up to the next power of two at E2M1's precision
    (mantissa >= 1.75), which is Quark's "even" rule. So no value is off by more than its block's scale. A
    block of zeros gets scale 1. Raises ValueError as `quantize_nvfp4` does (K a multiple of 32).
    """
    _check_source(weight, "mxfp4", first_expert)
    experts, rows, columns = weight.shape
    blocks = weight.float().reshape(experts, rows, columns // 32, 32)
    mantissa, exponent = torch.frexp(blocks.abs().amax(dim=-1))  # amax = mantissa * 2**exponent, mantissa in [.5, 1)
    byte = exponent - 1 - 2 + 127 + (mantissa >= 0.875).int()
    # Above 252 the codes 4 and 6 would overflow float32; 252 saturates magnitudes from 1.75 * 2**127.
    byte = torch.where(mantissa == 0, 127, byte).clamp(0, 252).to(torch.uint8)
    return pack_e2m1(encode_e2m1(blocks / decode_e8m0(byte).unsqueeze(-1)).flatten(-2)), byte


def expand_scale2(scale2: Tensor, rows: int) -> Tensor:
    """[E] or [E, 2] second scales -> [E, rows or 1, 1], gate's for the even rows and up's for the odd ones."""
    if scale2.dim() == 1:
        return scale2.view(-1, 1, 1)
    return scale2.repeat(1, rows // 2).unsqueeze(-1)


@dataclass(frozen=True, eq=False)
class ExpertWeight:
    """One projection of all routed experts of a layer, in the form in which it is held in memory.

    format  'bf16' (unquantised, whatever the float dtype), 'nvfp4' or 'mxfp4'
    data    'bf16': float [E, N, K]; else uint8 [E, N, K/2]
    scale   'nvfp4': float8_e4m3fn or its uint8 bytes [E, N, K/16]; 'mxfp4': uint8 [E, N, K/32]; 'bf16': None
    scale2  'nvfp4': float32 [E], or [E, 2] (gate, up) where the layout is 'interleaved'; else None
    layout  how the N rows are arranged: 'interleaved' = gate0, up0, gate1, up1, ... (w13), 'plain' = as they are (w2)
    order   how eight codes lie in a 32-bit word: 'pairs' as in checkpoints, 'words' as `moe_words` says
    input_scale  'nvfp4': float32 [1], the second scale of activations that are quantised to NVFP4 before the product,
            from the checkpoint's calibration, or None; else None

    Construction checks shapes and dtypes; `check_values` also reads the scales. Errors are ValueError or TypeError.
    """

    format: Format
    data: Tensor
    scale: Tensor | None = None
    scale2: Tensor | None = None
    layout: Layout = "plain"
    order: Order = "pairs"
    input_scale: Tensor | None = None

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"format: {self.format!r} is unknown, expected one of {', '.join(FORMATS)}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout: {self.layout!r} is unknown, expected one of {', '.join(LAYOUTS)}")
        if self.input_scale is not None:
            _expect_dtype("input_scale", self.input_scale, torch.float32)
            if self.format != "nvfp4" or tuple(self.input_scale.shape) != (1,):
                shape = list(self.input_scale.shape)
                raise ValueError(f"input_scale: shape {shape} for {self.format}, expected [1], and for nvfp4 alone")
        if self.order not in ORDERS:
            raise ValueError(f"order: {self.order!r} is unknown, expected one of {', '.join(ORDERS)}")
        if self.order == "words" and (self.format == "bf16" or self.data.shape[-1] % 4):
            raise ValueError("order: 'words' is of packed codes in whole 32-bit words, expected 'pairs' here")
        if self.data.dim() != 3:
            raise ValueError(f"data: shape {list(self.data.shape)}, expected three dimensions [experts, rows, columns]")
        if self.layout == "interleaved" and self.data.shape[1] % 2:
            raise ValueError(f"data: {self.data.shape[1]} rows cannot be gate and up rows in turn (an odd number)")
        if self.format == "bf16":
            if not self.data.dtype.is_floating_point or self.data.dtype.itemsize < 2:
                raise TypeError(f"data: dtype {self.data.dtype}, expected bfloat16 or another float of 16 bits or more")
            if self.scale is not None or self.scale2 is not None:
                raise ValueError("scale: given for unquantised data; pass the format that the scales belong to")
            return
        _expect_dtype("data", self.data, torch.uint8)
        if self.scale is None:
            raise ValueError(f"scale: missing, {self.format} needs its block scales")
        _check_blocks(self.cols, self.data.shape[:-1], self.scale.shape, self.format)
        if self.format == "nvfp4":
            as_e4m3(self.scale)
        else:
            _expect_dtype("scale", self.scale, torch.uint8)
        self._check_scale2()

    def _check_scale2(self) -> None:
        if self.format == "mxfp4":
            if self.scale2 is not None:
                raise ValueError("scale2: given, but MXFP4 has no second scale")
            return
        if self.scale2 is None:
            raise ValueError("scale2: missing, NVFP4 needs one float32 per expert")
        _expect_dtype("scale2", self.scale2, torch.float32)
        allowed = [(self.num_experts,)] + [(self.num_experts, 2)] * (self.layout == "interleaved")
        if tuple(self.scale2.shape) not in allowed:
            expected = " or ".join(str(list(shape)) for shape in allowed)
            raise ValueError(f"scale2: shape {list(self.scale2.shape)}, expected {expected} for layout {self.layout!r}")

    @property
    def num_experts(self) -> int:
        return self.data.shape[0]

    @property
    def rows(self) -> int:
        """N: output features (2 * width for w13)."""
        return self.data.shape[1]

    @property
    def cols(self) -> int:
        """K: input features, counted in values, not bytes."""
        return self.data.shape[2] * (1 if self.format == "bf16" else 2)

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes held: data and all scales."""
        parts = (self.data, self.scale, self.scale2, self.input_scale)
        return sum(t.numel() * t.element_size() for t in parts if t is not None)

    def require_layout(self, layout: Layout, argument: str = "weight") -> None:
        """Raise ValueError unless the rows are arranged as `layout`; kernels call it, a wrong split is fluent text."""
        if self.layout != layout:
            raise ValueError(f"{argument}: layout is {self.layout!r}, this operation needs {layout!r}")

    def require_order(self, order: Order, argument: str = "weight") -> None:
        """Raise ValueError unless codes lie as `order` says: in another order they are other values."""
        if self.order != order:
            raise ValueError(f"{argument}: codes are in the order {self.order!r}, this operation needs {order!r}")

    def dequant(self, expert: int, dtype: torch.dtype = torch.float32, rows: slice | None = None) -> Tensor:
        """Expert `expert` as [N, K] (or its rows `rows`, a slice of step 1) in `dtype`, computed in float32.

        Unquantised weights are only cast, so they stay differentiable (and share memory where the dtype is theirs).
        """
        if self.format == "bf16" and rows is None and 0 <= expert < self.data.shape[0]:
            return self.data[expert].to(dtype)
        if not 0 <= expert < self.num_experts:
            raise ValueError(f"expert: {expert} is out of range, this weight has experts 0..{self.num_experts - 1}")
        start, stop, step = (rows or slice(None)).indices(self.rows)
        if step != 1:
            raise ValueError(f"rows: step {step}, expected a slice of step 1")
        data = self.data[expert, start:stop]
        if self.format == "bf16":
            return data.to(dtype)
        scale = None if self.scale is None else self.scale[expert, start:stop]
        scale2 = None
        if self.scale2 is not None:
            per_row = expand_scale2(self.scale2[expert : expert + 1], self.rows)[0]
            scale2 = per_row if per_row.shape[0] == 1 else per_row[start:stop]
        data = to_pairs(data) if self.order == "words" else data
        return dequantize(data, scale, scale2, format=self.format).to(dtype)

    def check_values(self, first_expert: int = 0) -> None:
        """Raise ValueError naming the first expert (counted from `first_expert`, for callers that stream) and row whose
        scale is NaN, or the second scale or input scale that is out of range."""
        # One expert at a time, so that checking needs no second copy of the scales.
        for expert, scale in enumerate(self.scale.view(torch.uint8) if self.scale is not None else ()):
            bad = scale == 255 if self.format == "mxfp4" else (scale & 0x7F) == 0x7F
            if bool(bad.any()):
                row, block = bad.nonzero()[0].tolist()
                raise ValueError(
                    f"scale: NaN at expert {first_expert + expert}, row {row}, block {block} ({int(bad.sum())} NaN "
                    "scales in this expert); the checkpoint is damaged or of another format"
                )
        if self.scale2 is not None and not bool(torch.isfinite(self.scale2).all()):
            where = (~torch.isfinite(self.scale2)).nonzero()[0].tolist()
            part = f" ({('gate', 'up')[where[1]]} rows)" if len(where) == 2 else ""
            value = self.scale2[tuple(where)].item()
            raise ValueError(f"scale2: {value} at expert {first_expert + where[0]}{part}, expected a finite number")
        if self.input_scale is not None and not 0 < float(self.input_scale) < float("inf"):
            raise ValueError(f"input_scale: {float(self.input_scale)}, expected a positive finite number")

    def to(self, device: torch.device | str) -> ExpertWeight:
        """The same weight on `device`."""
        moved = self._of_each(lambda tensor: tensor.to(device))
        return moved if self.input_scale is None else replace(moved, input_scale=self.input_scale.to(device))

    def part(self, experts: slice) -> ExpertWeight:
        """The weight of some of the experts, as views."""
        return self._of_each(lambda tensor: tensor[experts])

    def clone(self) -> ExpertWeight:
        """A copy with tensors of its own."""
        return self._of_each(lambda tensor: tensor.clone())

    def _of_each(self, function: Callable[[Tensor], Tensor]) -> ExpertWeight:
        scale, scale2 = (None if t is None else function(t) for t in (self.scale, self.scale2))
        return replace(self, data=function(self.data), scale=scale, scale2=scale2)


def _byte_values(device: torch.device) -> Tensor:
    """[256, 2]: the two values in each packed byte."""
    return decode_e2m1(unpack_e2m1(torch.arange(256, dtype=torch.uint8, device=device).unsqueeze(-1)))


def _block(format: str) -> int:
    if format not in BLOCK:
        raise ValueError(f"format: {format!r} has no block scales, expected one of {', '.join(BLOCK)}")
    return BLOCK[format]


def _expect_dtype(argument: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{argument}: dtype {tensor.dtype}, expected {dtype}")


def _check_blocks(columns: int, leading: torch.Size, scale_shape: torch.Size, format: str) -> None:
    block = _block(format)
    if columns % block:
        raise ValueError(f"data: width {columns} is not a multiple of {format}'s block of {block}")
    expected = (*leading, columns // block)
    if tuple(scale_shape) != expected:
        raise ValueError(
            f"scale: shape {list(scale_shape)}, expected {list(expected)} (one a block of {block} of {columns} columns)"
        )


def _check_source(weight: Tensor, format: str, first_expert: int) -> None:
    if weight.dim() != 3:
        raise ValueError(f"weight: shape {list(weight.shape)}, expected three dimensions [experts, rows, columns]")
    if not weight.dtype.is_floating_point:
        raise TypeError(f"weight: dtype {weight.dtype}, expected a float dtype")
    if weight.shape[-1] % BLOCK[format]:
        raise ValueError(f"weight: width {weight.shape[-1]} is not a multiple of {format}'s block of {BLOCK[format]}")
    finite = torch.isfinite(weight).all(dim=-1)
    if not bool(finite.all()):
        expert, row = (~finite).nonzero()[0].tolist()
        where = f"expert {first_expert + expert}, row {row}"
        raise ValueError(f"weight: NaN or infinity at {where}; it cannot be quantised")
