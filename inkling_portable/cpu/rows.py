"""Projections, norms, gates and routing of few rows; formulas and rounding are those of the references."""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import prange

from inkling_kernels.activation import silu_mul_ref
from inkling_kernels.linear import linear_ref
from inkling_kernels.norm import rms_norm_ref
from inkling_kernels.ragged import check_tensor
from inkling_kernels.routing import routing_ref
from inkling_portable.cpu.tiles import (
    FEW,
    FLOAT,
    INT,
    LIKE,
    dot_fn,
    dots_fn,
    four_fn,
    gate_fn,
    jit,
    narrow_fn,
    parallel,
    parts_of,
    read_fn,
    records,
    row_fn,
    span_fn,
    widen_fn,
    write_fn,
)

#: Bytes of weights below which another thread costs more than it saves.
_LEAST = 1 << 17


@jit
def _linear_part(part, parts, like, y, x, x_stride, w, rows, outs, inputs):
    first, last = span_fn(outs, part, parts)
    wide = np.empty(((rows + 3) // 4 * 4, inputs), np.float32)
    for t in range(len(wide)):
        read_fn(wide[t], like, x + min(t, rows - 1) * x_stride * like.itemsize)
    out = row_fn(like, y, rows * outs)
    for n in range(first, last, 4):
        weights = four_fn(like, w, inputs, n, outs - 1, inputs)
        for t in range(0, rows, 4):
            found = dots_fn(wide[t : t + 4], weights)
            for i in range(min(4, rows - t)):
                for j in range(min(4, last - n)):
                    out[(t + i) * outs + n + j] = narrow_fn(like, found[4 * i + j])


@parallel
def _linear_parallel(parts, like, y, x, x_stride, w, rows, outs, inputs):
    for part in prange(parts):
        _linear_part(part, parts, like, y, x, x_stride, w, rows, outs, inputs)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`linear_ref`, for up to `FEW` rows in one pass over the weight."""
    (rows, inputs), (outs, columns) = x.shape, weight.shape
    if rows > FEW or records(x, weight):
        return linear_ref(x, weight)
    if x.dtype != weight.dtype or columns != inputs or x.stride(1) != 1 or not weight.is_contiguous():
        check_tensor("linear", "x", x, (None, columns), (weight.dtype,))
        raise ValueError(
            f"linear: x has strides {x.stride()} and weight {weight.stride()}; expected contiguous columns"
        )
    y = torch.empty(rows, outs, dtype=x.dtype)
    call = LIKE[x.dtype], y.data_ptr(), x.data_ptr(), x.stride(0), weight.data_ptr(), rows, outs, inputs
    parts = parts_of(weight.nbytes, _LEAST)
    _linear_part(0, 1, *call) if parts == 1 else _linear_parallel(parts, *call)
    return y


@jit
def normed_fn(like, address, x, w, eps, factor):
    """Store the RMS norm of `x` float32, weighted by `w` and times `factor`, rounded where the reference rounds."""
    out = row_fn(like, address, x.size)
    inverse = np.float32(1) / np.sqrt(dot_fn(x, x) / np.float32(x.size) + np.float32(eps))
    for i in range(x.size):
        y = narrow_fn(like, widen_fn(narrow_fn(like, x[i] * inverse)) * widen_fn(w[i]))
        out[i] = narrow_fn(like, widen_fn(y) * factor)


@jit
def _rms_norm(like, y, x, x_stride, w, rows, size, eps):
    wide, weight = np.empty(size, np.float32), row_fn(like, w, size)
    for t in range(rows):
        read_fn(wide, like, x + t * x_stride * like.itemsize)
        normed_fn(like, y + t * size * like.itemsize, wide, weight, eps, np.float32(1))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm_ref`, for up to `FEW` rows in one call."""
    if x.dim() != 2 or len(x) > FEW or records(x, weight):
        return rms_norm_ref(x, weight, eps)
    rows, size = x.shape
    if x.dtype != weight.dtype or weight.shape != (size,) or x.stride(1) != 1 or weight.stride(0) != 1:
        check_tensor("rms_norm", "weight", weight, (size,), (x.dtype,))
        raise ValueError(f"rms_norm: x has strides {x.stride()}, weight {weight.stride()}; expected contiguous columns")
    y = torch.empty(rows, size, dtype=x.dtype)
    _rms_norm(LIKE[x.dtype], y.data_ptr(), x.data_ptr(), x.stride(0), weight.data_ptr(), rows, size, eps)
    return y


@jit
def _silu_mul(like, y, x, x_stride, scale, scale_row, scale_column, rows, size):
    wide, gated = np.empty(2 * size, np.float32), np.empty(size, np.float32)
    for t in range(rows):
        read_fn(wide, like, x + t * x_stride * like.itemsize)
        gate_fn(gated, wide)
        if scale:
            factors = row_fn(FLOAT, scale + 4 * t * scale_row, (size - 1) * scale_column + 1)
            for i in range(size):
                gated[i] *= factors[i * scale_column]
        write_fn(like, y + t * size * like.itemsize, gated)


def silu_mul(x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """`silu_mul_ref`, for up to `FEW` rows in one call. `scale` is float32."""
    if x.dim() != 2 or len(x) > FEW or records(x) or (scale is not None and records(scale)) or x.shape[1] % 2:
        return silu_mul_ref(x, scale)
    if x.stride(1) != 1 or (scale is not None and scale.dtype != torch.float32):
        raise ValueError(
            f"silu_mul: x has strides {x.stride()} and scale is {scale if scale is None else scale.dtype}; "
            "expected contiguous columns and a scale of float32"
        )
    rows, size = len(x), x.shape[1] // 2
    y = torch.empty(rows, size, dtype=x.dtype)
    factors = (0, 0, 0) if scale is None else (scale.data_ptr(), *scale.expand(rows, size).stride())
    _silu_mul(LIKE[x.dtype], y.data_ptr(), x.data_ptr(), x.stride(0), *factors, rows, size)
    return y


@jit
def _routing(ids, weights, sinks, logits, stride, bias, global_scale, rows, experts, shared, top_k, route_scale):
    scores, logs = np.empty(experts, np.float32), np.empty(top_k + shared)
    biases, scale = row_fn(FLOAT, bias, experts), row_fn(FLOAT, global_scale, 1)[0] * np.float32(route_scale)
    chosen, weight = row_fn(INT, ids, rows * top_k), row_fn(FLOAT, weights, rows * top_k)
    sink = row_fn(FLOAT, sinks, rows * shared)
    for t in range(rows):
        z = row_fn(FLOAT, logits + 4 * t * stride, experts + shared)
        for e in range(experts):
            score = np.float32(1 / (1 + math.exp(-np.float64(z[e])))) + biases[e]
            # What is not a number comes first, as in a sort, so that its token cannot pass for sound.
            scores[e] = score if score == score else np.float32(np.inf)
        for k in range(top_k):
            best = -1
            for e in range(experts):
                taken = False
                for before in range(k):
                    taken |= chosen[t * top_k + before] == e
                if not taken and (best < 0 or scores[e] > scores[best]):
                    best = e
            chosen[t * top_k + k] = best
        top = -np.inf
        for k in range(top_k + shared):
            value = np.float64(z[chosen[t * top_k + k]] if k < top_k else z[experts + k - top_k])
            logs[k] = min(value, 0.0) - math.log1p(math.exp(-abs(value))) if value == value else value
            top = max(top, logs[k])
        total = 0.0
        for k in range(top_k + shared):
            logs[k] = math.exp(logs[k] - top)
            total += logs[k]
        for k in range(top_k + shared):
            value = np.float32(logs[k] / total) * scale
            if k < top_k:
                weight[t * top_k + k] = value
            else:
                sink[t * shared + k - top_k] = value


def routing(
    logits: torch.Tensor, bias: torch.Tensor, global_scale: torch.Tensor, *, top_k: int, route_scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`routing_ref`, for up to `FEW` rows in one call, whose exponentials are float64 and round once."""
    (rows, columns), experts = logits.shape, len(bias)
    if rows > FEW or records(logits, global_scale) or logits.dtype != torch.float32 or not 0 < top_k <= experts:
        return routing_ref(logits, bias, global_scale, top_k=top_k, route_scale=route_scale)
    for name, tensor, size in (("bias", bias, experts), ("global_scale", global_scale, 1)):
        if tensor.dtype != torch.float32 or tensor.numel() != size or not tensor.is_contiguous():
            raise ValueError(f"routing: {name} is {tensor.dtype} {list(tensor.shape)}; expected float32 [{size}]")
    if columns < experts or logits.stride(1) != 1:
        raise ValueError(f"routing: logits are {list(logits.shape)}; expected at least {experts} contiguous columns")
    shared = columns - experts
    ids = torch.empty(rows, top_k, dtype=torch.int32)
    weights, sinks = torch.empty(rows, top_k), torch.empty(rows, shared)
    outputs = ids.data_ptr(), weights.data_ptr(), sinks.data_ptr()
    inputs = logits.data_ptr(), logits.stride(0), bias.data_ptr(), global_scale.data_ptr()
    _routing(*outputs, *inputs, rows, experts, shared, top_k, route_scale)
    return ids, weights, sinks
