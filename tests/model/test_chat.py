"""Conversations: the checkpoint's own template places text and media, and the reply is generated behind it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from small_checkpoint import small_config, small_tokenizer, write_small
from transformers import AutoTokenizer

from inkling_portable import LLM, SamplingParams
from inkling_portable.prompts import PromptReader
from inkling_portable.text import TextCodec

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
IMAGE, AUDIO, IMAGE_MARK, AUDIO_MARK = 257, 258, 259, 260
# The named tokens of the small tokenizer: `<|three|>` and `<|four|>` are the markers, `<|one|>` the image placeholder.
PARTS = """{%- for message in messages -%}
<|five|>{{ message.role }}:
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{ part.text }}
{%- elif part.type == 'image' -%}<|three|><|one|>
{%- elif part.type == 'audio' -%}<|four|>
{%- else -%}{{ raise_exception('unknown part ' + part.type) }}
{%- endif -%}{%- endfor -%}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|five|>model:{%- endif -%}"""
TEXTS = "{%- for m in messages -%}[{{ m.role }}] {{ m.content + '' }}\n{%- endfor -%}"
PRINTS = "{%- for m in messages -%}[{{ m.role }}] {{ m.content }}\n{%- endfor -%}"


def with_template(folder: Path, template: str | None, in_config: bool = False) -> Path:
    small_tokenizer().save(str(folder / "tokenizer.json"))
    if template is not None and in_config:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    elif template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def reader(folder: Path) -> PromptReader:
    return PromptReader(folder, small_config(towers=True), TextCodec.find(folder))


def picture(size: tuple[int, int] = (39, 41)) -> Image.Image:
    return Image.fromarray(np.zeros((*size, 3), np.uint8))


@pytest.mark.parametrize("in_config", [False, True])
def test_media_between_texts(tmp_path, in_config):
    read = reader(with_template(tmp_path, PARTS, in_config))
    sound = (np.zeros(801, np.float32), 16000)
    messages = [
        {"role": "system", "content": "s"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "image", "image": picture()},
                {"type": "text", "text": "b"},
                {"type": "audio", "audio": sound},
                {"type": "image", "image": picture((1, 1))},
            ],
        },
        {"role": "model", "content": "r"},
        {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "image", "image": picture()}]},
    ]
    request = read.read({"messages": messages})
    text, five = read.codec.encode, 261
    expected = [five, *text("system:s"), five, *text("user:a"), IMAGE_MARK, IMAGE, IMAGE, *text("b"), AUDIO_MARK]
    expected += [AUDIO, AUDIO, IMAGE_MARK, IMAGE, five, *text("model:r"), five, *text("user:c"), IMAGE_MARK]
    assert request.tokens == [*expected, IMAGE, IMAGE, five, *text("model:")]
    assert [span.media.kind for span in request.spans] == ["image", "audio", "image", "image"]


def test_text_equals_transformers(tmp_path):
    read = reader(with_template(tmp_path, PARTS))
    turns = [("user", "what?"), ("model", "that"), ("user", "ä")]
    messages = [{"role": role, "content": content} for role, content in turns]
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, add_generation_prompt=True)
    assert read.read({"messages": messages}).tokens == theirs["input_ids"]


@pytest.mark.parametrize("template", [TEXTS, PRINTS])
def test_a_template_for_texts_gets_texts(tmp_path, template):
    read = reader(with_template(tmp_path, template))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read.read({"messages": [{"role": "user", "content": parts}]}).tokens == read.codec.encode("[user] a\nb")
    parts.append({"type": "image", "image": picture()})
    with pytest.raises(ValueError, match="the chat template has no place for image parts; send text only"):
        read.read({"messages": [{"role": "user", "content": parts}]})


def test_messages_that_cannot_be_rendered(tmp_path):
    read = reader(with_template(tmp_path, PARTS))

    def refused(content: Any, *parts: str) -> None:
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            read.read({"messages": [{"role": "user", "content": content}]})
        assert all(part in str(caught.value) for part in parts), caught.value

    refused([{"type": "video", "video": "a.mp4"}], "type 'video'", "expected text, image or audio")
    refused([{"type": "image"}], "has no 'image'")
    refused([{"type": "text", "txt": "a"}], "has no 'text'")
    refused([{"type": "image", "image": str(tmp_path / "no.png")}], "no.png")
    refused([{"text": "no type"}], "type None")
    refused(5, "content is 5")
    with pytest.raises(ValueError, match="messages is empty"):
        read.read({"messages": []})
    broken = tmp_path / "broken"
    broken.mkdir()
    with pytest.raises(ValueError, match="the chat template fails"):
        reader(with_template(broken, "{{ raise_exception('no') }}")).read({"messages": [{"role": "u", "content": "a"}]})
    bare = tmp_path / "bare"
    bare.mkdir()
    with pytest.raises(ValueError, match="has no chat template; use a plain prompt"):
        reader(with_template(bare, None)).read({"messages": [{"role": "u", "content": "a"}]})
    with pytest.raises(ValueError, match=r"has no tokenizer\.json; a chat needs"):
        PromptReader(tmp_path, small_config(), None).read({"messages": [{"role": "u", "content": "a"}]})


def test_replies(tmp_path):
    folder = with_template(write_small(tmp_path / "model", towers=True), PARTS)
    llm = LLM(folder, dtype="float32", max_model_len=500)
    one = [{"role": "user", "content": [{"type": "image", "image": picture()}, {"type": "text", "text": "and?"}]}]
    two = [{"role": "user", "content": "hello"}]
    three = [{"role": "user", "content": [{"type": "audio", "audio": str(tmp_path / "no.wav")}]}]
    reply = llm.chat(one, GREEDY)[0]
    prompt = {"prompt_token_ids": reply.prompt_token_ids, "multi_modal_data": {"image": picture()}}
    assert reply.outputs[0].token_ids == llm.generate(prompt, GREEDY)[0].outputs[0].token_ids
    outputs = llm.chat([one, three, two], GREEDY)
    assert outputs[0].outputs[0].token_ids == reply.outputs[0].token_ids
    assert "no.wav" in outputs[1].outputs[0].error
    assert outputs[2].outputs[0].token_ids == llm.chat(two, GREEDY)[0].outputs[0].token_ids
    with pytest.raises(ValueError, match=r"no\.wav"):
        llm.chat(three, GREEDY)
