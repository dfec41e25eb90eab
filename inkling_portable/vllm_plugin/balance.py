"""Expert-parallel load balancing (`--enable-eplb`): the experts of a model as vLLM's balancer sees and moves them.

Physical expert `p` is a place for weights, `P = n + r` of them a layer for `n` logical experts (those that the router
names) and `r` copies, dealt out evenly over the ranks. vLLM counts what each place computes, decides from time to time
which expert belongs in which place, moves the rows of the weights where they lie and changes its maps: expert `e` of
row `t` goes to its place number `hash(t) mod copies(e)`, which vLLM's own kernel looks up and counts.

vLLM has one buffer for a place's weights, shaped as those of the first layer. Layers of another format than the model's
(a 4-bit checkpoint keeps single ones in bf16) are therefore not shown to it: their experts stay where they were loaded,
without copies. Sources: vLLM 0.29 to 0.33, `distributed/eplb/eplb_state.py`, `fused_moe/router/base_router.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.distributed.eplb.eplb_state import EplbLayerState, EplbState
from vllm.model_executor.layers.fused_moe.router import base_router
from vllm.model_executor.models.interfaces import MixtureOfExperts
from vllm.v1.worker.ubatching import dbo_current_ubatch_id

from inkling_kernels.numerics import ExpertWeight, Format
from inkling_portable.experts import Experts
from inkling_portable.vllm_plugin.options import Build


class BalancedExperts:
    """The experts of one layer. Called with logical ids `[T, k]`, it gives physical ones of the same dtype."""

    def __init__(self, experts: Experts) -> None:
        # vLLM finds the state by this name, fills it, and changes the tensors in it.
        self.experts, self.eplb_state = experts, EplbLayerState()

    def get_expert_weights(self) -> list[torch.Tensor]:
        """Views `[experts, -1]` of everything that there is one of per expert, as bytes where vLLM's transports know
        no other type of that size; the input scale is the layer's."""
        found = []
        for weight in (self.experts.w13, self.experts.w2):
            for tensor in (weight.data, weight.scale, weight.scale2):
                if tensor is not None:
                    rows = tensor.detach().view(weight.num_experts, -1)
                    found.append(rows.view(torch.uint8) if rows.element_size() == 1 else rows)
        return found

    def set_eplb_state(self, **views: Any) -> None:
        self.eplb_state.set_layer_state(**views)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        state = self.eplb_state
        if state.num_unpadded_tokens_tensors is None:
            raise RuntimeError("the experts' places are vLLM's to say, and it has not registered this model's yet")
        placed: torch.Tensor = base_router.eplb_map_to_physical_and_record(
            topk_ids=ids,
            logical_to_physical_map=state.logical_to_physical_map,
            logical_replica_count=state.logical_replica_count,
            expert_load_view=state.expert_load_view,
            record_enabled=state.should_record_tensor,
            num_unpadded_tokens=state.num_unpadded_tokens_tensors[dbo_current_ubatch_id()],
        )
        return placed


class Balanced(MixtureOfExperts):
    """A model whose experts vLLM's balancer may move; the attributes are those of vLLM's protocol."""

    num_moe_layers = 0  # vLLM leaves a model without any alone

    def give_places(self, build: Build, layers: Iterable[Experts]) -> None:
        """Tell loaded layers which experts they hold, and vLLM which of them it may move."""
        if build.experts is None:
            return
        self.moe_layers: Sequence[Any] = []
        for experts in layers:
            places = _places(build, experts.w13.format)
            experts.first = build.experts.held(len(places)).start
            if _moves(build, experts.w13.format):
                experts.place = layer = BalancedExperts(experts)
                self.moe_layers.append(layer)
        if build.redundant is None:
            return
        self.num_moe_layers = len(self.moe_layers)
        self.num_expert_groups = 1
        self.num_logical_experts = self.num_routed_experts = build.whole.n_routed_experts
        self.num_redundant_experts = build.redundant
        self.num_physical_experts = self.num_logical_experts + build.redundant
        self.num_local_physical_experts = self.num_physical_experts // build.experts.size
        self.num_shared_experts = build.whole.n_shared_experts

    def set_eplb_state(
        self,
        expert_load_view: torch.Tensor,
        logical_to_physical_map: torch.Tensor,
        logical_replica_count: torch.Tensor,
    ) -> None:
        super().set_eplb_state(expert_load_view, logical_to_physical_map, logical_replica_count)
        kinds = [[(rows.shape, rows.dtype) for rows in weights] for weights in self.expert_weights]
        for index, kind in enumerate(kinds):
            if kind != kinds[0]:
                raise ValueError(
                    f"the weights of expert layer {index} are {kind} and those of the first {kinds[0]}: --enable-eplb "
                    "moves experts through one buffer, which needs equal ones; leave it out"
                )


def own_experts(build: Build, weight: ExpertWeight) -> ExpertWeight:
    """Of a layer's weight, the experts in this rank's places, in their order, some of them perhaps more than once."""
    if build.experts is None:
        raise ValueError("experts are not dealt out: there is no --enable-expert-parallel")
    if not _moves(build, weight.format):
        return build.experts.weight(weight)
    places = _places(build, weight.format)
    held = build.experts.held(len(places))
    taken = torch.tensor(places[held.start : held.stop])
    scale, scale2 = (None if each is None else each[taken] for each in (weight.scale, weight.scale2))
    return replace(weight, data=weight.data[taken], scale=scale, scale2=scale2)


def _moves(build: Build, format: Format) -> bool:
    return build.redundant is not None and format == build.format


def _places(build: Build, format: Format) -> list[int]:
    """The logical expert of each place of a layer in `format`, as loaded."""
    count = build.whole.n_routed_experts
    if build.redundant is None or not _moves(build, format):
        return list(range(count))
    return list(EplbState.build_initial_global_physical_to_logical_map(count, build.redundant))
