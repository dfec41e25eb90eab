"""The claim about an 8-bit cache: the results on file keep it, a short piece of text keeps it now, and breaking is
caught."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
import fp8_case
from gate import GateError

RESULTS = Path(fp8_case.__file__).parent / "results" / "fp8.json"


def test_the_results_on_file_keep_the_bounds() -> None:
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert found["bounds"] == fp8_case.BOUNDS
    assert found["held_out_tokens"] == fp8_case.HELD_OUT_TOKENS
    assert len(found["caches"]) == 6
    fp8_case.held(found["caches"])


@pytest.fixture(scope="module")
def reference() -> fp8_case.Reference:
    return fp8_case.Reference()


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    codec = fp8_case.TextCodec.find(fp8_case.default_model())
    assert codec is not None
    return fp8_case.encoded(codec, True, 2 * fp8_case.LENGTH)


def mean(losses: list[float]) -> float:
    assert len(losses) == 2
    return sum(losses) / len(losses)


def test_a_short_piece_of_text_keeps_them_now(reference: fp8_case.Reference, text: torch.Tensor) -> None:
    """And the cache is really used: the loss moves, and at a scale at which nothing is left it goes up by a lot."""
    plain = mean(reference.losses(text, torch.float32))
    largest = reference.calibrate(text)
    assert len(largest) == reference.config.num_hidden_layers
    assert all(float(x.min()) > 0 for pair in largest for x in pair)
    narrow = [(k / 448, v / 448) for k, v in largest]
    loss = mean(reference.losses(text, torch.float8_e4m3fn, narrow))
    assert loss != plain
    assert math.exp(loss - plain) - 1 <= fp8_case.BOUNDS["calibrated"] + 0.002
    crushed = [(k * 1e4, v * 1e4) for k, v in largest]
    assert mean(reference.losses(text, torch.float8_e4m3fn, crushed)) > plain + 0.5


def test_a_plain_cache_changes_nothing(reference: fp8_case.Reference, text: torch.Tensor) -> None:
    """Through pages and without any."""
    windows = text[: 2 * fp8_case.LENGTH + 1].unfold(0, fp8_case.LENGTH + 1, fp8_case.LENGTH)
    batch = fp8_case.Batch.uncached(len(windows), fp8_case.LENGTH)
    model = fp8_case.Inkling(reference.config, reference.ops, dtype=torch.float32).eval()
    model.load_state_dict(reference.model.state_dict(), strict=False)
    for mine, other in zip(model.experts().values(), reference.model.experts().values(), strict=True):
        mine.hold("w13", other.w13)
        mine.hold("w2", other.w2)
    with torch.inference_mode():
        hidden = model(model.embedding(windows[:, :-1].flatten()), batch)
        loss = torch.nn.functional.cross_entropy(model.logits(hidden), windows[:, 1:].flatten())
    assert mean(reference.losses(text, torch.float32)) == pytest.approx(float(loss), rel=1e-5)


def test_more_than_a_bound_is_an_error() -> None:
    row = {"perplexity": 20.0, "more": 0.0}
    fp8_case.held({"bfloat16": row, "e4m3fn, scale 1": row, "float32": row | {"more": 1.0}})
    for bad in ({"more": 0.5}, {"perplexity": float("nan")}):
        with pytest.raises(GateError, match="scale 1"):
            fp8_case.held({"e4m3fn, scale 1": row | bad})
