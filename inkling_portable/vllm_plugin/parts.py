"""vLLM's parallel linear layers as the projections of the shared model, and its collectives between the ranks.

Weights keep the layout of the shared model, which fills them with this rank's part itself: vLLM's own loaders are not
called. The linears are not quantised, whatever the checkpoint's experts are; LoRA wraps them as it does any model's.
"""

from __future__ import annotations

import torch
from torch import nn
from vllm.distributed import tensor_model_parallel_all_gather, tensor_model_parallel_reduce_scatter
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)

from inkling_portable.parallel import Rank


class VllmParts:
    """Makes the projections of one tensor-parallel rank; names are prefixed with `prefix` in vLLM's eyes."""

    def __init__(self, rank: Rank, dtype: torch.dtype, prefix: str) -> None:
        self.rank, self.prefix = rank, prefix
        self._options = {"bias": False, "return_bias": False, "params_dtype": dtype}

    # vLLM's layers are told the sizes of the whole model and cut them themselves.

    def column(self, name: str, inputs: int, outs: tuple[int, ...]) -> nn.Module:
        whole, prefix = [out * self.rank.size for out in outs], f"{self.prefix}.{name}"
        if len(whole) == 1:
            return ColumnParallelLinear(inputs, whole[0], prefix=prefix, **self._options)
        return MergedColumnParallelLinear(inputs, whole, prefix=prefix, **self._options)

    def row(self, name: str, inputs: int, outs: int) -> nn.Module:
        prefix = f"{self.prefix}.{name}"
        # The sum over the ranks is `scatter`'s, taken once behind everything that adds to it.
        return RowParallelLinear(inputs * self.rank.size, outs, prefix=prefix, reduce_results=False, **self._options)

    def whole(self, name: str, inputs: int, outs: int) -> nn.Module:
        return ReplicatedLinear(inputs, outs, prefix=f"{self.prefix}.{name}", **self._options)

    def channels(self, hidden: int) -> range:
        return self.rank.part(hidden, "hidden_size")

    def scatter(self, partial: torch.Tensor) -> torch.Tensor:
        return partial if self.rank.size == 1 else tensor_model_parallel_reduce_scatter(partial, dim=-1)

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        return own if self.rank.size == 1 else tensor_model_parallel_all_gather(own, dim=-1)
