"""The engine: batching, sampling, stopping, streaming, and requests that fail alone.

D9, key heads that do not divide among ranks, has no place here: the engine runs on one device. The plan of a parallel
model holds it (`tests/test_parallel.py`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from dense_model import Dense
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from tuned_model import VOCABULARY, build_tuned, tuned_config, tuned_tensors

from inkling_portable.cache import FULL, SLIDING
from inkling_portable.config import InklingConfig
from inkling_portable.engine import Engine
from inkling_portable.model import Inkling
from inkling_portable.request import CompletionOutput, RequestOutput
from inkling_portable.sampling import SamplingParams, draw, probabilities

GREEDY = SamplingParams(max_tokens=20, temperature=0)


@pytest.fixture(scope="module")
def weights() -> tuple[InklingConfig, dict[str, torch.Tensor]]:
    """Rows of the padded vocabulary are ten times as large as real ones: they would win, were they looked at."""
    config = tuned_config(1, log_scaling_n_floor=20, eos_token_id=(5, 6))
    return config, tuned_tensors(config, noise=1.0, embed_norm=True)


@pytest.fixture(scope="module")
def model(weights: tuple[InklingConfig, dict[str, torch.Tensor]]) -> Inkling:
    return build_tuned(*weights, 0)[0]


@pytest.fixture(scope="module")
def dense(weights: tuple[InklingConfig, dict[str, torch.Tensor]]) -> Dense:
    return Dense(*weights)


def new_engine(model: Inkling, **options: Any) -> Engine:
    settings = {"max_model_len": 200, "block_size": 8, "num_pages": {FULL: 200, SLIDING: 200}} | options
    return Engine(model, None, **settings)


def finish(engine: Engine) -> dict[int, CompletionOutput]:
    """Step to the end, and see that every page and slot has come back."""
    found: dict[int, RequestOutput] = {}
    while engine.unfinished():
        for output, _ in engine.step():
            found[output.request_id] = output
    for kind, pool in engine.cache.pools.items():
        assert pool.promised == 0
        assert not any(pool.holders)
        kept = sum(engine.cache._prefixes.holds(kind, page) for page in range(pool.size))
        assert len(pool.free) + kept == pool.size
    return {index: output.outputs[0] for index, output in found.items()}


def run(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams = GREEDY) -> list[CompletionOutput]:
    ids = [engine.submit(prompt, params) for prompt in prompts]
    found = finish(engine)
    return [found[i] for i in ids]


def prompt(count: int, seed: int = 0) -> list[int]:
    return torch.randint(7, 116, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [prompt(n, n) for n in (5, 40, 1, 17, 33, 8, 64, 3)]


@pytest.fixture(scope="module")
def expected(model: Inkling, dense: Dense) -> list[list[int]]:
    """What greedy decoding of each of `PROMPTS` must give: the float64 model agrees with every token."""
    found = [output.token_ids for output in run(new_engine(model), PROMPTS)]
    for tokens, new in zip(PROMPTS, found, strict=True):
        best = dense.logits(dense.hidden(tokens + new)).argmax(-1)[len(tokens) - 1 : -1].tolist()
        assert new == best
        ends = [i for i, token in enumerate(best) if token in (5, 6)]
        assert ends == [len(new) - 1] if len(new) < 20 else ends in ([], [19])
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 1, "block_size": 16},
        {"max_num_batched_tokens": 7, "max_num_seqs": 2, "block_size": 4},
        {"num_pages": {FULL: 26, SLIDING: 26}, "max_num_batched_tokens": 16},
        {"enable_prefix_caching": False, "block_size": 64},
    ],
    ids=str,
)
def test_no_schedule_changes_a_token(model: Inkling, expected: list[list[int]], options: dict[str, Any]) -> None:
    """Eight prompts however they are batched, cut into pieces and made to wait, twice over."""
    engine = new_engine(model, **options)
    for _ in range(2):
        assert [output.token_ids for output in run(engine, PROMPTS)] == expected


def test_the_state_does_not_grow_with_the_batched_tokens(model: Inkling) -> None:
    sizes = [
        [ring.shape for layer in new_engine(model, max_num_batched_tokens=n).cache.layers for ring in layer.rings]
        for n in (1, 4096)
    ]
    assert sizes[0] == sizes[1]
    assert {shape[:2] for shape in sizes[0]} == {(8, 3)}


def test_the_padded_vocabulary_is_never_seen(model: Inkling) -> None:
    """Not greedily, not at a temperature where all tokens are equally likely, not among the likeliest."""
    engine = new_engine(model, max_num_seqs=16)
    hot = [SamplingParams(max_tokens=30, temperature=100.0, seed=i, logprobs=999, ignore_eos=True) for i in range(16)]
    ids = [engine.submit(prompt(4, i), params) for i, params in enumerate(hot)]
    found = finish(engine)
    outputs = [found[i] for i in ids]
    seen = {token for output in outputs for token in output.token_ids}
    assert len(seen) > 100
    assert max(seen) < VOCABULARY
    assert all(set(row) == set(range(VOCABULARY)) for row in outputs[0].logprobs or ())
    total = sum(np.exp(list((outputs[0].logprobs or [{}])[0].values())))
    assert total == pytest.approx(1, abs=1e-5)
    for bad in (VOCABULARY, 127, -1):
        with pytest.raises(ValueError, match=rf"{bad} is out of range.*0\.\.{VOCABULARY - 1}"):
            engine.submit([bad], GREEDY)


def broken_model(weights: tuple[InklingConfig, dict[str, torch.Tensor]], bad: float) -> Inkling:
    """The model, with an embedding of token 3 that is not finite."""
    config, tensors = weights
    embed = tensors["llm.embed.weight"].clone()
    embed[3, 10] = bad
    return build_tuned(config, tensors | {"llm.embed.weight": embed}, 0)[0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_poisoned_request_fails_by_name_and_alone(
    model: Inkling, weights: tuple[InklingConfig, dict[str, torch.Tensor]], bad: float
) -> None:
    """Beside, before and after others, also those that share its beginning, and through recycled pages."""
    stem = prompt(40, 50)
    prompts = [prompt(9, 51), [*stem, 3, *prompt(20, 52)], [*stem, *prompt(5, 53)], [3], prompt(50, 54)]
    healthy, short = [prompts[i] for i in (0, 2, 4)], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    expected = [output.token_ids for output in run(new_engine(model), healthy, short)]
    for options in ({"num_pages": {FULL: 30, SLIDING: 30}}, {"max_num_batched_tokens": 16}, {"max_num_seqs": 1}):
        engine = new_engine(broken_model(weights, bad), **options)
        for repeat in range(2):
            outputs = run(engine, prompts, short)
            assert [outputs[i].token_ids for i in (0, 2, 4)] == expected
            assert [outputs[i].finish_reason for i in (1, 3)] == ["error"] * 2
            for i in (1, 3):
                assert f"request {i + 5 * repeat}:" in (outputs[i].error or "")
                assert outputs[i].token_ids == []


def numpy_distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """By the definition: the k likeliest, then the fewest of them that hold the mass p."""
    z = logits.astype(np.float64)
    with np.errstate(over="ignore"):
        p = np.exp((z - z.max()) / temperature)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    kept = order[:top_k] if top_k > 0 else order
    mass, total = 0.0, sum(p[token] for token in kept)
    out = np.zeros_like(p)
    for token in kept:
        if top_p < 1 and mass >= top_p * total:
            break
        out[token] = p[token]
        mass += p[token]
    return out / out.sum()


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 50),
    spread=st.sampled_from([0.0, 1.0, 5.0, 50.0]),
    temperature=st.sampled_from([5e-324, 1e-3, 0.3, 1.0, 2.5, 1e6]),
    top_k=st.sampled_from([-1, 0, 1, 2, 7, 1000]),
    top_p=st.sampled_from([1e-9, 0.1003, 0.5007, 0.9001, 0.9993, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_distributions(size: int, spread: float, temperature: float, top_k: int, top_p: float, seed: int) -> None:
    logits = (np.random.default_rng(seed).standard_normal(size) * spread).round(2).astype(np.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    found = probabilities(torch.from_numpy(logits), params).numpy()
    expected = numpy_distribution(logits, temperature, top_k, top_p)
    assert ((found > 0) == (expected > 0)).all()
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_draws_follow_the_distribution() -> None:
    p = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    counts = Counter(draw(p, generator) for _ in range(5000))
    assert set(counts) <= {0, 2, 3, 4}
    assert chisquare([counts[i] for i in (0, 2, 3, 4)], np.array([0.5, 0.3, 0.15, 0.05]) * 5000).pvalue > 1e-3


def test_the_engine_samples_from_its_logits(model: Inkling, dense: Dense) -> None:
    """600 requests with seeds of their own, against the float64 model's distribution."""
    given = prompt(6, 60)
    engine = new_engine(model, max_num_seqs=64, num_pages={FULL: 400, SLIDING: 400})
    ids = [
        engine.submit(given, SamplingParams(max_tokens=1, temperature=2.0, top_k=4, seed=seed)) for seed in range(600)
    ]
    found = finish(engine)
    counts = Counter(found[i].token_ids[0] for i in ids)
    p = numpy_distribution(dense.logits(dense.hidden(given))[-1].numpy(), 2.0, 4, 1.0)
    tokens = np.flatnonzero(p)
    assert set(counts) <= set(tokens.tolist())
    assert chisquare([counts[t] for t in tokens.tolist()], p[tokens] * 600).pvalue > 1e-3


def test_a_seed_repeats_whatever_runs_beside_it(model: Inkling) -> None:
    sampled = SamplingParams(max_tokens=15, temperature=1.5, top_p=0.9, seed=7, ignore_eos=True)
    alone = run(new_engine(model), [PROMPTS[1]], sampled)[0].token_ids
    engine = new_engine(model, max_num_batched_tokens=9, max_num_seqs=4)
    for index in range(9):
        engine.submit(PROMPTS[index % 8], SamplingParams(max_tokens=9, temperature=3.0, seed=None))
        if index == 4:
            own = engine.submit(PROMPTS[1], sampled)
    assert finish(engine)[own].token_ids == alone
    other = run(
        new_engine(model), [PROMPTS[1]], SamplingParams(max_tokens=15, temperature=1.5, seed=8, ignore_eos=True)
    )
    assert other[0].token_ids != alone
    unseeded = SamplingParams(max_tokens=15, temperature=3.0, ignore_eos=True)
    assert len({tuple(o.token_ids) for o in run(new_engine(model), [PROMPTS[1]] * 4, unseeded)}) == 4


def test_logprobs_are_those_of_the_raw_logits(model: Inkling, dense: Dense) -> None:
    """Temperature and cuts choose; they do not enter the reported numbers."""
    params = SamplingParams(max_tokens=6, temperature=0.7, top_k=3, seed=0, logprobs=2, ignore_eos=True)
    given = PROMPTS[3]
    output = run(new_engine(model), [given], params)[0]
    z = dense.logits(dense.hidden(given + output.token_ids))[len(given) - 1 : -1].numpy()
    exact = z - np.log(np.exp(z - z.max(1, keepdims=True)).sum(1, keepdims=True)) - z.max(1, keepdims=True)
    assert output.logprobs is not None
    assert len(output.logprobs) == 6
    for row, token, found in zip(exact, output.token_ids, output.logprobs, strict=True):
        assert set(found) == {token, *np.argsort(-row)[:2].tolist()}
        assert found == pytest.approx({t: row[t] for t in found}, abs=2e-4)
    only = run(new_engine(model), [given], SamplingParams(max_tokens=2, temperature=0, logprobs=0, ignore_eos=True))[0]
    assert [list(row) for row in only.logprobs or ()] == [[token] for token in only.token_ids]
    assert run(new_engine(model), [given])[0].logprobs is None


def test_what_ends_a_request(model: Inkling) -> None:
    given = PROMPTS[4]
    free = run(new_engine(model), [given], SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))[0].token_ids
    third = next(token for i, token in enumerate(free) if token not in free[:i] and token not in (5, 6) and i >= 3)
    at = free.index(third)
    stopped = run(new_engine(model), [given], SamplingParams(max_tokens=60, temperature=0, stop_token_ids=(third, 99)))[
        0
    ]
    first_end = min([at, *(i for i, token in enumerate(free) if token in (5, 6))])
    assert (stopped.token_ids, stopped.finish_reason) == (free[: first_end + 1], "stop")
    longest = run(
        new_engine(model, max_model_len=40), [given], SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    )
    assert (longest[0].token_ids, longest[0].finish_reason) == (free[: 40 - len(given)], "length")
    one = run(new_engine(model), [given], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))[0]
    assert (one.token_ids, one.finish_reason) == (free[:1], "length")


def test_an_end_of_text_token_of_the_config_ends_a_request(weights: Any, model: Inkling) -> None:
    free = run(new_engine(model), [PROMPTS[4]], SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))[
        0
    ].token_ids
    config, tensors = weights
    ending = build_tuned(config.replace(eos_token_id=(free[2],)), tensors, 0)[0]
    output = run(new_engine(ending), [PROMPTS[4]])[0]
    assert (output.token_ids, output.finish_reason) == (free[: free.index(free[2]) + 1], "stop")


def test_requests_that_cannot_be_served_are_refused_at_once(model: Inkling) -> None:
    engine = new_engine(model, max_model_len=30, num_pages={FULL: 3, SLIDING: 3})
    for tokens, params, message in (
        ([], GREEDY, "the prompt is empty"),
        (prompt(30), GREEDY, "has 30 tokens; with a context of 30 it may have at most 29"),
        (prompt(10), GREEDY, "cache pages"),
        ([7, 1.5], GREEDY, r"1\.5"),
        (["7"], GREEDY, "'7'"),
        ([7], SamplingParams(stop="x"), "stop is .*without a tokenizer"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit(tokens, params)  # type: ignore[arg-type]
    assert not engine.unfinished()
    assert len(run(engine, [prompt(4)], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))[0].token_ids) == 3


def test_more_requests_than_the_caches_hold_wait_their_turn(model: Inkling) -> None:
    """Random lengths, limits and arrivals through caches with room for about two, and nothing is lost on the way."""
    rng = random.Random(0)
    pages = {FULL: 14, SLIDING: 12}
    engine = new_engine(model, max_model_len=91, max_num_seqs=4, num_pages=pages, max_num_batched_tokens=20)
    waiting, expected, found = [], {}, {}
    for i in range(25):
        given, limit = prompt(rng.randint(1, 60), i % 5)[: rng.randint(1, 60)], rng.randint(1, 30)
        waiting.append((given, SamplingParams(max_tokens=limit, temperature=0, ignore_eos=True)))
    while waiting or engine.unfinished():
        for _ in range(rng.randint(0, 3)):
            if waiting:
                given, params = waiting.pop()
                expected[engine.submit(given, params)] = given, params.max_tokens
        for output, _ in engine.step():
            found[output.request_id] = output
    assert finish(engine) == {}
    big = new_engine(model)
    for index, (given, limit) in expected.items():
        whole = run(big, [given], SamplingParams(max_tokens=limit, temperature=0, ignore_eos=True))[0]
        assert found[index].outputs[0].token_ids == whole.token_ids
        assert found[index].prompt_token_ids == given
        timings = found[index].timings
        assert 0 <= timings["queued"] <= timings["first_token"] <= timings["total"]


def test_prompts_that_share_a_beginning_reuse_it(model: Inkling) -> None:
    engine = new_engine(model)
    stem = prompt(33, 70)
    first = engine.submit(stem, GREEDY)
    finish(engine)
    results = {}
    ids = [engine.submit([*stem, *prompt(n, 71)], GREEDY) for n in (1, 9)] + [engine.submit(prompt(33, 72), GREEDY)]
    while engine.unfinished():
        results |= {output.request_id: output for output, _ in engine.step()}
    assert [results[i].timings["reused_tokens"] for i in ids] == [32, 32, 0]
    assert first == 0


BAD: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 1.5, "3", None],
    "temperature": [-0.1, float("nan"), float("inf"), "hot"],
    "top_p": [0, -1, 1.01, float("nan"), "1"],
    "top_k": [-2, 2.5, "3"],
    "seed": [-1, 2**63, 0.5],
    "logprobs": [-1, 1.5],
    "stop": ["", ("a", ""), 3, (3,)],
    "stop_token_ids": [3, ("3",), (-1,)],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values], ids=str
)
def test_sampling_parameters_are_checked(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is .*; expected "):
        SamplingParams(**{name: value})


def test_sampling_parameters_take_lists_as_vllm_does() -> None:
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop="ab").stop == ("ab",)  # type: ignore[arg-type]
    assert SamplingParams(stop=None, stop_token_ids=None).stop_token_ids == ()  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)  # type: ignore[arg-type]
