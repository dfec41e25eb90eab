"""Reading media: bits equal to Transformers' processors, formats, damaged files; and media's place in a prompt."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from inkling_portable.config import AudioConfig, InklingConfig, preset
from inkling_portable.media import Media, MediaError, MediaSpan, cache_keys, expand_media, markers, with_media_ids
from inkling_portable.media_processor import MediaProcessor

CONFIG = preset("inkling")
PROCESSOR = MediaProcessor(CONFIG)
SIZES = [(1, 1), (39, 41), (40, 40), (80, 40), (41, 39), (8000, 30), (30, 1200), (257, 123)]
MODES = ["RGB", "L", "P", "RGBA", "LA", "CMYK", "1", "YCbCr"]


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng([seed, width, height]).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    if mode == "RGBA":
        image.putalpha(Image.fromarray(pixels[..., 0]))
    return image if mode == "RGBA" else image.convert(mode)


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


# Transformers' image processor imports torchvision, which may not import beside the torch at hand. These few functions
# are all that it calls; what they do is torchvision's documented behaviour.
TORCHVISION = {
    "__init__.py": "__version__ = '0.27.0'",
    "io.py": "",
    "transforms/__init__.py": """
import enum
class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
""",
    "transforms/functional.py": "from .v2.functional import pil_to_tensor",
    "transforms/v2/__init__.py": "",
    "transforms/v2/functional.py": """
import numpy
import torch
from torchvision.transforms import InterpolationMode
def pil_to_tensor(image):
    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1).contiguous()
def pad(image, padding, fill, padding_mode):
    left, top, right, bottom = padding
    return torch.nn.functional.pad(image, (left, right, top, bottom), padding_mode, fill)
def normalize(image, mean, std, inplace):
    mean, std = (torch.as_tensor(v, dtype=image.dtype)[:, None, None] for v in (mean, std))
    return (image - mean) / std
""",
}
ORACLE = """
import io, sys
import numpy, torch
from PIL import Image
from transformers.models.inkling.image_processing_inkling import InklingImageProcessor
files = numpy.load(sys.argv[1])
processor = InklingImageProcessor()
found = {}
for name in files.files:
    image = Image.open(io.BytesIO(files[name].tobytes()))
    found[name] = processor(image, input_data_format="channels_first", return_tensors="pt")["pixel_values"].numpy()
numpy.savez(sys.argv[2], **found)
"""


@pytest.fixture(scope="module")
def oracle_patches(tmp_path_factory):
    """What Transformers' image processor makes of every size and mode; in a process of its own, for the stand-in."""
    folder = tmp_path_factory.mktemp("oracle")
    for name, text in TORCHVISION.items():
        file = folder / "torchvision" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (folder / "torchvision-0.27.0.dist-info").mkdir()
    (folder / "torchvision-0.27.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.27.0\n"
    )
    images = {f"RGB {w} {h}": picture(w, h) for w, h in SIZES} | {f"{m} 61 83": picture(61, 83, m) for m in MODES}
    forms = {name: "TIFF" if name[:2] in ("CM", "YC") else "PNG" for name in images}
    contents = {name: encoded(image, forms[name]) for name, image in images.items()}
    np.savez(folder / "in.npz", **{name: np.frombuffer(content, np.uint8) for name, content in contents.items()})
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{ORACLE}", "in.npz", "out.npz"],
        cwd=folder,
        check=True,
    )
    found = np.load(folder / "out.npz")
    return {name: (content, torch.from_numpy(found[name])) for name, content in contents.items()}


@pytest.mark.parametrize("name", [f"RGB {w} {h}" for w, h in SIZES] + [f"{m} 61 83" for m in MODES])
def test_patches_equal_transformers_bit_for_bit(oracle_patches, name):
    content, expected = oracle_patches[name]
    media = PROCESSOR.image(content)
    assert media.kind == "image"
    assert media.rows.dtype == torch.float32
    assert media.rows.shape == expected.shape
    assert torch.equal(media.rows, expected)


def test_patches_hold_the_padding_of_the_reference():
    rows = PROCESSOR.image(encoded(Image.new("RGB", (41, 40), (255, 0, 0)))).rows
    assert rows.shape == (2, 2, 40, 40, 3)
    mean, std = (np.array(v) for v in (PROCESSOR.image_mean, PROCESSOR.image_std))
    inside, outside = (np.array([255, 0, 0]) / 255 - mean) / std, (-1 / 255 - mean) / std
    np.testing.assert_allclose(rows[0, 1, 39, 39], inside, rtol=1e-6)
    np.testing.assert_allclose(rows[1, 0, 0, 0], inside, rtol=1e-6)
    np.testing.assert_allclose(rows[1, 0, 0, 1], outside, rtol=1e-6)


@pytest.mark.parametrize(
    ("width", "height", "fraction", "expected"),
    [
        (100, 50, 2.0, (200, 100)),
        (1500, 10, 2.0, (2048, 14)),
        (3000, 10, 2.0, (3000, 10)),
        (3, 9, 0.5, (2, 5)),
        (90, 1, 0.3, (27, 1)),
    ],
)
def test_enlarged_images(width, height, fraction, expected):
    image = picture(width, height)
    rows = MediaProcessor(CONFIG, rescale_image_frac=fraction).image(encoded(image)).rows
    larger = image if image.size == expected else image.resize(expected, Image.Resampling.LANCZOS)
    assert torch.equal(rows, PROCESSOR.image(encoded(larger)).rows)


@pytest.mark.parametrize(
    ("form", "options"),
    [("JPEG", {}), ("WEBP", {"lossless": True}), ("GIF", {}), ("BMP", {}), ("PPM", {}), ("TIFF", {})],
)
def test_formats(form, options, tmp_path):
    content = encoded(picture(50, 45), form, **options)
    file = tmp_path / "picture"
    file.write_bytes(content)
    decoded = Image.open(io.BytesIO(content)).convert("RGB")
    media = PROCESSOR.image(file)
    assert media.name == str(file)
    assert torch.equal(media.rows, PROCESSOR.image(encoded(decoded)).rows)


def test_cmyk_jpeg():
    image = Image.new("CMYK", (10, 10), (0, 255, 255, 0))
    rows = PROCESSOR.image(encoded(image, "JPEG", quality=100)).rows
    red = PROCESSOR.image(encoded(Image.new("RGB", (10, 10), (255, 0, 0)))).rows
    torch.testing.assert_close(rows, red, rtol=0, atol=0.05)


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_sixteen_bit_grey_keeps_its_high_byte(form):
    grey = np.arange(0, 65536, 37, dtype=np.uint16)[: 40 * 44].reshape(40, 44)
    rows = PROCESSOR.image(encoded(Image.fromarray(grey), form)).rows
    eight = Image.fromarray((grey // 256).astype(np.uint8)).convert("RGB")
    assert torch.equal(rows, PROCESSOR.image(encoded(eight)).rows)


def test_orientation_of_a_photo_is_followed():
    image = picture(50, 20)
    exif = Image.Exif()
    exif[0x0112] = 6
    rows = PROCESSOR.image(encoded(image, "PNG", exif=exif)).rows
    assert torch.equal(rows, PROCESSOR.image(encoded(image.transpose(Image.Transpose.ROTATE_270))).rows)


def refused(run, *parts: str) -> None:
    with pytest.raises(MediaError) as caught:
        run()
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def test_unusable_images(tmp_path):
    png, jpeg = encoded(picture(200, 200)), encoded(picture(200, 200), "JPEG")
    refused(lambda: PROCESSOR.image(b"", "a.png"), "a.png is empty (0 bytes)")
    refused(lambda: PROCESSOR.image(png[: len(png) // 2], "a.png"), "a.png is damaged or truncated")
    refused(lambda: PROCESSOR.image(png[:20], "a.png"), "a.png is damaged or truncated")
    refused(lambda: PROCESSOR.image(jpeg[: len(jpeg) // 2], "a.jpg"), "a.jpg is damaged or truncated")
    refused(lambda: PROCESSOR.image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "a.eps"), "a.eps is no image")
    refused(lambda: PROCESSOR.image(b"hello", "a.txt"), "a.txt is no image of a known format (PNG, JPEG")
    refused(lambda: PROCESSOR.image(tmp_path / "no.png"), "no.png cannot be read: No such file")
    refused(lambda: PROCESSOR.image(tmp_path), "is no regular file")
    refused(lambda: PROCESSOR.image(encoded(Image.new("F", (4, 4)), "TIFF"), "a.tif"), "a.tif has floating-point")
    wide = Image.fromarray(np.full((4, 4), 70000, np.int32))
    refused(lambda: PROCESSOR.image(encoded(wide, "TIFF"), "a.tif"), "a.tif has pixels from 70000 to 70000; expected")
    # A megabyte of file can stand for gigapixels: they are counted before anything is decoded.
    huge = encoded(Image.new("1", (12000, 6000)))
    refused(lambda: PROCESSOR.image(huge, "big.png"), "big.png has 12000 x 6000 pixels; expected at most 67108864")
    bomb = bytearray(encoded(Image.new("1", (8, 8))))
    bomb[16:24] = (2**30).to_bytes(4, "big") * 2
    refused(lambda: PROCESSOR.image(bytes(bomb), "bomb.png"), "bomb.png")
    blind = MediaProcessor(CONFIG.replace(vision=None))
    refused(lambda: blind.image(png, "a.png"), "a.png cannot be used: this model has no vision tower")


GOOD = [encoded(picture(33, 21), form) for form in ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP")]


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.sampled_from(GOOD), st.data())
def test_damaged_images_are_read_or_refused(content, data):
    damaged = bytearray(content)
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
        damaged[at] = data.draw(st.integers(0, 255))
    kept = data.draw(st.integers(0, len(content)) | st.just(len(content)))
    try:
        rows = PROCESSOR.image(bytes(damaged[:kept]), "x.img").rows
    except MediaError as error:
        message = str(error)
    else:
        message = "x.img" if rows.isfinite().all() else ""
    assert message.startswith("x.img")


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
    rows = processor.image(encoded(Image.new("RGB", (10, 10), (255, 0, 255)))).rows
    assert rows[0, 0, 19, 19].tolist() == [1.0, -2.0, 1.0]
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
    message = broken("feature_extractor", "feature_size", 64)
    assert "feature_size is 64 in the processor's settings; expected n_mel_bins, 80" in message
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


def image(rows: int, name: str = "i.png") -> Media:
    return Media.of("image", name, torch.zeros(rows, 2))


def audio(rows: int, name: str = "a.wav") -> Media:
    return Media.of("audio", name, torch.zeros(rows, 2, dtype=torch.int32))


def ids(image_token: int, audio_token: int, image_mark: int | None, audio_mark: int | None) -> InklingConfig:
    return CONFIG.replace(
        image_token_id=image_token,
        audio_token_id=audio_token,
        image_bos_token_id=image_mark,
        audio_bos_token_id=audio_mark,
    )


SMALL = ids(90, 91, 80, 81)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([1, 80, 2, 81, 3], [1, 80, 90, 90, 2, 81, 91, 91, 91, 3]),
        ([1, 80, 90, 2, 81, 91, 3], [1, 80, 90, 90, 2, 81, 91, 91, 91, 3]),
        ([1, 80, 90, 90, 2, 81, 91, 91, 91, 3], [1, 80, 90, 90, 2, 81, 91, 91, 91, 3]),
        ([90, 91], [90, 90, 91, 91, 91]),
        ([81, 80], [81, 91, 91, 91, 80, 90, 90]),
    ],
    ids=["markers", "one placeholder", "all placeholders", "no markers", "audio first"],
)
def test_places_in_a_prompt(prompt, expected):
    out, spans = expand_media(prompt, [image(2)], [audio(3)], SMALL)
    assert out == expected
    assert spans == sorted(spans, key=lambda s: s.start)
    for span in spans:
        placeholder = 90 if span.media.kind == "image" else 91
        assert out[span.start : span.stop] == [placeholder] * span.media.tokens


def test_several_media_keep_their_order():
    images, audios = [image(1, "1"), image(3, "2")], [audio(2, "3")]
    out, spans = expand_media([80, 81, 80, 7], images, audios, SMALL)
    assert out == [80, 90, 81, 91, 91, 80, 90, 90, 90, 7]
    assert [(s.start, s.media.name) for s in spans] == [(1, "1"), (3, "3"), (6, "2")]


def test_ids_come_from_the_config():
    # The same media under the ids of two revisions of a tokenizer.
    for token, mark in ((90, 80), (95, 85)):
        out, _ = expand_media([1, mark, 2], [image(2)], [], ids(token, 91, mark, 81))
        assert out == [1, mark, token, token, 2]
    moved = ids(95, 91, 85, 81)
    refused(lambda: expand_media([1, 80, 2], [image(2)], [], moved), "i.png has no place in the prompt", "put token 85")


def test_a_prompt_without_media_is_left_alone():
    assert expand_media([1, 80, 81, 5], [], [], SMALL) == ([1, 80, 81, 5], [])
    unaware = CONFIG.replace(vision=None, audio=None, image_token_id=None)
    assert expand_media([1, 200054, 5], [], [], unaware) == ([1, 200054, 5], [])


def test_media_and_places_that_do_not_match():
    refused(lambda: expand_media([80, 80], [image(1)], [], SMALL), "more places for image inputs than the 1 given")
    refused(lambda: expand_media([1, 90], [], [], SMALL), "more places for image inputs than the 0 given", "token 1")
    refused(lambda: expand_media([80, 91], [image(1)], [], SMALL), "more places for audio inputs than the 0 given")
    refused(
        lambda: expand_media([1, 80], [image(1, "x"), image(1, "y.png")], [], SMALL),
        "y.png has no place in the prompt, which has room for 1 of the 2 image inputs; put token 80",
    )
    refused(lambda: expand_media([1], [], [audio(1)], SMALL), "a.wav has no place", "put token 81")
    refused(
        lambda: expand_media([80, 90, 90], [image(3)], [], SMALL),
        "the prompt has 2 placeholders at token 1 for i.png, which has 3 rows; expected none, one, or as many",
    )
    refused(lambda: expand_media([81], [audio(1)], [], SMALL), "a.wav is audio; it was given among the image inputs")
    refused(
        lambda: expand_media([80], [image(1)], [], SMALL.replace(vision=None)),
        "i.png cannot be used: this model has no vision tower; leave out the image input",
    )
    refused(lambda: expand_media([81], [], [audio(1)], SMALL.replace(audio=None)), "a.wav", "no audio tower")
    refused(
        lambda: expand_media([80], [image(1)], [], SMALL.replace(image_token_id=None)),
        "image_token_id is neither in config.json nor in the tokenizer (as <|unused_200054|>)",
    )
    tiny = SMALL.replace(vocab_size=85, unpadded_vocab_size=85)
    refused(
        lambda: expand_media([80], [image(1)], [], tiny), "image_token_id is 90; expected an id below vocab_size, 85"
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["i", "a", "text"]), st.integers(0, 4)), max_size=12), st.data())
def test_expansion_of_random_prompts(pieces, data):
    prompt: list[int] = []
    expected: list[int] = []
    given_media: dict[str, list[Media]] = {"i": [], "a": []}
    for kind, size in pieces:
        if kind not in given_media:
            prompt += [size + 1]
            expected += [size + 1]
            continue
        mark, token, make = (80, 90, image) if kind == "i" else (81, 91, audio)
        given_media[kind].append(make(size))
        prompt += [mark] + [token] * data.draw(st.sampled_from([0, 1, size]) if size else st.just(0))
        expected += [mark] + [token] * size
    out, spans = expand_media(prompt, given_media["i"], given_media["a"], SMALL)
    assert out == expected
    assert sum(s.media.tokens for s in spans) == sum(t in (90, 91) for t in expected)
    again, same = expand_media(out, given_media["i"], given_media["a"], SMALL)
    assert again == out
    assert [(s.start, s.media) for s in same] == [(s.start, s.media) for s in spans]


def test_ids_from_a_tokenizer():
    unknown = ids(90, 91, 80, 81).replace(image_token_id=None, audio_bos_token_id=None)
    words = {"<|unused_200054|>": 7, "<|content_audio_input|>": 8, "<|content_image|>": 9}
    config = with_media_ids(unknown, words.get)
    assert (config.image_token_id, config.audio_bos_token_id) == (7, 8)
    assert (config.image_bos_token_id, config.audio_token_id) == (80, 91)
    assert with_media_ids(unknown, {}.get) == unknown
    assert with_media_ids(SMALL, words.get) is SMALL


def test_markers():
    assert markers(2, 1, SMALL) == [80, 80, 81]
    assert markers(0, 0, ids(90, 91, None, None)) == []
    refused(lambda: markers(1, 0, ids(90, 91, None, 81)), "image_bos_token_id is neither in config.json nor in")


def test_prefix_keys_tell_media_apart():
    one, two = Media.of("image", "x", torch.zeros(3, 2)), Media.of("image", "x", torch.ones(3, 2))
    same = Media.of("image", "other name", torch.zeros(3, 2))
    prompt = [80, 90, 90, 90, 5]

    def keys(media: Media) -> list[int]:
        return cache_keys(prompt, [MediaSpan(1, media)])

    assert keys(one) == keys(same)
    assert [a == b for a, b in zip(keys(one), keys(two), strict=True)] == [True, False, False, False, True]
    assert len(set(keys(one))) == 5
    assert all(-(2**63) <= k < 2**63 for k in keys(one))
    assert one.digest != Media.of("audio", "x", torch.zeros(3, 2)).digest


def test_everything_is_light_until_used():
    code = (
        "import sys, inkling_portable.media_processor; "
        "print([m for m in ('transformers', 'soundfile', 'soxr', 'PIL', 'scipy') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_a_media_file_is_closed(tmp_path):
    file = tmp_path / "x.png"
    file.write_bytes(encoded(picture(5, 5)))
    media = PROCESSOR.image(Path(file))
    file.unlink()
    assert media.tokens == 1
