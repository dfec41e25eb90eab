"""Reading media: bits equal to Transformers' processors, formats, damaged files."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from inkling_portable.config import preset
from inkling_portable.media import MediaError
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
    refused(lambda: PROCESSOR.image(huge, "big.png"), "12000 x 6000 pixels, 45150 patches of 40 x 40; expected at most")
    thin = encoded(Image.new("1", (1, 1_400_000)))
    refused(lambda: PROCESSOR.image(thin, "thin.png"), "thin.png has 1 x 1400000 pixels, 35000 patches of 40 x 40")
    doubled = MediaProcessor(CONFIG, rescale_image_frac=2.0, max_image_patches=11)
    refused(lambda: doubled.image(encoded(picture(80, 80)), "d.png"), "d.png has 80 x 80 pixels, 20 patches")
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


def test_a_media_file_is_closed(tmp_path):
    file = tmp_path / "x.png"
    file.write_bytes(encoded(picture(5, 5)))
    media = PROCESSOR.image(Path(file))
    file.unlink()
    assert media.tokens == 1
