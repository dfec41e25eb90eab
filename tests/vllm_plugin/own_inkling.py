"""vLLM's own Inkling (0.33, `vllm/models/inkling/nvidia`) on a CPU, so that its outputs can be held against ours.

Its Triton kernels run in the interpreter: projections' preparation, convolutions, norms, embeddings, gates, towers.
Its weight mapping, routing, residual order, prediction depths and logits are its own too. Only what a CPU cannot run
is replaced, by torch in float32 that knows nothing of this package:

- FlashAttention 4, which compiles for NVIDIA GPUs alone: attention over the pages with the gathered relative bias.
- `prepack_moe_weight` and `cpu_fused_moe` of the C++ extension, which a CUDA wheel lacks: weights stay as they are, and
  each expert is applied to its tokens.
- `torch.mm(out_dtype=float32)`, which torch has on CUDA alone: the product of float32 copies.
- `torch.cuda`'s device properties, which it asks for the number of multiprocessors: one.

The interpreter makes integers of a comparison of scalars when it spreads it over a block; as a mask it needs booleans.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F


def attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, block_table: torch.Tensor,
    cache_seqlens: torch.Tensor, cu_seqlens_q: torch.Tensor, softmax_scale: float, window_size: tuple[int, int],
    rel_extent: int, rel_logits: torch.Tensor, out: torch.Tensor, **bounds: Any,
) -> torch.Tensor:  # fmt: skip
    """Causal attention of rows `q [T, Hq, D]` over pages `[P, page, Hkv, D]`: a key `d` positions back, `0 <= d <
    rel_extent`, has `rel_logits[row, head, d]` added to its score; one further back than the window is not seen."""
    starts, group = cu_seqlens_q.tolist(), q.shape[1] // keys.shape[2]
    for i, length in enumerate(cache_seqlens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        count = rows.stop - rows.start
        if count == 0:
            continue
        k, v = (pages[block_table[i].long()].flatten(0, 1)[:length].float() for pages in (keys, values))
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        back = torch.arange(length - count, length)[:, None] - torch.arange(length)
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), k) * softmax_scale
        bias = rel_logits[rows].float().transpose(0, 1).gather(2, back.clamp(0, rel_extent - 1).expand_as(scores))
        scores += torch.where((back >= 0) & (back < rel_extent), bias, 0)
        hidden = (back < 0) | ((back > window_size[0]) if window_size[0] >= 0 else False)
        scores = scores.masked_fill(hidden, float("-inf"))
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(out.dtype)
    return out


def experts(
    out: torch.Tensor, x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, w13_bias: None, w2_bias: None,
    weights: torch.Tensor, ids: torch.Tensor, *how: Any,
) -> None:  # fmt: skip
    """`out[t] = sum_k weights[t, k] w2[e] (silu(g) u)`: `e = ids[t, k]`, and `g, u` are the halves of `w13[e] x[t]`."""
    total = torch.zeros(out.shape)
    for expert in ids.unique().tolist():
        row, place = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[row].float() @ w13[expert].float().T).chunk(2, -1)
        inner = (F.silu(gate) * up).to(x.dtype).float()
        total.index_add_(0, row, inner @ w2[expert].float().T * weights[row, place, None].float())
    out.copy_(total)


def make_runnable() -> type:
    """Replace what cannot run, in this process. Returns the class of its gates."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
    from triton_interpreter import repair
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.models.inkling.nvidia import attention as nvidia_attention
    from vllm.models.inkling.nvidia import moe

    spread = InterpreterBuilder.create_splat

    def create_splat(self: Any, kind: Any, scalar: Any) -> Any:
        if scalar.data.dtype != bool:
            return spread(self, kind, scalar)
        return TensorHandle(np.full(kind.shape, scalar.data), scalar.dtype.scalar)

    repair()
    InterpreterBuilder.create_splat = create_splat
    nvidia_attention._INKLING_FA4_REL_ATTENTION_KERNEL.kernel = attention
    cpu_moe.cpu_prepack_moe_weight = lambda weight, isa: weight
    cpu_moe.cpu_fused_moe = experts
    moe._linear_with_fp32_out = lambda x, weight: x.float() @ weight.float().T
    torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(multi_processor_count=1)
    gate: type = moe.InklingGate
    return gate
