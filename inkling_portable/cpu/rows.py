"""Projections, norms, gates and routing of few rows; formulas and rounding are those of the references."""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import prange

from inkling_kernels.activation import silu_mul_ref
from inkling_kernels.linear import linear_ref
from inkling_kernels.norm import rms_norm_ref
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
    helper,
    kernel,
    narrow_fn,
    parallel_kernel,
    parts_of,
    read_fn,
    records,
    row_fn,
    span_fn,
    widen_fn,
    write_fn,
)

#: Bytes of weights below which another thread costs more than it saves.
_LEAST = 1 << 18


@kernel
def _linear_part(part, parts, like, y, x, w, rows, outs, inputs):
    first, last = span_fn(outs, part, parts)
    wide = np.empty(((rows + 3) // 4 * 4, inputs), np.float32)
    for t in range(len(wide)):
        read_fn(wide[t], like, x + min(t, rows - 1) * inputs * like.itemsize)
    out = row_fn(like, y, rows * outs)
    for n in range(first, last, 4):
        weights = four_fn(like, w, inputs, n, outs - 1, inputs)
        for t in range(0, rows, 4):
            found = dots_fn(wide[t : t + 4], weights)
            for i in range(min(4, rows - t)):
                for j in range(min(4, last - n)):
                    out[(t + i) * outs + n + j] = narrow_fn(like, found[4 * i + j])


@parallel_kernel
def _linear_parallel(parts, like, y, x, w, rows, outs, inputs):
    for part in prange(parts):
        _linear_part(part, parts, like, y, x, w, rows, outs, inputs)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`linear_ref`, for up to `FEW` rows in one pass over the weight."""
    (rows, inputs), (outs, columns), like = x.shape, weight.shape, LIKE.get(x.dtype)
    fits = like is not None and weight.dtype == x.dtype and inputs == columns and weight.is_contiguous()
    if rows > FEW or not fits or records(x, weight):
        return linear_ref(x, weight)
    x = x.contiguous()
    y = torch.empty(rows, outs, dtype=x.dtype)
    call = like, y.data_ptr(), x.data_ptr(), weight.data_ptr(), rows, outs, inputs
    parts = parts_of(weight.nbytes, _LEAST)
    _linear_part(0, 1, *call) if parts == 1 else _linear_parallel(parts, *call)
    return y


@helper
def normed_fn(like, address, x, w, eps, factor):
    """Store the RMS norm of `x` float32, weighted by `w` and times `factor`, rounded where the reference rounds."""
    out = row_fn(like, address, x.size)
    inverse = np.float32(1) / math.sqrt(dot_fn(x, x) / np.float32(x.size) + np.float32(eps))
    for i in range(x.size):
        y = narrow_fn(like, widen_fn(narrow_fn(like, x[i] * inverse)) * widen_fn(w[i]))
        out[i] = narrow_fn(like, widen_fn(y) * factor)


@kernel
def _rms_norm(like, y, x, w, rows, size, eps):
    wide, weight = np.empty(size, np.float32), row_fn(like, w, size)
    for t in range(rows):
        read_fn(wide, like, x + t * size * like.itemsize)
        normed_fn(like, y + t * size * like.itemsize, wide, weight, eps, np.float32(1))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm_ref`, for up to `FEW` rows in one call."""
    like, fits = LIKE.get(x.dtype), weight.dtype == x.dtype and weight.is_contiguous() and weight.shape == x.shape[1:]
    if like is None or not fits or x.shape[0] > FEW or records(x, weight):
        return rms_norm_ref(x, weight, eps)
    x = x.contiguous()
    y = torch.empty_like(x)
    _rms_norm(like, y.data_ptr(), x.data_ptr(), weight.data_ptr(), *x.shape, eps)
    return y


@kernel
def _silu_mul(like, y, x, scale, rows, size):
    wide, gated = np.empty(2 * size, np.float32), np.empty(size, np.float32)
    for t in range(rows):
        read_fn(wide, like, x + 2 * t * size * like.itemsize)
        gate_fn(gated, wide)
        if scale:
            factors = row_fn(FLOAT, scale + 4 * t * size, size)
            for i in range(size):
                gated[i] *= factors[i]
        write_fn(like, y + t * size * like.itemsize, gated)


def silu_mul(x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """`silu_mul_ref`, for up to `FEW` rows, and a float32 scale of each value, in one call."""
    like, rows, size = LIKE.get(x.dtype), x.shape[0], x.shape[-1] // 2
    fits = rows <= FEW and like is not None and x.shape == (rows, 2 * size) and not records(x)
    if scale is not None:
        fits = fits and scale.dtype == torch.float32 and scale.shape == (rows, size) and not records(scale)
        scale = scale.contiguous()
    if not fits:
        return silu_mul_ref(x, scale)
    x = x.contiguous()
    y = torch.empty(rows, size, dtype=x.dtype)
    _silu_mul(like, y.data_ptr(), x.data_ptr(), 0 if scale is None else scale.data_ptr(), rows, size)
    return y


@kernel
def _routing(ids, weights, sinks, logits, bias, global_scale, rows, experts, shared, top_k, route_scale):
    scores, logs = np.empty(experts, np.float32), np.empty(top_k + shared)
    biases, scale = row_fn(FLOAT, bias, experts), row_fn(FLOAT, global_scale, 1)[0] * np.float32(route_scale)
    chosen, weight = row_fn(INT, ids, rows * top_k), row_fn(FLOAT, weights, rows * top_k)
    sink = row_fn(FLOAT, sinks, rows * shared)
    for t in range(rows):
        z = row_fn(FLOAT, logits + 4 * t * (experts + shared), experts + shared)
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
    (rows, columns), (experts,) = logits.shape, bias.shape
    fits = logits.dtype == bias.dtype == global_scale.dtype == torch.float32 and global_scale.numel() == 1
    if rows > FEW or not fits or not 0 < top_k <= experts <= columns or records(logits, global_scale):
        return routing_ref(logits, bias, global_scale, top_k=top_k, route_scale=route_scale)
    logits, bias = logits.contiguous(), bias.contiguous()
    ids = torch.empty(rows, top_k, dtype=torch.int32)
    weights, sinks = torch.empty(rows, top_k), torch.empty(rows, columns - experts)
    outputs = ids.data_ptr(), weights.data_ptr(), sinks.data_ptr()
    inputs = logits.data_ptr(), bias.data_ptr(), global_scale.data_ptr()
    _routing(*outputs, *inputs, rows, experts, columns - experts, top_k, route_scale)
    return ids, weights, sinks
