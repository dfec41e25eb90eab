"""What the engine tests share: prompts, and what this package's engine makes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from inkling_portable import LLM, SamplingParams
from inkling_portable.text import TextCodec

Run = Callable[..., dict[str, Any]]
SOURCE = Path(__file__).with_name("checkpoints.py").read_text()


def expected(model: Path, prompts: list[Any], max_tokens: int, **options: Any) -> list[list[int]]:
    """What this package's engine says, each prompt alone."""
    llm = LLM(model, **options)
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    asked = [{"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt for prompt in prompts]
    return [list(llm.generate([prompt], params)[0].outputs[0].token_ids) for prompt in asked]


def ragged(model: Path) -> list[list[int]]:
    """Five prompts of a token to some hundred, longer and shorter than a sliding window."""
    codec = TextCodec.find(model)
    assert codec is not None
    texts = SOURCE[:1000], SOURCE[1500:1520], "import ", SOURCE[2000:2400], "d"
    return [codec.encode(text) for text in texts]


def tokens(step: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"] for output in step]
