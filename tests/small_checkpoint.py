"""A checkpoint of random weights with a byte-level tokenizer, written in a second, for tests of the commands.

Tokens follow a random cycle: the head's row of each token is the embedding of the token before it, so greedy decoding
wanders through the vocabulary instead of repeating itself, and drafts of the prediction depths are accepted in part.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from inkling_kernels.numerics import ExpertWeight
from inkling_portable.checkpoint_writer import write_checkpoint
from inkling_portable.config import AudioConfig, InklingConfig, MTPConfig, VisionConfig
from inkling_portable.tensor_table import tensor_table

VOCABULARY, PADDED, CONTEXT = 262, 272, 1024
END, NAMED = "<|endoftext|>", ("<|one|>", "<|two|>", "<|three|>", "<|four|>", "<|five|>")
MEDIA_IDS = {"image_token_id": 257, "audio_token_id": 258, "image_bos_token_id": 259, "audio_bos_token_id": 260}


def small_config(*, depths: int = 2, towers: bool = False, **changes: Any) -> InklingConfig:
    """Three layers of width 64, of every kind, with `depths` prediction depths."""
    fields: dict[str, Any] = {
        "vocab_size": PADDED, "unpadded_vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4, "swa_head_dim": 16, "sliding_window_size": 8, "d_rel": 16, "rel_extent": 24,
        "local_layer_ids": (0, 2), "dense_layer_ids": (0,), "intermediate_size": 96, "moe_intermediate_size": 32,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2, "route_scale": 2.0,
        "logits_mup_width_multiplier": 2.0, "max_position_embeddings": CONTEXT, "eos_token_id": (0,),
        "mtp": MTPConfig(num_layers=depths, local_layer_ids=(0,)) if depths else None,
    }  # fmt: skip
    if towers:
        fields["vision"] = VisionConfig(patch_size=40, temporal_patch_size=2, n_layers=2)
        fields["audio"] = AudioConfig(n_mel_bins=80, mel_vocab_size=16)
        fields |= MEDIA_IDS
    return InklingConfig(**(fields | changes))


def small_tokenizer() -> Tokenizer:
    """One token a byte (ids 1 to 256), id 0 for the end of a text, and five named tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({END: 0} | {char: i for i, char in enumerate(alphabet, 1)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, *NAMED])
    return tokenizer


def write_small(
    folder: Path, *, depths: int = 2, towers: bool = False, broken_token: int | None = None, **changes: Any
) -> Path:
    """Write the checkpoint and its tokenizer to `folder` and return it. The embedding of `broken_token` is NaN."""
    config = small_config(depths=depths, towers=towers, **changes)
    generator = torch.Generator().manual_seed(5)
    found: dict[str, torch.Tensor | ExpertWeight] = {}
    for spec in tensor_table(config):
        value = torch.randn(spec.shape, generator=generator) / spec.shape[-1] ** 0.5
        if "norm" in spec.name or "global_scale" in spec.name:
            value = torch.rand(spec.shape, generator=generator) + 0.5
        if spec.name.endswith("embed_norm.weight"):
            value.fill_(1)
        found[spec.name] = ExpertWeight("bf16", value, layout=spec.layout) if spec.experts else value
    embed = torch.randn(PADDED, config.hidden_size, generator=generator)
    following = torch.randperm(VOCABULARY, generator=generator)
    unembed = torch.randn(PADDED, config.hidden_size, generator=generator)
    unembed[following] = embed[:VOCABULARY]
    if broken_token is not None:
        embed[broken_token] = float("nan")
    found["llm.embed.weight"], found["llm.unembed.weight"] = embed, unembed
    for depth in range(depths):
        projection = found[f"mtp.layers.{depth}.input_proj.weight"]
        assert isinstance(projection, torch.Tensor)
        projection.mul_(0.3)[:, config.hidden_size :] += torch.eye(config.hidden_size)
    write_checkpoint(folder, config, found.items())
    small_tokenizer().save(str(folder / "tokenizer.json"))
    return folder
