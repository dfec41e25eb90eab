"""Text out of the engine: streaming, stop strings, characters of several tokens, and what a caller leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_checkpoint import VOCABULARY, small_tokenizer, write_small

from inkling_portable import LLM, SamplingParams
from inkling_portable.text import Detokenizer, TextCodec

PROMPT = "def main("


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_small(tmp_path_factory.mktemp("llm") / "small", depths=1)
    return LLM(folder, dtype="float32", max_model_len=200, block_size=8, max_num_batched_tokens=32)


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_small(tmp_path_factory.mktemp("llm") / "drafting", depths=2)
    return LLM(folder, dtype="float32", max_model_len=200, block_size=8, num_speculative_tokens=2)


def streamed(llm: LLM, params: SamplingParams, prompt: Any = PROMPT) -> tuple[list[str], Any]:
    """The pieces of a request's text, each checked to be what its output has grown by, and the last output."""
    pieces, output = [], None
    for output, piece in llm.stream(prompt, params):
        pieces.append(piece)
        assert output.outputs[0].text == "".join(pieces)
    assert output is not None
    return pieces, output.outputs[0]


def letters(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, **options)


@pytest.mark.parametrize("seed", range(4))
def test_streamed_text_is_the_text_of_the_tokens(llm: LLM, seed: int) -> None:
    """Random bytes: complete characters, broken ones and special tokens that have no text."""
    params = SamplingParams(max_tokens=80, temperature=50.0, seed=seed, ignore_eos=True)
    pieces, output = streamed(llm, params)
    assert output.text == small_tokenizer().decode(output.token_ids)
    assert len(pieces) == 80
    assert any(token < VOCABULARY - 5 for token in output.token_ids)


@settings(max_examples=40, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_no_character_comes_in_parts(text: str) -> None:
    """One token a byte: an accent takes two tokens and an emoji four, and a replacement character may be meant."""
    tokenizer = small_tokenizer()
    pieces = Detokenizer(TextCodec(Path(), tokenizer))
    tokens = tokenizer.encode(text).ids
    out = [pieces.push(token, last=i == len(tokens) - 1) for i, token in enumerate(tokens)]
    assert "".join(out) + pieces.flush() == text
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in out)


def test_text_cut_in_a_character_ends_with_a_replacement(llm: LLM) -> None:
    """The bytes of half an emoji are not lost when the tokens end: neither by length nor by a stop token."""
    tokenizer = small_tokenizer()
    tokens = tokenizer.encode("aé😀").ids[:-2]
    for ending in ("length", "stop"):
        pieces = Detokenizer(TextCodec(Path(), tokenizer))
        out = "".join(pieces.push(t, last=ending == "length" and t is tokens[-1]) for t in tokens)
        out += pieces.flush() if ending == "stop" else ""
        assert out == tokenizer.decode(tokens)
        assert out.startswith("aé")
        assert out.endswith("\ufffd")


@pytest.mark.parametrize("kind", ["llm", "drafting"])
@pytest.mark.parametrize("length", [1, 2, 5, 20])
@pytest.mark.parametrize("at", [0, 7, 30])
def test_a_stop_string_is_never_seen(kind: str, length: int, at: int, request: pytest.FixtureRequest) -> None:
    """It may span many tokens; what was streamed before it was found is not taken back."""
    llm: LLM = request.getfixturevalue(kind)
    whole = llm.generate(PROMPT, letters(60))[0].outputs[0].text
    stop = whole[at : at + length]
    cut = whole.index(stop)
    pieces, output = streamed(llm, letters(60, stop=("not there", stop, whole[at + 1 : at + 40])))
    assert (output.text, output.finish_reason) == (whole[:cut], "stop")
    assert "".join(pieces) == whole[:cut]
    assert len(output.token_ids) < 60


def test_text_that_only_begins_like_a_stop_string_comes_out(llm: LLM) -> None:
    whole = llm.generate(PROMPT, letters(40))[0].outputs[0]
    pieces, output = streamed(llm, letters(40, stop=(whole.text[5:15] + "\x00", whole.text[-3:] + "x")))
    assert (output.text, output.finish_reason) == (whole.text, "length")
    assert output.token_ids == whole.token_ids
    assert pieces[-1], "what was held back comes with the end"


def test_the_end_of_text_has_no_text(llm: LLM) -> None:
    free = llm.generate(PROMPT, letters(40))[0].outputs[0]
    token = free.token_ids[20]
    first = free.token_ids.index(token)
    output = llm.generate(PROMPT, letters(40, stop_token_ids=[token]))[0].outputs[0]
    assert (output.token_ids, output.finish_reason) == (free.token_ids[: first + 1], "stop")
    assert output.text == small_tokenizer().decode(free.token_ids[:first])


def test_text_and_its_tokens_are_one_prompt(llm: LLM) -> None:
    tokens = small_tokenizer().encode(PROMPT).ids
    text, ids, both = llm.generate(
        [PROMPT, {"prompt_token_ids": tokens}, {"prompt": "shown", "prompt_token_ids": tokens}], letters(5)
    )
    assert text.prompt_token_ids == ids.prompt_token_ids == tokens
    assert text.outputs[0].token_ids == ids.outputs[0].token_ids == both.outputs[0].token_ids
    assert (text.prompt, ids.prompt, both.prompt) == (PROMPT, None, "shown")


def empty(llm: LLM) -> bool:
    cache = llm.engine.cache
    return not llm.engine.unfinished() and not any(p.promised or any(p.holders) for p in cache.pools.values())


def test_a_refused_prompt_leaves_nothing_and_the_others_go_on(llm: LLM) -> None:
    good = llm.generate(PROMPT, letters(4))[0].outputs[0]
    for bad, message in (("", "empty"), ({"prompt_token_ids": [VOCABULARY]}, "out of range"), ("x" * 200, "context")):
        with pytest.raises(ValueError, match=message):
            llm.generate(bad, letters(4))
        assert empty(llm)
        first, failed, last = llm.generate([PROMPT, bad, PROMPT], letters(4))
        assert failed.outputs[0].finish_reason == "error"
        assert message in (failed.outputs[0].error or "")
        assert first.outputs[0].token_ids == last.outputs[0].token_ids == good.token_ids


def test_whoever_stops_listening_leaves_no_request_behind(llm: LLM) -> None:
    """Two run and twenty wait when the caller goes; the next caller gets its own answers alone."""
    stream = llm.stream([PROMPT] * 22, letters(50))
    next(stream)
    assert llm.engine.unfinished()
    stream.close()
    assert empty(llm)
    assert len(llm.generate([PROMPT], letters(3))) == 1


def test_numbers_of_prompts_and_parameters_must_agree(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 prompts came with 1 sampling parameters"):
        llm.generate([PROMPT, PROMPT], [letters(3)])
    assert llm.generate([], letters(3)) == []
    outputs = llm.generate([PROMPT, PROMPT], [letters(3), letters(5)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 5]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 0),
        ("max_num_seqs", -1),
        ("max_num_batched_tokens", 0),
        ("max_model_len", 1),
        ("max_model_len", 2000),
    ],
)
def test_sizes_that_no_engine_can_have(tmp_path: Path, name: str, value: int) -> None:
    """The checkpoint's own longest context is 1,024 tokens."""
    folder = write_small(tmp_path / "small", depths=0)
    with pytest.raises(ValueError, match=f"^{name} is {value}; expected at least"):
        LLM(folder, **{name: value})  # type: ignore[arg-type]


def test_a_draft_that_breaks_the_logits_is_only_a_wrong_draft(tmp_path: Path) -> None:
    """Drafts of a token with a NaN embedding are rejected like others; the request that never names it goes on."""
    token = VOCABULARY - 3
    folder = write_small(tmp_path / "broken", depths=1, broken_token=token)
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 100}
    plain = LLM(folder, **options).generate(PROMPT, letters(30))[0].outputs[0]
    assert token not in plain.token_ids
    llm = LLM(folder, num_speculative_tokens=1, **options)
    draft = llm.engine._draft

    def misled(requests: Any) -> None:
        draft(requests)
        for request in requests:
            request.drafts = [token] if request.drafts else []

    llm.engine._draft = misled  # type: ignore[method-assign]
    output = llm.generate(PROMPT, letters(30))[0]
    assert output.outputs[0].error is None
    assert output.outputs[0].token_ids == plain.token_ids
    assert output.timings["accepted"] == [0]
    assert torch.isnan(llm.model.embed[token]).any()
