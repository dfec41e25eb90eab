"""Expert-sink routing: choose the routed experts, weigh them together with the always-on shared ones.

    choice  = top_k over routed experts of sigmoid(z) + bias          equal scores: the lowest index first
    w       = softmax(logsigmoid([z[choice], z_shared])) * route_scale * global_scale

`logits` `[T, E + S]` float32 hold the routed experts' z first, then the shared ones' (the sinks); `bias` `[E]` only
selects and never weighs; `global_scale` is `[1]`. Everything is float32 whatever the activations' type: in bf16
near-ties flip.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def routing_ref(
    logits: torch.Tensor, bias: torch.Tensor, global_scale: torch.Tensor, *, top_k: int, route_scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `ids` `[T, k]` int32 (best first), `weights` `[T, k]` and `sink_weights` `[T, S]`, float32;
    differentiable in z.

    Raises `TypeError` where `logits` is not float32 and `ValueError` where `top_k` exceeds the routed experts.
    """
    experts = bias.shape[0]
    if logits.dtype != torch.float32:
        raise TypeError(f"routing: logits are {logits.dtype}; the router computes in float32")
    if not 0 < top_k <= experts:
        raise ValueError(f"routing: top_k is {top_k}; it must lie between 1 and the {experts} routed experts")
    scores = (torch.sigmoid(logits[:, :experts]) + bias).detach()
    # A stable descending sort keeps equal scores in index order, which topk does not promise.
    ids = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = torch.cat([logits.gather(1, ids), logits[:, experts:]], 1)
    weights = torch.softmax(F.logsigmoid(chosen), -1) * (global_scale * route_scale)
    return ids.to(torch.int32), weights[:, :top_k], weights[:, top_k:]
