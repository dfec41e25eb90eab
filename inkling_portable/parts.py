"""What a host may bring to the model: its projections, and how its ranks exchange what they compute apart."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from inkling_portable.ops import Ops


class Parts(Protocol):
    """Makes the projections of the model and brings together what the ranks of a tensor-parallel group compute apart.

    Sizes are this rank's (`inkling_portable.parallel`). `outs` are the widths of the products that one `column` call
    computes together; what a `row` projection yields is this rank's partial sum, and a `whole` one is nobody's part.
    """

    def column(self, name: str, inputs: int, outs: tuple[int, ...]) -> nn.Module: ...

    def row(self, name: str, inputs: int, outs: int) -> nn.Module: ...

    def whole(self, name: str, inputs: int, outs: int) -> nn.Module: ...

    def channels(self, hidden: int) -> range:
        """The channels of the residual stream that this rank convolves."""
        ...

    def scatter(self, partial: torch.Tensor) -> torch.Tensor:
        """This rank's channels of the sum over the ranks of `partial` `[T, H]`."""
        ...

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """All channels `[T, H]` of what each rank has its own of."""
        ...


class Projection(nn.Module):
    """`y = W x` without bias, computed by the operation `linear`."""

    def __init__(self, ops: Ops, weight: nn.Parameter) -> None:
        super().__init__()
        self.ops, self.weight = ops, weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(x, self.weight)


class TorchParts:
    """Whole projections in one dtype on one device; the one rank there is holds every channel."""

    def __init__(self, ops: Ops, dtype: torch.dtype, device: torch.device | str) -> None:
        self.ops, self.dtype, self.device = ops, dtype, device

    def column(self, name: str, inputs: int, outs: tuple[int, ...]) -> nn.Module:
        return self.row(name, inputs, sum(outs))

    def row(self, name: str, inputs: int, outs: int) -> nn.Module:
        return Projection(self.ops, parameter(outs, inputs, dtype=self.dtype, device=self.device))

    whole = row

    def channels(self, hidden: int) -> range:
        return range(hidden)

    def scatter(self, partial: torch.Tensor) -> torch.Tensor:
        return partial

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        return own


def weight_of(projection: nn.Module) -> torch.Tensor:
    """The matrix of a projection that a `Parts` factory made."""
    weight = projection.weight
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"{type(projection).__name__} has no weight tensor")
    return weight


def parameter(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """A parameter whose values are about to be loaded."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
