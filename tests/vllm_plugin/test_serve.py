"""`vllm serve` with this package's model behind it, asked by the OpenAI client: text, chat, tools, load, refusals."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import checkpoints
import openai
import pytest

from inkling_portable import LLM, SamplingParams

PROMPTS = [[7, 30 + n, 100 + 11 * n] for n in range(8)]
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_scripted(tmp_path_factory.mktemp("scripted") / "model")


@pytest.fixture(scope="module")
def client(
    model: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    """A client of a server of its own, which is stopped behind the tests."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    arguments = [
        *("--attention-backend", "CUSTOM", "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "256"),
        *("--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20), "--block-size", "16"),
        *("--reasoning-parser", "inkling", "--tool-call-parser", "inkling", "--enable-auto-tool-choice"),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "inkling"),
    ]
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(model), *arguments]
    variables = environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as out:
        server = subprocess.Popen(command, env=variables, cwd=log.parent, stdout=out, stderr=subprocess.STDOUT)
        try:
            until = time.monotonic() + 300
            while not healthy(port):
                assert server.poll() is None, log.read_text()[-6000:]
                assert time.monotonic() < until, log.read_text()[-6000:]
                time.sleep(0.5)
            yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)
            assert "inkling-portable" in log.read_text()
        finally:
            server.terminate()
            server.wait(60)


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def complete(client: openai.OpenAI, prompt: list[int], max_tokens: int = 12) -> list[int]:
    answer = client.completions.create(
        model="inkling", prompt=prompt, max_tokens=max_tokens, temperature=0, extra_body={"return_token_ids": True}
    )
    tokens: list[int] = answer.choices[0].model_dump()["token_ids"]
    return tokens


def right(model: Path) -> list[list[int]]:
    llm = LLM(model)
    asked: list[dict[str, Any]] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [list(o.outputs[0].token_ids) for o in llm.generate(asked, SamplingParams(temperature=0, max_tokens=12))]


@pytest.mark.usefixtures("in_torch")
def test_eight_at_once_one_dropped_and_one_too_long(client: openai.OpenAI, model: Path) -> None:
    expected = right(model)
    assert complete(client, PROMPTS[0]) == expected[0]

    def drop() -> None:
        stream = client.completions.create(model="inkling", prompt=[9, 9, 9], max_tokens=200, stream=True)
        next(iter(stream))
        stream.close()

    def overrun() -> openai.BadRequestError:
        with pytest.raises(openai.BadRequestError) as caught:
            complete(client, [5] * 300)
        return caught.value

    with ThreadPoolExecutor(10) as pool:
        answers = [pool.submit(complete, client, prompt) for prompt in PROMPTS]
        dropped, refused = pool.submit(drop), pool.submit(overrun)
        assert [answer.result() for answer in answers] == expected
        dropped.result()
        assert refused.result().status_code == 400
        assert "256" in str(refused.result())
    assert complete(client, PROMPTS[0]) == expected[0]


def test_a_streamed_chat_with_a_thought_and_a_tool_call(client: openai.OpenAI) -> None:
    """vLLM's renderer, reasoning parser and tool parser, by the names kept: what the model says is split up."""
    stream = client.chat.completions.create(
        model="inkling", messages=[{"role": "user", "content": "Weather in Paris?"}], tools=[TOOL], stream=True,
        temperature=0, max_tokens=32,
    )  # fmt: skip
    thought, name, arguments, reasons = "", "", "", []
    for event in stream:
        choice = event.choices[0]
        delta = choice.delta.model_dump()
        thought += delta.get("reasoning") or delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or []:
            name += call["function"].get("name") or ""
            arguments += call["function"].get("arguments") or ""
        reasons.append(choice.finish_reason)
    assert thought == checkpoints.THOUGHT
    assert (name, arguments) == ("get_weather", checkpoints.CALL[1])
    assert reasons[-1] == "tool_calls"
