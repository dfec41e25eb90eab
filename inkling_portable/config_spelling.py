"""The two public spellings of an Inkling `config.json`, read into the fields of `InklingConfig` and written back.

Original (released checkpoints, vLLM 0.33 `models/inkling/configs.py`): `intermediate_size` is the expert width once
`dense_intermediate_size` is present, `sconv_kernel_size`, `local_layer_ids`, `dense_mlp_idx` (that many first layers
are dense), `model_max_length`, a top-level `mtp_config`. Transformers (`configuration_inkling.py`): `intermediate_size`
is the dense width beside `moe_intermediate_size`, `conv_kernel_size`, `layer_types`, `mlp_layer_types`,
`num_mtp_layers`. Transformers also reads the original one and saves a mixture, so both may stand in one file; where
they say different things the file is refused. A null counts as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .config_files import ConfigError
from .config_quantization import SIDE_FILE, read_quantization, write_quantization

if TYPE_CHECKING:
    from .config import InklingConfig

SUBJECT = {
    "intermediate_size": "The dense MLPs' width (dense_intermediate_size, or intermediate_size beside "
    "moe_intermediate_size)",
    "moe_intermediate_size": "The experts' width (moe_intermediate_size, or intermediate_size beside "
    "dense_intermediate_size)",
    "local_layer_ids": "local_layer_ids (or layer_types)",
    "num_layers": "num_nextn_predict_layers (or num_mtp_layers)",
}
"""How a message names a field that the file does not have, where the spellings differ."""

NESTED_TYPE = "inkling_mm_model"
MODEL_TYPES = (NESTED_TYPE, "inkling_model", "inkling_text")

# Our fields with the other names that a file may have for them.
_TEXT_FIELDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"), ()),
    **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads", "d_rel", "rel_extent"), ()),
    **dict.fromkeys(("log_scaling_n_floor", "log_scaling_alpha", "num_experts_per_tok", "route_scale"), ()),
    "rms_norm_eps": (),
    "sliding_window_size": ("sliding_window",),
    "conv_kernel_size": ("sconv_kernel_size",),
    "n_routed_experts": ("num_local_experts", "num_experts"),
    "n_shared_experts": ("num_shared_experts",),
    "logits_mup_width_multiplier": ("embedding_multiplier",),
    "max_position_embeddings": ("model_max_length",),
}

# Choices of the architecture that the files state but this project computes in one way only. vLLM's defaults for them
# are the other way, so they are written out again.
_FIXED_TEXT: dict[str, Any] = {
    "q_bias": False,
    "o_bias": False,
    "use_embed_norm": True,
    "use_sconv": True,
    "use_gate_bias": True,
    "use_global_scale": True,
    "norm_after_topk": True,
    "gate_activation": "sigmoid",
    "shared_expert_sink": True,
    "hidden_act": "silu",
    "inference_moe_w13_interleaved": True,
    "final_logit_softcapping": None,
    "tie_word_embeddings": False,
    "mtp_hidden_states_first": True,
}
_FIXED_VISION: dict[str, Any] = {"vision_encoder_type": "hmlp", "use_vision_norm": True}
_FIXED_AUDIO: dict[str, Any] = {"audio_mode": "dmel", "use_audio_norm": True, "bias": False}

_VISION_FIELDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("patch_size", "temporal_patch_size", "hidden_size", "rms_norm_eps"), ()),
    "num_channels": ("n_channels",),
    "n_layers": ("num_hidden_layers",),
}
_AUDIO_FIELDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("rms_norm_eps", "dmel_min_value", "dmel_max_value"), ()),
    "n_mel_bins": ("num_codebooks",),
    "mel_vocab_size": ("codebook_size",),
}
# Name in mtp_config, names in the text section.
_MTP_FIELDS = {
    "num_layers": ("num_nextn_predict_layers", ("num_mtp_layers", "num_nextn_predict_layers")),
    "local_layer_ids": ("local_layer_ids", ("mtp_local_layer_ids",)),
    "chain_hidden_post_norm": ("chain_hidden_post_norm", ("chain_hidden_post_norm",)),
}
_MEDIA_IDS = ("image_token_id", "audio_token_id", "image_bos_token_id", "audio_bos_token_id")


class _Section:
    """One JSON object being consumed: what is left over at the end is `extra`.

    `paths` collects, for each field of ours, where the file spells it.
    """

    def __init__(self, name: str, values: Mapping[str, Any], problems: list[str], paths: dict[str, str]) -> None:
        self.name, self.left, self.problems, self.paths = name, dict(values), problems, paths

    def path(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key

    def pop(self, key: str) -> Any:
        return self.left.pop(key, None)

    def take(self, field: str, *names: str) -> Any:
        """The value of `field` under any of `names`; two that differ are a problem."""
        found = [(name, value) for name in names if (value := self.pop(name)) is not None]
        for name, value in found[1:]:
            if value != found[0][1]:
                self.differ(self.path(found[0][0]), found[0][1], self.path(name), value)
        if not found:
            return None
        self.paths[field] = self.path(found[0][0])
        return found[0][1]

    def differ(self, first: str, value: Any, second: str, other: Any) -> None:
        self.problems.append(
            f"{second} is {other!r} but {first} is {value!r}; both spell one field, so expected equal values."
        )

    def fixed(self, rules: Mapping[str, Any]) -> None:
        for name, only in rules.items():
            value = self.pop(name)
            if value is not None and value != only:
                self.problems.append(
                    f"{self.path(name)} is {value!r}; expected {only!r}, the only kind of Inkling supported."
                )


def read(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """`(fields, paths, problems)` of a parsed `config.json`.

    `fields` are arguments of `InklingConfig`, with mtp, vision and audio as plain dicts and absent ones left out;
    `paths` says where the file spells a field; `problems` are sentences about contradictions and unreadable parts.
    """
    problems: list[str] = []
    paths: dict[str, str] = {}
    top = _Section("", raw, problems, paths)
    model_type = top.pop("model_type")
    if model_type not in MODEL_TYPES:
        state = "is missing" if model_type is None else f"is {model_type!r}"
        raise ConfigError([f"model_type {state}; expected one of {', '.join(MODEL_TYPES)}."])
    sections: dict[str, _Section | None] = {}
    for name in ("text_config", "vision_config", "audio_config", "mtp_config"):
        value = top.pop(name)
        if value is not None and not isinstance(value, Mapping):
            problems.append(f"{name} is {value!r:.40}; expected a JSON object.")
            value = None
        sections[name] = None if value is None else _Section(name, value, problems, paths)
    nested = sections["text_config"]
    if (nested is not None) != (model_type == NESTED_TYPE):
        state = "stands" if nested is not None else "is missing"
        raise ConfigError([f"text_config {state} in a model of type {model_type}; expected it in {NESTED_TYPE} only."])
    text = nested or top
    text.pop("model_type")
    top.pop("architectures")

    fields = _read_text(text)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        inner = text.take(name, name)
        # Transformers fills the text section with its class defaults, so the outer value is the file's own.
        outer = top.take(name, name)
        fields[name] = inner if outer is None else outer
    eos = fields["eos_token_id"]
    fields["eos_token_id"] = () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    fields["mtp"] = _read_mtp(text, sections["mtp_config"])
    hidden = fields.get("hidden_size")
    fields["vision"] = _read_tower("vision", sections["vision_config"], hidden, _VISION_FIELDS, _FIXED_VISION)
    fields["audio"] = _read_tower("audio", sections["audio_config"], hidden, _AUDIO_FIELDS, _FIXED_AUDIO)
    for name in _MEDIA_IDS:
        fields[name] = top.take(name, name)
    top.fixed({"tie_word_embeddings": False})
    stated = {
        "quantization_config": top.pop("quantization_config"),
        "text_config.quantization_config": text.pop("quantization_config"),
        f"{SIDE_FILE}.json": top.pop(SIDE_FILE),
    }
    fields["quantization"], unknown = read_quantization(stated, problems)
    left = {name: section.left for name, section in sections.items() if section is not None}
    left["quantization_config"] = unknown
    fields["extra"] = top.left | {name: entries for name, entries in left.items() if entries}
    return {name: value for name, value in fields.items() if value is not None}, paths, problems


def _read_text(text: _Section) -> dict[str, Any]:
    unscaled = "logits_mup_width_multiplier" in text.left and text.left["logits_mup_width_multiplier"] is None
    fields = {name: text.take(name, name, *others) for name, others in _TEXT_FIELDS.items()}
    if unscaled and fields["logits_mup_width_multiplier"] is None:
        # vLLM divides by nothing where the file says null.
        fields["logits_mup_width_multiplier"] = 1.0
    text.fixed(_FIXED_TEXT)
    vocab, real = (text.take(name, name) for name in ("vocab_size", "unpadded_vocab_size"))
    if (padded := text.take("vocab_size", "padded_vocab_size")) is not None:
        # vLLM's own configurations hold the real size in vocab_size and the rows of the embedding beside it.
        if vocab not in (None, padded, real) and real is not None:
            text.problems.append(f"{text.path('vocab_size')} is {vocab!r}; expected {padded!r} or {real!r}.")
        vocab, real = padded, vocab if real is None else real
    fields["vocab_size"], fields["unpadded_vocab_size"] = vocab, real
    _read_heads(text, fields)
    fields["local_layer_ids"] = _read_local(text, fields["num_hidden_layers"])
    fields["dense_layer_ids"] = _read_dense(text, fields["num_hidden_layers"])
    _read_widths(text, fields)
    return fields


def _read_heads(text: _Section, fields: dict[str, Any]) -> None:
    """Head sizes; sliding layers take the full ones' where the file is silent, as in vLLM."""
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    for prefix in ("", "swa_"):
        dim = text.take(f"{prefix}head_dim", f"{prefix}head_dim")
        value_dim = text.pop(f"{prefix}v_head_dim")
        if dim is None and prefix:
            dim = fields["head_dim"]
        elif dim is None and _sizes(hidden, heads) and hidden % heads == 0:
            dim = hidden // heads
        if value_dim is not None and value_dim != dim:
            text.problems.append(
                f"{text.path(prefix + 'v_head_dim')} is {value_dim!r}; expected {prefix}head_dim, {dim!r}."
            )
        fields[f"{prefix}head_dim"] = dim
    for name in ("num_attention_heads", "num_key_value_heads"):
        if fields[f"swa_{name}"] is None:
            fields[f"swa_{name}"] = fields[name]


def _sizes(*values: Any) -> bool:
    return all(type(value) is int and value > 0 for value in values)


def _kinds(text: _Section, name: str, count: Any, kinds: Mapping[str, bool]) -> list[int] | None:
    """Indices whose entry in the list `name` is a kind marked True."""
    listed = text.pop(name)
    if listed is None:
        return None
    entries = listed if isinstance(listed, list | tuple) else [listed]
    wrong = [entry for entry in entries if not isinstance(entry, str) or entry not in kinds]
    if wrong or entries is not listed:
        shown = repr(wrong[0] if wrong else listed)
        text.problems.append(f"{text.path(name)} holds {shown:.60}; expected a list of {' or '.join(kinds)}.")
        return None
    if _sizes(count) and len(listed) != count:
        text.problems.append(f"{text.path(name)} has {len(listed)} entries; expected num_hidden_layers, {count}.")
        return None
    return [i for i, entry in enumerate(listed) if kinds[entry]]


def _read_local(text: _Section, count: Any) -> Any:
    ids = text.take("local_layer_ids", "local_layer_ids")
    types = _kinds(text, "layer_types", count, {"hybrid_sliding": True, "hybrid": False})
    if ids is None:
        return types
    if types is not None and (list(ids) if isinstance(ids, list | tuple) else ids) != types:
        text.problems.append(
            f"{text.path('local_layer_ids')} is {ids!r} but {text.path('layer_types')} makes the sliding layers "
            f"{types!r}; expected the two to agree."
        )
    return ids


def _read_dense(text: _Section, count: Any) -> Any:
    first = text.take("dense_layer_ids", "dense_mlp_idx")
    kinds = _kinds(text, "mlp_layer_types", count, {"dense": True, "sparse": False})
    if first is None:
        return kinds
    if type(first) is not int or first < 0 or (_sizes(count) and first > count):
        text.problems.append(
            f"{text.path('dense_mlp_idx')} is {first!r}; expected how many of the first layers are dense, "
            f"0 to num_hidden_layers, {count!r}."
        )
        return kinds
    if kinds is not None and kinds != list(range(first)):
        text.problems.append(
            f"{text.path('dense_mlp_idx')} is {first} but {text.path('mlp_layer_types')} makes the dense layers "
            f"{kinds!r}; expected the two to agree."
        )
    return list(range(first))


def _read_widths(text: _Section, fields: dict[str, Any]) -> None:
    """Dense and expert width: `intermediate_size` means one or the other by what stands beside it."""
    plain = text.take("plain", "intermediate_size")
    dense = text.take("intermediate_size", "dense_intermediate_size")
    expert = text.take("moe_intermediate_size", "moe_intermediate_size")
    path = text.paths.pop("plain", text.path("intermediate_size"))
    if dense is not None and expert is not None and plain not in (None, dense, expert):
        text.problems.append(
            f"{path} is {plain!r}; expected dense_intermediate_size, {dense!r}, or moe_intermediate_size, {expert!r}, "
            "since both are present."
        )
    count, ids = fields["num_hidden_layers"], fields["dense_layer_ids"]
    if dense is None and expert is None and ids and _sizes(count) and len(ids) == count:
        dense = plain
        text.paths["intermediate_size"] = path
    elif dense is None and expert is None and plain is not None:
        text.problems.append(
            f"{path} is {plain!r} and neither dense_intermediate_size nor moe_intermediate_size is present; "
            "expected one of them, since without it the dense and the expert width cannot be told apart."
        )
        dense = expert = plain
    elif dense is None:
        dense = plain
        text.paths["intermediate_size"] = path
    elif expert is None:
        expert = plain
        text.paths["moe_intermediate_size"] = path
    fields["intermediate_size"], fields["moe_intermediate_size"] = dense, expert


def _read_mtp(text: _Section, outer: _Section | None) -> dict[str, Any] | None:
    found: dict[str, Any] = {}
    for name, (outer_name, inner_names) in _MTP_FIELDS.items():
        key = f"mtp.{name}"
        inner = text.take(key, *inner_names)
        inner_path = text.paths.get(key, "")
        value = outer.take(key, outer_name) if outer is not None else None
        if inner is not None and value is not None and inner != value:
            text.differ(inner_path, inner, f"mtp_config.{outer_name}", value)
        found[name] = inner if value is None else value
    if found["num_layers"] in (None, 0):
        return None
    return {name: value for name, value in found.items() if value is not None}


def _read_tower(
    kind: str, section: _Section | None, hidden: Any, names: Mapping[str, tuple[str, ...]], fixed: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The tower's fields, or None where the file has none (vLLM's sign of that is a null decoder_dmodel)."""
    if section is None or ("decoder_dmodel" in section.left and section.left["decoder_dmodel"] is None):
        return None
    section.pop("model_type")
    width = section.take(f"{kind}.width", "decoder_dmodel", "text_hidden_size")
    if width is not None and width != hidden:
        section.problems.append(
            f"{section.paths[f'{kind}.width']} is {width!r}; expected the text model's hidden_size, {hidden!r}."
        )
    section.fixed(fixed)
    found = {name: section.take(f"{kind}.{name}", name, *others) for name, others in names.items()}
    if width is None and all(value is None for value in found.values()):
        return None
    return {name: value for name, value in found.items() if value is not None}


def write(config: InklingConfig) -> dict[str, Any]:
    """The original spelling of `config`, nested under `inkling_mm_model`."""
    ids = list(config.dense_layer_ids)
    renamed = ("conv_kernel_size", "max_position_embeddings")
    text: dict[str, Any] = {name: getattr(config, name) for name in _TEXT_FIELDS if name not in renamed}
    text |= _FIXED_TEXT | {
        "model_type": "inkling_text",
        "vocab_size": config.vocab_size,
        "unpadded_vocab_size": config.unpadded_vocab_size,
        "head_dim": config.head_dim,
        "swa_head_dim": config.swa_head_dim,
        "sconv_kernel_size": config.conv_kernel_size,
        "model_max_length": config.max_position_embeddings,
        "local_layer_ids": list(config.local_layer_ids),
        "dense_intermediate_size": config.intermediate_size,
        "intermediate_size": config.moe_intermediate_size,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id[0] if config.eos_token_id else None,
        "pad_token_id": config.pad_token_id,
    }
    if ids == list(range(len(ids))):
        text["dense_mlp_idx"] = len(ids)
    else:
        text["mlp_layer_types"] = ["dense" if i in ids else "sparse" for i in range(config.num_hidden_layers)]
    out: dict[str, Any] = {
        "architectures": ["InklingForConditionalGeneration"],
        "model_type": NESTED_TYPE,
        "text_config": text,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_id) if len(config.eos_token_id) > 1 else text["eos_token_id"],
        "pad_token_id": config.pad_token_id,
    }
    if config.mtp:
        outer = config.mtp.model_dump(mode="json")
        out["mtp_config"] = {_MTP_FIELDS[name][0]: value for name, value in outer.items()}
        # Transformers' text-only model reads the text section alone.
        text |= {_MTP_FIELDS[name][1][0]: value for name, value in outer.items()}
    if config.vision:
        vision = config.vision.model_dump()
        vision["n_channels"] = vision["num_channels"]
        out["vision_config"] = vision | _FIXED_VISION | {"decoder_dmodel": config.hidden_size}
    if config.audio:
        out["audio_config"] = config.audio.model_dump() | _FIXED_AUDIO | {"decoder_dmodel": config.hidden_size}
    out |= {name: getattr(config, name) for name in _MEDIA_IDS if getattr(config, name) is not None}
    if config.quantization:
        out["quantization_config"] = write_quantization(config.quantization)
    for name, value in config.extra.items():
        out[name] = {**value, **out.get(name, {})} if name.endswith("_config") and isinstance(value, Mapping) else value
    return out
