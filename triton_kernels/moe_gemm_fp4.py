"""Unpack and dot: tiles of NVFP4 and MXFP4 expert weights as the operand of a matrix product, on any chip.

    NVFP4:  w[n, k] = e2m1(code[n, k]) * e4m3(scale[n, k // 16]) * scale2      MXFP4:  e2m1(code) * 2 ** (scale - 127)

Codes are read as 32-bit words of eight. A code's sign and its three bits, put where a bfloat16 has its sign and the
lowest bits of its exponent field, are the value times 2**-126, subnormals included; two codes are placed at once, in
the halves of a word. Either half, as the upper half of a float32, is then multiplied by its block's scale: exact, so
that the product's upper half *is* the bfloat16. NVFP4's scale is an E4M3 byte moved into a float32 likewise; a factor
of 2**-7 that keeps it in range and the second scale are left to the accumulator (`NVFP4_FACTOR`). An E8M0 scale spans
float32's exponents, so MXFP4 multiplies twice.

Products with codes are exact in bfloat16 and in float32, so unpacking rounds nothing. Scale bytes that are NaN give
NaN; E8M0's byte 0 is 2**-127.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What the accumulated products of an unpacked NVFP4 tile are still to be multiplied by, beside the second scale.
NVFP4_FACTOR = tl.constexpr(128.0)
_TWO_119 = tl.constexpr(2.0**119)
_TWO_120 = tl.constexpr(2.0**120)
_TWO_126 = tl.constexpr(2.0**126)


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
def _scaled_fn(bits, scale, MX: tl.constexpr, dtype: tl.constexpr):
    """Placed code bits (a float32's upper half, as uint32) times their scale, as `dtype`; exact."""
    value = bits.to(tl.float32, bitcast=True)
    if MX:
        value = value * _TWO_126
    value = value * scale
    if dtype == tl.bfloat16:
        return (value.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return value.to(dtype)


@triton.jit
def _pair_fn(placed, scale, MX: tl.constexpr, dtype: tl.constexpr):
    """The two codes placed in the halves of each word, side by side on a new last axis."""
    low = _scaled_fn(placed << 16, scale, MX, dtype)
    high = _scaled_fn(placed & 0xFFFF0000, scale, MX, dtype)
    return tl.join(low, high)


@triton.jit
def unpack_fn(word, scale, MX: tl.constexpr, dtype: tl.constexpr):
    """uint32 words `[N, W]` of eight codes and float32 scales `[N, W]` -> values `[N, 8 W]` in the codes' order."""
    # Codes i and i + 4 of each word, whose places are 16 bits apart.
    p0 = _pair_fn(((word << 12) & 0x80008000) | ((word << 6) & 0x01C001C0), scale, MX, dtype)
    p1 = _pair_fn(((word << 8) & 0x80008000) | ((word << 2) & 0x01C001C0), scale, MX, dtype)
    p2 = _pair_fn(((word << 4) & 0x80008000) | ((word >> 2) & 0x01C001C0), scale, MX, dtype)
    p3 = _pair_fn((word & 0x80008000) | ((word >> 6) & 0x01C001C0), scale, MX, dtype)
    # Axes: row, word, then the code's number in binary, its 4 first.
    codes = tl.join(tl.join(p0, p2), tl.join(p1, p3))
    return tl.reshape(codes, [word.shape[0], word.shape[1] * 8])


@triton.jit
def fp4_tile_fn(
    words_ptr, scale_ptr, row, live, first, columns, word_row, scale_row, scale_col,
    MX: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, dtype: tl.constexpr,
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
    scale = e8m0_fn(byte) if MX else e4m3_fn(byte)
    spread = tl.broadcast_to(scale[:, :, None], [row.shape[0], BLOCK_K // SIZE, SIZE // 8])
    return unpack_fn(words, tl.reshape(spread, [row.shape[0], BLOCK_K // 8]), MX, dtype)
