"""What two runs of one model in bfloat16 are compared by: the router's choices in ties, and the drafts' logits.

Two correct models round differently, and where the last expert chosen and the first left out score within that
rounding, they may choose differently: from there on their outputs differ by whole experts. Following the other's choice
there, and there alone, keeps every later position comparable; any other difference stays and shows.
"""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# Scores, sigmoids of router logits plus biases: the rounding of the two runs moves them by no more.
TIE = 0.02


class Recorder:
    """The choices of vLLM's own gates: logits of experts and sinks, and the ids chosen, one row a token and layer."""

    def __init__(self, gate: Any) -> None:
        self.logits: list[torch.Tensor] = []
        self.ids: list[torch.Tensor] = []
        stock = gate.select_experts

        def select_experts(module: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            weights, ids = stock(module, logits)
            self.logits.append(logits[:, : module.n_total_experts].clone())
            self.ids.append(ids[:, : module.topk].clone())
            return weights, ids

        gate.select_experts = select_experts

    def save(self, file: str) -> None:
        save_file({"logits": torch.cat(self.logits), "ids": torch.cat(self.ids)}, file)


class Follower:
    """Has this package's router follow the choices in `file` where its own is a tie; `ties` are the scores between
    which it lay, of those that it would have broken otherwise.

    The token and layer of a row are found by its logits, which in both runs are nearly the same.
    """

    def __init__(self, file: str) -> None:
        from inkling_portable.ops import Ops

        self.ties: list[float] = []
        self.chosen = load_file(file)
        bind = Ops.bind

        def bound(cls: type, *arguments: Any, **options: Any) -> Any:
            ops = bind(*arguments, **options)
            self.stock = ops.routing
            return replace(ops, routing=self.route)

        Ops.bind = types.MethodType(bound, Ops)  # type: ignore[method-assign]

    def route(
        self, logits: torch.Tensor, bias: torch.Tensor, scale: torch.Tensor, *, top_k: int, route_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found = self.stock(logits, bias, scale, top_k=top_k, route_scale=route_scale)
        scores = (logits[:, : len(bias)].sigmoid() + bias).sort(1, descending=True)
        between = scores.values[:, top_k - 1] - scores.values[:, top_k]
        for row in (between < TIE).nonzero().flatten().tolist():
            distances = (self.chosen["logits"] - logits[row]).abs().amax(1)
            theirs = self.chosen["ids"][distances.argmin()].long()
            if distances.min() > 0.1 or set(theirs.tolist()) == set(found[0][row].tolist()):
                continue
            self.ties.append(between[row].item())
            # The bias decides who is chosen and has no part in the weights.
            raised = bias.index_add(0, theirs, torch.full((top_k,), 100.0))
            again = self.stock(logits[row : row + 1], raised, scale, top_k=top_k, route_scale=route_scale)
            for whole, one in zip(found, again, strict=True):
                whole[row] = one[0]
        return found


class Drafts:
    """The logits behind each draft of this process, by vLLM's own depths or by ours."""

    def __init__(self) -> None:
        from vllm.models.inkling.nvidia.mtp import InklingMTP

        from inkling_portable.vllm_plugin.model import PortableMTP

        self.logits: list[torch.Tensor] = []
        for kind in (InklingMTP, PortableMTP):
            self._watch(kind)

    def _watch(self, kind: Any) -> None:
        stock = kind.compute_logits

        def compute_logits(model: Any, *arguments: Any, **options: Any) -> torch.Tensor:
            logits: torch.Tensor = stock(model, *arguments, **options)
            self.logits.append(logits.float())
            return logits

        kind.compute_logits = compute_logits

    def save(self, file: str) -> None:
        save_file({f"{i:04}": logits.contiguous() for i, logits in enumerate(self.logits)}, file)
