"""Relative attention in float64, a loop over sequences, from dense keys: what the kernels' tests compare with."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from triton.runtime import interpreter

from inkling_kernels.rel_attention import rel_attention
from inkling_kernels.testing import PagedBatch, tolerance


@dataclass
class Exact:
    """The exact result, and what it would be if every value were positive: the scale of its rounding errors."""

    out: torch.Tensor
    magnitude: torch.Tensor


def exact_attention(batch: PagedBatch) -> Exact:
    q, r, proj = (x.detach().cpu().double() for x in (batch.q, batch.r, batch.proj))
    heads, extent = q.shape[1], proj.shape[1]
    out, magnitude = torch.zeros_like(q), torch.zeros_like(q)
    row = 0
    for q_len, kv_len, keys, values in zip(batch.q_lens, batch.kv_lens.tolist(), batch.keys, batch.values, strict=True):
        group = heads // keys.shape[1]
        k, v = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
        for position in range(kv_len - q_len, kv_len):
            low = 0 if batch.window is None else max(0, position - batch.window + 1)
            if position >= 0:
                distance = torch.arange(position - low, -1, -1)
                score = (k[:, low : position + 1] @ q[row].unsqueeze(-1)).squeeze(-1) * batch.scale
                bias = r[row] @ proj[:, distance.clamp(max=extent - 1)]
                score += torch.where(distance < extent, bias, 0.0)
                weight = score.softmax(-1).unsqueeze(1)
                out[row] = (weight @ v[:, low : position + 1]).squeeze(1)
                magnitude[row] = (weight @ v[:, low : position + 1].abs()).squeeze(1)
            row += 1
    return Exact(out, magnitude)


def signal(out: torch.Tensor, exact: Exact) -> float:
    """The largest error as a multiple of what is allowed there; infinite where a result is not a number and should be
    one, and where it is one and should not."""
    error = (out.double().cpu() - exact.out).abs() / tolerance(out.dtype, exact.magnitude)
    error = torch.where(exact.out.isnan() & out.cpu().isnan(), 0.0, error)
    return float(error.nan_to_num(nan=float("inf")).max()) if error.numel() else 0.0


def count_products(monkeypatch: pytest.MonkeyPatch) -> list[int] | None:
    """A list that grows by one with every `tl.dot` of the interpreter, or None where kernels are compiled."""
    if not isinstance(rel_attention.__globals__["_rel_attention_kernel"], interpreter.InterpretedFunction):
        return None
    stock, seen = interpreter.InterpreterBuilder.create_dot, []

    def dot(self, *args):
        seen.append(1)
        return stock(self, *args)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    return seen
