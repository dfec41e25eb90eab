"""Multi-token prediction: up to eight chained depths that draft the tokens after the next one.

    x_d = input_proj_d([rms(prev; hidden_norm_d), rms(E(next); embed_norm_d)])
    y_d = chain_norm(Block_d(x_d))                                  (without chain_norm where the model has none)

Row `p` of depth `d` joins the hidden state of depth `d - 1` at position `p` (the backbone's normed one for `d = 0`)
with the token at `p + 1 + d`, and drafts the token at `p + 2 + d`. `E` is the backbone's embedding after its
`embed_norm`; head and muP scaling are the backbone's too. A block is a decoder layer with a dense MLP and caches of
its own.

Log scaling of a full block goes by `p`, as in SGLang; Transformers goes by `p + 1 + d`, which at the released floor of
128,000 differs by less than bfloat16 can show. It can change what is drafted, never what is generated.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from inkling_kernels.numerics import ExpertWeight
from inkling_portable.cache import Batch
from inkling_portable.config import InklingConfig
from inkling_portable.model import DecoderLayer, copy_into
from inkling_portable.ops import Ops
from inkling_portable.parts import Parts, TorchParts, weight_of


class Depth(nn.Module):
    """One depth: two norms, the joining projection and a decoder block."""

    def __init__(
        self, config: InklingConfig, depth: int, ops: Ops, parts: Parts, dtype: torch.dtype, device: str
    ) -> None:
        super().__init__()
        self.ops, self.eps = ops, config.rms_norm_eps
        self.hidden_norm = nn.Parameter(torch.empty(config.hidden_size, dtype=dtype, device=device))
        self.embed_norm = nn.Parameter(torch.empty(config.hidden_size, dtype=dtype, device=device))
        self.input_proj = parts.whole(f"mtp.{depth}.input_proj", 2 * config.hidden_size, config.hidden_size)
        index = config.num_hidden_layers + depth
        self.block = DecoderLayer(
            config, config.mtp_layer(depth), ops, parts, f"mtp.{depth}", dtype, device, state_index=index
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Where each canonical tensor of the depth lives, by its name within the depth."""
        return {
            "hidden_norm.weight": self.hidden_norm,
            "embed_norm.weight": self.embed_norm,
            "input_proj.weight": weight_of(self.input_proj),
            **{f"transformer_block.{name}": tensor for name, tensor in self.block.tensors().items()},
        }

    def forward(
        self, hidden: torch.Tensor, embedded: torch.Tensor, batch: Batch, norm: torch.Tensor | None
    ) -> torch.Tensor:
        hidden = self.ops.rms_norm(hidden, self.hidden_norm, self.eps)
        embedded = self.ops.rms_norm(embedded, self.embed_norm, self.eps)
        x = self.input_proj(torch.cat([hidden, embedded], -1))
        return self.block(x, self.block.enter(x), batch, norm)[1]


class MultiTokenPrediction(nn.Module):
    """The first `depths` depths of a model that has them (`ValueError` where it has fewer)."""

    def __init__(
        self,
        config: InklingConfig,
        ops: Ops,
        depths: int,
        *,
        dtype: torch.dtype,
        device: str = "cpu",
        parts: Parts | None = None,
    ) -> None:
        super().__init__()
        available = config.mtp.num_layers if config.mtp else 0
        if config.mtp is None or not 0 < depths <= available:
            raise ValueError(f"{depths} drafts asked of a model with {available} multi-token-prediction depths")
        parts = parts or TorchParts(ops, dtype, device)
        self.depths = nn.ModuleList(Depth(config, d, ops, parts, dtype, device) for d in range(depths))
        self.chain_norm = (
            nn.Parameter(torch.empty(config.hidden_size, dtype=dtype, device=device))
            if config.mtp.chain_hidden_post_norm
            else None
        )

    def forward(self, depth: int, hidden: torch.Tensor, embedded: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Rows `[T, H]` of depth `depth`: `hidden` comes from the depth before, `embedded` are the tokens' normed
        embeddings.

        The result feeds the next depth and, through the backbone's `logits`, drafts a token.
        """
        return self.depths[depth](hidden, embedded, batch, self.chain_norm)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Where each canonical tensor (`mtp.…`) of the depths kept here lives."""
        found: dict[str, torch.Tensor] = {} if self.chain_norm is None else {"mtp.chain_norm.weight": self.chain_norm}
        for d, depth in enumerate(self._depths()):
            found |= {f"mtp.layers.{d}.{name}": tensor for name, tensor in depth.tensors().items()}
        return found

    def blocks(self) -> list[DecoderLayer]:
        """The decoder block of each depth."""
        return [depth.block for depth in self._depths()]

    def _depths(self) -> list[Depth]:
        return [depth for depth in self.depths if isinstance(depth, Depth)]

    def load(self, tensors: Iterable[tuple[str, torch.Tensor | ExpertWeight]]) -> None:
        """Copy canonical tensors into the depths kept here; those of further depths are passed over."""
        places = self.tensors()
        for name, value in tensors:
            parts = name.split(".")
            if parts[1] == "layers" and int(parts[2]) >= len(self.depths):
                continue
            if isinstance(value, ExpertWeight):
                raise KeyError(f"{name}: multi-token-prediction depths have no routed experts")
            copy_into(places[name], value, name)
