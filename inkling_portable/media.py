"""Images and audio in a prompt: what they are once read, where they stand, and under which token ids.

An image occupies a marker token (`image_bos_token_id`) and one placeholder (`image_token_id`) a patch, audio a marker
(`audio_bos_token_id`) and one placeholder (`audio_token_id`) a frame. The ids come from `config.json`, or from the
tokenizer through `with_media_ids`; they have moved between revisions of the released models, so no code names them.

The rows that the towers make of the media replace the placeholders' rows of the normed embedding, after `embed_norm`,
and are not normed again (`inkling_portable.towers.embed_media`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from .config import InklingConfig

Kind = Literal["image", "audio"]

_TOWER: dict[Kind, str] = {"image": "vision", "audio": "audio"}
_SPELLED = {
    "image_token_id": "<|unused_200054|>",
    "audio_token_id": "<|unused_200053|>",
    "image_bos_token_id": "<|content_image|>",
    "audio_bos_token_id": "<|content_audio_input|>",
}


class MediaError(ValueError):
    """An image or a sound that cannot be used, or a prompt that has no room for it; the message names the file."""


@dataclass(frozen=True, eq=False)
class Media:
    """One image or sound, ready for its tower.

    `rows` are patches `[n, frames, side, side, channels]` float32 of an image or dMel levels `[n, bins]` int32 of a
    sound: one token each. `name` is what messages call it, `digest` identifies its content.
    """

    kind: Kind
    name: str
    rows: torch.Tensor
    digest: bytes

    @classmethod
    def of(cls, kind: Kind, name: str, rows: torch.Tensor, content: torch.Tensor | None = None) -> Media:
        """Media of `rows`; the digest is that of `content`, a smaller tensor that determines them, or else theirs."""
        source = (rows if content is None else content).contiguous()
        digest = hashlib.blake2b(f"{kind} {tuple(source.shape)}".encode(), digest_size=16)
        digest.update(source.view(torch.uint8).numpy().data)
        return cls(kind, name, rows, digest.digest())

    @property
    def tokens(self) -> int:
        return self.rows.shape[0]


@dataclass(frozen=True, eq=False)
class MediaSpan:
    """The placeholders `start` (inclusive) to `stop` (exclusive) of a prompt, and the media whose rows replace them."""

    start: int
    media: Media

    @property
    def stop(self) -> int:
        return self.start + self.media.tokens


def with_media_ids(config: InklingConfig, token_id: Callable[[str], int | None]) -> InklingConfig:
    """`config` with the media ids that it lacks taken from a tokenizer: `token_id` maps a token's text to its id.

    The texts are those of Transformers' `InklingProcessor`. An id that neither knows stays None.
    """
    found = {name: token_id(text) for name, text in _SPELLED.items() if getattr(config, name) is None}
    return config.replace(**found) if found else config


def markers(images: int, audios: int, config: InklingConfig) -> list[int]:
    """Token ids that introduce `images` images and then `audios` sounds, for a prompt which does not place them."""
    ids: list[int] = []
    if images:
        ids += [_media_id(config, "image_bos_token_id")] * images
    if audios:
        ids += [_media_id(config, "audio_bos_token_id")] * audios
    return ids


def expand_media(
    token_ids: Sequence[int], images: Sequence[Media], audios: Sequence[Media], config: InklingConfig
) -> tuple[list[int], list[MediaSpan]]:
    """Give every image and sound its placeholders: `(token ids, spans in ascending order)`.

    Images take their places in the order in which the prompt has room for images, sounds likewise. A place is a marker,
    or a placeholder without one (as Transformers accepts), or a marker and its placeholders; there the prompt holds no
    placeholder, one, or already one a row. A prompt without media is returned as it is: its markers are ordinary
    tokens.

    Raises MediaError where places and media do not match in number, where media are given to a model without their
    tower, where a placeholder stands in a prompt without media, and where config lacks an id that is needed.
    """
    waiting: dict[Kind, list[Media]] = {"image": list(images), "audio": list(audios)}
    for kind, media in waiting.items():
        wrong = [m for m in media if m.kind != kind]
        if wrong:
            raise MediaError(f"{wrong[0].name} is {wrong[0].kind}; it was given among the {kind} inputs")
        if media and getattr(config, _TOWER[kind]) is None:
            raise MediaError(
                f"{media[0].name} cannot be used: this model has no {_TOWER[kind]} tower; leave out the {kind} input"
            )
    marks: dict[int, Kind] = {}
    places: dict[int, Kind] = {}
    for kind, media in waiting.items():
        placeholder, marker = getattr(config, f"{kind}_token_id"), getattr(config, f"{kind}_bos_token_id")
        if media:
            places[_media_id(config, f"{kind}_token_id")] = kind
            if marker is not None:
                marks[marker] = kind
        elif placeholder is not None and getattr(config, _TOWER[kind]) is not None:
            places[placeholder] = kind
    given = {kind: len(media) for kind, media in waiting.items()}
    for media in waiting.values():
        media.reverse()

    out: list[int] = []
    spans: list[MediaSpan] = []
    at = 0
    while at < len(token_ids):
        token = token_ids[at]
        here = marks.get(token) or places.get(token)
        if here is None:
            out.append(token)
            at += 1
            continue
        if token in marks:
            out.append(token)
            at += 1
        placeholder = getattr(config, f"{here}_token_id")
        run = 0
        while at + run < len(token_ids) and token_ids[at + run] == placeholder:
            run += 1
        if not waiting[here]:
            raise MediaError(
                f"the prompt has more places for {here} inputs than the {given[here]} given (one at token {at}); "
                "give one input for each"
            )
        taken = waiting[here].pop()
        if run not in (0, 1, taken.tokens):
            raise MediaError(
                f"the prompt has {run} placeholders at token {at} for {taken.name}, which has {taken.tokens} rows; "
                "expected none, one, or as many as rows"
            )
        spans.append(MediaSpan(len(out), taken))
        out += [placeholder] * taken.tokens
        at += run
    for kind, media in waiting.items():
        if media:
            marker = getattr(config, f"{kind}_bos_token_id")
            token = getattr(config, f"{kind}_token_id") if marker is None else marker
            raise MediaError(
                f"{media[-1].name} has no place in the prompt, which has room for {given[kind] - len(media)} of the "
                f"{given[kind]} {kind} inputs; put token {token} where each belongs"
            )
    return out, spans


def cache_keys(token_ids: Sequence[int], spans: Sequence[MediaSpan]) -> list[int]:
    """One key a token for prefix reuse: token ids, and in place of a placeholder a negative number that stands for the
    row's content, so that two prompts share a prefix only where their media are the same."""
    keys = list(token_ids)
    for span in spans:
        base = int.from_bytes(span.media.digest, "little")
        for row in range(span.media.tokens):
            keys[span.start + row] = -1 - ((base + row) % (1 << 62))
    return keys


def _media_id(config: InklingConfig, name: str) -> int:
    value: int | None = getattr(config, name)
    if value is None:
        raise MediaError(
            f"{name} is neither in config.json nor in the tokenizer (as {_SPELLED[name]}); add it to config.json"
        )
    if value >= config.vocab_size:
        raise MediaError(f"{name} is {value}; expected an id below vocab_size, {config.vocab_size}")
    return value
