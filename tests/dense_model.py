"""The decoder and its depths in float64, without any state, and an engine that notes what it computed.

Verification hides a wrong draft: the text stays right and only becomes slower. So `errors` compares what the engine's
depths computed at every step with a dense implementation that runs each depth over the whole sequence, with the
accepted tokens; and the logits that verified the drafts with those of the dense decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from inkling_portable.cache import FULL, SLIDING
from inkling_portable.engine import Engine
from inkling_portable.sampling import SamplingParams

LENGTHS = (1, 3, 7, 18, 41)
Media = Sequence[tuple[int, torch.Tensor]]
TOLERANCE = 2e-4  # of logits up to 20, float32 against float64


class Dense:
    """The decoder and its depths over whole sequences, from the formulas of the model, in float64."""

    def __init__(self, config: Any, tensors: dict[str, torch.Tensor]) -> None:
        self.config = config
        self.w = {name: value.double() for name, value in tensors.items()}

    def rms(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * self.w[f"{name}.weight"]

    def conv(self, x: torch.Tensor, name: str) -> torch.Tensor:
        w = self.w[f"{name}.weight"]
        past = F.pad(x, (0, 0, w.shape[1] - 1, 0))
        return x + sum(w[:, j] * past[j : j + len(x)] for j in range(w.shape[1]))

    def mlp(self, x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        both = x @ w13.T
        return (F.silu(both[..., 0::2]) * both[..., 1::2]) @ w2.T

    def attention(self, a: torch.Tensor, spec: Any, name: str) -> torch.Tensor:
        rows, group = len(a), spec.num_heads // spec.num_kv_heads
        q = self.rms((a @ self.w[f"{name}.wq_du.weight"].T).view(rows, -1, spec.head_dim), f"{name}.q_norm")
        k = self.conv(a @ self.w[f"{name}.wk_dv.weight"].T, f"{name}.k_sconv").view(rows, -1, spec.head_dim)
        v = self.conv(a @ self.w[f"{name}.wv_dv.weight"].T, f"{name}.v_sconv").view(rows, -1, spec.head_dim)
        r = (a @ self.w[f"{name}.wr_du.weight"].T).view(rows, -1, spec.d_rel)
        k, v = self.rms(k, f"{name}.k_norm").repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        distance = torch.arange(rows)[:, None] - torch.arange(rows)
        profiles = torch.einsum("thd,dx->htx", r, self.w[f"{name}.rel_logits_proj.proj"])
        bias = profiles.gather(2, distance.clamp(0, spec.extent - 1).expand(spec.num_heads, -1, -1))
        bias = bias.masked_fill((distance < 0) | (distance >= spec.extent), 0.0)
        score = torch.einsum("thd,jhd->htj", q, k) / spec.head_dim + bias
        if spec.log_scaling_n_floor:
            n = (torch.arange(rows, dtype=torch.float64) + 1) / spec.log_scaling_n_floor
            score *= (1 + spec.log_scaling_alpha * n.clamp(min=1).log())[:, None]
        hidden = (distance < 0) | (distance >= (spec.window or rows))
        weights = score.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("htj,jhd->thd", weights, v).flatten(1) @ self.w[f"{name}.wo_ud.weight"].T

    def experts(self, m: torch.Tensor, name: str) -> torch.Tensor:
        config, w = self.config, self.w
        z = m @ w[f"{name}.gate.weight"].T
        routed = z[:, : config.n_routed_experts]
        chosen = (routed.sigmoid() + w[f"{name}.gate.bias"]).topk(config.num_experts_per_tok).indices
        weights = torch.cat([routed.gather(1, chosen), z[:, config.n_routed_experts :]], 1)
        weights = F.logsigmoid(weights).softmax(-1) * config.route_scale * w[f"{name}.gate.global_scale"]
        every = torch.zeros(len(m), config.n_routed_experts, dtype=m.dtype)
        every = every.scatter(1, chosen, weights[:, : config.num_experts_per_tok])
        out = torch.zeros_like(m)
        for expert in range(config.n_routed_experts):
            y = self.mlp(m, w[f"{name}.experts.w13"][expert], w[f"{name}.experts.w2"][expert])
            out += every[:, expert, None] * y
        for s in range(config.n_shared_experts):
            shared = f"{name}.shared_experts.shared_"
            y = self.mlp(m, w[f"{shared}w13_weight"][s], w[f"{shared}w2_weight"][s])
            out += weights[:, config.num_experts_per_tok + s, None] * y
        return out

    def block(self, h: torch.Tensor, spec: Any, name: str) -> torch.Tensor:
        h = h + self.conv(self.attention(self.rms(h, f"{name}.attn_norm"), spec, f"{name}.attn"), f"{name}.attn_sconv")
        m = self.rms(h, f"{name}.mlp_norm")
        if spec.sparse:
            y = self.experts(m, f"{name}.mlp")
        else:
            y = self.mlp(m, self.w[f"{name}.mlp.w13_dn.weight"], self.w[f"{name}.mlp.w2_md.weight"])
            y = y * self.w[f"{name}.mlp.global_scale"]
        return h + self.conv(y, f"{name}.mlp_sconv")

    def embed(self, ids: list[int], media: Media = ()) -> torch.Tensor:
        rows = self.rms(self.w["llm.embed.weight"][ids], "llm.embed_norm")
        for at, given in media:
            rows[at : at + len(given)] = given.double()
        return rows

    def hidden(self, ids: list[int], media: Media = ()) -> torch.Tensor:
        h = self.embed(ids, media)
        for i in range(self.config.num_hidden_layers):
            h = self.block(h, self.config.layer(i), f"llm.layers.{i}")
        return self.rms(h, "llm.norm")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        head = self.w["llm.unembed.weight"][: self.config.unpadded_vocab_size]
        return hidden / self.config.logits_mup_width_multiplier @ head.T

    def drafting(self, hidden: torch.Tensor, ids: list[int], drafts: int, media: Media = ()) -> torch.Tensor:
        """Logits `[drafts, V]` of depths 0, 1, ... at the last of the rows `hidden` `[L, H]`."""
        rows, embedded, found = len(hidden), self.embed(ids, media), []
        for depth in range(drafts):
            name = f"mtp.layers.{depth}"
            token = self.rms(embedded[depth + 1 : depth + 1 + rows], f"{name}.embed_norm")
            x = torch.cat([self.rms(hidden, f"{name}.hidden_norm"), token], 1) @ self.w[f"{name}.input_proj.weight"].T
            hidden = self.block(x, self.config.mtp_layer(depth), f"{name}.transformer_block")
            if self.config.mtp.chain_hidden_post_norm:
                hidden = self.rms(hidden, "mtp.chain_norm")
            found.append(self.logits(hidden[-1]))
        return torch.stack(found)


class Watched(Engine):
    """The engine, noting what every step computed. `script` chooses the drafts: `(request id, tokens) -> tokens`."""

    script: Callable[[int, list[int]], list[int]] | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.drafted: list[tuple[int, list[int], list[int], torch.Tensor]] = []
        self.verified: list[tuple[int, int, torch.Tensor]] = []
        self.accepted: list[int] = []  # of the steps with all drafts
        self.steps: list[tuple[int, int]] = []  # (request, accepted) of all that verified drafts
        self.requests: dict[int, Any] = {}

    def _commit(self, plan: Any, hidden: Any, yielding: Any, logits: torch.Tensor, sound: torch.Tensor) -> Any:
        before = [(request, len(request.tokens), len(request.drafts)) for request, _ in yielding]
        events, at = super()._commit(plan, hidden, yielding, logits, sound), 0
        for (request, length, drafts), (_, span) in zip(before, yielding, strict=True):
            gained = len(request.tokens) - length
            self.requests[request.index] = request
            self.verified += [(request.index, length - 1 + i, logits[at + i].clone()) for i in range(gained)]
            if drafts:
                self.steps.append((request.index, gained - 1))
            if drafts == self.drafts:
                self.accepted.append(gained - 1)
            at += len(span)
        return events

    def _draft(self, requests: Any) -> None:
        head, rows, chosen = self.model.logits, [], []

        def noted(hidden: torch.Tensor) -> torch.Tensor:
            logits = head(hidden)
            rows.append(logits.clone())
            if self.script:
                for i, request in enumerate(requests):
                    logits[i, self.script(request.index, request.tokens)[len(rows) - 1]] = 1e9
            chosen.append(logits.argmax(-1).tolist())
            return logits

        self.model.logits = noted  # type: ignore[method-assign]
        try:
            super()._draft(requests)
        finally:
            del self.model.logits
        for i, request in enumerate(requests):
            if request.drafts:
                own = [each[i] for each in chosen]
                assert request.drafts == own[: len(request.drafts)]
                self.drafted.append((request.index, list(request.tokens), own, torch.stack([row[i] for row in rows])))


def watch(model: Any, mtp: Any, kind: type[Watched] = Watched, pages: int = 400, **options: Any) -> Watched:
    settings = {"max_model_len": 600, "block_size": 16, "num_pages": {FULL: pages, SLIDING: pages}} | options
    return kind(model, mtp, **settings)


def run(engine: Engine, prompts: list[list[int]], new: int = 24, **params: Any) -> list[list[int]]:
    first = min((engine.submit(p, SamplingParams(max_tokens=new, temperature=0, **params)) for p in prompts), default=0)
    found: dict[int, list[int]] = {}
    while engine.unfinished():
        for output, _ in engine.step():
            found[output.request_id - first] = output.outputs[0].token_ids
    return [found[i] for i in range(len(prompts))]


def prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 116, (n,), generator=generator).tolist() for n in lengths]


def errors(dense: Dense, engine: Watched) -> tuple[float, float]:
    """The largest differences of the engine's logits from the dense model's: when verifying, and when drafting."""
    hidden = {index: dense.hidden(request.tokens, request.media) for index, request in engine.requests.items()}
    verifying = [difference(dense.logits(hidden[i][at]), logits) for i, at, logits in engine.verified]
    drafting = []
    for i, tokens, drafts, logits in engine.drafted:
        media = engine.requests[i].media
        want = dense.drafting(hidden[i][: len(tokens) - 1], tokens + drafts, len(drafts), media)
        drafting.append(difference(want, logits))
        if engine.script is None:
            # The best token of every depth, or one as good to within rounding.
            drafting.append(float((want.max(-1).values - want[range(len(drafts)), drafts]).max()))
    return max(verifying), max(drafting)


def difference(want: torch.Tensor, found: torch.Tensor) -> float:
    assert want.shape == found.shape
    return float((want - found).abs().nan_to_num(nan=float("inf")).max())
