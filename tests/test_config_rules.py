"""Configurations: what every rule says of a file that breaks it, and contradictions between the spellings."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inkling_portable.config import ConfigError, InklingConfig

DATA = Path(__file__).parent / "data"


def original() -> dict:
    """A small model with both towers in the original spelling."""
    return json.loads((DATA / "config_original.json").read_text())


def refused(raw: dict) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        InklingConfig.from_dict(raw)
    assert "pydantic" not in str(caught.value)
    return caught.value.problems


def changed(raw: dict, path: str, value: object) -> dict:
    raw = copy.deepcopy(raw)
    *sections, name = path.split(".")
    place = raw
    for section in sections:
        place = place[section]
    if value is KeyError:
        del place[name]
    else:
        place[name] = value
    return raw


TEXT = "text_config."
RULES = [
    (TEXT + "hidden_size", -4, "text_config.hidden_size is -4; expected a positive integer."),
    (TEXT + "hidden_size", "64", "text_config.hidden_size is '64'; expected a positive integer."),
    (TEXT + "hidden_size", True, "text_config.hidden_size is True; expected a positive integer."),
    (TEXT + "hidden_size", KeyError, "hidden_size is missing; expected a positive integer."),
    (TEXT + "num_hidden_layers", 4.5, "text_config.num_hidden_layers is 4.5; expected a positive integer."),
    (TEXT + "d_rel", 0, "text_config.d_rel is 0; expected a positive integer."),
    (TEXT + "sconv_kernel_size", 1, "text_config.sconv_kernel_size is 1; expected an integer of at least 2."),
    (TEXT + "rms_norm_eps", 0.0, "text_config.rms_norm_eps is 0.0; expected a positive finite number."),
    (TEXT + "rms_norm_eps", float("nan"), "text_config.rms_norm_eps is nan; expected a positive finite number."),
    (TEXT + "route_scale", KeyError, "route_scale is missing; expected a positive finite number."),
    (
        TEXT + "unpadded_vocab_size",
        129,
        "text_config.unpadded_vocab_size is 129; expected at most vocab_size, 128.",
    ),
    (
        TEXT + "num_attention_heads",
        5,
        "text_config.num_attention_heads is 5; expected a multiple of num_key_value_heads, 2.",
    ),
    (
        TEXT + "swa_num_key_value_heads",
        3,
        "text_config.swa_num_attention_heads is 4; expected a multiple of swa_num_key_value_heads, 3.",
    ),
    (
        TEXT + "num_experts_per_tok",
        9,
        "text_config.num_experts_per_tok is 9; expected at most n_routed_experts, 8.",
    ),
    (TEXT + "n_shared_experts", 0, "text_config.n_shared_experts is 0; expected a positive integer."),
    (
        TEXT + "local_layer_ids",
        [0, 4],
        "text_config.local_layer_ids holds 4; expected indices below num_hidden_layers, 4.",
    ),
    (
        TEXT + "local_layer_ids",
        [3, 1],
        "text_config.local_layer_ids is [3, 1]; expected ascending indices without repeats.",
    ),
    (TEXT + "local_layer_ids", KeyError, "local_layer_ids (or layer_types) is missing; expected a list of layer"),
    (TEXT + "dense_mlp_idx", 5, "text_config.dense_mlp_idx is 5; expected how many of the first layers are dense"),
    (TEXT + "dense_intermediate_size", 0, "text_config.dense_intermediate_size is 0; expected a positive integer."),
    (TEXT + "dense_intermediate_size", KeyError, "neither dense_intermediate_size nor moe_intermediate_size"),
    (TEXT + "intermediate_size", KeyError, "text_config.intermediate_size is missing; expected a positive integer."),
    (TEXT + "log_scaling_n_floor", 0, "text_config.log_scaling_n_floor is 0; expected a positive integer or null."),
    (TEXT + "log_scaling_alpha", -0.1, "text_config.log_scaling_alpha is -0.1; expected a number of at least 0."),
    (TEXT + "q_bias", True, "text_config.q_bias is True; expected False, the only kind of Inkling supported."),
    (TEXT + "gate_activation", "softmax", "text_config.gate_activation is 'softmax'; expected 'sigmoid'"),
    (TEXT + "v_head_dim", 8, "text_config.v_head_dim is 8; expected head_dim, 16."),
    (TEXT + "layer_types", ["hybrid"] * 3, "text_config.layer_types has 3 entries; expected num_hidden_layers, 4."),
    (TEXT + "layer_types", ["full"] * 4, "text_config.layer_types holds 'full'; expected a list of hybrid_sliding or"),
    (TEXT + "layer_types", [["hybrid"]], "text_config.layer_types holds ['hybrid']; expected a list of"),
    ("tie_word_embeddings", True, "tie_word_embeddings is True; expected False"),
    ("eos_token_id", -1, "eos_token_id is (-1,); expected a token id of at least 0, or a list of them."),
    ("image_token_id", "x", "image_token_id is 'x'; expected a token id of at least 0, or null."),
    ("model_type", "llama", "model_type is 'llama'; expected one of inkling_mm_model, inkling_model, inkling_text."),
    ("model_type", KeyError, "model_type is missing; expected one of inkling_mm_model"),
    ("model_type", "inkling_text", "text_config stands in a model of type inkling_text; expected it in inkling_mm"),
    ("text_config", KeyError, "text_config is missing in a model of type inkling_mm_model"),
    ("vision_config", [1], "vision_config is [1]; expected a JSON object."),
    (
        "mtp_config.num_nextn_predict_layers",
        -1,
        "mtp_config.num_nextn_predict_layers is -1; expected a positive integer.",
    ),
    (
        "mtp_config.local_layer_ids",
        [2],
        "mtp_config.local_layer_ids holds 2; expected indices below the number of depths, 2.",
    ),
    ("vision_config.patch_size", 1, "vision_config.patch_size is 1; expected an integer of at least 2"),
    ("vision_config.n_layers", KeyError, "vision_config.n_layers is missing; expected a positive integer."),
    ("vision_config.n_channels", 0, "vision_config.n_channels is 0; expected a positive integer."),
    (
        "vision_config.decoder_dmodel",
        32,
        "vision_config.decoder_dmodel is 32; expected the text model's hidden_size, 64.",
    ),
    ("vision_config.vision_encoder_type", "linear", "vision_config.vision_encoder_type is 'linear'; expected 'hmlp'"),
    ("audio_config.mel_vocab_size", 1, "audio_config.mel_vocab_size is 1; expected an integer of at least 2."),
    ("audio_config.audio_mode", "flow", "audio_config.audio_mode is 'flow'; expected 'dmel'"),
    ("audio_config.dmel_max_value", -7.0, "audio_config.dmel_min_value is -7.0; expected less than dmel_max_value"),
    ("quantization_config", {"quant_method": "awq"}, "quantization_config.quant_method is 'awq'; expected ModelOpt"),
    ("quantization_config", "nvfp4", "quantization_config is 'nvfp4'; expected a JSON object."),
    (
        "quantization_config",
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        "quantization_config has (quant_algo, group_size) ('FP8', 16); expected ('NVFP4', 16).",
    ),
    (
        "quantization_config",
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4", "group_size": 128}}},
        "quantization_config has weights of (dtype, group_size) ('int4', 128); expected ('fp4', 32).",
    ),
    (
        "quantization_config",
        {"quant_method": "quark", "exclude": [1]},
        "quantization_config.exclude is [1]; expected a list of module names.",
    ),
]


@pytest.mark.parametrize(("path", "value", "message"), RULES)
def test_every_rule_has_its_sentence(path, value, message):
    problems = refused(changed(original(), path, value))
    assert any(message in problem for problem in problems), problems


CONTRADICTIONS = [
    (TEXT + "conv_kernel_size", 3, "conv_kernel_size", "sconv_kernel_size"),
    (TEXT + "max_position_embeddings", 8, "max_position_embeddings", "model_max_length"),
    (TEXT + "moe_intermediate_size", 33, "intermediate_size", "moe_intermediate_size"),
    (TEXT + "layer_types", ["hybrid"] * 4, "layer_types", "local_layer_ids"),
    (TEXT + "mlp_layer_types", ["sparse"] * 4, "mlp_layer_types", "dense_mlp_idx"),
    (TEXT + "num_mtp_layers", 3, "num_mtp_layers", "mtp_config.num_nextn_predict_layers"),
    (TEXT + "mtp_local_layer_ids", [1], "mtp_local_layer_ids", "mtp_config.local_layer_ids"),
    (TEXT + "chain_hidden_post_norm", False, "chain_hidden_post_norm", "mtp_config.chain_hidden_post_norm"),
    (TEXT + "sliding_window", 9, "sliding_window", "sliding_window_size"),
    (TEXT + "num_local_experts", 9, "num_local_experts", "n_routed_experts"),
    (TEXT + "embedding_multiplier", 1.0, "embedding_multiplier", "logits_mup_width_multiplier"),
    ("vision_config.num_channels", 4, "num_channels", "n_channels"),
    ("vision_config.text_hidden_size", 8, "text_hidden_size", "decoder_dmodel"),
]


@pytest.mark.parametrize(("path", "value", "first", "second"), CONTRADICTIONS)
def test_contradictions_between_the_spellings_are_refused(path, value, first, second):
    problems = refused(changed(original(), path, value))
    assert any(first in problem and second in problem for problem in problems), problems


def test_all_problems_are_reported_at_once():
    raw = changed(changed(original(), "text_config.d_rel", 0), "vision_config.patch_size", "big")
    problems = refused(changed(raw, "text_config.conv_kernel_size", 3))
    assert len(problems) == 3


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    layers=st.integers(1, 12),
    listed=st.lists(st.sampled_from(["hybrid", "hybrid_sliding"]), min_size=1, max_size=12),
    ids=st.lists(st.integers(0, 12), max_size=12, unique=True).map(sorted),
    dense=st.integers(0, 12),
    kinds=st.lists(st.sampled_from(["dense", "sparse"]), min_size=1, max_size=12),
)
def test_layer_lists_are_accepted_exactly_when_they_agree(layers, listed, ids, dense, kinds):
    raw = original()
    raw["text_config"] |= {
        "num_hidden_layers": layers,
        "layer_types": listed,
        "local_layer_ids": ids,
        "dense_mlp_idx": dense,
        "mlp_layer_types": kinds,
    }
    agree = (
        len(listed) == len(kinds) == layers
        and [i for i in range(layers) if listed[i] == "hybrid_sliding"] == ids
        and all((kinds[i] == "dense") == (i < dense) for i in range(layers))
        and dense <= layers
    )
    if agree:
        config = InklingConfig.from_dict(raw)
        assert [config.layer(i).sliding for i in range(layers)] == [t == "hybrid_sliding" for t in listed]
    else:
        refused(raw)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
PATHS = (
    [f"text_config.{name}" for name in original()["text_config"]]
    + [f"{s}.{name}" for s in ("mtp_config", "vision_config", "audio_config") for name in original()[s]]
    + ["text_config.layer_types", "text_config.mlp_layer_types", "quantization_config", "hf_quant_config"]
    + list(original())
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(path=st.sampled_from(PATHS), value=JSON_VALUES)
def test_any_value_anywhere_gives_a_config_or_a_config_error(path, value):
    problems: tuple[str, ...] = ()
    try:
        config = InklingConfig.from_dict(changed(original(), path, value))
    except ConfigError as error:
        problems = error.problems
    if not problems:
        assert InklingConfig.from_dict(config.to_dict()) == config
    assert all(problem.endswith(".") and "\n" not in problem for problem in problems)
