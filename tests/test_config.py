"""Configurations: both spellings, round trips, quantisation, presets, files. The rules are in test_config_rules.py."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest

from inkling_portable.config import PRESETS, ConfigError, InklingConfig, MTPConfig, QuantizationConfig, preset

DATA = Path(__file__).parent / "data"


def original() -> dict:
    """A small model with both towers in the original spelling."""
    return json.loads((DATA / "config_original.json").read_text())


def text_only() -> dict:
    """Its text part, flat and in the Transformers spelling."""
    return json.loads((DATA / "config_transformers.json").read_text())


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
@pytest.mark.parametrize("whole", [True, False])
def test_transformers_reads_what_we_write(raw, whole, tmp_path):
    from transformers.models.inkling import configuration_inkling as oracle

    config = InklingConfig.from_dict(raw)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    if whole:
        text = oracle.InklingConfig.from_pretrained(tmp_path).text_config
    else:
        text = oracle.InklingTextConfig.from_pretrained(tmp_path)
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
