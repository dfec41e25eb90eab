"""Reading audio: levels equal to Transformers' bit for bit, formats, rates, damaged files, a checkpoint's settings."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import wave

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inkling_portable.config import AudioConfig, preset
from inkling_portable.media import MediaError
from inkling_portable.media_processor import MediaProcessor

CONFIG = preset("inkling")
PROCESSOR = MediaProcessor(CONFIG)


def refused(run, *parts: str) -> None:
    with pytest.raises(MediaError) as caught:
        run()
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def oracle_levels(samples: np.ndarray, count: int = 16) -> torch.Tensor:
    """Transformers' extractor, and its processor's quantiser without the tokenizer which the class asks for."""
    from types import SimpleNamespace

    from transformers.models.inkling.feature_extraction_inkling import InklingFeatureExtractor
    from transformers.models.inkling.processing_inkling import InklingProcessor

    features = InklingFeatureExtractor()(samples, sampling_rate=16000, return_tensors="pt")
    centres = torch.linspace(-7.0, 2.0, count, dtype=torch.float64).float()
    stand_in = SimpleNamespace(bin_centers=centres, dmel_min_value=-7.0, dmel_max_value=2.0)
    bins = InklingProcessor._extract_dmel_bins(stand_in, features["input_features"])
    return bins[0, : int(features["input_features_mask"].sum())]


def wav(samples: np.ndarray, rate: int = 16000, form: str = "WAV", subtype: str | None = "FLOAT") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, subtype=subtype, format=form)
    return file.getvalue()


def noise(count: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng([seed, count])
    swell = np.exp(generator.uniform(-18, 0, -(-count // 400))).repeat(400)[:count]
    return (generator.standard_normal(count) * swell * 0.3).clip(-1, 1).astype(np.float32)


@pytest.mark.parametrize("count", [1, 799, 800, 801, 1600, 16001, 960_000])
def test_levels_equal_transformers_bit_for_bit(count):
    samples = noise(count)
    media = PROCESSOR.audio(wav(samples))
    expected = oracle_levels(samples)
    assert media.kind == "audio"
    assert media.rows.dtype == torch.int32
    assert media.tokens == -(-count // 800)
    assert torch.equal(media.rows, expected)
    # Most levels must occur for the comparison to say much.
    if count > 100_000:
        assert len(expected.unique()) > 10


def test_levels_of_silence_and_of_a_tone():
    silent = PROCESSOR.audio(wav(np.zeros(1600, np.float32))).rows
    # The floor of the mel energies, 1e-10, lies below the lowest level.
    assert int(silent.max()) <= 4
    tone = np.sin(2 * np.pi * 1000 * np.arange(16000) / 16000).astype(np.float32)
    rows = PROCESSOR.audio(wav(tone)).rows
    # 1 kHz is the 15th step of the Slaney scale, 45.245 of which lie between 0 and 8 kHz in 81 equal parts.
    assert rows[10].argmax().item() in (25, 26)


@pytest.mark.parametrize(("form", "subtype"), [("WAV", "PCM_16"), ("FLAC", "PCM_24"), ("WAV", "PCM_U8")])
@pytest.mark.parametrize("channels", [1, 2])
def test_audio_formats(form, subtype, channels):
    samples = np.stack([noise(4000, seed) for seed in range(channels)], axis=1)
    content = wav(samples, 16000, form, subtype)
    stored, _ = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
    mono = stored.sum(axis=1) / np.float32(channels)
    assert torch.equal(PROCESSOR.audio(content).rows, oracle_levels(mono))


def test_a_codec_that_cannot_seek():
    content = wav(noise(4000), form="AU", subtype="G723_24")
    # The codec pads to whole blocks of its own.
    assert PROCESSOR.audio(content).tokens == -(-soundfile.info(io.BytesIO(content)).frames // 800)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 96000])
def test_other_rates_sound_the_same(rate):
    def tone(at: int) -> np.ndarray:
        time = np.arange(2 * at) / at
        return (0.4 * np.sin(2 * np.pi * 440 * time) + 0.2 * np.sin(2 * np.pi * 1870 * time)).astype(np.float32)

    there, here = PROCESSOR.audio(wav(tone(rate), rate)).rows, PROCESSOR.audio(wav(tone(16000))).rows
    assert there.shape == here.shape
    # Away from the ends and below the lower of the two bandwidths, a level at most differs by rounding.
    low = (there[3:-3, :40] - here[3:-3, :40]).abs()
    loud = here[3:-3, :40] >= 8
    assert int(low[loud].max()) <= 1
    assert (low[loud] == 0).float().mean() > 0.95


def test_unusable_audio(tmp_path):
    samples = noise(4000)
    content, flac = wav(samples), wav(samples, form="FLAC", subtype="PCM_16")
    refused(lambda: PROCESSOR.audio(b"", "a.wav"), "a.wav is empty (0 bytes)")
    refused(lambda: PROCESSOR.audio(b"hello", "a.wav"), "a.wav is no audio of a known format, or damaged")
    refused(lambda: PROCESSOR.audio(content[: len(content) // 2], "a.wav"), "a.wav is truncated: it holds")
    refused(lambda: PROCESSOR.audio(flac[: len(flac) // 2], "a.flac"), "a.flac is")
    refused(lambda: PROCESSOR.audio(content[:30], "a.wav"), "a.wav is")
    refused(lambda: PROCESSOR.audio(wav(samples[:0]), "a.wav"), "a.wav holds no sound: it has 0 samples")
    refused(lambda: PROCESSOR.audio(wav(samples[:1], 192000), "a.wav"), "a.wav holds no sound: less than one sample")
    for bad in (np.nan, np.inf):
        broken = samples.copy()
        broken[100] = bad
        refused(lambda broken=broken: PROCESSOR.audio(wav(broken), "a.wav"), "a.wav holds samples that are not finite")
    refused(lambda: PROCESSOR.audio(tmp_path / "no.wav"), "no.wav cannot be read: No such file")
    long = MediaProcessor(CONFIG, max_audio_seconds=0.1)
    refused(lambda: long.audio(content, "a.wav"), "a.wav lasts 0 s; expected at most 0")
    deaf = MediaProcessor(CONFIG.replace(audio=None))
    refused(lambda: deaf.audio(content, "a.wav"), "a.wav cannot be used: this model has no audio tower")


def test_a_wav_written_to_a_pipe_is_read_to_its_end():
    samples = (noise(3000) * 32767).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16000, 0, "NONE", ""))
        writer.writeframes(samples.tobytes())
    content = bytearray(file.getvalue())
    expected = PROCESSOR.audio(bytes(content)).rows
    content[4:8] = content[40:44] = b"\xff\xff\xff\xff"
    assert torch.equal(PROCESSOR.audio(bytes(content)).rows, expected)


SOUNDS = [
    wav(noise(600), form=form, subtype=kind) for form, kind in (("WAV", "PCM_16"), ("WAV", "FLOAT"), ("FLAC", None))
]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.sampled_from(SOUNDS), st.data())
def test_damaged_audio_is_read_or_refused(content, data):
    damaged = bytearray(content)
    for at in data.draw(st.lists(st.integers(0, 60) | st.integers(0, len(content) - 1), max_size=3)):
        damaged[at] = data.draw(st.integers(0, 255))
    kept = data.draw(st.integers(0, len(content)) | st.just(len(content)))
    try:
        rows = PROCESSOR.audio(bytes(damaged[:kept]), "x.wav").rows
    except MediaError as error:
        message = str(error)
    else:
        message = "x.wav" if int(rows.min()) >= 0 and int(rows.max()) < 16 else ""
    assert message.startswith("x.wav")


def test_settings_of_a_checkpoint(tmp_path):
    assert MediaProcessor.from_pretrained(tmp_path, CONFIG) == PROCESSOR
    file = tmp_path / "processor_config.json"
    raw = {
        "image_processor": {
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.25, 0.5],
            "size": {"height": 40, "width": 40},
            "rescale_image_frac": 2.0,
            "rescale_image_max_upscaled_long_edge": None,
            "rescale_factor": 0.00392156862745098,
            "do_rescale": True,
        },
        "feature_extractor": {"feature_size": 80, "sampling_rate": 8000, "audio_token_duration_s": 0.05},
        "num_dmel_bins": 8,
    }
    file.write_text(json.dumps(raw))
    processor = MediaProcessor.from_pretrained(tmp_path, CONFIG)
    assert (processor.image_mean, processor.image_std) == ((0.5, 0.5, 0.5), (0.5, 0.25, 0.5))
    assert (processor.rescale_image_frac, processor.rescale_image_max_upscaled_long_edge) == (2.0, None)
    rows = processor.patches(np.full((10, 10, 3), (255, 0, 255), np.uint8), CONFIG.vision)
    assert rows[0, 0, 9, 9].tolist() == [1.0, -2.0, 1.0]
    sound = processor.audio(wav(noise(4000), 8000))
    assert sound.tokens == 10
    assert int(sound.rows.max()) < 8

    def broken(section: str | None, name: str, value: object) -> str:
        changed = json.loads(json.dumps(raw))
        (changed[section] if section else changed)[name] = value
        file.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=name) as caught:
            MediaProcessor.from_pretrained(tmp_path, CONFIG).audio(wav(noise(4000), 8000))
        return str(caught.value)

    assert "size is {'height': 14, 'width': 14}; expected {'height': 40, 'width': 40}" in broken(
        "image_processor", "size", {"height": 14, "width": 14}
    )
    assert "image_mean is [1]; expected three numbers" in broken("image_processor", "image_mean", [1])
    assert "expected a positive number or null" in broken("image_processor", "rescale_image_frac", -1)
    assert "do_normalize is False; expected True" in broken("image_processor", "do_normalize", False)
    assert "num_dmel_bins is 17; expected 2 to mel_vocab_size, 16" in broken(None, "num_dmel_bins", 17)
    assert "dmel_max_value is 3.0; expected 2.0, as in config.json" in broken(None, "dmel_max_value", 3.0)
    message = broken("feature_extractor", "feature_size", 64)
    assert "feature_size is 64 in the processor's settings; expected n_mel_bins, 80" in message
    with pytest.raises(ValueError, match="nowhere is no folder; expected a checkpoint's folder"):
        MediaProcessor.from_pretrained(tmp_path / "nowhere", CONFIG)
    file.write_text("[]")
    with pytest.raises(ValueError, match="holds a JSON list; expected an object"):
        MediaProcessor.from_pretrained(tmp_path, CONFIG)
    file.write_text("{")
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        MediaProcessor.from_pretrained(tmp_path, CONFIG)


def test_levels_follow_the_model_s_vocabulary():
    config = CONFIG.replace(audio=AudioConfig(n_mel_bins=80, mel_vocab_size=5))
    samples = noise(8000)
    assert torch.equal(MediaProcessor(config).audio(wav(samples)).rows, oracle_levels(samples, 5))


def test_everything_is_light_until_used():
    code = (
        "import sys, inkling_portable.media_processor; "
        "print([m for m in ('transformers', 'soundfile', 'soxr', 'PIL', 'scipy') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
