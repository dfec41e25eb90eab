"""A small engine over the shared model: continuous batching, chunked prefill, prefix reuse, speculative decoding.

It serves the command line, the tests and the benchmarks; serving users is vLLM's job, and the Python names follow
vLLM's.

A step takes rows from every running sequence: one and its drafts where it decodes, a piece of its prompt where it is
still being read, up to `max_num_batched_tokens` rows in all. Requests are admitted when the caches can hold them to
their end, so none is ever pushed out. A request whose logits are not finite fails by name; the others go on.

For a model that was bound for `batch_invariant` (`inkling_kernels.batch_invariant`), rows of prompts and rows of
generated tokens do not share a step, the latter state the most rows that they may ever have, and only pages of prompts
are kept for reuse: so a row's kernels do not depend on what else is running, or has run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from numbers import Integral

import torch

from inkling_portable.cache import Cache
from inkling_portable.model import Inkling
from inkling_portable.mtp import MultiTokenPrediction
from inkling_portable.request import CompletionOutput, Request, RequestOutput
from inkling_portable.sampling import SamplingParams, verify
from inkling_portable.text import Detokenizer, TextCodec


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
        self.batch_invariant = model.ops.facts.batch_invariant
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
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
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
        request = Request(self._count, prompt, list(tokens), names, media, *rest)
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
        if params.stop and self.codec is None:
            raise ValueError(
                f"stop is {params.stop}; without a tokenizer there is no text, give stop_token_ids instead"
            )
        vocabulary = self.config.unpadded_vocab_size
        for token in tokens:
            if not isinstance(token, Integral):
                raise ValueError(f"token id {token!r} is not an integer; the vocabulary is 0..{vocabulary - 1}")
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

    def abort(self, requests: Collection[int]) -> None:
        """Drop the requests with these ids that have not ended; what they hold goes back."""
        self._waiting = deque(request for request in self._waiting if request.index not in requests)
        for request in [request for request in self._running if request.index in requests]:
            self._close(request)

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
        if self.batch_invariant:
            reading = any(_reading(request) for request, _ in plan)
            batch = replace(batch, max_query_len=None if reading else 1 + self.drafts, decode_query_len=None)
        spans = [(request, request.state.length, n) for request, n in plan]
        ids = [t for request, at, n in spans for t in request.tokens[at : at + n] + request.drafts]
        hidden = self.model(self._embed(ids, spans), batch)
        yielding = self._yielding(plan)
        rows = self._index([row for _, span in yielding for row in span])
        events = self._commit(plan, hidden, yielding, *self.model.checked_logits(hidden[rows]))
        sound = [request for request, _ in plan if request.output.finish_reason != "error"]
        self._draft(sound)
        for request in sound:
            self.cache.retire(request.state)
            if not self.batch_invariant or request.state.length <= request.prompt_length:
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

    def _plan(self) -> list[tuple[Request, int]]:
        """Which sequences take how many rows; decoding ones first, equal row counts side by side."""
        decoding = [r for r in self._running if len(r.tokens) - r.state.length == 1]
        if self.batch_invariant and any(map(_reading, self._running)):
            decoding = [r for r in decoding if _reading(r)]
        plan = [(r, 1 + len(r.drafts)) for r in decoding]
        budget = max(self.chunk - sum(n for _, n in plan), 0 if plan else 1)
        for request in self._running:
            left = len(request.tokens) - request.state.length
            if left > 1 and budget > 0:
                n = min(left, budget)
                n = self._end_at_page(request.state.length, n, left)
                plan.append((request, n))
                budget -= n
        return sorted(plan, key=lambda item: item[1])

    def _end_at_page(self, start: int, rows: int, left: int) -> int:
        """Shorten a piece of a prompt so that it ends where its state can be kept for reuse: at the last page
        boundary.
        """
        if not self.cache.prefix_caching:
            return rows
        # The same prompt again must leave its last token to compute, so its very end is no boundary to reuse.
        end = start + rows - (rows == left)
        boundary = end // self.cache.page_size * self.cache.page_size
        kept = self.cache.ring - (self.config.conv_kernel_size - 1) - self.drafts
        return boundary - start if start < boundary and start + rows - boundary > kept else rows

    def _embed(self, ids: list[int], spans: list[tuple[Request, int, int]]) -> torch.Tensor:
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

    def _yielding(self, plan: list[tuple[Request, int]]) -> list[tuple[Request, range]]:
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
        plan: list[tuple[Request, int]],
        hidden: torch.Tensor,
        yielding: list[tuple[Request, range]],
        logits: torch.Tensor,
        sound: torch.Tensor,
    ) -> list[tuple[RequestOutput, str]]:
        events, at, finite = self._fail_unread(plan, hidden), 0, sound.tolist()
        committed = {id(request): n for request, n in plan}
        for request, span in yielding:
            # Rows behind a draft that makes the logits overflow say nothing of the tokens before it.
            usable = (*finite[at : at + len(span)], False).index(False)
            part = logits[at : at + usable]
            at += len(span)
            if not usable:
                events.append(request.fail(f"the logits for position {len(request.tokens)} are not finite"))
                continue
            tokens = verify(request.drafts[: usable - 1], part, request.params, request.generator)
            before, text = len(request.tokens), request.take(tokens, part, self.config.eos_token_id)
            if request.drafts:
                request.count_accepted(self.drafts, len(tokens) - 1)
                committed[id(request)] = len(request.tokens) - before
            events.append((request.result(), text))
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

    def _fail_unread(self, plan: list[tuple[Request, int]], hidden: torch.Tensor) -> list[tuple[RequestOutput, str]]:
        """End the requests whose piece of prompt left hidden states that are not finite, before anyone reuses them."""
        events, row, finite = [], 0, torch.isfinite(hidden).all(-1).tolist()
        for request, n in plan:
            first = request.state.length
            if len(request.tokens) - first > n and not all(finite[row : row + n]):
                position = first + finite[row : row + n].index(False)
                events.append(request.fail(f"the hidden states of position {position} are not finite"))
            row += n
        return events

    # -- drafting ----------------------------------------------------------------------------------------------------

    def _draft(self, requests: list[Request]) -> None:
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
        if self.batch_invariant:
            batch = replace(batch, max_query_len=None, decode_query_len=None)
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

    def _close(self, request: Request) -> None:
        request.note_end()
        self.cache.close(request.state)
        request.seq = None
        self._running.remove(request)


def _reading(request: Request) -> bool:
    """Whether the next row of the request is one of its prompt."""
    return request.state.length < request.prompt_length
