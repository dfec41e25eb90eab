"""The routed experts of a layer: their two weights as held in memory, and how they come there.

A weight is held in the format it is given in, or in the layout that its implementation reads (`Row.prepare`). At load,
each implementation for packed weights has to reproduce, on the first expert that it gets, what plain dequantisation
gives (`inkling_kernels.moe_check`): an instruction that a chip or compiler gets wrong is an error before the first
request, not text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from inkling_kernels.moe_check import self_check
from inkling_kernels.numerics import ExpertWeight
from inkling_portable.ops import ExpertsOp, Ops

# Values of an expert's w2 up to which the check is worth its time in the interpreter.
_INTERPRETED = 1 << 16

log = logging.getLogger(__name__)


class Experts(nn.Module):
    """The two expert weights of a layer, which may be replaced; packed formats stay packed.

    Under expert parallelism a rank holds those from number `first` on, as many as its weights have; None: all of them.
    Where a host moves and copies experts, numbers are those of places, into which `place` turns the router's `[T, k]`.
    """

    w13: ExpertWeight
    w2: ExpertWeight
    first: int | None = None
    place: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __init__(self, ops: Ops, w13: ExpertWeight, w2: ExpertWeight) -> None:
        super().__init__()
        self.ops = ops
        self.hold("w13", w13)
        self.hold("w2", w2)

    def hold(self, name: str, weight: ExpertWeight) -> None:
        """Replace one weight (`w13` or `w2`); parameters among its tensors are this module's, others its buffers."""
        for part in ("data", "scale", "scale2", "input_scale"):
            tensor = getattr(weight, part)
            key = f"{name}_{part}"
            self._parameters.pop(key, None)
            self._buffers.pop(key, None)
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(key, tensor)
            elif tensor is not None:
                self.register_buffer(key, tensor, persistent=False)
        object.__setattr__(self, name, weight)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum `[T, H]` of the experts `ids` `[T, k]` of each row of `x` `[T, H]`."""
        if self.place is not None:
            ids = self.place(ids)
        if self.first is not None:
            # -1 is an expert that another rank holds.
            own = ids - self.first
            ids = torch.where((own >= 0) & (own < self.w13.num_experts), own, -1)
        return self.ops.experts[self.w13.format].run(x, self.w13, self.w2, ids, weights)


class ExpertsLoader:
    """Puts weights, as a checkpoint's reader yields them, into layers, in whatever order the two of a layer come.

    `errors` holds, by format, what the self-check of its implementation found.
    """

    def __init__(self, ops: Ops, dtype: torch.dtype) -> None:
        self.ops, self.dtype = ops, dtype
        self.errors: dict[str, float] = {}
        self._firsts: dict[str, ExpertWeight] = {}
        target, facts = ops.target, ops.facts
        small = facts.hidden_size * facts.expert_width <= _INTERPRETED
        self._checks = target.is_gpu or (target.vendor == "interpret" and small)

    def take(self, experts: Experts, which: str, weight: ExpertWeight) -> None:
        """Have `experts` hold `weight` as its `which`, `w13` or `w2`. Raises `SelfCheckFailed` where its implementation
        computes something else than the weights say, ValueError for a format that the operations were not bound for.
        """
        if weight.format not in self.ops.experts:
            raise ValueError(
                f"{which}: format is {weight.format}, but this model's operations were bound for "
                f"{', '.join(self.ops.experts)}"
            )
        op = self.ops.experts[weight.format]
        if self._checks and weight.format != "bf16" and weight.format not in self.errors and weight.num_experts:
            self._check(op, which, weight)
        experts.hold(which, weight if op.prepare is None else op.prepare(weight))

    def _check(self, op: ExpertsOp, which: str, weight: ExpertWeight) -> None:
        # A copy, since a view would keep all of the weight in memory beside what `prepare` makes of it.
        self._firsts[which] = weight.part(slice(0, 1)).clone()
        if len(self._firsts) < 2:
            return
        w13, w2 = self._firsts["w13"], self._firsts["w2"]
        error = self.errors[weight.format] = self_check(op.on_loaded(self.dtype), w13, w2)
        log.info("moe_experts=%s: self-check in %s off by %.2g", op.row.name, weight.format, error)
        self._firsts.clear()
