"""Configurations: both spellings, every rule's message, round trips, presets, files."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inkling_portable.config import PRESETS, ConfigError, InklingConfig, MTPConfig, QuantizationConfig, preset


def original() -> dict:
    """A small model in the original spelling."""
    return {
        "architectures": ["InklingForConditionalGeneration"],
        "model_type": "inkling_mm_model",
        "eos_token_id": 6,
        "image_token_id": 100,
        "image_bos_token_id": 101,
        "audio_token_id": 102,
        "audio_bos_token_id": 103,
        "text_config": {
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "vocab_size": 128,
            "unpadded_vocab_size": 120,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 16,
            "sliding_window_size": 8,
            "d_rel": 16,
            "rel_extent": 24,
            "log_scaling_n_floor": 40,
            "log_scaling_alpha": 0.1,
            "rms_norm_eps": 1e-6,
            "local_layer_ids": [0, 1, 3],
            "dense_mlp_idx": 1,
            "sconv_kernel_size": 4,
            "dense_intermediate_size": 96,
            "intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "route_scale": 8.0,
            "logits_mup_width_multiplier": 24.0,
            "model_max_length": 4096,
            "use_embed_norm": True,
            "gate_activation": "sigmoid",
        },
        "mtp_config": {"num_nextn_predict_layers": 2, "local_layer_ids": [0], "chain_hidden_post_norm": True},
        "vision_config": {
            "decoder_dmodel": 64,
            "vision_encoder_type": "hmlp",
            "patch_size": 40,
            "temporal_patch_size": 2,
            "n_channels": 3,
            "n_layers": 4,
            "use_vision_norm": True,
        },
        "audio_config": {
            "decoder_dmodel": 64,
            "n_mel_bins": 80,
            "mel_vocab_size": 16,
            "dmel_min_value": -7.0,
            "dmel_max_value": 2.0,
            "audio_mode": "dmel",
            "use_audio_norm": True,
            "bias": False,
        },
    }


def text_only() -> dict:
    """The same text model, flat and in the Transformers spelling."""
    text = dict(original()["text_config"])
    for name in ("local_layer_ids", "dense_mlp_idx", "use_embed_norm", "gate_activation"):
        del text[name]
    text["conv_kernel_size"] = text.pop("sconv_kernel_size")
    text["max_position_embeddings"] = text.pop("model_max_length")
    text["moe_intermediate_size"] = text.pop("intermediate_size")
    text["intermediate_size"] = text.pop("dense_intermediate_size")
    return text | {
        "model_type": "inkling_text",
        "eos_token_id": 6,
        "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid", "hybrid_sliding"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_mtp_layers": 2,
        "mtp_local_layer_ids": [0],
        "chain_hidden_post_norm": True,
    }


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


def test_original_spelling_field_by_field():
    config = InklingConfig.from_dict(original())
    assert (config.intermediate_size, config.moe_intermediate_size) == (96, 32)
    assert (config.local_layer_ids, config.dense_layer_ids) == ((0, 1, 3), (0,))
    assert (config.conv_kernel_size, config.max_position_embeddings) == (4, 4096)
    assert (config.vocab_size, config.unpadded_vocab_size, config.eos_token_id) == (128, 120, (6,))
    assert config.mtp == MTPConfig(num_layers=2, local_layer_ids=(0,), chain_hidden_post_norm=True)
    assert config.vision is not None
    assert (config.vision.patch_size, config.vision.n_layers, config.vision.num_channels) == (40, 4, 3)
    assert config.audio is not None
    assert (config.audio.n_mel_bins, config.audio.mel_vocab_size) == (80, 16)
    assert (config.image_token_id, config.audio_bos_token_id) == (100, 103)
    assert config.extra == {}


def test_transformers_flat_spelling_is_equal():
    config = InklingConfig.from_dict(original())
    flat = InklingConfig.from_dict(text_only())
    media = dict.fromkeys(("image_token_id", "audio_token_id", "image_bos_token_id", "audio_bos_token_id"))
    text_part = config.replace(vision=None, audio=None, **media)
    assert flat == text_part
    assert hash(flat) == hash(text_part)
    assert flat != config


def test_transformers_saves_what_it_read_from_the_original_spelling(tmp_path):
    from transformers.models.inkling.configuration_inkling import InklingConfig as Oracle

    raw = original()
    Oracle(**copy.deepcopy(raw)).save_pretrained(tmp_path)
    saved = InklingConfig.from_pretrained(tmp_path)
    # Transformers has class defaults of its own where the file is silent.
    assert saved == InklingConfig.from_dict(raw).replace(bos_token_id=1)
    assert saved.extra["text_config"]["initializer_range"] == 0.02


@pytest.mark.parametrize("raw", [original(), text_only()], ids=["original", "transformers"])
def test_transformers_reads_what_we_write(raw):
    from transformers.models.inkling.configuration_inkling import InklingConfig as Oracle

    config = InklingConfig.from_dict(raw)
    text = Oracle(**config.to_dict()).text_config
    assert (text.intermediate_size, text.moe_intermediate_size) == (96, 32)
    assert text.layer_types == ["hybrid_sliding", "hybrid_sliding", "hybrid", "hybrid_sliding"]
    assert text.mlp_layer_types == ["dense", "sparse", "sparse", "sparse"]
    assert (text.conv_kernel_size, text.max_position_embeddings, text.eos_token_id) == (4, 4096, 6)
    assert (text.num_mtp_layers, text.mtp_local_layer_ids, text.chain_hidden_post_norm) == (2, [0], True)


@pytest.mark.parametrize("raw", [original(), text_only()], ids=["original", "transformers"])
def test_round_trip(raw):
    config = InklingConfig.from_dict(raw | {"made_by": {"tool": [1, None]}, "dtype": "bfloat16"})
    again = InklingConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert again.extra == config.extra == {"made_by": {"tool": [1, None]}, "dtype": "bfloat16"}


def test_round_trip_of_dense_layers_that_are_not_first():
    raw = changed(text_only(), "mlp_layer_types", ["sparse", "dense", "sparse", "sparse"])
    config = InklingConfig.from_dict(raw)
    assert config.dense_layer_ids == (1,)
    assert InklingConfig.from_dict(config.to_dict()) == config


def test_unknown_fields_stay_in_their_section():
    raw = changed(original(), "text_config.colour", "blue")
    raw = changed(raw, "vision_config.num_attention_heads", 16)
    config = InklingConfig.from_dict(raw)
    assert config.extra == {"text_config": {"colour": "blue"}, "vision_config": {"num_attention_heads": 16}}
    assert config.to_dict()["text_config"]["colour"] == "blue"


def test_layer_specs():
    config = InklingConfig.from_dict(original())
    sliding, full = config.layer(0), config.layer(2)
    assert (sliding.sliding, sliding.window, sliding.extent, sliding.group) == (True, 8, 8, 1)
    assert (sliding.sparse, full.sparse) == (False, True)
    assert (full.sliding, full.window, full.extent, full.group) == (False, None, 24, 2)
    assert (full.q_size, full.kv_size, full.r_size) == (64, 32, 64)
    assert (sliding.log_scaling_n_floor, full.log_scaling_n_floor) == (None, 40)
    assert [config.mtp_layer(d).sliding for d in (0, 1)] == [True, False]
    assert not config.mtp_layer(1).sparse
    with pytest.raises(ValueError, match="layer index is 4; expected 0 to 3"):
        config.layer(4)
    with pytest.raises(ValueError, match="MTP depth is 2, but this model has 2 depths"):
        config.mtp_layer(2)
    with pytest.raises(ValueError, match="this model has 0 depths"):
        config.replace(mtp=None).mtp_layer(0)


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


def test_agreeing_spellings_are_accepted():
    raw = original()
    raw["text_config"] |= {
        "conv_kernel_size": 4,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 32,
        "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid", "hybrid_sliding"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_mtp_layers": 2,
        "chain_hidden_post_norm": True,
    }
    assert InklingConfig.from_dict(raw) == InklingConfig.from_dict(original())


def test_all_problems_are_reported_at_once():
    raw = changed(changed(original(), "text_config.d_rel", 0), "vision_config.patch_size", "big")
    problems = refused(changed(raw, "text_config.conv_kernel_size", 3))
    assert len(problems) == 3


def test_silent_fields():
    raw = original()
    for name in ("unpadded_vocab_size", "swa_head_dim", "swa_num_key_value_heads", "head_dim", "dense_mlp_idx"):
        del raw["text_config"][name]
    del raw["mtp_config"], raw["vision_config"], raw["image_token_id"]
    raw["audio_config"] = {"decoder_dmodel": None}
    raw["text_config"]["logits_mup_width_multiplier"] = None
    config = InklingConfig.from_dict(raw)
    assert config.unpadded_vocab_size == config.vocab_size == 128
    assert (config.head_dim, config.swa_head_dim, config.swa_num_key_value_heads) == (16, 16, 2)
    assert config.dense_layer_ids == ()
    assert config.mtp is config.vision is config.audio is config.image_token_id is None
    assert config.logits_mup_width_multiplier == 1.0


def test_vllm_spelling_of_the_vocabulary():
    raw = original()
    del raw["text_config"]["unpadded_vocab_size"]
    raw["text_config"] |= {"vocab_size": 120, "padded_vocab_size": 128}
    assert InklingConfig.from_dict(raw) == InklingConfig.from_dict(original())


def test_an_all_dense_model_needs_no_experts():
    raw = original()
    for name in ("n_routed_experts", "num_experts_per_tok", "n_shared_experts", "dense_intermediate_size"):
        del raw["text_config"][name]
    raw["text_config"]["dense_mlp_idx"] = 4
    config = InklingConfig.from_dict(raw)
    assert config.intermediate_size == 32
    assert InklingConfig.from_dict(config.to_dict()) == config


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
    try:
        config = InklingConfig.from_dict(changed(original(), path, value))
    except ConfigError as error:
        assert error.problems
        assert all(problem.endswith(".") and "\n" not in problem for problem in error.problems)
    else:
        assert InklingConfig.from_dict(config.to_dict()) == config


def test_quantization_of_both_makers():
    inline = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["model.llm.layers.2.mlp.experts", "*gate"]}
    config = InklingConfig.from_dict(original() | {"quantization_config": inline})
    assert config.quantization == QuantizationConfig(
        format="nvfp4", excluded=("model.llm.layers.2.mlp.experts", "*gate")
    )
    quark = {
        "quant_method": "quark",
        "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}},
        "exclude": ["re:.*shared_experts.*", "model.llm.layers.1.mlp.experts.w13_weight"],
    }
    mxfp4 = InklingConfig.from_dict(original() | {"quantization_config": quark})
    assert mxfp4.quantization is not None
    assert mxfp4.quantization.format == "mxfp4"
    for each in (config, mxfp4):
        assert InklingConfig.from_dict(each.to_dict()) == each

    assert config.quantization.excludes("model.llm.layers.2.mlp.experts.w13_weight")
    assert not config.quantization.excludes("model.llm.layers.20.mlp.experts.w13_weight")
    assert config.quantization.excludes("model.llm.layers.3.mlp.gate.weight")
    assert mxfp4.quantization.excludes("model.llm.layers.3.mlp.shared_experts.shared_w2_weight")
    assert mxfp4.quantization.excludes("model.llm.layers.1.mlp.experts.w13_weight")
    assert not mxfp4.quantization.excludes("model.llm.layers.1.mlp.experts.w2_weight")


def test_quantization_in_the_side_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(original()))
    side = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(side))
    config = InklingConfig.from_pretrained(tmp_path)
    assert config.quantization == QuantizationConfig(format="nvfp4", excluded=("lm_head",))
    assert config.extra == {"quantization_config": {"producer": {"name": "modelopt"}}}

    (tmp_path / "config.json").write_text(json.dumps(original() | {"quantization_config": {"quant_method": "quark"}}))
    with pytest.raises(ConfigError, match=r"says mxfp4 but hf_quant_config\.json says nvfp4; expected one format"):
        InklingConfig.from_pretrained(tmp_path)


def test_presets():
    big, small = preset("inkling"), preset("inkling-small")
    assert set(PRESETS) == {"inkling", "inkling-small"}
    assert [i for i in range(66) if not big.layer(i).sliding] == [5, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65]
    assert [i for i in range(42) if not small.layer(i).sliding] == [5, 11, 17, 23, 29, 35, 41]
    assert (big.layer(5).group, big.layer(0).group) == (8, 4)
    assert (small.layer(5).group, small.layer(0).group) == (4, 4)
    assert (big.hidden_size, big.moe_intermediate_size, big.intermediate_size) == (6144, 3072, 24576)
    assert (small.hidden_size, small.moe_intermediate_size, small.intermediate_size) == (4096, 2048, 16384)
    assert (big.logits_mup_width_multiplier, small.logits_mup_width_multiplier) == (24, 16)
    for config in (big, small):
        assert (config.vocab_size, config.unpadded_vocab_size) == (201024, 200058)
        assert (config.log_scaling_n_floor, config.log_scaling_alpha, config.route_scale) == (128000, 0.1, 8.0)
        assert config.dense_layer_ids == (0, 1)
        assert config.mtp is not None
        assert config.mtp.num_layers == 8
        assert InklingConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match="preset is 'huge'; expected one of inkling, inkling-small"):
        preset("huge")


def test_direct_construction_is_held_to_the_rules():
    with pytest.raises(ConfigError, match=r"num_layers is 0; expected a positive integer\."):
        MTPConfig(num_layers=0)
    with pytest.raises(ConfigError, match="depths is not a field of MTPConfig"):
        MTPConfig(num_layers=1, depths=2)
    with pytest.raises(ConfigError, match="num_attention_heads is 3; expected a multiple of num_key_value_heads"):
        preset("inkling").replace(num_attention_heads=3)


def test_files(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"has no config\.json; expected a checkpoint's folder"):
        InklingConfig.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="does not exist; expected a checkpoint's folder or a hub id"):
        InklingConfig.from_pretrained(tmp_path / "nowhere")
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "inkling_text",\n oops')
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON \(line 2: "):
        InklingConfig.from_pretrained(tmp_path)
    file.write_text("[1, 2]")
    with pytest.raises(ConfigError, match=r"holds a JSON list; expected an object"):
        InklingConfig.from_pretrained(tmp_path)
    file.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        InklingConfig.from_pretrained(tmp_path)
    file.write_text(json.dumps(text_only()))
    assert InklingConfig.from_pretrained(file) == InklingConfig.from_pretrained(str(tmp_path))
    file.write_text(json.dumps(text_only() | {"d_rel": 0}))
    with pytest.raises(ConfigError, match=r"config\.json: d_rel is 0; expected a positive integer"):
        InklingConfig.from_pretrained(tmp_path)

    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(repo: str, name: str, revision: str | None = None) -> str:
        raise LocalEntryNotFoundError(f"no connection for {name} of {repo}")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(ConfigError, match=r"owner/model is neither a local folder nor a hub repository .*no conn"):
        InklingConfig.from_pretrained("owner/model")

    file.write_text(json.dumps(text_only()))

    def online(repo: str, name: str, revision: str | None = None) -> str:
        if name == "config.json":
            return str(file)
        raise huggingface_hub.errors.EntryNotFoundError(f"{name} is not in {repo}")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", online)
    assert InklingConfig.from_pretrained("owner/model") == InklingConfig.from_dict(text_only())


def test_import_is_light():
    code = (
        "import sys, inkling_portable.config as c, inkling_portable as p; c.preset('inkling'); "
        "p.InklingConfig; print([m for m in ('torch', 'transformers', 'huggingface_hub', 'numpy') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_unknown_package_attribute():
    import inkling_portable

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = inkling_portable.nothing
