"""The shared Inkling as vLLM's model classes: text, text with images and sounds, and the prediction depths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed import get_pp_group
from vllm.distributed.utils import get_pp_indices
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import SupportsLoRA, SupportsMultiModal, SupportsPP
from vllm.model_executor.models.utils import (
    WeightsMapper,
    _merge_multimodal_embeddings,
    make_empty_intermediate_tensors_factory,
)
from vllm.sequence import IntermediateTensors

from inkling_kernels.numerics import BLOCK, ExpertWeight, Layout
from inkling_portable.experts import Experts
from inkling_portable.model import DecoderLayer, Inkling
from inkling_portable.mtp import MultiTokenPrediction
from inkling_portable.tensor_table import Section
from inkling_portable.towers import Towers
from inkling_portable.vllm_plugin.balance import Balanced, own_experts
from inkling_portable.vllm_plugin.options import Build
from inkling_portable.vllm_plugin.parts import VllmParts
from inkling_portable.vllm_plugin.state import ConvolutionState, KeysAndValues, LayerCaches, transferred, without_scales
from inkling_portable.weight_stream import assemble


class Embedding(nn.Module):
    """The backbone's normed embedding, under the name by which vLLM gives it to the prediction depths."""

    def __init__(self, model: Inkling) -> None:
        super().__init__()
        self._model = (model,)  # in a tuple, so that it is not a module of this one

    @property
    def weight(self) -> torch.Tensor:
        return self._model[0].embed

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self._model[0].embedding(ids)


class Blocks(nn.Module):
    """What the backbone and the prediction depths share: options, caches of their layers, and loading."""

    # For LoRA: what a fused product is made of, and what adapters of either spelling call the others.
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "wqkvr": ["wq_du", "wk_dv", "wv_dv", "wr_du"],
        "shared_w13": ["shared_w13_0", "shared_w13_1"],
    }
    embedding_modules: ClassVar[dict[str, str]] = {}
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"model.llm.layers.": "model.layers.", "model.language_model.layers.": "model.layers."},
        orig_to_new_substr={
            ".attn.wo_ud.": ".attn.wo.",
            ".mlp.w13_dn.": ".mlp.w13.",
            ".mlp.w2_md.": ".mlp.w2.",
            ".self_attn.o_proj.": ".attn.wo.",
            ".mlp.down_proj.": ".mlp.w2.",
        }
        | {f".self_attn.{p}_proj.": f".attn.w{p}_d{'u' if p in 'qr' else 'v'}." for p in "qkvr"},
    )

    def __init__(self, vllm_config: VllmConfig, model_config: ModelConfig, build: Build) -> None:
        super().__init__()
        self.build, self.vllm_config, self.config = build, vllm_config, model_config.hf_config
        self.parts = VllmParts(build.rank, build.dtype, "model")
        self.caches: dict[int, LayerCaches] = {}

    def give_caches(self, layers: Iterable[tuple[str, DecoderLayer]]) -> None:
        """Tell vLLM of the caches that the layers need, under their names."""
        build = self.build
        for name, layer in layers:
            channels = (2 * layer.spec.kv_size, len(layer.own), len(layer.own))
            scales = None
            if build.ops.facts.kv_dtype == "float8_e4m3fn":
                # Values that they bring beyond the type saturate.
                k, v = (torch.ones(1, dtype=torch.float32, device=build.device) for _ in range(2))
                scales = (k, v)
            self.caches[layer.state_index] = LayerCaches(
                layer.spec,
                layer.state_index,
                KeysAndValues(layer.spec, f"{name}.attn", self.vllm_config),
                ConvolutionState(
                    channels, build.config.conv_kernel_size, build.dtype, f"{name}.conv_state", self.vllm_config
                ),
                scales,
            )

    def batch(self, index: int, h: torch.Tensor) -> Any:
        """This step as layer `index` takes it; without metadata vLLM is measuring memory."""
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, dict):
            return self.caches[index].batch(metadata, len(h))
        return self.caches[index].rehearsal(len(h), h.dtype, h.device)

    def scaled(self, product: torch.Tensor | None) -> torch.Tensor | None:
        """Logits, float32, of the head's product; None on ranks to which vLLM does not gather it."""
        if product is None:
            return None
        config = self.build.config
        divisor = config.logits_mup_width_multiplier
        logits: torch.Tensor = self.build.ops.logits(product, vocabulary=product.shape[1], divisor=divisor)[0]
        return logits

    def own_weights(
        self, stream: Iterable[tuple[str, torch.Tensor]], sections: Sequence[Section]
    ) -> Iterator[tuple[str, torch.Tensor | ExpertWeight]]:
        """This rank's part of each tensor that vLLM's loader brings."""
        build = self.build
        own = self.parts.channels(build.whole.hidden_size)
        weights = without_scales(stream, self.caches, build.whole.num_hidden_layers)
        for name, value in assemble(build.whole, weights, sections):
            if isinstance(value, ExpertWeight):
                yield name, self._own_experts(name, value)
            elif name.endswith((".attn_sconv.weight", ".mlp_sconv.weight")):
                yield name, value[own.start : own.stop]
            elif name.startswith(("visual.", "audio.")):
                yield name, value
            else:
                yield name, build.rank.tensor(build.whole, name, value)

    def _own_experts(self, name: str, value: ExpertWeight) -> ExpertWeight:
        build = self.build
        part = build.rank.tensor(build.whole, name, value) if build.experts is None else own_experts(build, value)
        if not isinstance(part, ExpertWeight):
            raise TypeError(f"{name} is no expert weight")
        part = part.to(build.device)
        return replace(part, data=part.data.to(build.dtype)) if part.format == "bf16" else part


class PortableForCausalLM(Blocks, Balanced, SupportsPP, SupportsLoRA):
    """The text model."""

    sections: ClassVar[tuple[Section, ...]] = ("text",)

    def __init__(self, *, vllm_config: VllmConfig, build: Build) -> None:
        super().__init__(vllm_config, vllm_config.model_config, build)
        config, pipeline = build.config, get_pp_group()
        stage = range(*get_pp_indices(config.num_hidden_layers, pipeline.rank_in_group, pipeline.world_size))
        self.first, self.last = pipeline.is_first_rank, pipeline.is_last_rank
        self.model = Inkling(
            config, build.ops, dtype=build.dtype, device=build.device, parts=self.parts, stage=stage, head=False
        )
        self.model.add_module("embed_tokens", Embedding(self.model))
        if vllm_config.load_config.load_format == "dummy":
            for experts in self.model.experts().values():
                hold_nothing(experts, build)
            self.give_places(build, self.model.experts().values())
        self.give_caches((f"model.layers.{layer.state_index}", layer) for layer in self.model.decoder_layers())
        vocabulary = config.unpadded_vocab_size
        self.lm_head = ParallelLMHead(vocabulary, config.hidden_size, params_dtype=build.dtype, prefix="lm_head")
        self.logits_processor = LogitsProcessor(vocabulary)
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states"], config.hidden_size
        )
        self.requires_grad_(False)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embedding(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor | IntermediateTensors:
        if not self.first and intermediate_tensors is not None:
            h = intermediate_tensors["hidden_states"]
        elif inputs_embeds is not None:
            h = inputs_embeds
        elif input_ids is not None:
            h = self.model.embedding(input_ids)
        else:
            raise ValueError("the model was called without token ids, embeddings or an earlier stage's hidden states")
        out = torch.empty_like(h)
        self._layers(h, out)
        return out if self.last else IntermediateTensors({"hidden_states": out})

    @eager_break_during_capture
    def _layers(self, h: torch.Tensor, out: torch.Tensor) -> None:
        # The shapes of a launch follow the number of sequences, which a piecewise graph does not fix: there the layers
        # run eagerly between the graphs, while a full graph of decode batches holds them.
        norm = self.model.norm if self.last else None
        with transferred(self.caches.values()):
            out.copy_(self.model.through(h, lambda layer: self.batch(layer.state_index, h), norm)[1])

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.scaled(self.logits_processor(self.lm_head, hidden_states))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill the model from vLLM's stream. Raises `CheckpointError` listing what is missing or unknown."""
        self.model.load(self._placed(self.own_weights(weights, self.sections)))
        self.give_places(self.build, self.model.experts().values())
        return {name for name, _ in self.named_parameters()}

    def _placed(
        self, tensors: Iterable[tuple[str, torch.Tensor | ExpertWeight]]
    ) -> Iterator[tuple[str, torch.Tensor | ExpertWeight]]:
        """The backbone's tensors of this stage; the head's go to vLLM's head."""
        places, experts = self.model.tensors(), self.model.experts()
        for name, value in tensors:
            if name == "llm.unembed.weight":
                rows = value[: self.build.config.unpadded_vocab_size]  # type: ignore[index]
                self.lm_head.weight_loader(self.lm_head.weight, rows.to(self.build.dtype))
            elif name in places or name.rpartition(".")[0] in experts:
                yield name, value


class PortableForConditionalGeneration(PortableForCausalLM, SupportsMultiModal):
    """The text model with towers for images and sounds; vLLM's processor makes patches and levels of them."""

    sections: ClassVar[tuple[Section, ...]] = ("text", "visual", "audio")

    def __init__(self, *, vllm_config: VllmConfig, build: Build) -> None:
        super().__init__(vllm_config=vllm_config, build=build)
        self.towers = Towers(build.config, build.ops, dtype=build.dtype, device=build.device).requires_grad_(False)

    def get_language_model(self) -> nn.Module:
        return self

    def embed_multimodal(self, **kwargs: Any) -> list[torch.Tensor]:
        """Embeddings `[tokens, H]` of each image and then of each sound, from vLLM's batched processor outputs."""
        found: list[torch.Tensor] = []
        for tower, rows, counts in (
            (self.towers.visual, kwargs.get("pixel_values"), kwargs.get("num_patches")),
            (self.towers.audio, kwargs.get("input_audio_features"), kwargs.get("num_audio_tokens")),
        ):
            if rows is None or tower is None or len(rows) == 0:
                continue
            sizes = [len(item) for item in rows] if isinstance(rows, (list, tuple)) else _sizes(counts, len(rows))
            together = torch.cat(list(rows)) if isinstance(rows, (list, tuple)) else rows
            # Levels of sounds may come as floats: see versions.py.
            found += tower(together.long() if tower is self.towers.audio else together).split(sizes)
        return found

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Sequence[torch.Tensor] | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return _merged(self.model.embedding(input_ids), multimodal_embeddings, is_multimodal)

    def _placed(
        self, tensors: Iterable[tuple[str, torch.Tensor | ExpertWeight]]
    ) -> Iterator[tuple[str, torch.Tensor | ExpertWeight]]:
        def text() -> Iterator[tuple[str, torch.Tensor | ExpertWeight]]:
            for name, value in tensors:
                if name.startswith(("visual.", "audio.")) and isinstance(value, torch.Tensor):
                    self.towers.load([(name, value)])
                else:
                    yield name, value

        return super()._placed(text())


class PortableMTP(Blocks):
    """The multi-token-prediction depths, as the draft model of vLLM's speculative decoding."""

    def __init__(self, *, vllm_config: VllmConfig, build: Build) -> None:
        speculative = vllm_config.speculative_config
        if speculative is None or build.whole.mtp is None:
            raise ValueError("the model has no multi-token-prediction depths: leave --speculative-config out")
        super().__init__(vllm_config, speculative.draft_model_config, build)
        self.count = min(build.whole.mtp.num_layers, speculative.num_speculative_tokens or build.whole.mtp.num_layers)
        self.model = MultiTokenPrediction(
            build.config, build.ops, self.count, dtype=build.dtype, device=build.device, parts=self.parts
        )
        self.give_caches((f"mtp.{d}", block) for d, block in enumerate(self.model.blocks()))
        self.lm_head: nn.Module | None = None  # vLLM gives it the backbone's, and `model.embed_tokens` too
        self.logits_processor = LogitsProcessor(build.config.unpadded_vocab_size)
        self.requires_grad_(False)

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Sequence[torch.Tensor] | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return _merged(self._embedding(input_ids), multimodal_embeddings, is_multimodal)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> torch.Tensor:
        embedded = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        out = torch.empty_like(hidden_states)
        self._depth(hidden_states, embedded, out, spec_step_idx % self.count)
        return out

    def _embedding(self, ids: torch.Tensor) -> torch.Tensor:
        # Set by vLLM, which finds the backbone's under this name.
        return self.model.get_submodule("embed_tokens")(ids)

    @eager_break_during_capture
    def _depth(self, hidden: torch.Tensor, embedded: torch.Tensor, out: torch.Tensor, depth: int) -> None:
        index = self.build.config.num_hidden_layers + depth
        with transferred([self.caches[index]]):
            out.copy_(self.model(depth, hidden, embedded, self.batch(index, hidden)))

    def compute_logits(self, hidden_states: torch.Tensor, spec_step_idx: int = 0) -> torch.Tensor | None:
        return self.scaled(self.logits_processor(self.lm_head, hidden_states))

    def get_top_tokens(self, hidden_states: torch.Tensor, spec_step_idx: int = 0) -> torch.Tensor:
        return self.logits_processor.get_top_tokens(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill the depths kept from vLLM's stream. Raises `CheckpointError` listing what is missing or unknown."""
        self.model.load(self.own_weights(weights, ("mtp",)))
        return {name for name, _ in self.named_parameters()}


def hold_nothing(experts: Experts, build: Build) -> None:
    """Have a layer hold weights of zeros in its format, for `--load-format dummy`, which reads no checkpoint."""
    count, format = build.ops.facts.num_experts, build.format
    hidden, width = build.config.hidden_size, build.ops.facts.expert_width
    layouts: tuple[tuple[str, int, int, Layout], ...] = (
        ("w13", 2 * width, hidden, "interleaved"),
        ("w2", hidden, width, "plain"),
    )
    prepare = build.ops.experts[format].prepare
    for which, rows, columns, layout in layouts:
        with torch.device(build.device):
            if format == "bf16":
                weight = ExpertWeight("bf16", torch.zeros(count, rows, columns, dtype=build.dtype), layout=layout)
            else:
                scale = torch.zeros(count, rows, columns // BLOCK[format], dtype=torch.uint8)
                second = torch.ones(count, dtype=torch.float32) if format == "nvfp4" else None
                codes = torch.zeros(count, rows, columns // 2, dtype=torch.uint8)
                weight = ExpertWeight(format, codes, scale, second, layout)
        experts.hold(which, weight if prepare is None else prepare(weight))


def _sizes(counts: Any, total: int) -> list[int]:
    """How many rows each item has of `total` that came in one tensor."""
    if counts is None:
        return [total]
    return [int(n) for n in torch.as_tensor(counts).flatten().tolist()]


def _merged(h: torch.Tensor, media: Sequence[torch.Tensor] | None, is_multimodal: torch.Tensor | None) -> torch.Tensor:
    """`h` with the media's rows over those of their placeholders."""
    if media is None or len(media) == 0 or is_multimodal is None:
        return h
    return _merge_multimodal_embeddings(inputs_embeds=h, multimodal_embeddings=media, is_multimodal=is_multimodal)
