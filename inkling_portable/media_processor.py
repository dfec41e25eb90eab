"""Reading images and audio and turning them into what the towers take.

Image -> RGB, 8 bits -> optionally enlarged -> cut into patches of P x P pixels, `ceil(height / P)` rows of
`width // P + 1` columns (the last column is empty where P divides the width), what the image does not cover being -1 ->
`(x - 255 mean) / (255 std)` -> each patch repeated over the frames: `[n, frames, P, P, 3]` float32.

Audio -> mono -> 16 kHz -> log10 mel spectrogram -> the nearest of the dMel levels: `[n, bins]` int32, 50 ms a frame.

Both equal Transformers' Inkling processors bit for bit. The spectrogram is Transformers' own `InklingFeatureExtractor`.
Its image processor needs torchvision, which the package index builds against one torch only and which does not import
beside a CPU or ROCm one, so patches are cut here, the same on every machine. The levels are computed here because
Transformers' processor computes them only when it has a tokenizer. Sources: `image_processing_inkling.py`,
`feature_extraction_inkling.py`, `processing_inkling.py` in Transformers 5.20.
"""

from __future__ import annotations

import io
import json
import math
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

from .config import AudioConfig, InklingConfig, VisionConfig
from .media import Media, MediaError

if TYPE_CHECKING:
    import numpy.typing as npt
    from PIL.Image import Image
    from soundfile import SoundFile
    from transformers.models.inkling.feature_extraction_inkling import InklingFeatureExtractor

Source = str | Path | bytes

# Formats that Pillow decodes by itself; others start programs (EPS) or hold no picture.
_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
# What Pillow's decoders raise on damaged files.
_DAMAGED = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    MemoryError,
    struct.error,
    zlib.error,
)


@dataclass(frozen=True)
class MediaProcessor:
    """Reads media for the model of `config`. The defaults are those of Transformers' processor classes.

    `rescale_image_frac` enlarges images by that factor, at most to `rescale_image_max_upscaled_long_edge` pixels on the
    long edge (Lanczos); None leaves them as they are, as Transformers does, while vLLM 0.33 uses 2. `dmel_bins` of None
    means the model's `mel_vocab_size` levels. The limits refuse what would exhaust memory, before it is decoded:
    2**15 patches are an image of 7,200 x 7,200, an hour is 72,000 frames.
    """

    config: InklingConfig
    image_mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    rescale_image_frac: float | None = None
    rescale_image_max_upscaled_long_edge: int | None = 2048
    audio_settings: dict[str, Any] = field(default_factory=dict)
    dmel_bins: int | None = None
    max_image_patches: int = 2**15
    max_audio_seconds: float = 3600.0

    @classmethod
    def from_pretrained(cls, path: str | Path, config: InklingConfig) -> MediaProcessor:
        """The settings in a checkpoint folder's `processor_config.json` (or `preprocessor_config.json`), where it has
        one; the defaults elsewhere. ValueError where there is no such folder (a hub model is to be fetched first), the
        file is no JSON object or a setting cannot be used."""
        if not Path(path).is_dir():
            raise ValueError(f"{path} is no folder; expected a checkpoint's folder")
        processor = cls(config)
        for name in ("processor_config.json", "preprocessor_config.json"):
            file = Path(path) / name
            if file.is_file():
                return processor._configured(file)
        return processor

    def _configured(self, file: Path) -> MediaProcessor:
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} cannot be read as JSON: {error}") from None
        if not isinstance(raw, dict):
            raise ValueError(f"{file} holds a JSON {type(raw).__name__}; expected an object")
        image, audio = raw.get("image_processor") or raw, raw.get("feature_extractor") or raw
        found: dict[str, Any] = {}
        side = self.config.vision.patch_size if self.config.vision else None
        fixed = {"do_convert_rgb": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255}
        for name, only in (fixed | {"size": {"height": side, "width": side}} if side else fixed).items():
            if image.get(name, only) not in (only, None):
                raise ValueError(f"{file}: {name} is {image[name]!r}; expected {only!r}, the only kind supported")
        for name in ("image_mean", "image_std"):
            if (value := image.get(name)) is not None:
                if not (isinstance(value, list) and len(value) == 3 and all(isinstance(v, int | float) for v in value)):
                    raise ValueError(f"{file}: {name} is {value!r}; expected three numbers")
                found[name] = tuple(value)
        for name in ("rescale_image_frac", "rescale_image_max_upscaled_long_edge"):
            if name in image:
                value = image[name]
                if value is not None and not (isinstance(value, int | float) and value > 0):
                    raise ValueError(f"{file}: {name} is {value!r}; expected a positive number or null")
                found[name] = value
        if (value := raw.get("num_dmel_bins")) is not None:
            found["dmel_bins"] = value
        for name in ("dmel_min_value", "dmel_max_value"):
            expected = getattr(self.config.audio, name, None)
            if expected is not None and raw.get(name, expected) != expected:
                raise ValueError(f"{file}: {name} is {raw[name]!r}; expected {expected}, as in config.json")
        names = ("feature_size", "sampling_rate", "audio_token_duration_s", "window_size_multiplier", "n_fft")
        found["audio_settings"] = {name: audio[name] for name in names if audio.get(name) is not None}
        return replace(self, **found)

    def image(self, source: Source, name: str | None = None) -> Media:
        """Patches of the image file `source` (a path, or its content as bytes); `name` is what errors call it.

        PNG, JPEG, WebP, GIF (first frame), BMP, TIFF and PPM; grey, palette, RGB, CMYK, 16 bits (the high byte counts);
        alpha is dropped and a photo's orientation tag followed, as in Transformers. MediaError for anything else.
        """
        name = name or _name(source, "image")
        vision = self.config.vision
        if vision is None:
            raise MediaError(f"{name} cannot be used: this model has no vision tower; leave out the image input")
        if vision.num_channels != 3:
            raise MediaError(f"{name} cannot be used: the model takes {vision.num_channels} channels, an image has 3")
        with _opened(source, name) as file:
            picture = self._picture(file, name, vision)
        pixels = np.array(picture)
        return Media.of("image", name, self.patches(pixels, vision), torch.from_numpy(pixels))

    def _picture(self, file: BinaryIO, name: str, vision: VisionConfig) -> Image:
        """The decoded first frame as an upright 8-bit RGB picture, enlarged where the settings say so."""
        from PIL import Image as pillow
        from PIL import ImageOps, UnidentifiedImageError

        try:
            with warnings.catch_warnings():
                # Pillow warns of pictures smaller than our own limit, and of metadata that has no effect here.
                warnings.simplefilter("ignore")
                stored = pillow.open(file, formats=_IMAGE_FORMATS)
                rows, columns = self._grid(*self._size(*stored.size), vision)
                if rows * columns > self.max_image_patches:
                    width, height = stored.size
                    raise MediaError(
                        f"{name} has {width} x {height} pixels, {rows * columns} patches of {vision.patch_size} x "
                        f"{vision.patch_size}; expected at most {self.max_image_patches}"
                    )
                stored.load()
                picture = _rgb(ImageOps.exif_transpose(stored), name)
        except MediaError:
            raise
        except UnidentifiedImageError:
            raise MediaError(f"{name} is no image of a known format ({', '.join(_IMAGE_FORMATS)})") from None
        except pillow.DecompressionBombError as error:
            raise MediaError(f"{name} is too large: {error}") from None
        except _DAMAGED as error:
            raise MediaError(f"{name} is damaged or truncated: {error}") from None
        size = self._size(*picture.size)
        return picture if size == picture.size else picture.resize(size, resample=pillow.Resampling.LANCZOS)

    def _size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after enlarging, each rounded half up."""
        if self.rescale_image_frac is None:
            return width, height
        long_edge = max(width, height)
        target = long_edge * self.rescale_image_frac
        if self.rescale_image_max_upscaled_long_edge is not None:
            target = min(target, max(self.rescale_image_max_upscaled_long_edge, long_edge))
        ratio = target / long_edge
        return max(1, math.floor(width * ratio + 0.5)), max(1, math.floor(height * ratio + 0.5))

    @staticmethod
    def _grid(width: int, height: int, vision: VisionConfig) -> tuple[int, int]:
        return -(-height // vision.patch_size), width // vision.patch_size + 1

    def patches(self, pixels: npt.NDArray[np.uint8], vision: VisionConfig) -> torch.Tensor:
        """`[height, width, 3]` 8-bit RGB -> `[n, frames, P, P, 3]` float32 (the frames share memory)."""
        height, width, channels = pixels.shape
        side = vision.patch_size
        rows, columns = self._grid(width, height, vision)
        canvas = torch.full((rows * side, columns * side, channels), -1.0)
        canvas[:height, :width] = torch.from_numpy(pixels)
        # Transformers multiplies mean and deviation by 255 instead of dividing the pixels, in float32.
        canvas.sub_(torch.tensor(self.image_mean) * 255.0).div_(torch.tensor(self.image_std) * 255.0)
        grid = canvas.view(rows, side, columns, side, channels).transpose(1, 2)
        patches = grid.reshape(rows * columns, 1, side, side, channels)
        return patches.expand(-1, vision.temporal_patch_size, -1, -1, -1)

    def audio(self, source: Source, name: str | None = None) -> Media:
        """dMel levels of the audio file `source` (a path, or its content as bytes); `name` is what errors call it.

        WAV, FLAC and what else libsndfile decodes, at any rate; channels are averaged, then resampled (soxr, HQ).
        MediaError for anything else, for no samples and for samples that are not finite.
        """
        name = name or _name(source, "audio")
        audio = self.config.audio
        if audio is None:
            raise MediaError(f"{name} cannot be used: this model has no audio tower; leave out the audio input")
        rate = self.extractor.sampling_rate
        with _opened(source, name) as file:
            _check_wav(file, name)
        samples = _read_audio(source, name, rate, self.max_audio_seconds)
        return Media.of("audio", name, self.levels(samples, audio))

    @cached_property
    def extractor(self) -> InklingFeatureExtractor:
        """Transformers' spectrogram, for the model's number of mel bins."""
        from transformers.models.inkling.feature_extraction_inkling import InklingFeatureExtractor

        expected = self.config.audio.n_mel_bins if self.config.audio else None
        bins = self.audio_settings.get("feature_size", expected)
        if bins != expected:
            raise ValueError(f"feature_size is {bins!r} in the processor's settings; expected n_mel_bins, {expected}")
        return InklingFeatureExtractor(**{"feature_size": bins, **self.audio_settings})

    def levels(self, samples: npt.NDArray[np.float32], audio: AudioConfig) -> torch.Tensor:
        """Mono samples `[n]` float32 at the extractor's rate -> `[frames, bins]` int32 levels."""
        count = audio.mel_vocab_size if self.dmel_bins is None else self.dmel_bins
        if not (type(count) is int and 2 <= count <= audio.mel_vocab_size):
            raise ValueError(f"num_dmel_bins is {count!r}; expected 2 to mel_vocab_size, {audio.mel_vocab_size}")
        low, high = audio.dmel_min_value, audio.dmel_max_value
        features = self.extractor(samples, sampling_rate=self.extractor.sampling_rate, return_tensors="pt")
        # In float64 and rounded once: the centres are then the nearest float32 to the exact ones.
        centres = torch.linspace(low, high, count, dtype=torch.float64).to(torch.float32)
        parts = [
            (part.clamp(low, high).unsqueeze(-1) - centres).abs().argmin(dim=-1).to(torch.int32)
            for part in features["input_features"][0].split(1024)
        ]
        return torch.cat(parts)


def _name(source: Source, what: str) -> str:
    return f"the {what}" if isinstance(source, bytes) else str(source)


@contextmanager
def _opened(source: Source, name: str) -> Iterator[BinaryIO]:
    """`source` as a seekable file that holds at least a byte."""
    with ExitStack() as stack:
        try:
            if isinstance(source, bytes):
                file: BinaryIO = io.BytesIO(source)
            elif Path(source).exists() and not Path(source).is_file():
                raise MediaError(f"{name} is no regular file")
            else:
                file = stack.enter_context(Path(source).open("rb"))
        except OSError as error:
            raise MediaError(f"{name} cannot be read: {error.strerror or error}") from None
        if not file.read(1):
            raise MediaError(f"{name} is empty (0 bytes)")
        file.seek(0)
        yield file


def _rgb(picture: Image, name: str) -> Image:
    from PIL import Image as pillow

    if picture.mode == "F":
        raise MediaError(f"{name} has floating-point pixels; expected 8 or 16 bits a channel")
    if picture.mode != "I" and not picture.mode.startswith("I;16"):
        return picture.convert("RGB")
    # Pillow would clip 16-bit grey at 255. The high byte is what it keeps of 16-bit colour.
    grey = np.asarray(picture).astype(np.int64)
    if grey.min() < 0 or grey.max() > 0xFFFF:
        raise MediaError(f"{name} has pixels from {grey.min()} to {grey.max()}; expected 8 or 16 bits a channel")
    return pillow.fromarray((grey >> 8).astype(np.uint8)).convert("RGB")


def _read_audio(source: Source, name: str, rate: int, max_seconds: float) -> npt.NDArray[np.float32]:
    """Mono samples at `rate`."""
    import soundfile

    try:
        with soundfile.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else str(source)) as file:
            samples, source_rate = _mono(file, name, max_seconds), file.samplerate
    except soundfile.LibsndfileError as error:
        raise MediaError(f"{name} is no audio of a known format, or damaged: {error.error_string}") from None
    if not np.isfinite(samples).all():
        raise MediaError(f"{name} holds samples that are not finite (NaN or infinite)")
    if source_rate != rate:
        import soxr

        try:
            samples = soxr.resample(samples, source_rate, rate, quality="HQ")
        except (ValueError, RuntimeError) as error:
            raise MediaError(f"{name} cannot be resampled from {source_rate} to {rate} Hz: {error}") from None
    if not len(samples):
        raise MediaError(f"{name} holds no sound: less than one sample at {rate} Hz")
    return samples


def _mono(file: SoundFile, name: str, max_seconds: float) -> npt.NDArray[np.float32]:
    frames, rate = file.frames, file.samplerate
    if frames == 0:
        raise MediaError(f"{name} holds no sound: it has 0 samples")
    if frames > max_seconds * rate:
        raise MediaError(f"{name} lasts {frames / rate:.0f} s; expected at most {max_seconds:.0f}")
    mono = np.empty(frames, np.float32)
    done = 0
    # In blocks, so that the channels of the whole file are never held beside their mean.
    for block in file.blocks(blocksize=1 << 18, frames=frames, dtype="float32", always_2d=True):
        mono[done : done + len(block)] = block.mean(axis=1)
        done += len(block)
    if done < frames:
        raise MediaError(f"{name} is truncated: it holds {done} of {frames} samples")
    return mono


def _check_wav(file: BinaryIO, name: str) -> None:
    """MediaError where a RIFF file's data chunk is longer than the file: libsndfile would read what is left of it.

    Programs that write to a pipe leave the length 0 or close to 2**32; those files end where they end.
    """
    header = file.read(12)
    size_of_file = file.seek(0, io.SEEK_END)
    at = 12
    while header[:4] == b"RIFF" and header[8:] == b"WAVE" and at + 8 <= size_of_file:
        file.seek(at)
        kind, size = struct.unpack("<4sI", file.read(8))
        at += 8
        if kind == b"data":
            if size_of_file - at < size < 0x7FFFFF00:
                raise MediaError(f"{name} is truncated: it holds {size_of_file - at} of {size} bytes of sound")
            break
        at += size + size % 2
