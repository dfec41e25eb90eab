"""Media in a prompt: places, ids, prefix keys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inkling_portable.config import InklingConfig, preset
from inkling_portable.media import Media, MediaError, MediaSpan, cache_keys, expand_media, markers, with_media_ids

CONFIG = preset("inkling")


def refused(run, *parts: str) -> None:
    with pytest.raises(MediaError) as caught:
        run()
    for part in parts:
        assert part in str(caught.value), str(caught.value)


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
