"""Images and audio through the whole model, against Transformers' InklingForConditionalGeneration."""

from __future__ import annotations

import io
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from small_checkpoint import small_config, small_tokenizer, write_small

from inkling_portable import LLM, SamplingParams
from inkling_portable.cache import Batch
from inkling_portable.config import VisionConfig
from inkling_portable.towers import embed_media

IMAGE, AUDIO, IMAGE_MARK, AUDIO_MARK = 257, 258, 259, 260  # as `small_checkpoint` has them
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@dataclass
class Pair:
    """The two models of one checkpoint, which Transformers saved."""

    theirs: Any
    ours: LLM
    folder: Path

    def inputs(self, prompt: dict[str, Any]) -> dict[str, torch.Tensor]:
        """What Transformers takes for the prompt, with placeholders expanded by our reader."""
        request = self.ours._reader.read(prompt)
        media = [span.media for span in request.spans]
        images, sounds = ([m.rows for m in media if m.kind == kind] for kind in ("image", "audio"))
        found = {"input_ids": torch.tensor([request.tokens])}
        if images:
            found["pixel_values"] = torch.cat(images)
        if sounds:
            longest = max(map(len, sounds))
            padded = [torch.nn.functional.pad(levels, (0, 0, 0, longest - len(levels))) for levels in sounds]
            found["audio_input_ids"] = torch.stack(padded)
            found["audio_input_ids_mask"] = torch.tensor([[i < len(x) for i in range(longest)] for x in sounds])
        return found

    @torch.inference_mode()
    def difference(self, prompt: dict[str, Any]) -> float:
        """The largest difference of the logits at any position, all of the order of one to ten."""
        request, llm = self.ours._reader.read(prompt), self.ours
        h = llm.model.embedding(torch.tensor(request.tokens))
        embed_media(h, 0, request.spans, [llm.towers(span.media) for span in request.spans])
        found = llm.model.logits(llm.model(h, Batch.uncached(1, len(h))))
        expected = self.theirs(**self.inputs(prompt)).logits[0]
        assert found.shape == expected.shape
        assert 1 < expected.abs().max() < 20
        return float((found - expected).abs().max())

    def texts(self, prompts: list[dict[str, Any]]) -> list[list[int]]:
        """Greedy tokens of Transformers, one prompt after another."""
        found = []
        for prompt in prompts:
            inputs = self.inputs(prompt)
            out = self.theirs.generate(**inputs, max_new_tokens=GREEDY.max_tokens, do_sample=False)
            found.append(out[0, inputs["input_ids"].shape[1] :].tolist())
        return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    transformers.logging.set_verbosity_error()
    folder = tmp_path_factory.mktemp("media") / "model"
    vision = VisionConfig(patch_size=40, temporal_patch_size=2, n_layers=4)
    config = small_config(depths=0, towers=True, vision=vision, sliding_window_size=32, max_position_embeddings=4096)
    torch.manual_seed(0)
    raw = config.to_dict()
    raw["text_config"] |= {"initializer_range": 0.2}
    theirs = transformers.InklingForConditionalGeneration(transformers.InklingConfig(**raw)).eval()
    with torch.no_grad():
        for name, value in theirs.named_parameters():
            if "norm" in name or "scale" in name:
                value.uniform_(0.5, 1.5)
            elif "conv1d" in name:
                value.normal_(0, 0.3)
    theirs.generation_config.eos_token_id = None
    theirs.save_pretrained(folder)
    small_tokenizer().save(str(folder / "tokenizer.json"))
    ours = LLM(folder, dtype="float32", max_model_len=2048, max_num_batched_tokens=100, block_size=16)
    return Pair(theirs, ours, folder)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def sound(samples: int, seed: int = 0) -> tuple[np.ndarray, int]:
    rng = np.random.default_rng(seed)
    tone = np.sin(np.arange(samples) * rng.uniform(0.05, 0.5)) + rng.normal(0, 0.1, samples)
    return (0.5 * tone).astype(np.float32), 16000


def image_prompt(*images: Any) -> dict[str, Any]:
    tokens = [5, 6, 7] + [token for _ in images for token in (IMAGE_MARK, 40, 41)]
    return {"prompt_token_ids": tokens, "multi_modal_data": {"image": list(images)}}


def audio_prompt(*sounds: Any) -> dict[str, Any]:
    tokens = [9] + [token for _ in sounds for token in (AUDIO_MARK, 50)]
    return {"prompt_token_ids": tokens, "multi_modal_data": {"audio": list(sounds)}}


MIXED = {
    "prompt_token_ids": [3, IMAGE_MARK, 20, 21, AUDIO_MARK, 22, AUDIO_MARK, IMAGE_MARK, IMAGE, 23, 24, AUDIO_MARK, 25],
    "multi_modal_data": {
        "image": [picture(90, 35), picture(39, 41)],
        "audio": [sound(801), sound(16000, 1), sound(4000, 2)],
    },
}


@pytest.mark.parametrize(("size", "rows"), [((1, 1), 1), ((39, 41), 2), ((8000, 30), 201), ((120, 81), 12)])
def test_logits_behind_an_image(pair, size, rows):
    prompt = image_prompt(picture(*size))
    assert len(pair.ours._reader.read(prompt).tokens) == 6 + rows
    assert pair.difference(prompt) < 2e-4


@pytest.mark.parametrize(("samples", "rows"), [(1, 1), (799, 1), (800, 1), (801, 2), (960_000, 1200)])
def test_logits_behind_a_sound(pair, samples, rows):
    prompt = audio_prompt(sound(samples))
    assert len(pair.ours._reader.read(prompt).tokens) == 3 + rows
    assert pair.difference(prompt) < 2e-4


def test_several_of_both_in_one_prompt(pair):
    assert pair.difference(MIXED) < 2e-4
    assert pair.difference(image_prompt(*(picture(60, 60, seed) for seed in range(4)))) < 2e-4
    assert pair.difference(audio_prompt(*(sound(n, n) for n in (1, 3000, 801)))) < 2e-4


def test_greedy_text_in_a_batch_and_in_pieces(pair):
    """Prompts longer than a step, media that straddle its end, all in one batch."""
    prompts = [
        MIXED,
        image_prompt(picture(8000, 30)),
        audio_prompt(sound(48_000)),
        {"prompt_token_ids": list(range(1, 120))},
        image_prompt(picture(1, 1), picture(39, 41)),
    ]
    outputs = pair.ours.generate(prompts, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == pair.texts(prompts)


def test_a_prefix_is_reused_for_the_same_media_only(pair):
    """Two images of one size give equal placeholders: only their content tells them apart."""
    prompts = [image_prompt(picture(300, 200, seed)) for seed in (1, 2, 1)]
    expected = pair.texts(prompts)
    assert expected[0] != expected[1]
    outputs = [pair.ours.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert [output.timings["reused_tokens"] for output in outputs] == [0, 0, 32]
    tail = image_prompt(picture(300, 200, 1))
    tail["prompt_token_ids"] = [*tail["prompt_token_ids"], 77, 78]
    assert pair.ours.generate(tail, GREEDY)[0].timings["reused_tokens"] >= 32
    sounds = [audio_prompt(sound(40_000, seed)) for seed in (1, 2, 1)]
    reused = [pair.ours.generate(prompt, GREEDY)[0].timings["reused_tokens"] for prompt in sounds]
    assert reused == [0, 0, 48]


def test_media_may_be_files_bytes_or_objects(pair, tmp_path):
    image, (samples, rate) = picture(39, 41), sound(3000)
    image.save(tmp_path / "a.png")
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    integers = np.frombuffer((samples * 32767).astype("<i2").tobytes(), "<i2")
    images = [tmp_path / "a.png", str(tmp_path / "a.png"), (tmp_path / "a.png").read_bytes(), image]
    sounds = [tmp_path / "a.wav", str(tmp_path / "a.wav"), (tmp_path / "a.wav").read_bytes(), (integers, rate)]
    for prompt, items in ((image_prompt, images), (audio_prompt, sounds)):
        digests = {pair.ours._reader.read(prompt(item)).spans[0].media.digest for item in items}
        assert len(digests) == 1
    single = {"prompt_token_ids": [4, IMAGE_MARK], "multi_modal_data": {"image": image}}
    assert pair.ours._reader.read(single).tokens == [4, IMAGE_MARK, IMAGE, IMAGE]


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "LA", "CMYK", "1", "YCbCr", "I;16", "HSV"])
def test_pillow_images_are_read_as_their_files(pair, mode, tmp_path):
    grey = np.arange(41 * 39, dtype=np.uint16).reshape(41, 39) * 40
    image = Image.fromarray(grey) if mode == "I;16" else picture(39, 41).convert(mode)
    image.convert("RGB").save(tmp_path / "plain.png") if mode == "HSV" else image.save(tmp_path / "it.tiff")
    file = next(tmp_path.iterdir())
    found, expected = (pair.ours._reader.read(image_prompt(item)).spans[0].media.digest for item in (image, file))
    assert found == expected


def test_a_prompt_without_places_has_its_media_in_front(pair):
    data = {"image": [picture(1, 1), picture(39, 41)], "audio": sound(801)}
    found = pair.ours._reader.read({"prompt": "ab", "multi_modal_data": data})
    text = pair.ours.codec.encode("ab")
    front = [IMAGE_MARK, IMAGE, IMAGE_MARK, IMAGE, IMAGE, AUDIO_MARK, AUDIO, AUDIO]
    assert found.tokens == [*front, *text]
    assert found.text == "ab"
    placed = {"prompt_token_ids": [8, IMAGE, IMAGE_MARK], "multi_modal_data": data}
    assert pair.ours._reader.read(placed).tokens == [AUDIO_MARK, AUDIO, AUDIO, 8, IMAGE, IMAGE_MARK, IMAGE, IMAGE]


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def bad_requests(folder: Path) -> dict[str, tuple[dict[str, Any], str]]:
    """Requests that cannot be served, and what their errors must name."""
    good = png(picture(39, 41))
    files = {"empty.png": b"", "cut.png": good[: len(good) // 2], "text.png": b"no image", "none.wav": b"RIFF"}
    huge = good[:16] + (200_000).to_bytes(4, "big") * 2 + good[24:]
    for name, content in (files | {"huge.png": huge}).items():
        (folder / name).write_bytes(content)
    found = {name: (image_prompt(folder / name), name) for name in files if name.endswith("png")}
    found["none.wav"] = audio_prompt(folder / "none.wav"), "none.wav"
    found["huge.png"] = image_prompt(folder / "huge.png"), "huge.png"
    found["absent"] = image_prompt(folder / "absent.png"), "absent.png"
    found["folder"] = audio_prompt(folder), str(folder)
    found["nan"] = audio_prompt((np.full(900, np.nan, np.float32), 16000)), "audio 1"
    found["no samples"] = audio_prompt(sound(900), (np.zeros(0, np.float32), 16000)), "audio 2"
    found["stereo array"] = audio_prompt((np.zeros((2, 900), np.float32), 16000)), "shape"
    found["no rate"] = audio_prompt((np.zeros(900, np.float32), 0)), "rate 0"
    found["not a pair"] = audio_prompt(np.zeros(900, np.float32)), "audio 1 is a ndarray"
    found["no image"] = image_prompt(5), "image 1 is a int"
    found["float image"] = image_prompt(Image.fromarray(np.zeros((4, 4), np.float32))), "image 1"
    found["places left"] = {"prompt_token_ids": [IMAGE_MARK] * 2, "multi_modal_data": {"image": picture(1, 1)}}, "image"
    two = {"image": [picture(1, 1), picture(1, 2)]}
    found["media left"] = {"prompt_token_ids": [4, IMAGE_MARK], "multi_modal_data": two}, "image 2"
    found["placeholder alone"] = {"prompt_token_ids": [4, AUDIO]}, "audio"
    found["video"] = {"prompt_token_ids": [4], "multi_modal_data": {"video": "a.mp4"}}, "video"
    found["field"] = {"prompt_token_ids": [4], "multi_modal": {}}, "multi_modal"
    found["ids"] = {"prompt_token_ids": [4, "a"]}, "prompt_token_ids"
    found["too long"] = image_prompt(*[picture(8000, 30)] * 11), "2048"
    return found


def test_a_bad_request_fails_alone(pair, tmp_path):
    bad = bad_requests(tmp_path)
    good = [MIXED, {"prompt": "hello"}]
    outputs = pair.ours.generate([good[0], *(prompt for prompt, _ in bad.values()), good[1]], GREEDY)
    for (name, (_, part)), output in zip(bad.items(), outputs[1:-1], strict=True):
        result = output.outputs[0]
        assert result.finish_reason == "error", name
        assert part in result.error, (name, result.error)
        assert result.token_ids == []
    assert [outputs[i].outputs[0].token_ids for i in (0, -1)] == pair.texts(good)
    assert [output.request_id for output in outputs] == sorted(output.request_id for output in outputs)


def test_a_single_bad_prompt_raises(pair, tmp_path):
    for name, (prompt, part) in bad_requests(tmp_path).items():
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            pair.ours.generate(prompt, GREEDY)
        assert part in str(caught.value), name
    assert not pair.ours.engine.unfinished()


def test_a_model_without_towers_names_the_file(tmp_path):
    picture(4, 4).save(tmp_path / "cat.png")
    llm = LLM(write_small(tmp_path / "model"), max_model_len=100)
    outputs = llm.generate([image_prompt(tmp_path / "cat.png"), {"prompt": "a"}, audio_prompt("dog.wav")], GREEDY)
    assert "cat.png" in outputs[0].outputs[0].error
    assert "no vision tower" in outputs[0].outputs[0].error
    assert "dog.wav" in outputs[2].outputs[0].error
    assert len(outputs[1].outputs[0].token_ids) == GREEDY.max_tokens


def test_more_drafts_than_depths(tmp_path):
    folder = write_small(tmp_path / "model", depths=2)
    for drafts in (3, -1):
        with pytest.raises(ValueError, match=f"num_speculative_tokens is {drafts}; expected 0 to 2"):
            LLM(folder, num_speculative_tokens=drafts)
