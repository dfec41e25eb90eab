"""What a caller asks for, turned into what the engine takes: token ids, rows of media, and keys for prefix reuse.

A prompt is a text, or a mapping with `prompt` (text) or `prompt_token_ids`, and `multi_modal_data`: `image` and
`audio`, each one item or a list. An image is a path, a file's content (bytes) or a PIL image; a sound is a path, bytes,
or a pair (samples, rate). Media take the places that the prompt has for them; where it has none they stand in front.

Or it has `messages`, a conversation: each a `role` and a `content`, which is a text or a list of parts, of the form
`{"type": "text", "text": ...}`, `{"type": "image", "image": ...}` or `{"type": "audio", "audio": ...}`. The
checkpoint's own chat template renders them and places the media.

Names follow vLLM's.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from inkling_portable.config import InklingConfig
from inkling_portable.media import (
    Kind,
    Media,
    MediaError,
    MediaSpan,
    cache_keys,
    expand_media,
    markers,
    with_media_ids,
)
from inkling_portable.media_processor import MediaProcessor, Source
from inkling_portable.text import TextCodec

Prompt = str | Mapping[str, Any]
FIELDS = ("prompt", "prompt_token_ids", "multi_modal_data", "messages")
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Request:
    """A prompt that has been read: its text, if it had one, its tokens with all placeholders, and its media."""

    text: str | None
    tokens: list[int]
    spans: list[MediaSpan]

    @property
    def keys(self) -> list[int]:
        """What names each position for prefix reuse: the token, or the content of the media there."""
        return cache_keys(self.tokens, self.spans)


class PromptReader:
    """Reads prompts for the model in `folder`. ValueError, naming the file or field, for what cannot be served."""

    def __init__(self, folder: Path, config: InklingConfig, codec: TextCodec | None) -> None:
        self.folder, self.codec = folder, codec
        self.config = with_media_ids(config, codec.token_id) if codec else config

    @cached_property
    def processor(self) -> MediaProcessor:
        return MediaProcessor.from_pretrained(self.folder, self.config)

    def read(self, prompt: Prompt) -> Request:
        """The request that `prompt` describes."""
        fields: Mapping[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else prompt
        for name in fields:
            if name not in FIELDS:
                raise ValueError(f"the prompt has a field {name!r}; expected {', '.join(FIELDS)}")
        if "messages" in fields:
            fields = self._chat(fields["messages"])
        tokens = self._tokens(fields)
        images, audios = (self._media(kind, fields.get("multi_modal_data") or {}) for kind in KINDS)
        found, spans = expand_media(self._placed(tokens, images, audios), images, audios, self.config)
        return Request(fields.get("prompt"), found, spans)

    def _chat(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if self.codec is None:
            raise ValueError(f"{self.folder} has no tokenizer.json; a chat needs its tokenizer and its chat template")
        if not messages:
            raise ValueError("messages is empty; expected at least one message")
        data: dict[str, list[Any]] = {}
        plain: list[dict[str, Any]] = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, list | tuple):
                content = [_part(part, data) for part in content]
            elif content is not None and not isinstance(content, str):
                raise ValueError(f"a message's content is {content!r}; expected a text or a list of parts")
            plain.append({**message, "content": content})
        return {"prompt_token_ids": self.codec.chat(plain), "multi_modal_data": data}

    def _tokens(self, fields: Mapping[str, Any]) -> list[int]:
        if (tokens := fields.get("prompt_token_ids")) is not None:
            wrong = [token for token in tokens if not isinstance(token, int)]
            if wrong:
                raise ValueError(f"prompt_token_ids holds {wrong[0]!r}; expected token ids, integers")
            return list(tokens)
        if not isinstance(text := fields.get("prompt"), str):
            raise ValueError("a prompt has neither 'prompt', a text, nor 'prompt_token_ids'")
        if self.codec is None:
            raise ValueError("the checkpoint has no tokenizer.json; give prompt_token_ids instead of text")
        return self.codec.encode(text)

    def _media(self, kind: Kind, data: Mapping[str, Any]) -> list[Media]:
        for name in data:
            if name not in KINDS:
                raise ValueError(f"multi_modal_data has {name!r}; expected {' and '.join(KINDS)}")
        items = data.get(kind, ())
        if not isinstance(items, list):
            items = [items] if kind in data else []
        read = self.processor.image if kind == "image" else self.processor.audio
        found = []
        for index, item in enumerate(items):
            name = str(item) if isinstance(item, str | Path) else f"{kind} {index + 1}"
            found.append(read(_image(item, name) if kind == "image" else _audio(item, name), name))
        return found

    def _placed(self, tokens: list[int], images: Sequence[Media], audios: Sequence[Media]) -> list[int]:
        """`tokens`, behind markers for the kinds of media that have no place in them."""
        config = self.config
        places = {
            "image": {config.image_token_id, config.image_bos_token_id},
            "audio": {config.audio_token_id, config.audio_bos_token_id},
        }
        given = {kind: len(media) for kind, media in (("image", images), ("audio", audios))}
        lacking = {kind: 0 if places[kind].intersection(tokens) else count for kind, count in given.items()}
        if not any(lacking.values()) or any(getattr(config, tower) is None for tower in _towers(lacking)):
            return tokens
        begin = 1 if tokens and tokens[0] == config.bos_token_id else 0
        return [*tokens[:begin], *markers(lacking["image"], lacking["audio"], config), *tokens[begin:]]


def _towers(counts: Mapping[str, int]) -> list[str]:
    return [{"image": "vision", "audio": "audio"}[kind] for kind, count in counts.items() if count]


def _part(part: Mapping[str, Any], data: dict[str, list[Any]]) -> dict[str, Any]:
    """A part as the template takes it; what it holds of media is moved to `data`."""
    kind = part.get("type")
    if kind not in ("text", *KINDS):
        raise ValueError(f"a content part has type {kind!r}; expected text, {' or '.join(KINDS)}")
    if part.get(kind) is None:
        raise ValueError(f"a content part of type {kind!r} has no {kind!r}; expected it under that name")
    if kind == "text":
        return dict(part)
    data.setdefault(kind, []).append(part[kind])
    return {"type": kind}


def _image(item: Any, name: str) -> Source:
    """`item` as a file. What is no file is written as one, so that all images take one way."""
    if isinstance(item, str | Path | bytes):
        return item
    from PIL import Image, ImageOps

    if not isinstance(item, Image.Image):
        raise MediaError(f"{name} is a {type(item).__name__}; expected a path, bytes or a PIL image")
    file = io.BytesIO()
    try:
        upright = ImageOps.exif_transpose(item)
        deep = upright.mode[0] in "IF"
        (upright if deep else upright.convert("RGB")).save(file, "TIFF" if deep else "PPM")
    except (OSError, ValueError) as error:
        raise MediaError(f"{name} cannot be used: {error}") from None
    return file.getvalue()


def _audio(item: Any, name: str) -> Source:
    if isinstance(item, str | Path | bytes):
        return item
    import numpy as np
    import soundfile

    expected = "expected a path, bytes or a pair (samples, rate)"
    if not isinstance(item, tuple) or len(item) != 2:
        raise MediaError(f"{name} is a {type(item).__name__}; {expected}")
    samples, rate = np.asarray(item[0]), item[1]
    subtype = {"i2": "PCM_16", "i4": "PCM_32", "f2": "FLOAT", "f4": "FLOAT", "f8": "FLOAT"}.get(samples.dtype.str[1:])
    if samples.ndim != 1 or subtype is None:
        raise MediaError(
            f"{name} has samples of shape {samples.shape} and dtype {samples.dtype}; expected one channel of integers "
            "of 16 or 32 bits or of floats"
        )
    if not isinstance(rate, int | float) or rate != int(rate) or not 1 <= rate <= 2**31 - 1:
        raise MediaError(f"{name} has rate {rate!r}; expected samples a second, a positive integer")
    file = io.BytesIO()
    kept = samples.astype(np.float32) if subtype == "FLOAT" else samples
    soundfile.write(file, kept, int(rate), format="WAV", subtype=subtype)
    return file.getvalue()
