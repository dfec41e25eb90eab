"""Which tensors a checkpoint of a given configuration holds: names, shapes, and what each becomes in memory.

Canonical names are those of the released checkpoints without the leading `model.`, with the tensors of one expert
projection collapsed into one entry (`llm.layers.3.mlp.experts.w13`).
A stored file spells them in one of three ways (`Spelling`):

- original             `model.llm.layers.0.attn.wq_du.weight`, w13 row-interleaved (gate0, up0, gate1, up1, ...)
- transformers         `model.layers.0.self_attn.q_proj.weight`, gate and up apart (text-only `save_pretrained`)
- transformers_nested  the same under `model.language_model.`, towers as `model.vision_tower.` and `model.audio_tower.`

MTP tensors are spelled `model.mtp.…` in all of them. Sources: the tensor names of vLLM 0.33 `models/inkling/` and
Transformers' `conversion_mapping.py`; the preset `inkling-small` gives the tensor counts of the released files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import ceil, log
from typing import Literal

from .config import InklingConfig, LayerSpec, VisionConfig

Spelling = Literal["original", "transformers", "transformers_nested"]
Section = Literal["text", "mtp", "visual", "audio"]
View = Literal["whole", "gate", "up", "halves"]


@dataclass(frozen=True)
class TensorSpec:
    """One canonical tensor. `shape` is the in-memory shape (convolutions [C, W]), w13 rows interleaved.

    `float32`: delivered in float32 whatever the model's dtype. `stored_float32`: released files store it in float32.
    `experts`: delivered as an `ExpertWeight`. `interleaved`: rows are gate and up in turn.
    """

    name: str
    shape: tuple[int, ...]
    section: Section
    float32: bool = False
    stored_float32: bool = False
    experts: bool = False
    interleaved: bool = False
    convolution: bool = False

    @property
    def layout(self) -> Literal["interleaved", "plain"]:
        """The row layout under which an `ExpertWeight` of this tensor is held."""
        return "interleaved" if self.interleaved else "plain"


@dataclass(frozen=True)
class StoredPart:
    """One stored tensor and which rows of its canonical tensor it holds: all of them, the gate's or the up
    projection's, or `halves`, all the gate's rows and then all of up's (of each expert)."""

    name: str
    shape: tuple[int, ...]
    view: View = "whole"


def tensor_table(config: InklingConfig) -> list[TensorSpec]:
    """Every canonical tensor of `config`, in the order in which files are written."""
    vocabulary = (config.vocab_size, config.hidden_size)
    hidden = (config.hidden_size,)
    table = [TensorSpec("llm.embed.weight", vocabulary, "text"), TensorSpec("llm.embed_norm.weight", hidden, "text")]
    for index in range(config.num_hidden_layers):
        table += _block(config, config.layer(index), f"llm.layers.{index}", "text")
    table += [TensorSpec("llm.norm.weight", hidden, "text"), TensorSpec("llm.unembed.weight", vocabulary, "text")]
    if config.mtp is not None:
        for depth in range(config.mtp.num_layers):
            prefix = f"mtp.layers.{depth}"
            table += [
                TensorSpec(f"{prefix}.hidden_norm.weight", hidden, "mtp"),
                TensorSpec(f"{prefix}.embed_norm.weight", hidden, "mtp"),
                TensorSpec(f"{prefix}.input_proj.weight", (config.hidden_size, 2 * config.hidden_size), "mtp"),
            ]
            table += _block(config, config.mtp_layer(depth), f"{prefix}.transformer_block", "mtp")
        if config.mtp.chain_hidden_post_norm:
            table.append(TensorSpec("mtp.chain_norm.weight", hidden, "mtp"))
    if config.vision is not None:
        table += _visual(config, config.vision)
    if config.audio is not None:
        rows = config.audio.n_mel_bins * config.audio.mel_vocab_size
        table += [
            TensorSpec("audio.encoder.weight", (rows, config.hidden_size), "audio"),
            TensorSpec("audio.final_norm.weight", hidden, "audio"),
        ]
    return table


def _block(config: InklingConfig, layer: LayerSpec, prefix: str, section: Section) -> Iterator[TensorSpec]:
    """One decoder block: attention, its convolutions, and a dense or expert MLP."""
    hidden = config.hidden_size

    def tensor(name: str, *shape: int, **flags: bool) -> TensorSpec:
        return TensorSpec(f"{prefix}.{name}", shape, section, **flags)

    def convolution(name: str, channels: int) -> TensorSpec:
        return tensor(name, channels, config.conv_kernel_size, float32=True, stored_float32=True, convolution=True)

    yield tensor("attn_norm.weight", hidden)
    yield tensor("attn.wq_du.weight", layer.q_size, hidden)
    yield tensor("attn.wk_dv.weight", layer.kv_size, hidden)
    yield tensor("attn.wv_dv.weight", layer.kv_size, hidden)
    yield tensor("attn.wr_du.weight", layer.r_size, hidden)
    yield tensor("attn.q_norm.weight", layer.head_dim)
    yield tensor("attn.k_norm.weight", layer.head_dim)
    yield convolution("attn.k_sconv.weight", layer.kv_size)
    yield convolution("attn.v_sconv.weight", layer.kv_size)
    yield tensor("attn.rel_logits_proj.proj", layer.d_rel, layer.extent)
    yield tensor("attn.wo_ud.weight", hidden, layer.q_size)
    yield convolution("attn_sconv.weight", hidden)
    yield tensor("mlp_norm.weight", hidden)
    if not layer.sparse:
        width = config.intermediate_size
        yield tensor("mlp.w13_dn.weight", 2 * width, hidden, interleaved=True)
        yield tensor("mlp.w2_md.weight", hidden, width)
        yield tensor("mlp.global_scale", 1, float32=True, stored_float32=True)
    else:
        width, routed, shared = config.moe_intermediate_size, config.n_routed_experts, config.n_shared_experts
        yield tensor("mlp.gate.weight", routed + shared, hidden, float32=True)
        yield tensor("mlp.gate.bias", routed, float32=True, stored_float32=True)
        yield tensor("mlp.gate.global_scale", 1, float32=True, stored_float32=True)
        yield tensor("mlp.experts.w13", routed, 2 * width, hidden, experts=True, interleaved=True)
        yield tensor("mlp.experts.w2", routed, hidden, width, experts=True)
        yield tensor("mlp.shared_experts.shared_w13_weight", shared, 2 * width, hidden, interleaved=True)
        yield tensor("mlp.shared_experts.shared_w2_weight", shared, hidden, width)
    yield convolution("mlp_sconv.weight", hidden)


def _visual(config: InklingConfig, vision: VisionConfig) -> Iterator[TensorSpec]:
    steps = vision_scales(vision)
    for index, (start, end) in enumerate(pairwise(steps)):
        last = index == vision.n_layers - 1
        folded = start[2] * (end[0] // start[0]) * (end[1] // start[1]) ** 2
        out = config.hidden_size if last else end[2]
        yield TensorSpec(f"visual.layers.linear_{index}.weight", (out, folded), "visual")
        if not last:
            yield TensorSpec(f"visual.layers.norm_{index}.weight", (out,), "visual")
    yield TensorSpec("visual.final_norm.weight", (config.hidden_size,), "visual")


def vision_scales(vision: VisionConfig) -> list[tuple[int, int, int]]:
    """The `n_layers + 1` stages of the hMLP tower as (frames, pixels a side, channels) that one position covers.

    Candidate stages multiply the side by the prime factors of the patch size, largest first, then the frames by those
    of the temporal size; channels are what is covered, rounded up to 64. The stages kept are those whose log sizes are
    closest in sum to `n_layers + 1` equal steps; first and last are fixed. Source: vLLM 0.33 `common/towers.py`.
    """
    candidates = [(1, 1, vision.num_channels)]
    frames = side = 1
    for factor in reversed(_prime_factors(vision.patch_size)):
        side *= factor
        candidates.append((1, side, _round_up_64(side * side * vision.num_channels)))
    for factor in reversed(_prime_factors(vision.temporal_patch_size)):
        frames *= factor
        candidates.append((frames, side, _round_up_64(side * side * vision.num_channels * frames)))
    total = log(vision.patch_size**2 * vision.temporal_patch_size * vision.num_channels)
    ideal = [total * step / vision.n_layers for step in range(vision.n_layers + 1)]
    sizes = [log(f * s * s) for f, s, _ in candidates]
    if vision.n_layers >= len(candidates):
        chosen = [min(range(len(sizes)), key=lambda i: abs(want - sizes[i])) for want in ideal]
    else:
        chosen = list(
            min(
                combinations(range(len(sizes)), len(ideal)),
                key=lambda pick: sum(abs(want - sizes[i]) for want, i in zip(ideal, pick, strict=True)),
            )
        )
    chosen[0], chosen[-1] = 0, len(candidates) - 1
    return [candidates[index] for index in chosen]


def _round_up_64(value: int) -> int:
    return ceil(value / 64) * 64


def _prime_factors(value: int) -> list[int]:
    factors, divisor = [], 2
    while value > 1:
        while value % divisor == 0:
            factors.append(divisor)
            value //= divisor
        divisor += 1
    return factors


_TRANSFORMERS_BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn.wq_du.weight": "self_attn.q_proj.weight",
    "attn.wk_dv.weight": "self_attn.k_proj.weight",
    "attn.wv_dv.weight": "self_attn.v_proj.weight",
    "attn.wr_du.weight": "self_attn.r_proj.weight",
    "attn.wo_ud.weight": "self_attn.o_proj.weight",
    "attn.q_norm.weight": "self_attn.q_norm.weight",
    "attn.k_norm.weight": "self_attn.k_norm.weight",
    "attn.k_sconv.weight": "self_attn.k_sconv.conv1d.weight",
    "attn.v_sconv.weight": "self_attn.v_sconv.conv1d.weight",
    "attn.rel_logits_proj.proj": "self_attn.rel_logits_proj.proj",
    "attn_sconv.weight": "attn_sconv.conv1d.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp_sconv.weight": "mlp_sconv.conv1d.weight",
    "mlp.w2_md.weight": "mlp.down_proj.weight",
    "mlp.global_scale": "mlp.global_scale",
    "mlp.gate.weight": "mlp.gate.weight",
    "mlp.gate.bias": "mlp.gate.e_score_correction_bias",
    "mlp.gate.global_scale": "mlp.gate.global_scale",
    "mlp.experts.w13": "mlp.experts.gate_up_proj",
    "mlp.experts.w2": "mlp.experts.down_proj",
    "mlp.shared_experts.shared_w2_weight": "mlp.shared_experts.down_proj",
}
_TRANSFORMERS_SPLIT = {
    "mlp.w13_dn.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.shared_experts.shared_w13_weight": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
}
_TRANSFORMERS_TOP = {
    "llm.embed.weight": "embed_tokens.weight",
    "llm.embed_norm.weight": "embed_tokens.embed_norm.weight",
    "llm.norm.weight": "norm.weight",
}
_TRANSFORMERS_AUDIO = {
    "audio.encoder.weight": "model.audio_tower.embed_audio_tokens.embed_audio_tokens.weight",
    "audio.final_norm.weight": "model.audio_tower.norm.weight",
}


def stored_parts(spec: TensorSpec, spelling: Spelling) -> tuple[StoredPart, ...]:
    """The unquantised stored tensors that make up `spec`."""
    shape = (spec.shape[0], 1, spec.shape[1]) if spec.convolution else spec.shape
    if spelling == "original" or spec.section == "mtp":
        return (StoredPart(_original(spec), shape),)
    if spec.section != "text":
        return (StoredPart(_transformers_tower(spec), shape),)
    if spec.name == "llm.unembed.weight":
        return (StoredPart("lm_head.weight", shape),)
    root = "model." if spelling == "transformers" else "model.language_model."
    if spec.name in _TRANSFORMERS_TOP:
        return (StoredPart(root + _TRANSFORMERS_TOP[spec.name], shape),)
    _, _, index, block_name = spec.name.split(".", 3)
    prefix = f"{root}layers.{index}."
    if block_name in _TRANSFORMERS_SPLIT:
        gate, up = _TRANSFORMERS_SPLIT[block_name]
        half = (*shape[:-2], shape[-2] // 2, shape[-1])
        return (StoredPart(prefix + gate, half, "gate"), StoredPart(prefix + up, half, "up"))
    view: View = "halves" if spec.experts and spec.interleaved else "whole"
    return (StoredPart(prefix + _TRANSFORMERS_BLOCK[block_name], shape, view),)


def _original(spec: TensorSpec) -> str:
    return f"model.{spec.name}_weight" if spec.experts else f"model.{spec.name}"


def _transformers_tower(spec: TensorSpec) -> str:
    if spec.section == "audio":
        return _TRANSFORMERS_AUDIO[spec.name]
    name = spec.name.removeprefix("visual.")
    if not name.startswith("layers."):
        return f"model.vision_tower.{name}"
    kind, index = name.split(".")[1].split("_")
    module = "projection" if kind == "linear" else "layer_norm"
    return f"model.vision_tower.encoder_layers.{index}.{module}.weight"


def spelling_of(names: set[str]) -> Spelling:
    """Which spelling a file's tensor names follow (the original one where nothing speaks for another)."""
    if any(name.startswith("model.language_model.") for name in names):
        return "transformers_nested"
    if any(name.startswith(("model.layers.", "model.embed_tokens.")) for name in names):
        return "transformers"
    return "original"
