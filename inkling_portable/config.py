"""What an Inkling checkpoint says about itself: sizes, layer kinds, towers, MTP depths, quantisation.

`InklingConfig` holds one model in one vocabulary, whichever of the two public spellings `config.json` uses:

- the original one (`thinkingmachines/Inkling`; facts from vLLM 0.33 `vllm/models/inkling/configs.py`), and
- the Transformers one (`transformers.models.inkling.configuration_inkling`).

`inkling_portable.config_spelling` translates between them. Nothing here imports torch or transformers.

Every rule that a file can break is reported by `ConfigError`, all of them at once, one sentence each, naming the
field, its value and what was expected. Where the two public readers would fill an absent field with different values
(`route_scale`: 8 in Transformers, 1 in vLLM) the field is required; a guess there would be fluent and wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import Field, model_validator

from . import config_spelling
from .config_files import ConfigError, locate, read_json
from .config_quantization import SIDE_FILE
from .config_sections import (
    AudioConfig,
    Count,
    FrozenConfig,
    LayerIds,
    MTPConfig,
    Positive,
    QuantizationConfig,
    Size,
    TokenId,
    VisionConfig,
    id_problems,
    raise_problems,
)

__all__ = [
    "PRESETS",
    "AudioConfig",
    "ConfigError",
    "InklingConfig",
    "LayerSpec",
    "MTPConfig",
    "QuantizationConfig",
    "VisionConfig",
    "preset",
]


@dataclass(frozen=True)
class LayerSpec:
    """One attention block's sizes. `extent` is the reach of the relative bias, `window` the keys a query may see."""

    index: int
    sliding: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_rel: int
    extent: int
    window: int | None
    sparse: bool
    log_scaling_n_floor: int | None
    log_scaling_alpha: float

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def r_size(self) -> int:
        return self.num_heads * self.d_rel

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


class InklingConfig(FrozenConfig):
    """One Inkling model. Equality and hash ignore `extra`: two spellings of one model are equal.

    `vocab_size` counts the padded rows of the embedding, `unpadded_vocab_size` the tokens that may be sampled.
    `intermediate_size` is the dense MLPs' width, `moe_intermediate_size` one expert's.
    `extra` keeps the fields this project does not know, under the section they came from.
    """

    vocab_size: Size
    unpadded_vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    swa_num_attention_heads: Size
    swa_num_key_value_heads: Size
    swa_head_dim: Size
    sliding_window_size: Size = 512
    d_rel: Size = 16
    rel_extent: Size = 1024
    log_scaling_n_floor: Size | None = Field(None, description="a positive integer or null")
    log_scaling_alpha: float = Field(0.1, strict=True, ge=0, allow_inf_nan=False, description="a number of at least 0")
    conv_kernel_size: int = Field(4, strict=True, ge=2, description="an integer of at least 2")
    local_layer_ids: LayerIds
    dense_layer_ids: LayerIds = ()
    intermediate_size: Count = 0
    moe_intermediate_size: Count = 0
    n_routed_experts: Count = 0
    num_experts_per_tok: Count = 0
    n_shared_experts: Count = 0
    route_scale: Positive
    rms_norm_eps: Positive = 1e-6
    logits_mup_width_multiplier: Positive
    max_position_embeddings: Size = 131072
    bos_token_id: TokenId = None
    eos_token_id: tuple[Count, ...] = Field((), description="a token id of at least 0, or a list of them")
    pad_token_id: TokenId = None
    mtp: MTPConfig | None = Field(None, description="an MTPConfig or null")
    vision: VisionConfig | None = Field(None, description="a VisionConfig or null")
    audio: AudioConfig | None = Field(None, description="an AudioConfig or null")
    image_token_id: TokenId = None
    audio_token_id: TokenId = None
    image_bos_token_id: TokenId = None
    audio_bos_token_id: TokenId = None
    quantization: QuantizationConfig | None = Field(None, description="a QuantizationConfig or null")
    extra: dict[str, Any] = Field(default_factory=dict, description="a mapping of unknown fields")

    @model_validator(mode="before")
    @classmethod
    def _real_vocabulary(cls, data: dict[str, Any]) -> dict[str, Any]:
        if data.get("unpadded_vocab_size") is None and "vocab_size" in data:
            data = {**data, "unpadded_vocab_size": data["vocab_size"]}
        return data

    @model_validator(mode="after")
    def _rules(self) -> InklingConfig:
        problems = []
        if self.unpadded_vocab_size > self.vocab_size:
            problems.append(
                f"unpadded_vocab_size is {self.unpadded_vocab_size}; expected at most vocab_size, {self.vocab_size}."
            )
        for prefix in ("", "swa_"):
            heads = getattr(self, f"{prefix}num_attention_heads")
            kv_heads = getattr(self, f"{prefix}num_key_value_heads")
            if heads % kv_heads:
                problems.append(
                    f"{prefix}num_attention_heads is {heads}; expected a multiple of {prefix}num_key_value_heads, "
                    f"{kv_heads}."
                )
        for name in ("local_layer_ids", "dense_layer_ids"):
            problems += id_problems(name, getattr(self, name), self.num_hidden_layers, "num_hidden_layers")
        sparse = len(set(self.dense_layer_ids)) < self.num_hidden_layers
        needed = ["intermediate_size"] if self.dense_layer_ids or self.mtp else []
        if sparse:
            needed += ["moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "n_shared_experts"]
        for name in needed:
            if getattr(self, name) == 0:
                state = "is 0" if name in self.model_fields_set else "is missing"
                problems.append(f"{name} {state}; expected a positive integer.")
        if sparse and self.num_experts_per_tok > self.n_routed_experts:
            problems.append(
                f"num_experts_per_tok is {self.num_experts_per_tok}; expected at most n_routed_experts, "
                f"{self.n_routed_experts}."
            )
        raise_problems(problems)
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InklingConfig) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in type(self).model_fields if name != "extra")

    def layer(self, index: int) -> LayerSpec:
        """Backbone layer `index`; ValueError outside 0..num_hidden_layers-1."""
        if not 0 <= index < self.num_hidden_layers:
            raise ValueError(f"layer index is {index}; expected 0 to {self.num_hidden_layers - 1}.")
        return self._spec(index, index in self.local_layer_ids, index not in self.dense_layer_ids)

    def mtp_layer(self, depth: int) -> LayerSpec:
        """The block of MTP depth `depth` (always a dense MLP); ValueError where the model has no such depth."""
        depths = self.mtp.num_layers if self.mtp else 0
        if self.mtp is None or not 0 <= depth < depths:
            raise ValueError(f"MTP depth is {depth}, but this model has {depths} depths.")
        return self._spec(depth, depth in self.mtp.local_layer_ids, False)

    def _spec(self, index: int, sliding: bool, sparse: bool) -> LayerSpec:
        return LayerSpec(
            index=index,
            sliding=sliding,
            num_heads=self.swa_num_attention_heads if sliding else self.num_attention_heads,
            num_kv_heads=self.swa_num_key_value_heads if sliding else self.num_key_value_heads,
            head_dim=self.swa_head_dim if sliding else self.head_dim,
            d_rel=self.d_rel,
            extent=self.sliding_window_size if sliding else self.rel_extent,
            window=self.sliding_window_size if sliding else None,
            sparse=sparse,
            log_scaling_n_floor=None if sliding else self.log_scaling_n_floor,
            log_scaling_alpha=self.log_scaling_alpha,
        )

    def replace(self, **changes: Any) -> InklingConfig:
        """A copy with `changes`, held to every rule."""
        return InklingConfig(**{name: getattr(self, name) for name in type(self).model_fields} | changes)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str | None = None) -> InklingConfig:
        """Read a parsed `config.json` of either spelling; `source` names it in a ConfigError."""
        if not isinstance(raw, Mapping):
            raise ConfigError([f"The configuration is {raw!r:.40}; expected a JSON object."], source)
        try:
            fields, paths, problems = config_spelling.read(raw)
        except ConfigError as error:
            raise ConfigError(error.problems, source) from None
        for name, section in (("mtp", MTPConfig), ("vision", VisionConfig), ("audio", AudioConfig)):
            if fields.get(name) is not None:
                try:
                    fields[name] = section(**fields[name])
                except ConfigError as error:
                    problems += [_in_file(line, paths, f"{name}.", f"{name}_config.") for line in error.problems]
                    del fields[name]
        try:
            config = cls(**fields)
        except ConfigError as error:
            # A field that is derived from another is missing only where that one is, which has been said.
            own = [line for line in error.problems if not re.match(r"(swa_|unpadded_)\w+ is missing", line)]
            problems = [*problems, *(_in_file(line, paths, "", "") for line in own)]
        if problems:
            raise ConfigError(problems, source)
        return config

    @classmethod
    def from_pretrained(cls, path: str | Path, revision: str | None = None) -> InklingConfig:
        """Read `config.json` (and `hf_quant_config.json` beside it) from a folder, that file, or a hub repository.

        A name such as `owner/model` that is no local path is fetched with `huggingface_hub`. ConfigError where there
        is no such folder or repository, no `config.json`, or no valid JSON in it.
        """
        file, quantization = locate(str(path), revision)
        raw = read_json(file)
        if quantization is not None:
            raw = {**raw, SIDE_FILE: read_json(quantization)}
        return cls.from_dict(raw, str(file))

    def to_dict(self) -> dict[str, Any]:
        """The original spelling, nested, ready for `config.json`; `from_dict` reads it back to an equal config."""
        return config_spelling.write(self)


def _in_file(problem: str, paths: Mapping[str, str], key_prefix: str, path_prefix: str) -> str:
    """`problem` with its subject, the first word, named as the file spells it."""
    name, _, rest = problem.partition(" ")
    return f"{paths.get(key_prefix + name) or path_prefix + config_spelling.SUBJECT.get(name, name)} {rest}"


def preset(name: str) -> InklingConfig:
    """The configuration of a released model, `inkling` or `inkling-small`, from its published `config.json`."""
    if name not in PRESETS:
        raise ConfigError([f"preset is {name!r}; expected one of {', '.join(sorted(PRESETS))}."])
    return PRESETS[name]


def _released(**sizes: Any) -> InklingConfig:
    """What both released files share; special-token ids are those of their tokenizers."""
    layers = sizes["num_hidden_layers"]
    return InklingConfig(
        vocab_size=201024,
        unpadded_vocab_size=200058,
        num_key_value_heads=8,
        head_dim=128,
        swa_head_dim=128,
        log_scaling_n_floor=128000,
        local_layer_ids=tuple(i for i in range(layers) if (i + 1) % 6),
        dense_layer_ids=(0, 1),
        n_routed_experts=256,
        num_experts_per_tok=6,
        n_shared_experts=2,
        route_scale=8.0,
        max_position_embeddings=1048576,
        eos_token_id=(200006,),
        mtp=MTPConfig(num_layers=8, local_layer_ids=(0, 2, 4, 5, 6, 7)),
        vision=VisionConfig(patch_size=40, temporal_patch_size=2, n_layers=4),
        audio=AudioConfig(n_mel_bins=80, mel_vocab_size=16),
        image_token_id=200054,
        audio_token_id=200053,
        image_bos_token_id=200005,
        audio_bos_token_id=200020,
        **sizes,
    )


PRESETS: Mapping[str, InklingConfig] = MappingProxyType(
    {
        "inkling": _released(
            hidden_size=6144,
            num_hidden_layers=66,
            num_attention_heads=64,
            swa_num_attention_heads=64,
            swa_num_key_value_heads=16,
            intermediate_size=24576,
            moe_intermediate_size=3072,
            logits_mup_width_multiplier=24.0,
        ),
        "inkling-small": _released(
            hidden_size=4096,
            num_hidden_layers=42,
            num_attention_heads=32,
            swa_num_attention_heads=32,
            swa_num_key_value_heads=8,
            intermediate_size=16384,
            moe_intermediate_size=2048,
            logits_mup_width_multiplier=16.0,
        ),
    }
)
