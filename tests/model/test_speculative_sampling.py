"""Speculative sampling keeps the distribution of plain sampling, by chi-square tests over 20,000 samples and more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from dense_model import watch
from scipy.stats import chi2
from tuned_model import build_tuned, tuned_config, tuned_tensors

from inkling_portable import engine as engine_module
from inkling_portable.sampling import SamplingParams, verify

SAMPLES = 21_000
PARAMS = {
    "plain": {},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "all three": {"top_k": 6, "top_p": 0.9, "temperature": 1.3},
}
Verify = Callable[[Sequence[int], torch.Tensor, SamplingParams, Any], list[int]]


def distribution(logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """What plain sampling draws from, written out by sorting."""
    p = np.exp((logits - logits.max()) / temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = order[: top_k or len(p)]
    mass = np.cumsum(p[kept]) / p[kept].sum()
    kept = kept[: int(np.searchsorted(mass, top_p * (1 - 1e-12))) + 1]
    out = np.zeros_like(p)
    out[kept] = p[kept] / p[kept].sum()
    return out


def p_value(counts: Counter[int], p: np.ndarray) -> float:
    """Of a chi-square test; outcomes expected less than 5 times are one, and an impossible outcome settles it."""
    total = sum(counts.values())
    if any(p[token] == 0 for token in counts):
        return 0.0
    expected, found = p * total, np.array([counts[token] for token in range(len(p))])
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    found = np.append(found[~rare], found[rare].sum())
    kept = expected > 0
    statistic = ((found[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    return float(chi2.sf(statistic, kept.sum() - 1))


def tables(seed: int = 0) -> tuple[torch.Tensor, list[int]]:
    """A language of 12 tokens: logits after each token, and a draft after each (a likely one, a rare one, any)."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(12, 12, generator=generator) * 1.5
    ranks = logits.argsort(-1, descending=True)
    return logits, [int(ranks[token, (0, 1, 4, 11)[token % 4]]) for token in range(12)]


def walk(check: Verify, samples: int, drafts: int = 3, **params: Any) -> list[tuple[int, int]]:
    """Pairs of neighbouring tokens in a text of `samples` tokens, drawn by steps of `drafts` drafts."""
    logits, drafted = tables()
    generator, asked = torch.Generator().manual_seed(11), SamplingParams(**params)
    text = [3]
    while len(text) <= samples:
        proposal = [text[-1]]
        while len(proposal) <= drafts:
            proposal.append(drafted[proposal[-1]])
        text += check(proposal[1:], logits[proposal], asked, generator)
    return list(pairwise(text))


def p_values(pairs: list[tuple[int, int]], expected: list[np.ndarray]) -> list[float]:
    """A test for each token of what follows it."""
    after: dict[int, Counter[int]] = {}
    for token, following in pairs:
        after.setdefault(token, Counter())[following] += 1
    return [p_value(counts, expected[token]) for token, counts in after.items() if sum(counts.values()) >= 100]


def expectation(**params: Any) -> list[np.ndarray]:
    return [distribution(row.double().numpy(), **params) for row in tables()[0]]


@pytest.mark.parametrize("name", PARAMS)
def test_verified_drafts_are_distributed_as_plain_samples(name):
    values = p_values(walk(verify, SAMPLES, **PARAMS[name]), expectation(**PARAMS[name]))
    assert len(values) > 5
    assert min(values) > 1e-4, values


def always(drafts: Sequence[int], logits: torch.Tensor, params: SamplingParams, generator: Any) -> list[int]:
    return [*drafts, *verify([], logits[-1:], params, generator)]


def redrawn_from_all(drafts: Sequence[int], logits: torch.Tensor, params: SamplingParams, generator: Any) -> list[int]:
    """A rejected draft can be drawn again."""
    for i, draft in enumerate(drafts):
        p = distribution(logits[i].double().numpy(), params.temperature, params.top_k, params.top_p)
        if float(torch.rand(1, generator=generator)) >= p[draft]:
            return [*drafts[:i], *verify([], logits[i : i + 1], params, generator)]
    return always(drafts, logits, params, generator)


def redrawn_from_next(drafts: Sequence[int], logits: torch.Tensor, params: SamplingParams, generator: Any) -> list[int]:
    """The token in place of a rejected draft comes from the row behind it."""
    found = verify(drafts, logits, params, generator)
    rejected = len(found) <= len(drafts)
    return [*found[:-1], *verify([], logits[len(found) : len(found) + 1], params, generator)] if rejected else found


def uncut(drafts: Sequence[int], logits: torch.Tensor, params: SamplingParams, generator: Any) -> list[int]:
    """Drafts are accepted by the whole distribution, before top-k and top-p."""
    for i, draft in enumerate(drafts):
        p = distribution(logits[i].double().numpy(), params.temperature)
        if float(torch.rand(1, generator=generator)) >= p[draft]:
            cut = logits[i : i + 1].clone()
            cut[0, draft] = -1e9
            return [*drafts[:i], *verify([], cut, params, generator)]
    return always(drafts, logits, params, generator)


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        (always, "plain"),
        (always, "top-p"),
        (redrawn_from_all, "plain"),
        (redrawn_from_next, "plain"),
        (uncut, "top-k"),
    ],
)
def test_broken_verification_fails(broken, name):
    assert min(p_values(walk(broken, 4000, **PARAMS[name]), expectation(**PARAMS[name]))) < 1e-12


def bigrams(check: Verify | None, tokens: int) -> tuple[list[tuple[int, int]], list[np.ndarray], float]:
    """Pairs of neighbouring tokens from 32 texts, what a token's followers are drawn from, and drafts accepted a step.

    With nothing added by the layers, the model's next token depends on the token before it alone.
    """
    config = tuned_config(
        3, (0,), vocab_size=16, unpadded_vocab_size=12, num_hidden_layers=1, local_layer_ids=(0,), vision=None,
        audio=None, image_token_id=None, audio_token_id=None, image_bos_token_id=None, audio_bos_token_id=None,
    )  # fmt: skip
    tensors = tuned_tensors(config, noise=0.0)
    tensors["llm.unembed.weight"] *= 0.2
    model, mtp = build_tuned(config, tensors, 3)
    with pytest.MonkeyPatch.context() as patch:
        if check is not None:
            patch.setattr(engine_module, "verify", check)
        engine = watch(model, mtp, max_num_seqs=32, pages=32 * 24)
        texts = {}
        for seed in range(32):
            engine.submit([seed % 12], SamplingParams(max_tokens=tokens, seed=7919 * seed + 1000))
        while engine.unfinished():
            for output, _ in engine.step():
                texts[output.request_id] = output.prompt_token_ids + output.outputs[0].token_ids
    pairs = [pair for text in texts.values() for pair in pairwise(text)]
    hidden = torch.nn.functional.rms_norm(tensors["llm.embed.weight"].double(), (64,), eps=1e-6)
    hidden = hidden * tensors["llm.norm.weight"].double()
    logits = hidden / config.logits_mup_width_multiplier @ tensors["llm.unembed.weight"][:12].double().T
    steps = len(engine.accepted)
    return pairs, [distribution(row.numpy()) for row in logits[:12]], sum(engine.accepted) / steps


def test_an_engine_that_drafts_samples_as_one_that_does_not():
    pairs, expected, accepted = bigrams(None, 280)
    assert len(pairs) == 32 * 280
    assert 0.2 < accepted < 2.5
    values = p_values(pairs, expected)
    assert min(values) > 1e-4, values
    pairs, _, accepted = bigrams(always, 280)
    assert accepted == 3
    values = p_values(pairs, expected)
    assert min(values) < 1e-12
