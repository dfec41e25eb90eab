"""Small checkpoints for the vLLM tests: random ones, and one that says what it is told to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from small_checkpoint import small_config, small_tokenizer
from tokenizers import Tokenizer

from inkling_kernels.numerics import ExpertWeight
from inkling_portable.checkpoint_writer import write_checkpoint
from inkling_portable.config import InklingConfig
from inkling_portable.tensor_table import tensor_table

# vLLM's media processor has the ids of the released tokenizer built in.
MEDIA = {
    "image_bos_token_id": ("<|content_image|>", 200005),
    "audio_bos_token_id": ("<|content_audio_input|>", 200020),
    "audio_token_id": ("<|unused_200053|>", 200053),
    "image_token_id": ("<|unused_200054|>", 200054),
}
PROCESSOR = {
    "processor_class": "InklingProcessor",
    "image_processor": {
        "image_processor_type": "InklingImageProcessor", "do_convert_rgb": True, "do_normalize": True,
        "do_rescale": True, "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711], "resample": 1, "rescale_factor": 1 / 255,
        "rescale_image_frac": 2.0, "rescale_image_max_upscaled_long_edge": 2048, "size": {"height": 40, "width": 40},
    },
    "feature_extractor": {
        "feature_extractor_type": "InklingFeatureExtractor", "audio_token_duration_s": 0.05, "feature_size": 80,
        "hop_length": 800, "n_fft": 1600, "padding_side": "right", "padding_value": 0.0,
        "return_attention_mask": True, "sampling_rate": 16000, "window_size": 1600, "window_size_multiplier": 2.0,
    },
}  # fmt: skip

# A turn of the scripted model: what follows each token, from the opening of its turn to its end.
THOUGHT, CALL = "Paris, then.", ('{"name":"get_weather","args":', '{"city":"Paris"}', "}")
TURN = (
    "<|message_model|>", "<|content_thinking|>", THOUGHT, "<|end_message|>", "<|content_invoke_tool_json|>", *CALL,
    "<|content_model_end_sampling|>",
)  # fmt: skip
SPECIAL = tuple(
    f"<|{name}|>"
    for name in (
        *("message_user", "message_model", "message_system", "message_tool", "content_text", "content_image"),
        *("content_model_end_sampling", "content_thinking", "content_audio_input", "content_tool_error"),
        *("content_xml", "content_invoke_tool_json", "content_invoke_tool_text", "end_message", "audio_end"),
    )
)


def write_random(
    folder: Path, config: InklingConfig, tokenizer: Tokenizer, follows: Mapping[int, int] | None = None
) -> Path:
    """A checkpoint of random weights, those of norms and scales too. With `follows` they are ones, and greedy decoding
    continues a token with the one that it maps to."""
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    found: dict[str, torch.Tensor | ExpertWeight] = {}
    for spec in tensor_table(config):
        value = normal(*spec.shape) / spec.shape[-1] ** 0.5
        if "norm" in spec.name or "global_scale" in spec.name:
            value = torch.ones(spec.shape) if follows else torch.rand(spec.shape, generator=generator) + 0.5
        if follows and spec.name.endswith(("wo_ud.weight", "w2_md.weight", "shared_w2_weight", "experts.w2")):
            value *= 0.02
        found[spec.name] = ExpertWeight("bf16", value, layout=spec.layout) if spec.experts else value
    if follows:
        embed, unembed = normal(config.vocab_size, config.hidden_size), normal(config.vocab_size, config.hidden_size)
        for token, following in follows.items():
            unembed[following] = 4 * embed[token]
        found["llm.embed.weight"], found["llm.unembed.weight"] = embed, unembed
    write_checkpoint(folder, config, found.items())
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_media(folder: Path, **changes: Any) -> Path:
    """Random weights with both towers, and the processor's configuration as released checkpoints have it. `changes` are
    those of the small configuration."""
    state = json.loads(small_tokenizer().to_str())
    state["model"]["vocab"] |= dict(MEDIA.values())
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens([name for name, _ in MEDIA.values()])
    ids = {field: token for field, (_, token) in MEDIA.items()}
    config = small_config(depths=0, towers=True, vocab_size=201_024, unpadded_vocab_size=200_058, **ids | changes)
    write_random(folder, config, tokenizer)
    (folder / "processor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def write_scripted(folder: Path) -> Path:
    """A model that thinks, calls a tool and ends its turn, whatever it was told; other bytes follow one another."""
    tokenizer = small_tokenizer()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([THOUGHT, *CALL])
    ids = [tokenizer.token_to_id(token) for token in TURN]
    size = tokenizer.get_vocab_size()
    end = ids[-1]
    follows = {token: token % 256 + 1 for token in range(1, 257)} | dict(pairwise(ids))
    config = small_config(depths=0, vocab_size=-(-size // 16) * 16, unpadded_vocab_size=size, eos_token_id=(end,))
    return write_random(folder, config, tokenizer, follows)
