"""The Inkling decoder: one model for every device, format and host program.

    a  = rms(h; attn_norm)        h += conv(Attention(a)) m  = rms(h; mlp_norm)         h += conv(MLP(m))
    MLP is dense, or routed experts plus always-on shared ones

Arithmetic lives in the operations that the dispatch table bound (`Ops`); this file says in which order they run and
with which weights. Projections come from a `Parts` factory, so a host with parallel linear layers of its own brings
them. Rows of all sequences are concatenated (`[T, ...]`); a `Batch` says whose they are and where their state lives.

Weights are named after the checkpoint's tensors; query, key, value and relative projections are one product, as are
gate and up, whose rows alternate. The shared experts are one dense MLP whose hidden units carry their expert's
weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from inkling_kernels.numerics import ExpertWeight
from inkling_portable.cache import Batch, LayerState, kind_of
from inkling_portable.config import InklingConfig, LayerSpec
from inkling_portable.experts import Experts, ExpertsLoader
from inkling_portable.ops import Ops
from inkling_portable.parts import Parts, TorchParts, parameter, weight_of


class Attention(nn.Module):
    """Relative attention: fused projections, preparation with its short convolutions and norms, attention, output
    product.
    """

    def __init__(
        self, config: InklingConfig, spec: LayerSpec, ops: Ops, parts: Parts, name: str, dtype: torch.dtype, device: str
    ) -> None:
        super().__init__()
        self.spec, self.ops, self.eps = spec, ops, config.rms_norm_eps
        widths = (spec.q_size, spec.kv_size, spec.kv_size, spec.r_size)
        self.wqkvr = parts.column(f"{name}.wqkvr", config.hidden_size, widths)
        self.wo = parts.row(f"{name}.wo", spec.q_size, config.hidden_size)
        self.kv_sconv = parameter(2 * spec.kv_size, config.conv_kernel_size, dtype=torch.float32, device=device)
        self.q_norm = parameter(spec.head_dim, dtype=dtype, device=device)
        self.k_norm = parameter(spec.head_dim, dtype=dtype, device=device)
        # `[d_rel, extent]` with what belongs to a distance side by side, as the kernels read it.
        self.rel_proj = nn.Parameter(parameter(spec.extent, spec.d_rel, dtype=dtype, device=device).detach().t())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Where each canonical tensor lives."""
        spec = self.spec
        q, k, v, r = weight_of(self.wqkvr).split([spec.q_size, spec.kv_size, spec.kv_size, spec.r_size])
        k_sconv, v_sconv = self.kv_sconv.split(spec.kv_size)
        return {
            "wq_du.weight": q,
            "wk_dv.weight": k,
            "wv_dv.weight": v,
            "wr_du.weight": r,
            "wo_ud.weight": weight_of(self.wo),
            "k_sconv.weight": k_sconv,
            "v_sconv.weight": v_sconv,
            "q_norm.weight": self.q_norm,
            "k_norm.weight": self.k_norm,
            "rel_logits_proj.proj": self.rel_proj,
        }

    def forward(self, a: torch.Tensor, batch: Batch, state: LayerState | None) -> torch.Tensor:
        spec, kind = self.spec, kind_of(self.spec)
        fp8 = {} if state is None or state.kv_scales is None else {"kv_scales": state.kv_scales}
        q, r, k_pages, v_pages = self.ops.qkvr_prep(
            self.wqkvr(a),
            self.kv_sconv,
            self.q_norm,
            self.k_norm,
            self.eps,
            state and state.kv_conv,
            batch.slots,
            batch.cu_seqlens,
            batch.kv_lens,
            state and (state.k_pages, state.v_pages),
            batch.slot_mapping.get(kind),
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            d_rel=spec.d_rel,
            log_scaling_n_floor=spec.log_scaling_n_floor,
            log_scaling_alpha=spec.log_scaling_alpha,
            **fp8,
        )
        out = self.ops.rel_attention(
            q,
            r,
            k_pages,
            v_pages,
            self.rel_proj,
            batch.tables[kind],
            batch.cu_seqlens,
            batch.kv_lens,
            window=spec.window,
            scale=1.0 / spec.head_dim,
            max_query_len=batch.max_query_len,
            max_kv_len=batch.max_kv_len,
            decode_query_len=batch.decode_query_len,
            **fp8,
        )
        return self.wo(out.flatten(1))


class DenseMLP(nn.Module):
    """`w2 silu_mul(w13 x) * global_scale`; the scale is this MLP's own tensor, not the router's."""

    def __init__(self, config: InklingConfig, ops: Ops, parts: Parts, name: str, device: str) -> None:
        super().__init__()
        self.ops = ops
        self.w13 = parts.column(f"{name}.w13", config.hidden_size, (2 * config.intermediate_size,))
        self.w2 = parts.row(f"{name}.w2", config.intermediate_size, config.hidden_size)
        self.global_scale = parameter(1, dtype=torch.float32, device=device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Where each canonical tensor lives."""
        return {
            "w13_dn.weight": weight_of(self.w13),
            "w2_md.weight": weight_of(self.w2),
            "global_scale": self.global_scale,
        }

    def forward(self, m: torch.Tensor) -> torch.Tensor:
        y = self.w2(self.ops.silu_mul(self.w13(m)))
        return y * self.global_scale.to(y.dtype)


class MoE(nn.Module):
    """Routed experts, weighed together with the shared experts that every token passes through."""

    def __init__(
        self, config: InklingConfig, ops: Ops, parts: Parts, name: str, dtype: torch.dtype, device: str
    ) -> None:
        super().__init__()
        self.config, self.ops = config, ops
        experts, shared, width = config.n_routed_experts, config.n_shared_experts, config.moe_intermediate_size
        self.gate = parameter(experts + shared, config.hidden_size, dtype=torch.float32, device=device)
        self.gate_bias = parameter(experts, dtype=torch.float32, device=device).requires_grad_(False)
        self.gate_scale = parameter(1, dtype=torch.float32, device=device)
        self.shared_w13 = parts.column(f"{name}.shared_w13", config.hidden_size, (2 * width,) * shared)
        self.shared_w2 = parts.row(f"{name}.shared_w2", shared * width, config.hidden_size)
        self.experts = Experts(
            ops,
            ExpertWeight(
                "bf16",
                parameter(experts, 2 * width, config.hidden_size, dtype=dtype, device="meta"),
                layout="interleaved",
            ),
            ExpertWeight(
                "bf16", parameter(experts, config.hidden_size, width, dtype=dtype, device="meta"), layout="plain"
            ),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Where each canonical tensor lives; the shared experts appear apart, as the checkpoint has them."""
        shared = self.config.n_shared_experts
        return {
            "gate.weight": self.gate,
            "gate.bias": self.gate_bias,
            "gate.global_scale": self.gate_scale,
            "shared_experts.shared_w13_weight": weight_of(self.shared_w13).unflatten(0, (shared, -1)),
            "shared_experts.shared_w2_weight": weight_of(self.shared_w2).unflatten(1, (shared, -1)).transpose(0, 1),
        }

    def forward(self, m: torch.Tensor) -> torch.Tensor:
        config = self.config
        logits = self.ops.linear(m.float(), self.gate)
        ids, weights, sinks = self.ops.routing(
            logits, self.gate_bias, self.gate_scale, top_k=config.num_experts_per_tok, route_scale=config.route_scale
        )
        routed = self.experts(m, ids, weights)
        per_unit = sinks.repeat_interleave(config.moe_intermediate_size, 1)
        return routed + self.shared_w2(self.ops.silu_mul(self.shared_w13(m), per_unit))


class DecoderLayer(nn.Module):
    """One decoder layer: attention and MLP, each behind a norm and followed by a convolution onto the residual."""

    def __init__(
        self,
        config: InklingConfig,
        spec: LayerSpec,
        ops: Ops,
        parts: Parts,
        name: str,
        dtype: torch.dtype,
        device: str,
        state_index: int,
    ) -> None:
        super().__init__()
        self.spec, self.ops, self.eps, self.state_index = spec, ops, config.rms_norm_eps, state_index
        self.parts, self.own = parts, parts.channels(config.hidden_size)
        hidden, width = config.hidden_size, config.conv_kernel_size
        self.attn_norm = parameter(hidden, dtype=dtype, device=device)
        self.attn = Attention(config, spec, ops, parts, f"{name}.attn", dtype, device)
        self.attn_sconv = parameter(len(self.own), width, dtype=torch.float32, device=device)
        self.mlp_norm = parameter(hidden, dtype=dtype, device=device)
        self.mlp: MoE | DenseMLP = (
            MoE(config, ops, parts, f"{name}.mlp", dtype, device)
            if spec.sparse
            else DenseMLP(config, ops, parts, f"{name}.mlp", device)
        )
        self.mlp_sconv = parameter(len(self.own), width, dtype=torch.float32, device=device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Where each canonical tensor of the layer lives, by its name within the layer; experts aside."""
        own = {f"{name}.weight": getattr(self, name) for name in ("attn_norm", "attn_sconv", "mlp_norm", "mlp_sconv")}
        attn = {f"attn.{name}": tensor for name, tensor in self.attn.tensors().items()}
        return own | attn | {f"mlp.{name}": tensor for name, tensor in self.mlp.tensors().items()}

    def enter(self, h: torch.Tensor) -> torch.Tensor:
        """`h` as the layer's `forward` takes it beside `h` itself: normed for its attention."""
        normed: torch.Tensor = self.ops.rms_norm(h, self.attn_norm, self.eps)
        return normed

    def forward(
        self, h: torch.Tensor, normed: torch.Tensor, batch: Batch, norm: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream behind the layer, and that normed by `norm` for whoever is next (as it is where that is
        None); `normed` is `enter(h)`. Each norm rides on the convolution before it.
        """
        state = batch.states[self.state_index] if batch.states is not None else None
        y = self.attn(normed, batch, state)
        h, m = self._convolved(y, self.attn_sconv, state.attn_conv if state else None, batch, h, self.mlp_norm)
        return self._convolved(self.mlp(m), self.mlp_sconv, state.mlp_conv if state else None, batch, h, norm)

    def _convolved(
        self,
        partial: torch.Tensor,
        weight: torch.Tensor,
        ring: torch.Tensor | None,
        batch: Batch,
        h: torch.Tensor,
        norm: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`h + conv(sum of the ranks' partial)`, each rank convolving channels of its own, and that normed."""
        where, own = (batch.slots, batch.cu_seqlens, batch.kv_lens), self.own
        if norm is not None and len(own) == h.shape[1]:
            return self.ops.short_conv(partial, weight, ring, *where, h, norm_weight=norm, eps=self.eps)
        y = self.ops.short_conv(self.parts.scatter(partial), weight, ring, *where, h[:, own.start : own.stop])
        y = self.parts.gather(y)
        return y, y if norm is None else self.ops.rms_norm(y, norm, self.eps)


class Inkling(nn.Module):
    """The text backbone with embedding and head. Build it, then `load` canonical tensors, or initialise it for
    training.

    `stage` are the layers that a rank of a pipeline holds (all of them by default). A host may have a head of its own
    (`head=False`).
    """

    def __init__(
        self,
        config: InklingConfig,
        ops: Ops,
        *,
        dtype: torch.dtype,
        device: str = "cpu",
        parts: Parts | None = None,
        stage: range | None = None,
        head: bool = True,
    ) -> None:
        super().__init__()
        self.config, self.ops, self.dtype = config, ops, dtype
        parts = parts or TorchParts(ops, dtype, device)
        self.embed = parameter(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.embed_norm = parameter(config.hidden_size, dtype=dtype, device=device)
        # A layer keeps its number where others are missing.
        self.layers = nn.ModuleList(
            DecoderLayer(config, config.layer(i), ops, parts, f"layers.{i}", dtype, device, i)
            if stage is None or i in stage
            else nn.Identity()
            for i in range(config.num_hidden_layers)
        )
        self.norm = parameter(config.hidden_size, dtype=dtype, device=device)
        # Rows of the padded vocabulary are not kept: no logit of theirs exists to be sampled, ranked or drafted.
        shape = (config.unpadded_vocab_size, config.hidden_size)
        self.unembed = parameter(*shape, dtype=dtype, device=device) if head else None

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        """Normed embeddings `[T, H]` of token ids `[T]` int64."""
        return self.ops.embedding(ids, self.embed, self.embed_norm, self.config.rms_norm_eps)

    def forward(self, h: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Run the rows `h` `[T, H]` (from `embedding`, placeholders replaced) and return the normed hidden states
        `[T, H]`.
        """
        return self.through(h, lambda layer: batch, self.norm)[1]

    def through(
        self, h: torch.Tensor, batch_of: Callable[[DecoderLayer], Batch], norm: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `h` `[T, H]` behind the layers held here, and those normed by `norm` (as they are where it is None).
        `batch_of` gives the step as a layer's host keeps its state.
        """
        layers = list(self.decoder_layers())
        normed = layers[0].enter(h)
        for layer, behind in zip(layers, [*(layer.attn_norm for layer in layers[1:]), norm], strict=True):
            h, normed = layer(h, normed, batch_of(layer), behind)
        return h, normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[N, unpadded_vocab_size]`, float32, of normed hidden states `[N, H]`."""
        return self.checked_logits(hidden)[0]

    def checked_logits(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`logits`, and for each row whether all of them are finite, `[N]` bool."""
        if self.unembed is None:
            raise ValueError("the model was built without a head; its host computes logits")
        config = self.config
        product = self.ops.linear(hidden, self.unembed)
        return self.ops.logits(
            product, vocabulary=config.unpadded_vocab_size, divisor=config.logits_mup_width_multiplier
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Where each canonical tensor (`llm.…`) lives: views into the parameters, experts aside (see `experts`)."""
        found: dict[str, torch.Tensor] = {
            "llm.embed.weight": self.embed,
            "llm.embed_norm.weight": self.embed_norm,
            "llm.norm.weight": self.norm,
        }
        if self.unembed is not None:
            found["llm.unembed.weight"] = self.unembed
        for layer in self.decoder_layers():
            found |= {f"llm.layers.{layer.state_index}.{name}": tensor for name, tensor in layer.tensors().items()}
        return found

    def decoder_layers(self) -> Iterator[DecoderLayer]:
        """The decoder layers held here, in order."""
        for layer in self.layers:
            if isinstance(layer, DecoderLayer):
                yield layer

    def experts(self) -> dict[str, Experts]:
        """The expert weights of each expert layer, by the canonical prefix `llm.layers.N.mlp.experts`."""
        return {
            f"llm.layers.{layer.state_index}.mlp.experts": layer.mlp.experts
            for layer in self.decoder_layers()
            if isinstance(layer.mlp, MoE)
        }

    def load(self, tensors: Iterable[tuple[str, torch.Tensor | ExpertWeight]]) -> None:
        """Copy canonical checkpoint tensors into the model, one at a time; the head's padded rows are left out.

        Expert weights are brought into the form of their implementation, each of which checks itself on the first that
        come (`SelfCheckFailed`). The checkpoint has been inspected before, so an unknown name (`KeyError`) or another
        shape (`ValueError`) is a defect.
        """
        places, experts, loader = self.tensors(), self.experts(), ExpertsLoader(self.ops, self.dtype)
        for name, value in tensors:
            if isinstance(value, ExpertWeight):
                prefix, _, which = name.rpartition(".")
                loader.take(experts[prefix], which, value)
            else:
                copy_into(places[name], value[: self.config.unpadded_vocab_size] if "unembed" in name else value, name)


def copy_into(target: torch.Tensor, value: torch.Tensor, name: str) -> None:
    """Copy `value` into `target` of the same shape."""
    if target.shape != value.shape:
        raise ValueError(f"{name}: shape {tuple(value.shape)}, expected {tuple(target.shape)}")
    with torch.no_grad():
        target.copy_(value)
