"""A request on its way through the engine: its tokens, its text, and what comes out of it."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from inkling_portable.cache import SequenceState
from inkling_portable.sampling import SamplingParams
from inkling_portable.text import Detokenizer


@dataclass
class CompletionOutput:
    """What was generated for a request. `finish_reason` is 'stop', 'length' or 'error' (then `error` says what
    happened).
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    finish_reason: str | None = None
    error: str | None = None


@dataclass
class RequestOutput:
    """A request and its completion. `timings` are seconds: `queued`, `first_token` (both from submission) and
    `total`, with `tokens_per_second` of decoding. With speculative decoding there are also `steps`, those that
    verified drafts; `accepted`, in how many of them the draft of each position was; and `mean_accepted_length`, the
    tokens that such a step yields: `(sum(accepted) + steps) / steps`.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    timings: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Request:
    """What the engine knows of a request; `seq` is its state in the caches while it runs."""

    index: int
    prompt: str | None
    tokens: list[int]  # the prompt's, then the generated ones
    keys: list[int]  # the same, but naming the content of media where tokens are placeholders: what prefixes go by
    media: Sequence[tuple[int, torch.Tensor]]  # (position, rows [n, H]) that replace placeholders' embeddings
    params: SamplingParams
    limit: int  # tokens in all
    generator: torch.Generator | None
    text: Detokenizer | None
    submitted: float
    decoded: str = ""  # all text so far, also what may yet turn out to belong to a stop string
    prompt_length: int = 0
    seq: SequenceState | None = None
    drafts: list[int] = field(default_factory=list)
    output: CompletionOutput = field(default_factory=CompletionOutput)
    timings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def state(self) -> SequenceState:
        """The caches of a running request."""
        if self.seq is None:
            raise RuntimeError(f"request {self.index} is not running")
        return self.seq

    def result(self) -> RequestOutput:
        return RequestOutput(self.index, self.prompt, self.tokens[: self.prompt_length], [self.output], self.timings)

    def take(self, tokens: Sequence[int], logits: torch.Tensor, end_ids: Collection[int]) -> str:
        """Add `tokens`, chosen from the rows of `logits`, until something ends the request; returns the new text.

        The last characters are held back while a stop string may begin with them, so text once out is never cut.
        """
        params, output = self.params, self.output
        held = max(map(len, params.stop), default=1) - 1
        self.timings.setdefault("first_token", time.perf_counter() - self.submitted)
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else end_ids)}
        for row, token in zip(logits, tokens, strict=False):
            self.tokens.append(token)
            self.keys.append(token)
            output.token_ids.append(token)
            if output.logprobs is not None:
                logprob = torch.log_softmax(row, -1)
                best = torch.topk(logprob, min(params.logprobs or 0, len(row)))
                chosen = {token: float(logprob[token])}
                output.logprobs.append(chosen | dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
            if token in stops:
                output.finish_reason = "stop"
            elif len(self.tokens) >= self.limit:
                output.finish_reason = "length"
            if self.text and token not in stops:
                self.decoded += self.text.push(token, last=output.finish_reason is not None)
            elif self.text:
                self.decoded += self.text.flush()
            found = [at for stop in params.stop if (at := self.decoded.find(stop, len(output.text))) >= 0]
            if found:
                self.decoded, output.finish_reason = self.decoded[: min(found)], "stop"
            if output.finish_reason:
                held = 0
                break
        return self._let_out(held)

    def fail(self, error: str) -> tuple[RequestOutput, str]:
        """End the request by an error, which is said to be its own; returns its output and its last text."""
        self.output.finish_reason, self.output.error = "error", f"request {self.index}: {error}"
        return self.result(), self._let_out(0)

    def _let_out(self, held: int) -> str:
        out = len(self.output.text)
        text = self.decoded[out : max(len(self.decoded) - held, out)]
        self.output.text += text
        return text

    def count_accepted(self, drafts: int, accepted: int) -> None:
        """Note a step that verified drafts, of `drafts` at most, and accepted so many."""
        counts = self.timings.setdefault("accepted", [0] * drafts)
        for i in range(accepted):
            counts[i] += 1
        steps = self.timings["steps"] = self.timings.get("steps", 0) + 1
        self.timings["mean_accepted_length"] = (sum(counts) + steps) / steps

    def note_end(self) -> None:
        """Note how long everything took."""
        total = self.timings["total"] = time.perf_counter() - self.submitted
        decoding = total - self.timings.get("first_token", total)
        if len(self.output.token_ids) > 1 and decoding > 0:
            self.timings["tokens_per_second"] = (len(self.output.token_ids) - 1) / decoding
