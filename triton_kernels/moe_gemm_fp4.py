"""Unpack and dot: tiles of NVFP4 and MXFP4 expert weights as the operand of a matrix product, on any chip.

    NVFP4:  w[n, k] = e2m1(code[n, k]) * e4m3(scale[n, k // 16]) * scale2      MXFP4:  e2m1(code) * 2 ** (scale - 127)

Codes are read as 32-bit words of eight, in either order of `moe_words`. A code's sign and its three bits, put where a
bfloat16 has its sign and the lowest bits of its exponent field, are the value times 2**-126, subnormals included; two
neighbouring codes are placed at once, in the halves of a word, and multiplied by their block's scale, which is exact:

* `ASM == "ptx"`: both at once by a bfloat16 multiply-add, which every chip from sm80 on has;
* portably: either half as the upper half of a float32, so that the product's upper half *is* the bfloat16;
* `ASM == "cdna4"`, for codes in pairs: CDNA4's `v_cvt_scalef32_pk` makes two bfloat16 or float32 of a byte of codes,
  times the power of two whose exponent field the scale has (0 is 2**-127, 255 NaN), so MXFP4 needs nothing else.

All three give the same bits. NVFP4's scale is an E4M3 byte moved into a float32 as codes are; a factor of 2**-7 that
keeps it in range and the second scale are left to the accumulator (`NVFP4_FACTOR`). An E8M0 scale spans bfloat16's
exponents, so MXFP4 multiplies twice where it multiplies.

Products with codes are exact in bfloat16 and in float32, so unpacking rounds nothing. Scale bytes that are NaN give
NaN; E8M0's byte 0 is 2**-127.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl

from inkling_kernels.moe_words import to_words
from inkling_kernels.numerics import ExpertWeight
from inkling_kernels.target import Target

# What the accumulated products of an unpacked NVFP4 tile are still to be multiplied by, beside the second scale.
NVFP4_FACTOR = tl.constexpr(128.0)
_TWO_119 = tl.constexpr(2.0**119)
_TWO_120 = tl.constexpr(2.0**120)
_TWO_126 = tl.constexpr(2.0**126)
_TWO_M126 = tl.constexpr(2.0**-126)


def unpack_asm(target: Target | None) -> str:
    """Whose instructions may unpack on `target`: "ptx", "cdna4", or "" for none beside the portable ones."""
    if target is None:
        return ""
    if target.vendor == "cuda":
        return "ptx"
    return "cdna4" if "mfma_scale" in target.capabilities else ""


def prepare_experts(weight: ExpertWeight, target: Target | None = None) -> ExpertWeight:
    """`weight` in the order of codes that `target` unpacks fastest, copied where that is another; slices of a
    checkpoint's weights are taken before. CDNA4 converts pairs of codes itself, every other chip takes words."""
    if weight.format == "bf16" or weight.order == "words" or unpack_asm(target) == "cdna4":
        return weight
    return replace(weight, data=to_words(weight.data), order="words")


@triton.jit
def e4m3_fn(byte):
    """float32 `e4m3(byte) * 2**119` of uint8 bytes, `float8_e4m3fn` with its sign and NaN."""
    bits = byte.to(tl.uint32)
    placed = ((bits & 0x7F) << 20) | ((bits & 0x80) << 24)
    value = placed.to(tl.float32, bitcast=True) * _TWO_120 * _TWO_119
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def e8m0_fn(byte):
    """float32 `2 ** (byte - 127)` of uint8 bytes; 0 is a subnormal, 255 is NaN."""
    bits = byte.to(tl.uint32)
    placed = tl.where(bits == 0, 0x00400000, bits << 23)
    return tl.where(bits == 255, 0x7FC00000, placed).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _placed_fn(word, ORDER: tl.constexpr):
    """Codes 2j and 2j + 1 of each word (j = 0..3) in the halves of a word, each placed as the module says."""
    if ORDER == "words":
        p0 = word & 0x81C081C0
        p1 = (word << 3) & 0x81C081C0
        p2 = (word << 6) & 0x81C081C0
        p3 = ((word << 1) & 0x80008000) | ((word >> 5) & 0x01000100) | ((word >> 4) & 0x00C000C0)
    else:
        p0 = _placed_byte_fn(word << 24)
        p1 = _placed_byte_fn(word << 16)
        p2 = _placed_byte_fn(word << 8)
        p3 = _placed_byte_fn(word)
    return p0, p1, p2, p3


@triton.jit
def _placed_byte_fn(word):
    """`_placed_fn` of the two codes in a word's highest byte."""
    return (word & 0x80000000) | ((word >> 6) & 0x01C00000) | ((word >> 12) & 0x8000) | ((word >> 18) & 0x01C0)


@triton.jit
def _converted_fn(word, scale, WIDE: tl.constexpr):
    """CDNA4: the pairs of a word's four bytes of codes, times the power of two that `scale` has as its exponent: two
    bfloat16 in 32 bits or (`WIDE`) two float32 in 64."""
    if WIDE:
        p0 = tl.inline_asm_elementwise(
            "v_cvt_scalef32_pk_f32_fp4 $0, $1, $2", "=v,v,v", [word, scale], tl.uint64, True, 1
        )
        p1 = tl.inline_asm_elementwise(
            "v_cvt_scalef32_pk_f32_fp4 $0, $1, $2 op_sel:[1,0,0]", "=v,v,v", [word, scale], tl.uint64, True, 1
        )
        p2 = tl.inline_asm_elementwise(
            "v_cvt_scalef32_pk_f32_fp4 $0, $1, $2 op_sel:[0,1,0]", "=v,v,v", [word, scale], tl.uint64, True, 1
        )
        p3 = tl.inline_asm_elementwise(
            "v_cvt_scalef32_pk_f32_fp4 $0, $1, $2 op_sel:[1,1,0]", "=v,v,v", [word, scale], tl.uint64, True, 1
        )
    else:
        p0 = tl.inline_asm_elementwise(
            "v_cvt_scalef32_pk_bf16_fp4 $0, $1, $2", "=v,v,v", [word, scale], tl.uint32, True, 1
        )
        p1 = tl.inline_asm_elementwise(
            "v_cvt_scalef32_pk_bf16_fp4 $0, $1, $2 op_sel:[1,0,0]", "=v,v,v", [word, scale], tl.uint32, True, 1
        )
        p2 = tl.inline_asm_elementwise(
            "v_cvt_scalef32_pk_bf16_fp4 $0, $1, $2 op_sel:[0,1,0]", "=v,v,v", [word, scale], tl.uint32, True, 1
        )
        p3 = tl.inline_asm_elementwise(
            "v_cvt_scalef32_pk_bf16_fp4 $0, $1, $2 op_sel:[1,1,0]", "=v,v,v", [word, scale], tl.uint32, True, 1
        )
    return p0, p1, p2, p3


@triton.jit
def _product_fn(pairs, scale):
    """NVIDIA from sm80 on: pairs of bfloat16 times pairs of bfloat16, subnormals kept."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }", "=r,r,r", [pairs, scale],
        tl.uint32, True, 1,
    )  # fmt: skip


@triton.jit
def _halves_fn(pairs, dtype: tl.constexpr):
    """Words of two bfloat16 `[N, W]` -> their values `[N, 2 W]` as `dtype`."""
    low = (pairs & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.reshape(tl.join(low, high), [pairs.shape[0], pairs.shape[1] * 2]).to(dtype)


@triton.jit
def _spread_fn(value, N: tl.constexpr, W: tl.constexpr):
    """`[N, B]` -> `[N, W]`, each value of a row repeated."""
    times: tl.constexpr = W // value.shape[1]
    return tl.reshape(tl.broadcast_to(value[:, :, None], [N, value.shape[1], times]), [N, W])


@triton.jit
def _scaled_fn(low, high, scale, dtype: tl.constexpr):
    """float32 values of even and odd codes `[N, W]` times the scale of their block `[N, B]` -> `[N, 2 W]`."""
    scale = _spread_fn(scale, low.shape[0], low.shape[1])
    value = tl.reshape(tl.join(low * scale, high * scale), [low.shape[0], 2 * low.shape[1]])
    if dtype == tl.bfloat16:
        # Nothing is cut off: the value is a bfloat16 already.
        return value.to(tl.bfloat16, fp_downcast_rounding="rtz")
    return value.to(dtype)


@triton.jit
def _in_order_fn(pairs):
    """The four pairs of each word `[N, W]` one after another `[N, 4 W]`."""
    p0, p1, p2, p3 = pairs
    return tl.reshape(tl.join(tl.join(p0, p2), tl.join(p1, p3)), [p0.shape[0], 4 * p0.shape[1]])


@triton.jit
def unpack_fn(word, byte, MX: tl.constexpr, ORDER: tl.constexpr, ASM: tl.constexpr, dtype: tl.constexpr):
    """uint32 words `[N, W]` of eight codes and the scale byte of each block `[N, B]` -> values `[N, 8 W]`."""
    N: tl.constexpr = word.shape[0]
    W: tl.constexpr = word.shape[1]
    if ASM == "cdna4" and ORDER == "pairs":
        if MX:
            scale = _spread_fn(byte.to(tl.uint32) << 23, N, W)
            return _halves_fn(_in_order_fn(_converted_fn(word, scale, WIDE=False)), dtype)
        one: tl.constexpr = 0x3F800000
        pairs = _in_order_fn(_converted_fn(word, tl.full([N, W], one, tl.uint32), WIDE=True))
        low = (pairs & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
        high = (pairs >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
        return _scaled_fn(low, high, e4m3_fn(byte) * _TWO_M126, dtype)
    pairs = _in_order_fn(_placed_fn(word, ORDER))
    if ASM == "ptx":
        if MX:
            pairs = _product_fn(pairs, 0x7E807E80)
        scale = (e8m0_fn(byte) if MX else e4m3_fn(byte)).to(tl.uint32, bitcast=True) >> 16
        return _halves_fn(_product_fn(pairs, _spread_fn(scale | (scale << 16), N, 4 * W)), dtype)
    low = (pairs << 16).to(tl.float32, bitcast=True)
    high = (pairs & 0xFFFF0000).to(tl.float32, bitcast=True)
    if MX:
        return _scaled_fn(low * _TWO_126, high * _TWO_126, e8m0_fn(byte), dtype)
    return _scaled_fn(low, high, e4m3_fn(byte), dtype)


@triton.jit
def fp4_tile_fn(
    words_ptr, scale_ptr, row, live, first, columns, word_row, scale_row, scale_col,
    MX: tl.constexpr, ORDER: tl.constexpr, ASM: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Columns `first .. first + BLOCK_K - 1` of an expert's rows `row` (int64), as `dtype`; 0 where `live` is false or
    past the last column. With `EVEN`, `BLOCK_K` divides `columns`."""
    SIZE: tl.constexpr = 32 if MX else 16
    word = first // 8 + tl.arange(0, BLOCK_K // 8)
    block = first // SIZE + tl.arange(0, BLOCK_K // SIZE)
    word_live, block_live = live[:, None], live[:, None]
    if not EVEN:
        word_live = word_live & (word < columns // 8)[None, :]
        block_live = block_live & (block < columns // SIZE)[None, :]
    words = tl.load(words_ptr + ((row * word_row)[:, None] + word.to(tl.int64)[None, :]), mask=word_live, other=0)
    scale_at = scale_ptr + ((row * scale_row)[:, None] + (block.to(tl.int64) * scale_col)[None, :])
    byte = tl.load(scale_at, mask=block_live, other=0)
    return unpack_fn(words, byte, MX, ORDER, ASM, dtype)
