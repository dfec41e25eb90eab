"""Choosing tokens: what a request asks for, plain sampling, and the verification of drafts.

Logits are float32 rows over the real vocabulary. With temperature 0 the highest logit wins (the lowest id among
equals). Else `p = softmax(logits / temperature)`, cut to the `top_k` likeliest tokens and then to the smallest set of
likeliest tokens whose mass reaches `top_p`, renormalised. Draws come from the request's own generator, so they depend
on its seed and on nothing that runs beside it.

Verification keeps the distribution exactly that of plain sampling. A draft `x` is one proposed token (a point mass),
so it is accepted with probability `p(x)`; on rejection the token is drawn from `p` without `x`, renormalised.
(Speculative sampling, Leviathan et al. 2023, for a deterministic proposal.) With temperature 0 this is: accepted
while it equals the argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import torch


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks of the sampler; names and meanings are vLLM's.

    `top_k` 0 or -1 and `top_p` 1 keep every token. `logprobs` asks for that many likeliest tokens at each step beside
    the chosen one, from the raw logits. `stop` and `stop_token_ids` may be lists or None, `stop` also one string.
    Raises `ValueError` naming the field.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected {expected}")

        def integer(value: object, low: int, high: float = float("inf")) -> bool:
            return isinstance(value, Integral) and low <= int(value) < high

        def number(value: object) -> bool:
            return isinstance(value, Real)

        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if value is None or isinstance(value, str | list):
                object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value or ()))
        need(integer(self.max_tokens, 1), "max_tokens", "an integer of at least 1")
        warm = number(self.temperature) and 0 <= self.temperature < float("inf")
        need(warm, "temperature", "0 (greedy) or a positive finite number")
        need(number(self.top_p) and 0 < self.top_p <= 1, "top_p", "a number above 0 and at most 1")
        need(integer(self.top_k, -1), "top_k", "a positive integer, or 0 or -1 for all tokens")
        need(self.seed is None or integer(self.seed, 0, 2**63), "seed", "a non-negative integer below 2**63")
        need(self.logprobs is None or integer(self.logprobs, 0), "logprobs", "an integer of at least 0")
        texts = isinstance(self.stop, tuple) and all(isinstance(text, str) and text for text in self.stop)
        need(texts, "stop", "strings that are not empty")
        ids = isinstance(self.stop_token_ids, tuple) and all(integer(token, 0) for token in self.stop_token_ids)
        need(ids, "stop_token_ids", "token ids, integers of at least 0")

    def generator(self) -> torch.Generator | None:
        """A source of randomness for one request; None where the choice is greedy."""
        if self.temperature == 0:
            return None
        generator = torch.Generator()
        generator.manual_seed(self.seed) if self.seed is not None else generator.seed()
        return generator


def probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution `[V]` float64 that a row of logits `[V]` is sampled from (temperature above 0)."""
    # The difference first: a quotient of two large numbers would overflow where the temperature is tiny.
    p = torch.softmax((logits.double() - logits.max()) / params.temperature, -1)
    if params.top_k > 0 or params.top_p < 1:
        # A stable sort, so that which of several equal tokens survives a cut does not depend on the machine.
        ordered, index = torch.sort(p, descending=True, stable=True)
        if params.top_k > 0:
            ordered[params.top_k :] = 0
        if params.top_p < 1:
            before = ordered.cumsum(0) - ordered
            ordered[before >= params.top_p * ordered.sum()] = 0
        p = torch.zeros_like(p).scatter_(0, index, ordered)
    return p / p.sum()


def draw(p: torch.Tensor, generator: torch.Generator) -> int:
    """One token from the distribution `p` `[V]`."""
    return int(torch.multinomial(p, 1, generator=generator))


def verify(
    drafts: Sequence[int], logits: torch.Tensor, params: SamplingParams, generator: torch.Generator | None
) -> list[int]:
    """The tokens that a step yields: accepted drafts and one more.

    Row `i` of `logits` `[1 + len(drafts), V]` is the model's distribution after the tokens before draft `i`; the last
    row is the one after all of them. Without drafts this is plain sampling of one token.
    """
    if params.temperature == 0:
        best = logits.argmax(-1).tolist()
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == best[accepted]:
            accepted += 1
        return best[: accepted + 1]
    if generator is None:
        raise ValueError("generator is None; sampling with a temperature needs the request's own generator")
    tokens: list[int] = []
    for i, row in enumerate(logits):
        p = probabilities(row, params)
        if i == len(drafts):
            return [*tokens, draw(p, generator)]
        draft = drafts[i]
        if float(torch.rand(1, dtype=torch.float64, generator=generator)) < float(p[draft]):
            tokens.append(draft)
            continue
        p[draft] = 0
        return [*tokens, draw(p, generator)]
    return tokens
