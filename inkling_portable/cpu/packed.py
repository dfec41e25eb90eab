"""Where the kernels find the weight rows of an expert: as they lie in memory, or unpacked from 4-bit codes.

Values are those of `inkling_kernels.numerics`, in its order of products: code times block scale, which is exact, times
the second scale, then rounded to the activations' type. So packed weights and their dequantised copy give equal bits.
"""

from __future__ import annotations

import numpy as np
import torch

from inkling_kernels.numerics import BLOCK, E2M1_VALUES, ExpertWeight, decode_e4m3, decode_e8m0
from inkling_portable.cpu.tiles import BYTE, FLOAT, helper, narrow_fn, row_fn

_BYTES = torch.arange(256, dtype=torch.uint8)
#: The values of scale bytes.
_SCALES = {"bf16": FLOAT, "nvfp4": decode_e4m3(_BYTES).numpy(), "mxfp4": decode_e8m0(_BYTES).numpy()}
_CODES = np.array(E2M1_VALUES, np.float32)

#: Addresses and strides of a weight's parts, and the values of its scale bytes.
Place = tuple[tuple[int, ...], np.ndarray]


def place_of(weight: ExpertWeight, dtype: torch.dtype) -> Place | None:
    """What `dense_fn` takes of a weight for activations of `dtype`; None where it is made for other layouts."""
    data, scale, second = weight.data, weight.scale, weight.scale2
    if data.stride(2) != 1 or (scale is not None and scale.stride(2) != 1) or (scale is None and data.dtype != dtype):
        return None
    scales = (0, 0, 0) if scale is None else (scale.data_ptr(), *scale.stride()[:2])
    seconds = (0, 0, 0) if second is None else (second.data_ptr(), *second.stride(), 0)[:3]
    return (data.data_ptr(), *data.stride()[:2], BLOCK.get(weight.format, 0), *scales, *seconds), _SCALES[weight.format]


@helper(exact=True)
def dense_fn(dense, like, place, scales, expert, first):
    """Address and row stride of an expert's rows from `first` on; packed ones are unpacked into `dense`, all of it."""
    data, stride, row_stride, block, scale, scale_stride, scale_row, second, second_stride, second_row = place
    if block == 0:
        return data + (expert * stride + first * row_stride) * like.itemsize, row_stride
    columns = dense.shape[1]
    for n in range(len(dense)):
        codes = row_fn(BYTE, data + expert * stride + (first + n) * row_stride, columns // 2)
        factors = row_fn(BYTE, scale + expert * scale_stride + (first + n) * scale_row, columns // block)
        last = np.float32(1)
        if second:
            last = row_fn(FLOAT, second + 4 * (expert * second_stride + (first + n) % 2 * second_row), 1)[0]
        out = dense[n]
        for k in range(codes.size):
            factor = scales[factors[2 * k // block]]
            out[2 * k] = narrow_fn(like, _CODES[codes[k] & 15] * factor * last)
            out[2 * k + 1] = narrow_fn(like, _CODES[codes[k] >> 4] * factor * last)
    return dense.ctypes.data, columns
