"""The order of 4-bit codes that a matrix product's operand is unpacked from with few instructions: "words".

Eight consecutive codes are a 32-bit word in either order. In "pairs", the checkpoints' order, code i has bits 4i ..
4i + 3. In "words", code 2j + h lies in half h of the word, sign first:

    j = 0   bits 15, 8, 7, 6      where a bfloat16 has its sign and the lowest bits of its exponent and mantissa
    j = 1   bits 12, 5, 4, 3      there after a shift by 3
    j = 2   bits  9, 2, 1, 0      there after a shift by 6
    j = 3   bits 14, 13, 11, 10   what is left

so that two neighbouring codes are placed by one shift and one mask, three times out of four. Nothing else of a weight
changes: rows, columns, scales and strides are those of "pairs", and slices at multiples of eight columns stay slices.
"""

from __future__ import annotations

import torch
from torch import Tensor

# (bits of a code, place in "pairs" of code 0, place in "words", of the code in half 0) for j = 0..3.
_MOVES = (
    ((8, 15), (7, 6)),
    ((8, 12), (7, 3)),
    ((8, 9), (7, 0)),
    ((8, 14), (4, 13), (3, 10)),
)
# Words rearranged at a time: what that takes beside the result stays small.
_CHUNK = 1 << 22


def to_words(packed: Tensor) -> Tensor:
    """Codes uint8 `[..., K / 2]` in "pairs" -> a new tensor of the same shape in "words"; K is a multiple of 8."""
    return _moved(packed, to_words=True)


def to_pairs(packed: Tensor) -> Tensor:
    """The inverse of `to_words`."""
    return _moved(packed, to_words=False)


def _moved(packed: Tensor, *, to_words: bool) -> Tensor:
    if packed.dtype != torch.uint8 or packed.shape[-1] % 4:
        raise ValueError(
            f"packed: {packed.dtype} of shape {list(packed.shape)}, expected uint8 codes whose last dimension is a "
            "multiple of 4 (8 columns): words are rearranged whole"
        )
    out = packed.contiguous().clone()
    if out.numel() == 0:
        return out
    for words in out.view(torch.int32).view(-1).split(_CHUNK):
        source = words.clone()
        words.zero_()
        for j, moves in enumerate(_MOVES):
            for half in (0, 1):
                code = 4 * (2 * j + half)
                for bits, place in moves:
                    low = (bits & -bits).bit_length() - 1
                    there = place + 16 * half
                    if to_words:
                        words |= ((source >> code) & bits) >> low << there
                    else:
                        words |= ((source >> there) & (bits >> low)) << (low + code)
    return out
