"""Tensor and expert parallelism: which part of the model, and of each checkpoint tensor, a rank holds.

Tensor parallelism (`Rank`): query heads, expert and dense widths and the vocabulary are cut into `size` equal parts. A
layer kind with fewer key/value heads than ranks has each head on `size / heads` neighbouring ranks, so that every rank
still holds the head that its query heads read; full and sliding layers are judged apart, since their head counts
differ. A division that does not come out even is refused with the sizes that would. The products behind `wo`, `w2` and
the shared experts are partial sums, to be added up over the ranks before the convolution that follows them; the head
yields each rank's own slice of the vocabulary. Packed experts are cut along whole blocks: codes and scales of a rank
are views of theirs.

Expert parallelism (`ExpertRank`): whole routed experts are dealt out in runs as even as can be, and each rank adds up
those of its own. A rank may hold none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from inkling_kernels.numerics import BLOCK, ExpertWeight
from inkling_portable.config import InklingConfig, LayerSpec


@dataclass(frozen=True)
class _Member:
    size: int
    rank: int

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"rank is {self.rank} of {self.size}; expected 0 <= rank < size")


class Rank(_Member):
    """Rank `rank` of a tensor-parallel group of `size`; `ValueError` where it is not one."""

    def part(self, total: int, what: str) -> range:
        """This rank's share of `total` things in order."""
        if total % self.size:
            sizes = [n for n in range(1, total + 1) if total % n == 0 and n <= 64]
            raise ValueError(f"{what} is {total}, which {self.size} ranks cannot share evenly; use one of {sizes}")
        share = total // self.size
        return range(self.rank * share, (self.rank + 1) * share)

    def heads(self, spec: LayerSpec) -> tuple[range, range]:
        """The query heads and the key/value heads of a layer that this rank holds."""
        kind = "sliding" if spec.sliding else "full"
        queries = self.part(spec.num_heads, f"the number of query heads of {kind} layers")
        if spec.num_kv_heads % self.size == 0:
            return queries, self.part(spec.num_kv_heads, "")
        if self.size % spec.num_kv_heads:
            raise ValueError(
                f"{kind} layers have {spec.num_kv_heads} key/value heads, which {self.size} ranks can neither share "
                "nor hold in equally many copies; use a size that divides the number of heads or is a multiple of it"
            )
        head = self.rank * spec.num_kv_heads // self.size
        return queries, range(head, head + 1)

    def vocabulary(self, config: InklingConfig) -> range:
        """The token ids whose logits this rank computes; rows of the padding are nobody's, and the range may be
        empty.
        """
        rows = self.part(config.vocab_size, "vocab_size")
        return range(min(rows.start, config.unpadded_vocab_size), min(rows.stop, config.unpadded_vocab_size))

    def config(self, config: InklingConfig) -> InklingConfig:
        """The sizes of this rank's part of the model. Checks every division at once, before anything is read."""
        full, sliding = (self.heads(spec) for spec in _kinds(config))
        dense = self.part(config.intermediate_size, "the dense MLP's width")
        experts = self.part(config.moe_intermediate_size, "the experts' width")
        block = BLOCK.get(config.quantization.format, 1) if config.quantization else 1
        if len(experts) % block:
            raise ValueError(
                f"{self.size} ranks leave {len(experts)} of the experts' width {config.moe_intermediate_size} each; "
                f"expected a multiple of the format's block of {block}"
            )
        return config.replace(
            num_attention_heads=len(full[0]),
            num_key_value_heads=len(full[1]),
            swa_num_attention_heads=len(sliding[0]),
            swa_num_key_value_heads=len(sliding[1]),
            intermediate_size=len(dense),
            moe_intermediate_size=len(experts),
        )

    def tensor(
        self, config: InklingConfig, name: str, value: torch.Tensor | ExpertWeight
    ) -> torch.Tensor | ExpertWeight:
        """This rank's part of the canonical tensor `name` of the whole model `config`; a view where it is one."""
        if isinstance(value, ExpertWeight):
            return self._experts(config, name, value)
        leaf = name.rsplit(".", 2)[-2] if name.endswith((".weight", ".proj")) else name.rsplit(".", 1)[-1]
        parts = name.split(".")
        if parts[1] != "layers" or parts[0] not in ("llm", "mtp"):
            return value
        spec = config.layer(int(parts[2])) if parts[0] == "llm" else config.mtp_layer(int(parts[2]))
        queries, keys = self.heads(spec)
        widths = {"wq_du": spec.head_dim, "wr_du": spec.d_rel}
        if leaf in widths:
            return value[queries.start * widths[leaf] : queries.stop * widths[leaf]]
        if leaf in ("wk_dv", "wv_dv", "k_sconv", "v_sconv"):
            return value[keys.start * spec.head_dim : keys.stop * spec.head_dim]
        if leaf == "wo_ud":
            return value[:, queries.start * spec.head_dim : queries.stop * spec.head_dim]
        if leaf in ("w2_md", "shared_w2_weight"):
            own = self.part(value.shape[-1], f"the width of {name}")
            return value[..., own.start : own.stop]
        if leaf in ("w13_dn", "shared_w13_weight"):
            # Rows alternate gate and up, so a run of units is a run of row pairs.
            own = self.part(value.shape[-2] // 2, f"the width of {name}")
            return value[..., 2 * own.start : 2 * own.stop, :]
        return value

    def _experts(self, config: InklingConfig, name: str, value: ExpertWeight) -> ExpertWeight:
        own = self.part(config.moe_intermediate_size, f"the width of {name}")
        if value.layout == "interleaved":
            rows = slice(2 * own.start, 2 * own.stop)
            return replace(value, data=value.data[:, rows], scale=None if value.scale is None else value.scale[:, rows])
        if value.format == "bf16":
            return replace(value, data=value.data[..., own.start : own.stop])
        block = BLOCK[value.format]
        if own.start % block or own.stop % block or value.scale is None:
            raise ValueError(
                f"{name}: columns {own.start}..{own.stop - 1} do not fall on the format's blocks of {block}"
            )
        return replace(
            value,
            data=value.data[..., own.start // 2 : own.stop // 2],
            scale=value.scale[..., own.start // block : own.stop // block],
        )


class ExpertRank(_Member):
    """Rank `rank` of an expert-parallel group of `size`; `ValueError` where it is not one."""

    def held(self, total: int) -> range:
        """The experts of `total` that this rank holds; the first ranks have one more where it does not come out even,
        and the last have none where there are more ranks than experts."""
        share, more = divmod(total, self.size)
        start = self.rank * share + min(self.rank, more)
        return range(start, start + share + (self.rank < more))

    def weight(self, value: ExpertWeight) -> ExpertWeight:
        """This rank's experts of a layer's weight, as views."""
        held = self.held(value.num_experts)
        return value.part(slice(held.start, held.stop))

    def ids(self, ids: torch.Tensor, total: int) -> torch.Tensor:
        """Ids among `total` experts as ids among those held, and -1, which adds nothing, for all others."""
        held = self.held(total)
        return torch.where((ids >= held.start) & (ids < held.stop), ids - held.start, -1)


def _kinds(config: InklingConfig) -> tuple[LayerSpec, LayerSpec]:
    """A full and a sliding layer of the model, whether or not it has both."""
    whole = config.replace(num_hidden_layers=2, local_layer_ids=(1,), dense_layer_ids=(), mtp=None)
    return whole.layer(0), whole.layer(1)
