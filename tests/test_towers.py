"""The vision and audio towers against Transformers' modules, their memory, and their rows' place in a prompt."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.inkling import configuration_inkling as oracle_config
from transformers.models.inkling import modeling_inkling as oracle

from inkling_kernels.target import Target
from inkling_portable.config import PRESETS, AudioConfig, VisionConfig, preset
from inkling_portable.facts import Facts
from inkling_portable.media import Media, MediaSpan
from inkling_portable.ops import Ops
from inkling_portable.tensor_table import tensor_table
from inkling_portable.towers import AudioTower, Towers, VisionTower, embed_media

OPS = Ops.bind(Target.parse("cpu"), Facts(dtype="float32", kv_dtype="float32"), forced={})


def randomise(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            spread = 0.5 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, spread, generator=generator)


def vision_pair(vision: VisionConfig, hidden: int, dtype: torch.dtype = torch.float32):
    """Transformers' tower and ours with its weights under the checkpoint's names."""
    theirs = oracle.InklingVisionModel(
        oracle_config.InklingVisionConfig(
            text_hidden_size=hidden,
            patch_size=vision.patch_size,
            temporal_patch_size=vision.temporal_patch_size,
            num_channels=vision.num_channels,
            n_layers=vision.n_layers,
        )
    ).eval()
    randomise(theirs, 3)
    weights = {"final_norm.weight": theirs.final_norm.weight}
    for i, layer in enumerate(theirs.encoder_layers):
        weights[f"layers.linear_{i}.weight"] = layer.projection.weight
        if layer.add_norm:
            weights[f"layers.norm_{i}.weight"] = layer.layer_norm.weight
    ours = VisionTower(vision, hidden, OPS, dtype=dtype)
    ours.load_state_dict(weights)
    return theirs.to(dtype), ours


def audio_pair(audio: AudioConfig, hidden: int):
    theirs = oracle.InklingAudioModel(
        oracle_config.InklingAudioConfig(
            n_mel_bins=audio.n_mel_bins, mel_vocab_size=audio.mel_vocab_size, text_hidden_size=hidden
        )
    ).eval()
    randomise(theirs, 4)
    ours = AudioTower(audio, hidden, OPS, dtype=torch.float32)
    ours.load_state_dict(
        {
            "encoder.weight": theirs.embed_audio_tokens.embed_audio_tokens.weight,
            "final_norm.weight": theirs.norm.weight,
        }
    )
    return theirs, ours


@torch.inference_mode()
@pytest.mark.parametrize("patches", [1, 2, 201, 300])
def test_vision_tower_of_the_released_shape(patches):
    # The numbers of patches of images of 1 x 1, 39 x 41 and 8,000 x 30 pixels, and more than go through at a time.
    theirs, ours = vision_pair(VisionConfig(patch_size=40, temporal_patch_size=2, n_layers=4), 96)
    pixels = torch.randn(patches, 2, 40, 40, 3, generator=torch.Generator().manual_seed(patches))
    expected = theirs(pixels).last_hidden_state[:, 0]
    torch.testing.assert_close(ours(pixels), expected, rtol=0, atol=1e-5)
    alone = torch.cat([ours(pixels[i : i + 1]) for i in (0, patches - 1)])
    torch.testing.assert_close(alone, expected[[0, patches - 1]], rtol=0, atol=1e-5)


@torch.inference_mode()
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    patch=st.sampled_from([2, 4, 6, 8, 9, 14, 15, 40]),
    frames=st.sampled_from([2, 3]),
    channels=st.integers(1, 4),
    layers=st.integers(1, 5),
)
def test_vision_tower_of_other_shapes(patch, frames, channels, layers):
    factors = {2: 1, 4: 2, 6: 2, 8: 3, 9: 2, 14: 2, 15: 2, 40: 4}[patch] + 1
    # Where every stage is used Transformers multiplies widths by 64 instead of rounding them.
    layers = min(layers, factors)
    vision = VisionConfig(patch_size=patch, temporal_patch_size=frames, num_channels=channels, n_layers=layers)
    theirs, ours = vision_pair(vision, 32)
    pixels = torch.randn(3, frames, patch, patch, channels, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(pixels), theirs(pixels).last_hidden_state[:, 0], rtol=0, atol=1e-5)


@torch.inference_mode()
def test_vision_tower_of_single_frames():
    # Transformers cannot build one. A frame beside an equal one, weighed nothing, must not matter.
    one = VisionTower(VisionConfig(patch_size=4, temporal_patch_size=1, n_layers=1), 8, OPS, dtype=torch.float32)
    two = VisionTower(VisionConfig(patch_size=4, temporal_patch_size=2, n_layers=1), 8, OPS, dtype=torch.float32)
    randomise(one, 2)
    weight = one.layers["linear_0"].weight
    two.load_state_dict(
        {"layers.linear_0.weight": torch.cat([weight, 0 * weight], 1), "final_norm.weight": one.final_norm.weight}
    )
    pixels = torch.randn(3, 1, 4, 4, 3, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(one(pixels), two(pixels.expand(-1, 2, -1, -1, -1)), rtol=0, atol=1e-6)


@torch.inference_mode()
def test_vision_tower_in_bfloat16():
    theirs, ours = vision_pair(VisionConfig(patch_size=40, temporal_patch_size=2, n_layers=4), 64, torch.bfloat16)
    pixels = torch.randn(5, 2, 40, 40, 3, generator=torch.Generator().manual_seed(0))
    expected = theirs(pixels.bfloat16()).last_hidden_state[:, 0]
    found = ours(pixels)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected.float(), rtol=2**-7, atol=2**-7)


@torch.inference_mode()
@pytest.mark.parametrize("frames", [1, 2, 127, 128, 129, 1200])
def test_audio_tower(frames):
    # 1200 frames are a minute.
    theirs, ours = audio_pair(AudioConfig(n_mel_bins=80, mel_vocab_size=16), 96)
    levels = torch.randint(0, 16, (frames, 80), generator=torch.Generator().manual_seed(frames), dtype=torch.int32)
    expected = theirs(levels[None].long()).last_hidden_state[0]
    torch.testing.assert_close(ours(levels), expected, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_audio_tower_rounds_its_sum_once():
    tower = AudioTower(AudioConfig(n_mel_bins=80, mel_vocab_size=16), 64, OPS, dtype=torch.bfloat16)
    randomise(tower, 5)
    levels = torch.randint(0, 16, (200, 80), generator=torch.Generator().manual_seed(5))
    rows = tower.encoder.weight.double()[levels + 16 * torch.arange(80)]
    total = rows.sum(1).bfloat16().double()
    normed = (total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt()).bfloat16()
    # A float32 sum falls on the other side of a rounding boundary now and then; one rounded 80 times, nearly always.
    differ = tower(levels) != normed * tower.final_norm.weight
    assert differ.float().mean() < 0.005


def peak_bytes(run, trace: Path) -> int:
    """The most bytes above the start that torch's CPU allocator had given out while `run()` ran."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    profile.export_chrome_trace(str(trace))
    total = peak = 0
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    for event in sorted(events, key=lambda e: e["ts"]):
        total += event["args"]["Bytes"]
        peak = max(peak, total)
    assert events
    return peak


def test_peak_bytes_sees_what_torch_allocates(tmp_path):
    def run() -> None:
        x = torch.ones(1_000_000)
        (x + 1).sum()

    assert 8_000_000 <= peak_bytes(run, tmp_path / "trace.json") < 9_000_000


@pytest.mark.parametrize(
    ("frames", "hidden", "dtype"),
    [
        (5_000, 6144, torch.bfloat16),
        (5_000, 1024, torch.float32),
        (80_000, 256, torch.bfloat16),
        (100, 6144, torch.bfloat16),
    ],
)
def test_audio_memory_is_under_twice_the_output(frames, hidden, dtype, tmp_path):
    tower = AudioTower(AudioConfig(n_mel_bins=80, mel_vocab_size=16), hidden, OPS, dtype=dtype)
    randomise(tower, 6)
    levels = torch.randint(0, 16, (frames, 80), generator=torch.Generator().manual_seed(6), dtype=torch.int32)
    with torch.inference_mode():
        kept = []
        peak = peak_bytes(lambda: kept.append(tower(levels)), tmp_path / "trace.json")
    assert kept[0].nbytes <= peak < 2 * kept[0].nbytes


def test_vision_memory_does_not_grow_with_the_image(tmp_path):
    vision = VisionConfig(patch_size=40, temporal_patch_size=2, n_layers=4)
    tower = VisionTower(vision, 64, OPS, dtype=torch.float32)
    randomise(tower, 6)
    pixels = torch.zeros(1, 1, 40, 40, 3).expand(512, 2, -1, -1, -1)
    with torch.inference_mode():
        peaks = [peak_bytes(lambda n=n: tower(pixels[:n]), tmp_path / "trace.json") for n in (256, 512)]
    assert peaks[1] - peaks[0] < 256 * 64 * 4 * 1.5


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_parameters_are_the_checkpoint_s_tensors(name):
    config = preset(name)
    towers = Towers(config, OPS, dtype=torch.bfloat16, device="meta")
    listed = {spec.name: spec.shape for spec in tensor_table(config) if spec.section in ("visual", "audio")}
    assert {key: tuple(value.shape) for key, value in towers.named_parameters()} == listed
    assert {key.split(".")[1] for key in listed} == {"layers", "final_norm", "encoder"}


def tiny(**changes):
    sizes = {
        "hidden_size": 32,
        "vocab_size": 64,
        "unpadded_vocab_size": 60,
        "num_hidden_layers": 1,
        "local_layer_ids": (0,),
        "dense_layer_ids": (0,),
        "mtp": None,
        "vision": VisionConfig(patch_size=8, temporal_patch_size=2, n_layers=2),
        "audio": AudioConfig(n_mel_bins=4, mel_vocab_size=16),
        "image_token_id": 50,
        "audio_token_id": 51,
        "image_bos_token_id": 52,
        "audio_bos_token_id": 53,
    }
    return preset("inkling").replace(**(sizes | changes))


def test_load_and_its_errors():
    towers = Towers(tiny(), OPS, dtype=torch.float32)
    randomise(towers, 7)
    copy = Towers(tiny(), OPS, dtype=torch.float32)
    copy.load((name, value.detach().clone()) for name, value in towers.named_parameters())
    for (name, one), (_, two) in zip(towers.named_parameters(), copy.named_parameters(), strict=True):
        assert torch.equal(one, two), name
    with pytest.raises(KeyError, match=r"visual\.extra"):
        copy.load([("visual.extra", torch.zeros(1))])
    with pytest.raises(ValueError, match=r"audio\.encoder\.weight: shape \(3, 32\), expected \(64, 32\)"):
        copy.load([("audio.encoder.weight", torch.zeros(3, 32))])


def test_wrong_input_is_named():
    towers = Towers(tiny(), OPS, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"patches have shape \(1, 2, 8, 8\); expected \(n, 2, 8, 8, 3\)"):
        towers.visual(torch.zeros(1, 2, 8, 8))
    with pytest.raises(ValueError, match=r"levels are \(2, 5\) torch.int64; expected \(n, 4\) integers"):
        towers.audio(torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"levels are \(2, 4\) torch.float32; expected"):
        towers.audio(torch.zeros(2, 4))
    for wrong in (-1, 16):
        with pytest.raises(ValueError, match=r"expected 0..15 \(mel_vocab_size\)"):
            towers.audio(torch.full((2, 4), wrong))
    assert towers.audio(torch.zeros(0, 4, dtype=torch.int32)).shape == (0, 32)
    assert towers.visual(torch.zeros(0, 2, 8, 8, 3)).shape == (0, 32)
    blind = Towers(tiny(vision=None), OPS, dtype=torch.float32)
    assert blind.visual is None
    with pytest.raises(ValueError, match="cat cannot be used: this model has no tower for image inputs"):
        blind(Media.of("image", "cat", torch.zeros(1, 2, 8, 8, 3)))


def test_rows_replace_placeholders_in_whole_and_in_chunks():
    spans = [
        MediaSpan(2, Media.of("image", "a", torch.zeros(3, 1))),
        MediaSpan(7, Media.of("audio", "b", torch.zeros(2, 1))),
    ]
    features = [torch.full((3, 4), 10.0) + torch.arange(3)[:, None], torch.full((2, 4), 20.0)]
    plain = torch.arange(10.0)[:, None].expand(-1, 4)
    expected = [0, 1, 10, 11, 12, 5, 6, 20, 20, 9]
    for chunk in (10, 1, 3, 4):
        rows = plain.clone()
        for first in range(0, 10, chunk):
            embed_media(rows[first : first + chunk], first, spans, features)
        assert rows[:, 0].tolist() == expected, chunk


@torch.inference_mode()
def test_rows_reach_the_decoder_as_in_transformers():
    """Marker, placeholders and text of both kinds in one prompt: the decoder's input equals Transformers'."""
    config = tiny()
    raw = config.to_dict()
    raw["text_config"] |= {"head_dim": 8, "swa_head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    raw["text_config"] |= {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "dense_intermediate_size": 32}
    theirs = oracle.InklingForConditionalGeneration(oracle_config.InklingConfig(**raw)).eval()
    randomise(theirs, 8)
    seen = {}
    theirs.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True
    )
    ids = [1, 52, 50, 50, 50, 7, 53, 51, 51, 9]
    pixels = torch.randn(3, 2, 8, 8, 3, generator=torch.Generator().manual_seed(9))
    levels = torch.randint(0, 16, (2, 4), generator=torch.Generator().manual_seed(9))
    theirs(
        input_ids=torch.tensor([ids]),
        pixel_values=pixels,
        audio_input_ids=levels[None],
        audio_input_ids_mask=torch.ones(1, 2, dtype=torch.bool),
    )

    weights = {"audio.encoder.weight": theirs.model.audio_tower.embed_audio_tokens.embed_audio_tokens.weight}
    weights["audio.final_norm.weight"] = theirs.model.audio_tower.norm.weight
    vision = theirs.model.vision_tower
    weights["visual.final_norm.weight"] = vision.final_norm.weight
    for i, layer in enumerate(vision.encoder_layers):
        weights[f"visual.layers.linear_{i}.weight"] = layer.projection.weight
    weights["visual.layers.norm_0.weight"] = vision.encoder_layers[0].layer_norm.weight
    towers = Towers(config, OPS, dtype=torch.float32)
    towers.load(weights.items())

    embedded = theirs.model.language_model.embed_tokens(torch.tensor(ids))
    spans = [MediaSpan(2, Media.of("image", "i", pixels)), MediaSpan(7, Media.of("audio", "a", levels.int()))]
    embed_media(embedded, 0, spans, [towers(span.media) for span in spans])
    torch.testing.assert_close(embedded, seen["inputs_embeds"][0], rtol=0, atol=1e-5)
