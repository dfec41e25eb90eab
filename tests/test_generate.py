"""`inkling generate`: what it prints where, for people and for programs, and that every option reaches the engine."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image
from small_checkpoint import CONTEXT, MEDIA_IDS, NAMED, small_tokenizer, write_small

from inkling_portable import cli, llm
from inkling_portable.request import CompletionOutput, RequestOutput

PROMPTS = ("hello", "a longer prompt, of 33 characters", "x")
KEYS = {"prompt_token_ids", "token_ids", "text", "logprobs", "finish_reason", "timings"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("generate") / "small")


class Run:
    """`inkling generate --model MODEL …` in this process."""

    def __init__(self, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.model, self.capsys = model, capsys

    def __call__(self, *args: object, model: Path | None = None) -> tuple[int, str, str]:
        code = cli.main(["generate", "--model", str(model or self.model), *map(str, args)])
        return code, *self.capsys.readouterr()

    def json(self, *args: object, model: Path | None = None) -> list[dict[str, Any]]:
        code, out, _ = self(*args, "--json", model=model)
        assert code == 0
        return [json.loads(line) for line in out.splitlines()]


@pytest.fixture
def run(small: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(small, capsys)


def prompts(*texts: str) -> list[str]:
    return [word for text in texts for word in ("--prompt", text)]


# JSON.


def test_json_is_one_object_a_prompt_and_nothing_else(run: Run) -> None:
    ids = small_tokenizer().encode("hello").ids
    found = run.json(*prompts(*PROMPTS), "--prompt-token-ids", ",".join(map(str, ids)), "--max-tokens", 9)
    assert [set(one) for one in found] == [KEYS] * 4
    assert [one["prompt_token_ids"] for one in found[:3]] == [small_tokenizer().encode(text).ids for text in PROMPTS]
    assert found[3]["prompt_token_ids"] == ids
    assert found[3]["token_ids"] == found[0]["token_ids"]
    for one in found:
        assert len(one["token_ids"]) == 9
        assert one["text"] == small_tokenizer().decode(one["token_ids"])
        assert (one["finish_reason"], one["logprobs"]) == ("length", None)
        assert {"queued", "first_token", "total", "tokens_per_second", "reused_tokens"} <= set(one["timings"])
        assert 0 <= one["timings"]["first_token"] <= one["timings"]["total"]


def test_logprobs_are_those_of_the_token_and_of_the_likeliest(run: Run) -> None:
    (found,) = run.json("--prompt", "hello", "--logprobs", 3, "--max-tokens", 5)
    (alone,) = run.json("--prompt", "hello", "--logprobs", 0, "--max-tokens", 5)
    (every,) = run.json("--prompt", "hello", "--logprobs", 10_000, "--max-tokens", 1)
    assert [len(step) for step in found["logprobs"]] == [3] * 5
    for token, step, one in zip(found["token_ids"], found["logprobs"], alone["logprobs"], strict=True):
        assert step[str(token)] == max(step.values())
        assert one == {str(token): step[str(token)]}
    assert math.isclose(sum(map(math.exp, every["logprobs"][0].values())), 1, rel_tol=1e-5)


def test_no_tokenizer_is_needed_for_token_ids(run: Run, tmp_path: Path) -> None:
    bare = write_small(tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    (found,) = run.json("--prompt-token-ids", " 5, 17,200", "--max-tokens", 4, model=bare)
    assert found["prompt_token_ids"] == [5, 17, 200]
    assert found["text"] is None
    code, out, _ = run("--prompt-token-ids", "5,17,200", "--max-tokens", 4, model=bare)
    assert (code, out) == (0, "5,17,200," + ",".join(map(str, found["token_ids"])) + "\n")


# Options.


@pytest.mark.parametrize("options", [["--speculative", "2"], ["--speculative", "1"], ["--chunk", "5"]], ids=" ".join)
def test_drafts_and_chunks_change_no_token(options: list[str], run: Run) -> None:
    plain = run.json(*prompts(*PROMPTS), "--max-tokens", 24, "--dtype", "float32")
    other = run.json(*prompts(*PROMPTS), "--max-tokens", 24, "--dtype", "float32", *options)
    assert [one["token_ids"] for one in other] == [one["token_ids"] for one in plain]
    if "--speculative" in options:
        accepted = [one["timings"]["accepted"] for one in other]
        assert [len(counts) for counts in accepted] == [int(options[1])] * 3
        assert sum(counts[0] for counts in accepted) > 0


def test_sampling_options_reach_the_sampler(run: Run) -> None:
    def tokens(*options: object) -> list[int]:
        return run.json("--prompt", "hello", "--max-tokens", 12, *options)[0]["token_ids"]

    greedy = tokens()
    hot = ("--temperature", 5, "--seed", 3)
    assert tokens(*hot) == tokens(*hot) != greedy
    assert tokens(*hot) != tokens("--temperature", 5, "--seed", 4)
    assert tokens(*hot, "--top-k", 1) == greedy
    assert tokens(*hot, "--top-p", 1e-6) == greedy


def test_stop_text_ends_a_completion_and_is_left_out(run: Run) -> None:
    (whole,) = run.json("--prompt", "hello", "--max-tokens", 30)
    stop = whole["text"][5:8]
    (found,) = run.json("--prompt", "hello", "--max-tokens", 30, "--stop", "never there", "--stop", stop)
    assert found["text"] == whole["text"][: whole["text"].index(stop)]
    assert found["finish_reason"] == "stop"


# For people.


def test_prompt_and_completion_are_on_stdout_and_timings_on_stderr(run: Run) -> None:
    texts = [one["text"] for one in run.json(*prompts(*PROMPTS), "--max-tokens", 6)]
    code, out, err = run(*prompts(*PROMPTS), "--max-tokens", 6)
    assert code == 0
    assert out == "\n".join(f"{prompt}{text}\n" for prompt, text in zip(PROMPTS, texts, strict=True))
    lines = err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["request 0", "request 1", "request 2"]
    assert all(re.search(r"prompt tokens \(0 reused\).*; 6 tokens at [\d.]+ tokens/s; ", line) for line in lines)


def test_acceptance_is_said_with_drafts(run: Run) -> None:
    *_, err = run("--prompt", "hello", "--speculative", 2, "--max-tokens", 24)
    assert re.search(r"drafts accepted \d+%, \d+%, \d\.\d\d tokens a step$", err.strip())


@pytest.mark.parametrize("options", [[], ["--speculative", "2"], ["--stop", "CCh", "--stop", "u"]], ids=" ".join)
def test_streamed_text_is_the_same(options: list[str], run: Run) -> None:
    args = [*prompts(*PROMPTS), "--max-tokens", "40", *options]
    code, streamed, err = run(*args, "--stream")
    assert code == 0
    assert len(err.splitlines()) == 3
    assert streamed == run(*args)[1]


def test_text_is_streamed_as_it_comes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    real = llm.LLM.stream

    def watched(self: llm.LLM, *args: Any) -> Any:
        for event in real(self, *args):
            yield event
            written.append(run.capsys.readouterr().out)

    monkeypatch.setattr(llm.LLM, "stream", watched)
    run("--prompt", "hello", "--stream", "--max-tokens", 12)
    assert sum(bool(piece) for piece in written) > 5


def test_logprobs_are_a_table(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    (found,) = run.json("--prompt", "hello", "--logprobs", 2, "--max-tokens", 3)
    _, out, _ = run("--prompt", "hello", "--logprobs", 2, "--max-tokens", 3)
    for step in found["logprobs"]:
        assert all(f"{value:.3f}" in out for value in step.values())


def test_text_that_the_terminal_cannot_show_is_marked(small: Path) -> None:
    script = "import sys; from inkling_portable.cli import main; sys.exit(main())"
    args = ["generate", "--model", str(small), "--prompt", "schön", "--max-tokens", "2"]
    environment = {"PYTHONIOENCODING": "ascii"}
    ran = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(b"sch?n")


def test_without_a_model_the_built_in_one_answers_and_says_so(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(llm, "default_model", lambda: small)
    assert cli.main(["generate", "--prompt", "hello", "--max-tokens", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "no --model" in err
    assert "built-in" in err
    assert json.loads(out)["token_ids"]


def test_a_prompt_that_cannot_be_served_is_named_and_the_others_are_printed(run: Run) -> None:
    args = [*prompts("hello", "x" * CONTEXT, "x"), "--max-tokens", "2"]
    code, out, err = run(*args, "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert code == 1
    assert [one["finish_reason"] for one in found] == ["length", "error", "length"]
    assert err == f"inkling: request 1: {found[1]['error']}\n"
    assert f"the prompt has {CONTEXT} tokens" in err


def test_a_failed_request_is_named_and_the_others_are_printed(run: Run, tmp_path: Path) -> None:
    broken = write_small(tmp_path / "broken", broken_token=7)
    args = ["--prompt-token-ids", "5,6", "--prompt-token-ids", "5,7,6", "--prompt-token-ids", "8", "--max-tokens", "1"]
    code, out, err = run(*args, "--json", model=broken)
    first, second, third = map(json.loads, out.splitlines())
    assert code == 1
    assert [one["finish_reason"] for one in (first, second, third)] == ["length", "error", "length"]
    assert "request 1" in second["error"]
    assert err == f"inkling: {second['error']}\n"
    assert set(first) == set(third) == KEYS
    for stream in ((), ("--stream",)):
        code, out, err = run(*args, *stream, model=broken)
        assert code == 1
        assert out.count("\n\n") == 2
        assert f"inkling: {second['error']}" in err.splitlines()


# Chat and media.


def test_chat_uses_the_template_of_the_checkpoint(run: Run, tmp_path: Path) -> None:
    talking = write_small(tmp_path / "talking")
    (talking / "chat_template.jinja").write_text(
        "{% for m in messages %}<|one|>{{ m.role }}:{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|two|>{% endif %}"
    )
    (found,) = run.json("--prompt", "Hi there", "--chat", "--max-tokens", 3, model=talking)
    ids = small_tokenizer().encode(f"{NAMED[0]}user:Hi there{NAMED[1]}").ids
    assert found["prompt_token_ids"] == ids
    code, out, _ = run("--prompt", "Hi there", "--chat", "--max-tokens", 3, model=talking)
    assert (code, out) == (0, f"Hi there\n{found['text']}\n")


class Recorder:
    """Stands for `LLM`: keeps what it was given and answers every prompt with nothing."""

    made: Recorder

    def __init__(self, model: str | None, **options: Any) -> None:
        self.model, self.options, self.codec, self.conversion = model, options, None, None
        Recorder.made = self

    def generate(self, prompts: list[Any], params: Any) -> list[RequestOutput]:
        self.prompts, self.params = prompts, params
        return [RequestOutput(0, None, [1], [CompletionOutput(finish_reason="length")]) for _ in prompts]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    monkeypatch.setattr(llm, "LLM", Recorder)
    return Recorder


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with towers, two images of 1 and 8 patches, and a sound of 3 frames."""
    folder = write_small(tmp_path_factory.mktemp("seeing") / "model", towers=True)
    Image.new("RGB", (39, 39), "red").save(folder.parent / "a.png")
    Image.new("RGB", (41, 120), "blue").save(folder.parent / "b.jpg")
    soundfile.write(folder.parent / "c.wav", np.zeros(2400), 16_000)
    return folder


def test_media_go_before_every_text(seeing: Path, run: Run) -> None:
    a, b, c = (seeing.parent / name for name in ("a.png", "b.jpg", "c.wav"))
    image, audio, image_mark, audio_mark = MEDIA_IDS.values()
    options = ["--image", a, "--audio", c, "--image", b, "--max-tokens", 2]
    found = run.json(*prompts("one", "two"), *options, model=seeing)
    for one, text in zip(found, ("one", "two"), strict=True):
        ids = one["prompt_token_ids"]
        assert [ids.count(token) for token in (image_mark, audio_mark, audio)] == [2, 1, 3]
        assert ids.count(image) == 1 + 3 * 2
        assert ids[:2] == [image_mark, image]
        assert ids[-3:] == small_tokenizer().encode(text).ids
        assert one["finish_reason"] == "length"
    code, out, _ = run(*prompts("one"), *options, model=seeing)
    assert (code, out) == (0, f"one{found[0]['text']}\n")


def test_media_in_a_chat_are_placed_by_the_template(seeing: Path, run: Run, tmp_path: Path) -> None:
    talking = Path(shutil.copytree(seeing, tmp_path / "model"))
    (talking / "chat_template.jinja").write_text(
        "{% for m in messages %}{% for part in m.content %}"
        "{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'image' %}<|three|>"
        "{% else %}<|four|>{% endif %}{% endfor %}{% endfor %}<|five|>"
    )
    image, audio, image_mark, audio_mark = MEDIA_IDS.values()
    (found,) = run.json(
        *("--chat", "--prompt", "what", "--audio", seeing.parent / "c.wav", "--image", seeing.parent / "a.png"),
        *("--max-tokens", 2),
        model=talking,
    )
    what = small_tokenizer().encode("what").ids
    assert found["prompt_token_ids"] == [image_mark, image, audio_mark, audio, audio, audio, *what, 261]


@pytest.mark.parametrize("name", ["cut.png", "empty.wav", "text.png"])
def test_unreadable_media_are_refused_before_weights_load(
    name: str, seeing: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm, "LLM", lambda *args, **kwargs: pytest.fail("weights are loaded"))
    whole = (seeing.parent / "a.png").read_bytes()
    file = tmp_path / name
    file.write_bytes({"cut.png": whole[: len(whole) // 2], "empty.wav": b"", "text.png": b"no picture"}[name])
    option = "--audio" if name.endswith("wav") else "--image"
    code, out, err = run(*prompts("one", "two"), option, file, model=seeing)
    assert (code, out) == (2, "")
    assert err.startswith(f"inkling: {file} is ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("terminal", [True, False])
def test_loading_options_reach_the_model(
    terminal: bool, run: Run, recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    args = ["--prompt", "hello", "--dtype", "float32", "--device", "auto", "--chunk", "7", "--speculative", "1"]
    assert run(*args, "--moe-format", "nvfp4")[0] == 0
    assert recorder.made.options == {
        "dtype": "float32",
        "moe_format": "nvfp4",
        "device": "auto",
        "max_num_batched_tokens": 7,
        "num_speculative_tokens": 1,
        "progress": terminal,
    }


def test_interpreter_is_switched_on_before_a_kernel_is_imported() -> None:
    script = """
import os, sys
from inkling_portable.cli import main
seen = {}
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("triton", "inkling_kernels"):
            seen[name] = os.environ.get("TRITON_INTERPRET")
sys.meta_path.insert(0, Watch())
main()
print(*seen.items(), sep="\\n")
"""
    args = ["generate", "--model", "/no/such/folder", "--prompt", "x", "--device", "interpret"]
    ran = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, check=False, env={})
    seen = ran.stdout.splitlines()
    assert "('inkling_kernels', '1')" in seen, ran.stderr
    assert all(line.endswith("'1')") for line in seen)
