"""A small Inkling with prediction depths that are right often, but not always.

Tokens follow a permutation: the head's row of `next(t)` is the embedding of `t`, so a token that passes through the
layers little disturbed predicts its successor, and so does each depth. `noise` says how much the layers disturb. Drafts
are then accepted in part, which random weights would never show.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from inkling_kernels.numerics import ExpertWeight
from inkling_kernels.target import Target
from inkling_portable.checkpoint_writer import write_checkpoint
from inkling_portable.config import AudioConfig, InklingConfig, MTPConfig, VisionConfig
from inkling_portable.facts import Facts
from inkling_portable.model import Inkling
from inkling_portable.mtp import MultiTokenPrediction
from inkling_portable.ops import Ops
from inkling_portable.tensor_table import tensor_table

VOCABULARY, PADDED = 120, 128


def tuned_config(
    depths: int = 8, local: tuple[int, ...] = (0, 2, 5), chain: bool = True, **changes: Any
) -> InklingConfig:
    sizes: dict[str, Any] = {
        "vocab_size": PADDED,
        "unpadded_vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 16,
        "sliding_window_size": 8,
        "d_rel": 16,
        "rel_extent": 24,
        "log_scaling_n_floor": None,
        "log_scaling_alpha": 0.1,
        "conv_kernel_size": 4,
        "local_layer_ids": (0, 2),
        "dense_layer_ids": (0,),
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "route_scale": 2.0,
        "rms_norm_eps": 1e-6,
        "logits_mup_width_multiplier": 2.0,
        "max_position_embeddings": 4096,
        "eos_token_id": (),
        "vision": VisionConfig(patch_size=40, temporal_patch_size=2, n_layers=2),
        "audio": AudioConfig(n_mel_bins=80, mel_vocab_size=16),
        "image_token_id": 118,
        "audio_token_id": 119,
        "image_bos_token_id": 116,
        "audio_bos_token_id": 117,
    }
    local = tuple(i for i in local if i < depths)
    mtp = MTPConfig(num_layers=depths, local_layer_ids=local, chain_hidden_post_norm=chain)
    return InklingConfig(**(sizes | {"mtp": mtp} | changes))


def tuned_tensors(
    config: InklingConfig, noise: float, seed: int = 0, embed_norm: bool = False
) -> dict[str, torch.Tensor]:
    """Canonical tensors, float32. Without `embed_norm` the backbone's embedding norm has weights of one."""
    generator = torch.Generator().manual_seed(seed)
    hidden, real = config.hidden_size, config.unpadded_vocab_size
    found: dict[str, torch.Tensor] = {}
    for spec in tensor_table(config):
        name, shape = spec.name, spec.shape
        if name.endswith("norm.weight") or "norm_" in name or "global_scale" in name:
            value = torch.rand(shape, generator=generator) + 0.5
        elif name.endswith("gate.bias"):
            value = torch.randn(shape, generator=generator) * 0.1
        elif "sconv" in name:
            value = torch.randn(shape, generator=generator) * 0.3
        elif name.endswith("rel_logits_proj.proj"):
            value = torch.randn(shape, generator=generator) * 0.5
        else:
            value = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        if name.endswith(("wo_ud.weight", "w2_md.weight", "experts.w2", "shared_w2_weight")):
            value *= noise
        found[name] = value
    if not embed_norm:
        found["llm.embed_norm.weight"].fill_(1)
    embed = torch.randn(config.vocab_size, hidden, generator=generator)
    following = torch.randperm(real, generator=generator)
    # Rows behind the real vocabulary would win every choice, if they could be chosen.
    unembed = 10 * torch.randn(config.vocab_size, hidden, generator=generator)
    unembed[following] = embed[:real]
    found["llm.embed.weight"], found["llm.unembed.weight"] = embed, unembed * (6 / hidden**0.5)
    for depth in range(config.mtp.num_layers if config.mtp else 0):
        projection = found[f"mtp.layers.{depth}.input_proj.weight"]
        projection *= 0.3 * noise
        projection[:, hidden:] += torch.eye(hidden)
    return found


def canonical(
    config: InklingConfig, tensors: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor | ExpertWeight]]:
    for spec in tensor_table(config):
        value = tensors[spec.name]
        yield spec.name, ExpertWeight("bf16", value, layout=spec.layout) if spec.experts else value


def write_tuned(path: Path, config: InklingConfig, tensors: dict[str, torch.Tensor], **options: Any) -> None:
    write_checkpoint(path, config, canonical(config, tensors), dtype=torch.float32, **options)


def build_tuned(
    config: InklingConfig, tensors: dict[str, torch.Tensor], drafts: int
) -> tuple[Inkling, MultiTokenPrediction | None]:
    """The model under test in float32, with its first `drafts` depths."""
    ops = Ops.bind(Target.parse("cpu"), Facts(dtype="float32", kv_dtype="float32"))
    model = Inkling(config, ops, dtype=torch.float32)
    mtp = MultiTokenPrediction(config, ops, drafts, dtype=torch.float32) if drafts else None
    for name, value in canonical(config, tensors):
        if name.startswith("llm."):
            model.load([(name, value)])
        elif name.startswith("mtp.") and mtp is not None:
            mtp.load([(name, value)])
    model.requires_grad_(False)
    if mtp is not None:
        mtp.requires_grad_(False)
    return model, mtp
