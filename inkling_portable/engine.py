"""A small engine over the shared model: continuous batching, chunked prefill, prefix reuse, speculative decoding.

It serves the command line, the tests and the benchmarks; serving users is vLLM's job, and the Python names follow
vLLM's.

A step takes rows from every running sequence: one and its drafts where it decodes, a piece of its prompt where it is
still being read, up to `max_num_batched_tokens` rows in all. Requests are admitted when the caches can hold them to
their end, so none is ever pushed out. A request whose logits are not finite fails by name; the others go on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from inkling_portable.cache import Cache, SequenceState
from inkling_portable.model import Inkling
from inkling_portable.mtp import MultiTokenPrediction
from inkling_portable.sampling import SamplingParams, verify
from inkling_portable.text import Detokenizer, TextCodec


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
class _Request:
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


class Engine:
    """Steps requests through a model that is already built; `LLM` wraps it for people."""

    def __init__(
        self,
        model: Inkling,
        mtp: MultiTokenPrediction | None,
        *,
        max_model_len: int,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 512,
        block_size: int = 64,
        num_pages: Mapping[str, int],
        enable_prefix_caching: bool = True,
        device: str = "cpu",
        codec: TextCodec | None = None,
    ) -> None:
        self.model, self.mtp, self.config, self.codec = model, mtp, model.config, codec
        self.max_model_len, self.max_num_seqs, self.chunk = max_model_len, max_num_seqs, max_num_batched_tokens
        self.drafts = len(mtp.depths) if mtp else 0
        self.cache = Cache(
            self.config,
            page_size=block_size,
            num_pages=dict(num_pages),
            max_seqs=max_num_seqs,
            dtype=model.dtype,
            device=device,
            draft_rows=self.drafts,
            mtp_layers=self.drafts,
            prefix_caching=enable_prefix_caching,
        )
        self.device = torch.device(device)
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._count = 0

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
        media: Sequence[tuple[int, torch.Tensor]] = (),
        keys: Sequence[int] | None = None,
    ) -> int:
        """Queue a request and return its id. Raises `ValueError` for what cannot be served; see `check`.

        `media` holds `(position, rows [n, H])`: embeddings that stand where the prompt has placeholders. `keys` name
        every prompt position for prefix reuse and default to the tokens; placeholders of different media need
        different keys.
        """
        limit = self.check(tokens, params)
        text, names = Detokenizer(self.codec) if self.codec else None, list(tokens if keys is None else keys)
        rest = params, limit, params.generator(), text, time.perf_counter()
        request = _Request(self._count, prompt, list(tokens), names, media, *rest)
        if params.logprobs is not None:
            request.output.logprobs = []
        self._count += 1
        self._waiting.append(request)
        return request.index

    def refuse(self, prompt: str | None, error: str) -> RequestOutput:
        """The output, with an id in turn, of a request that cannot be served for the reason `error`."""
        self._count += 1
        return RequestOutput(self._count - 1, prompt, [], [CompletionOutput(finish_reason="error", error=error)])

    def check(self, tokens: Sequence[int], params: SamplingParams) -> int:
        """How many tokens a request may come to. Raises `ValueError` for tokens or lengths that cannot be served."""
        if not tokens:
            raise ValueError("the prompt is empty; give at least one token")
        vocabulary = self.config.unpadded_vocab_size
        for token in tokens:
            if not 0 <= token < vocabulary:
                raise ValueError(f"token id {token} is out of range; the vocabulary is 0..{vocabulary - 1}")
        if len(tokens) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens; with a context of {self.max_model_len} it may have at most "
                f"{self.max_model_len - 1}"
            )
        limit = min(len(tokens) + params.max_tokens, self.max_model_len)
        need = self.cache.pages_needed(limit, self.chunk)
        if any(need[kind] > pool.size for kind, pool in self.cache.pools.items()):
            have = {kind: pool.size for kind, pool in self.cache.pools.items()}
            raise ValueError(
                f"the request needs {need} cache pages of {self.cache.page_size} tokens, the cache has {have}; "
                "ask for fewer tokens or give it more memory"
            )
        return limit

    def _index(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def unfinished(self) -> bool:
        return bool(self._waiting or self._running)

    # -- one step ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[tuple[RequestOutput, str]]:
        """Run one step; return the requests that got text or ended, each with the text it got."""
        self._admit()
        plan = self._plan()
        if not plan:
            return []
        batch = self.cache.batch([request.state for request, _ in plan], [n for _, n in plan])
        spans = [(request, request.state.length, n) for request, n in plan]
        ids = [t for request, at, n in spans for t in request.tokens[at : at + n] + request.drafts]
        hidden = self.model(self._embed(ids, spans), batch)
        yielding = self._yielding(plan)
        logits = self.model.logits(hidden[self._index([row for _, span in yielding for row in span])])
        events = self._commit(plan, hidden, yielding, logits)
        sound = [request for request, _ in plan if request.output.finish_reason != "error"]
        self._draft(sound)
        for request in sound:
            self.cache.retire(request.state)
            self.cache.register(request.state, request.keys)
        for request, _ in plan:
            if request.output.finish_reason is not None:
                self._close(request)
        return events

    def _admit(self) -> None:
        now = time.perf_counter()
        while self._waiting and len(self._running) < self.max_num_seqs:
            request = self._waiting[0]
            if not self.cache.fits(request.limit, self.chunk):
                break
            self._waiting.popleft()
            request.seq = self.cache.open(request.keys, request.limit, self.chunk)
            request.timings["queued"] = now - request.submitted
            request.timings["reused_tokens"] = request.seq.length
            self._running.append(request)

    def _plan(self) -> list[tuple[_Request, int]]:
        """Which sequences take how many rows; decoding ones first, equal row counts side by side."""
        decoding = [r for r in self._running if len(r.tokens) - r.state.length == 1]
        plan = [(r, 1 + len(r.drafts)) for r in decoding]
        budget = max(self.chunk - sum(n for _, n in plan), 0 if plan else 1)
        for request in self._running:
            left = len(request.tokens) - request.state.length
            if left > 1 and budget > 0:
                n = min(left, budget)
                n = self._end_at_page(request.state.length, n)
                plan.append((request, n))
                budget -= n
        return sorted(plan, key=lambda item: item[1])

    def _end_at_page(self, start: int, rows: int) -> int:
        """Shorten a piece of a prompt so that it ends where its state can be kept for reuse: at the last page
        boundary.
        """
        if not self.cache.prefix_caching:
            return rows
        boundary = (start + rows) // self.cache.page_size * self.cache.page_size
        kept = self.cache.ring - (self.config.conv_kernel_size - 1) - self.drafts
        return boundary - start if start < boundary and start + rows - boundary > kept else rows

    def _embed(self, ids: list[int], spans: list[tuple[_Request, int, int]]) -> torch.Tensor:
        """Embedding rows of `ids`; each span is `(request, position of its first row, rows)`. Media replace
        placeholders.
        """
        h, row = self.model.embedding(self._index(ids)), 0
        for request, first, n in spans:
            for at, rows in request.media:
                a, b = max(first, at), min(first + n, at + len(rows))
                if a < b:
                    h[row + a - first : row + b - first] = rows[a - at : b - at].to(h.dtype)
            row += n
        return h

    def _yielding(self, plan: list[tuple[_Request, int]]) -> list[tuple[_Request, range]]:
        """The rows whose logits are needed: all of a decoding sequence, the last of a finished prompt."""
        found, row = [], 0
        for request, n in plan:
            known = len(request.tokens) - request.state.length
            if known == 1:
                found.append((request, range(row, row + n)))
            elif known == n:
                found.append((request, range(row + n - 1, row + n)))
            row += n
        return found

    def _commit(
        self,
        plan: list[tuple[_Request, int]],
        hidden: torch.Tensor,
        yielding: list[tuple[_Request, range]],
        logits: torch.Tensor,
    ) -> list[tuple[RequestOutput, str]]:
        finite = torch.isfinite(logits).all(-1).tolist()
        events, at = [], 0
        committed = {id(request): n for request, n in plan}
        for request, span in yielding:
            part, ok = logits[at : at + len(span)], all(finite[at : at + len(span)])
            at += len(span)
            if not ok:
                position = len(request.tokens)
                request.output.finish_reason = "error"
                request.output.error = f"request {request.index}: the logits for position {position} are not finite"
                events.append((self._output(request), ""))
                continue
            tokens, before = verify(request.drafts, part, request.params, request.generator), len(request.tokens)
            text = self._append(request, tokens, part)
            if request.drafts:
                self._count_accepted(request, len(tokens) - 1)
                committed[id(request)] = len(request.tokens) - before
            events.append((self._output(request), text))
        row = 0
        for request, n in plan:
            seq, kept = request.state, committed[id(request)]
            if self.drafts:
                # Entries computed with drafts that were then accepted stand; the others are computed again.
                if request.drafts:
                    seq.mtp_length = max(min(seq.length, seq.length + kept - self.drafts), 0)
                rows = hidden[row : row + kept]
                seq.hidden = rows if seq.hidden is None else torch.cat([seq.hidden, rows])
            request.drafts = []
            self.cache.advance(seq, kept)
            row += n
        return events

    def _append(self, request: _Request, tokens: list[int], logits: torch.Tensor) -> str:
        """Take `tokens` into the request until something ends it; returns the new text."""
        params, output, text = request.params, request.output, ""
        request.timings.setdefault("first_token", time.perf_counter() - request.submitted)
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.config.eos_token_id))
        for row, token in zip(logits, tokens, strict=False):
            request.tokens.append(token)
            request.keys.append(token)
            output.token_ids.append(token)
            if output.logprobs is not None:
                logprob = torch.log_softmax(row, -1)
                best = torch.topk(logprob, min(params.logprobs or 0, len(row)))
                chosen = {token: float(logprob[token])}
                output.logprobs.append(chosen | dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
            if token in stops:
                output.finish_reason = "stop"
            elif len(request.tokens) >= request.limit:
                output.finish_reason = "length"
            if request.text and token not in stops:
                text += request.text.push(token, last=output.finish_reason is not None)
            elif request.text:
                text += request.text.flush()
            if request.text and (cut := _first_stop(output.text + text, params.stop)) is not None:
                text = (output.text + text)[len(output.text) : cut] if cut >= len(output.text) else ""
                output.text, output.finish_reason = output.text[:cut], "stop"
            if output.finish_reason:
                break
        output.text += text
        return text

    def _count_accepted(self, request: _Request, accepted: int) -> None:
        timings = request.timings
        counts = timings.setdefault("accepted", [0] * self.drafts)
        for i in range(accepted):
            counts[i] += 1
        steps = timings["steps"] = timings.get("steps", 0) + 1
        timings["mean_accepted_length"] = (sum(counts) + steps) / steps

    # -- drafting ----------------------------------------------------------------------------------------------------

    def _draft(self, requests: list[_Request]) -> None:
        """Bring the depths' state up to the committed positions and draft for the sequences that decode next."""
        if self.mtp is None or not requests:
            return
        starts, rows, prev = [], [], []
        for request in requests:
            seq = request.state
            starts.append(seq.mtp_length)
            rows.append(seq.length - seq.mtp_length)
            prev.append(seq.newest_hidden(rows[-1]))
        batch = self.cache.batch([r.state for r in requests], rows, starts)
        hidden = torch.cat(prev)
        last = batch.cu_seqlens[1:].long() - 1
        drafting = [r.state.length == len(r.tokens) - 1 and r.output.finish_reason is None for r in requests]
        drafts: list[list[int]] = [[] for _ in requests]
        for depth in range(self.drafts):
            ids = []
            for request, start, n, own in zip(requests, starts, rows, drafts, strict=True):
                first, end = start + 1 + depth, len(request.tokens)
                known = (request.tokens[first : first + n] + own[max(first - end, 0) :])[:n]
                # Near the end of a prompt that is still being read the token is not known yet: any will do, because the
                # entry is not final and is computed again.
                ids += known + [0] * (n - len(known))
            spans = [(r, start + 1 + depth, n) for r, start, n in zip(requests, starts, rows, strict=True)]
            hidden = self.mtp(depth, hidden, self._embed(ids, spans), batch)
            best = self.model.logits(hidden[last]).argmax(-1).tolist()
            for own, token, wanted in zip(drafts, best, drafting, strict=True):
                if wanted:
                    own.append(token)
        for request, own in zip(requests, drafts, strict=True):
            seq = request.state
            request.drafts = own[: max(request.limit - len(request.tokens) - 1, 0)]
            seq.mtp_length = max(min(seq.length, len(request.tokens) - self.drafts), 0)
            seq.hidden = seq.newest_hidden(2 * self.drafts + 1).clone()

    # -- results -----------------------------------------------------------------------------------------------------

    def _output(self, request: _Request) -> RequestOutput:
        prompt = request.tokens[: request.prompt_length]
        return RequestOutput(request.index, request.prompt, prompt, [request.output], request.timings)

    def _close(self, request: _Request) -> None:
        timings, total = request.timings, time.perf_counter() - request.submitted
        timings["total"] = total
        if "first_token" in timings and len(request.output.token_ids) > 1 and total > timings["first_token"]:
            timings["tokens_per_second"] = (len(request.output.token_ids) - 1) / (total - timings["first_token"])
        self.cache.close(request.state)
        request.seq = None
        self._running.remove(request)


def _first_stop(text: str, stops: Sequence[str]) -> int | None:
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
