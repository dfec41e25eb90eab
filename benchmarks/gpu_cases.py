"""What the `gpu` benchmark times: inputs of the released sizes, variants of each operation, and their float64 oracles.

Inputs are made on any device, also on `meta`, where nothing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from inkling_kernels.moe_gemm import moe_experts
from inkling_kernels.moe_gemm_fp4 import prepare_experts
from inkling_kernels.norm import rms_norm
from inkling_kernels.numerics import ExpertWeight, dequantize
from inkling_kernels.rel_attention import rel_attention
from inkling_kernels.rel_attention_decode import rel_attention_decode
from inkling_kernels.routing import routing
from inkling_kernels.short_conv import short_conv
from inkling_kernels.target import Target
from inkling_portable.config import LayerSpec, preset

Tensor = torch.Tensor
PAGE, BF16 = 16, 2


@dataclass
class Timed:
    """One case: its variants by name, ours first; the gate, which returns the largest error as a part of what is
    allowed; the least bytes and operations of the task (0: not set against a roof); what is asked of the times."""

    name: str
    calls: dict[str, Callable[[], Any]]
    gate: Callable[[dict[str, Any]], dict[str, float]]
    bytes: int = 0
    operations: int = 0
    asked: dict[str, float] = field(default_factory=dict)


@dataclass
class Attention:
    """A batch of sequences with `rows` query rows and `keys` keys each, over shuffled pages."""

    spec: LayerSpec
    rows: int
    keys: int
    q: Tensor
    r: Tensor
    k_pages: Tensor
    v_pages: Tensor
    proj: Tensor
    block_table: Tensor
    cu_seqlens: Tensor
    kv_lens: Tensor

    @classmethod
    def make(cls, spec: LayerSpec, batch: int, rows: int, keys: int, device: torch.device | str) -> Attention:
        pages = -(-keys // PAGE)

        def normal(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()

        order = torch.randperm(batch * pages, device="cpu").to(device=device, dtype=torch.int32)
        pool = (batch * pages, PAGE, spec.num_kv_heads, spec.head_dim)
        return cls(
            spec, rows, keys, normal(batch * rows, spec.num_heads, spec.head_dim),
            normal(batch * rows, spec.num_heads, spec.d_rel), normal(*pool), normal(*pool),
            (normal(spec.extent, spec.d_rel) / 4).t(), order.view(batch, pages),
            torch.arange(batch + 1, dtype=torch.int32, device=device) * rows,
            torch.full((batch,), keys, dtype=torch.int32, device=device),
        )  # fmt: skip

    @property
    def batch(self) -> int:
        return len(self.kv_lens)

    def run(self, target: Target | None, *, bias: bool = True) -> Tensor:
        """Our kernel. Without `bias` its extent is 1, so that only the tiles on the diagonal multiply one: the same
        tiling with (almost) no bias."""
        proj = self.proj if bias else self.proj[:, :1]
        given = (self.q, self.r, self.k_pages, self.v_pages, proj, self.block_table, self.cu_seqlens, self.kv_lens)
        options: dict[str, Any] = {"window": self.spec.window, "scale": 1 / self.spec.head_dim, "target": target}
        if self.rows > 9:
            return rel_attention(*given, **options)
        return rel_attention_decode(*given, **options, max_query_len=self.rows)

    def dense(self, pages: Tensor) -> Tensor:
        """Keys or values as `[B, Hkv, keys, D]`."""
        flat = pages[self.block_table.long()].flatten(1, 2)[:, : self.keys]
        return flat.transpose(1, 2).contiguous()

    def flex(self) -> Callable[[], Tensor]:
        """torch's compiled flex attention over dense keys, reading relative logits that are made here, untimed."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        extent, window, first = self.spec.extent, self.spec.window, self.keys - self.rows
        q = self.q.view(self.batch, self.rows, *self.q.shape[1:]).transpose(1, 2).contiguous()
        r = self.r.view(self.batch, self.rows, *self.r.shape[1:]).transpose(1, 2)
        logits = (r @ self.proj).contiguous()
        k, v = self.dense(self.k_pages), self.dense(self.v_pages)

        def score(value: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            distance = i + first - j
            inside = (distance >= 0) & (distance < extent)
            return value + torch.where(inside, logits[b, h, i, distance.clamp(0, extent - 1)], 0.0)

        def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            distance = i + first - j
            return (distance >= 0) & (distance < window) if window is not None else distance >= 0

        mask = create_block_mask(seen, None, None, self.rows, self.keys, device=str(self.q.device))
        compiled = torch.compile(flex_attention, dynamic=False)
        options = {"block_mask": mask, "scale": 1 / self.spec.head_dim, "enable_gqa": True}

        def call() -> Tensor:
            return compiled(q, k, v, score_mod=score, **options).transpose(1, 2).flatten(0, 1)

        return call

    def error(self, out: Tensor, samples: int = 16) -> float:
        """The largest error of some rows against float64, as a part of what roundings explain: those of the
        probabilities and of the result, and for relative logits that pass through memory theirs."""
        generator = torch.Generator().manual_seed(len(out))
        worst, group = 0.0, self.spec.group
        for row in {0, len(out) - 1, *torch.randint(len(out), (samples,), generator=generator).tolist()}:
            b, position = row // self.rows, self.keys - self.rows + row % self.rows
            low = 0 if self.spec.window is None else max(0, position - self.spec.window + 1)
            at = torch.arange(low, position + 1, device=out.device)
            place = self.block_table[b, at // PAGE].long(), at % PAGE
            k, v = (pages[place].double().transpose(0, 1) for pages in (self.k_pages, self.v_pages))
            q = self.q[row].double().view(-1, group, self.spec.head_dim)
            score = (q @ k.transpose(1, 2) / self.spec.head_dim).flatten(0, 1)
            distance = position - at
            bias = self.r[row].double() @ self.proj.double()[:, distance.clamp(max=self.spec.extent - 1)]
            weight = (score + torch.where(distance < self.spec.extent, bias, 0.0)).softmax(-1)
            weight = weight.view(-1, group, len(at))
            exact, size = ((weight @ x).flatten(0, 1) for x in (v, v.abs()))
            allowed = 2.0**-8 * (2 + float(bias.abs().max())) * size + 1e-30
            error = (out[row].double() - exact).abs() / allowed
            worst = max(worst, float(error.nan_to_num(nan=float("inf")).max()))
        return worst


def attention(
    name: str, spec: LayerSpec, batch: int, rows: int, keys: int, target: Target | None, device: torch.device | str,
    asked: dict[str, float],
) -> Timed:  # fmt: skip
    inputs = Attention.make(spec, batch, rows, keys, device)
    calls = {"ours": lambda: inputs.run(target), "no bias": lambda: inputs.run(target, bias=False)}
    if inputs.q.device.type == "cuda":
        calls["flex"] = inputs.flex()
    seen = keys if spec.window is None else min(keys, spec.window + rows - 1)
    pairs = batch * sum(min(position + 1, spec.window or keys) for position in range(keys - rows, keys))
    return Timed(
        f"{name}, {'sliding' if spec.sliding else 'full'} {spec.num_heads}/{spec.num_kv_heads}", calls,
        lambda outs: {who: inputs.error(outs[who]) for who in calls if who != "no bias"},
        bytes=batch * (2 * seen * spec.kv_size + rows * (2 * spec.q_size + spec.r_size)) * BF16,
        operations=4 * pairs * spec.q_size, asked=asked,
    )  # fmt: skip


def attentions(target: Target | None, device: torch.device | str, shrink: int = 1) -> Iterator[Timed]:
    """Prefill, decoding and verification of Inkling's layers; lengths divided by `shrink`."""
    full, sliding = preset("inkling").layer(5), preset("inkling").layer(0)
    k = 1024 // shrink
    prefill = {"no bias": 1.35, "flex": 1.0}
    for spec in (full, sliding):
        yield attention("prefill 8K", spec, 1, 8 * k, 8 * k, target, device, prefill)
    for batch, keys in ((1, 8), (32, 8), (1, 64), (32, 64)):
        asked = {"bytes": 0.75} if keys == 64 else {}
        yield attention(f"decode b{batch} at {keys}K", full, batch, 1, keys * k, target, device, asked)
    yield attention("decode b32 at 8K", sliding, 32, 1, 8 * k, target, device, {})
    for batch, keys in ((1, 64), (32, 8)):
        yield attention(f"verify 9 rows, b{batch} at {keys}K", full, batch, 9, keys * k, target, device, {})


def close(out: Tensor, exact: Tensor, allowed: Tensor) -> float:
    error = (out.double() - exact).abs() / (allowed + 1e-30)
    return float(error.nan_to_num(nan=float("inf")).max())


def streams(target: Target | None, device: torch.device | str, tokens: int = 8192) -> Iterator[Timed]:
    """The residual stream's convolution and norm, and the routing of its tokens."""
    config = preset("inkling")
    hidden, experts, top_k = config.hidden_size, config.n_routed_experts, config.num_experts_per_tok
    x = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=device).normal_()
    weight = torch.ones(hidden, dtype=torch.bfloat16, device=device)
    taps = torch.empty(hidden, config.conv_kernel_size, device=device).normal_()
    state = torch.zeros(1, config.conv_kernel_size - 1, hidden, dtype=torch.bfloat16, device=device)

    def int32(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device)

    where = int32(0), int32(0, tokens), int32(tokens)

    def convolved(out: Tensor) -> float:
        rows = F.pad(x[:64].double().t(), (taps.shape[1] - 1, 0))
        exact = F.conv1d(rows[None], taps.double()[:, None], groups=hidden)[0].t()
        size = F.conv1d(rows.abs()[None], taps.double().abs()[:, None], groups=hidden)[0].t()
        return close(out[:64], exact + x[:64].double(), 2.0**-7 * (size + x[:64].double().abs()))

    yield Timed(
        f"convolution, {tokens:,} tokens", {"ours": lambda: short_conv(x, taps, state, *where, target=target)},
        lambda outs: {"ours": convolved(outs["ours"])}, bytes=2 * x.numel() * BF16, asked={"bytes": 0.8},
    )  # fmt: skip

    def normed(out: Tensor) -> float:
        wide = x.double()
        exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return close(out, exact, 2.0**-7 * exact.abs())

    yield Timed(
        f"norm, {tokens:,} tokens",
        {"ours": lambda: rms_norm(x, weight, 1e-6, target=target),
         "torch": lambda: F.rms_norm(x, (hidden,), weight, 1e-6)},
        lambda outs: {who: normed(outs[who]) for who in ("ours", "torch")}, bytes=2 * x.numel() * BF16,
        asked={"bytes": 0.8},
    )  # fmt: skip
    logits = torch.empty(tokens, experts + config.n_shared_experts, device=device).normal_()
    bias, one = torch.zeros(experts, device=device), torch.ones(1, device=device)

    def chosen(out: tuple[Tensor, ...]) -> float:
        best = logits[:, :experts].topk(top_k).values
        # Scores are sigmoids in float32, which may call neighbours equal.
        return float((logits.gather(1, out[0].long()) - best).abs().max() / 1e-4)

    yield Timed(
        f"routing, {tokens:,} tokens",
        {"ours": lambda: routing(logits, bias, one, top_k=top_k, route_scale=1.0, target=target),
         "torch": lambda: torch.topk(logits[:, :experts], top_k)},
        lambda outs: {"ours": chosen(outs["ours"])}, bytes=logits.numel() * 4,
    )  # fmt: skip


def expert_weights(
    format: str, experts: int, hidden: int, width: int, device: torch.device | str
) -> tuple[ExpertWeight, ExpertWeight]:
    """Random w13 and w2: for 4-bit formats random codes, their scales such that a product keeps its input's size."""

    def made(rows: int, columns: int, layout: Any) -> ExpertWeight:
        size = columns**-0.5
        if format == "bf16":
            data = torch.empty(experts, rows, columns, dtype=torch.bfloat16, device=device).normal_(std=size)
            return ExpertWeight("bf16", data, layout=layout)
        codes = torch.randint(256, (experts, rows, columns // 2), dtype=torch.uint8, device=device)
        # Codes have a standard deviation of about 3.
        if format == "mxfp4":
            byte = 127 + math.floor(math.log2(size / 3))
            scale = torch.randint(byte, byte + 2, (experts, rows, columns // 32), dtype=torch.uint8, device=device)
            return ExpertWeight("mxfp4", codes, scale, layout=layout)
        one, two = 0x38, 0x40
        scale = torch.randint(one, two, (experts, rows, columns // 16), dtype=torch.uint8, device=device)
        return ExpertWeight("nvfp4", codes, scale, torch.full((experts,), size / 4.5, device=device), layout=layout)

    return made(2 * width, hidden, "interleaved"), made(hidden, width, "plain")


def grouped(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The same experts by torch's grouped product: `w13` `[E, 2I, H]`, gate and up rows in turn, `w2` `[E, H, I]`."""
    ordered, order = torch.sort(ids.flatten(), stable=True)
    ends = torch.searchsorted(ordered, torch.arange(len(w13), dtype=torch.int32, device=x.device), right=True).int()
    token = order // ids.shape[1]
    both = torch._grouped_mm(x[token], w13.transpose(1, 2), offs=ends)
    inner = F.silu(both[:, 0::2]) * both[:, 1::2]
    each = torch._grouped_mm(inner, w2.transpose(1, 2), offs=ends)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return out.index_add_(0, token, each.float() * weights.flatten()[order, None]).to(x.dtype)


def unpacked(weight: ExpertWeight) -> Tensor:
    """All of a weight in bfloat16, a few experts at a time."""
    if weight.format == "bf16":
        return weight.data
    out = torch.empty(weight.num_experts, weight.rows, weight.cols, dtype=torch.bfloat16, device=weight.device)
    for first in range(0, weight.num_experts, 32):
        part = slice(first, first + 32)
        second = None if weight.scale2 is None else weight.scale2[part].view(-1, 1, 1)
        scale = None if weight.scale is None else weight.scale[part]
        out[part] = dequantize(weight.data[part], scale, second, format=weight.format).bfloat16()  # type: ignore[arg-type]
    return out


def experts(
    target: Target | None, device: torch.device | str, *, tokens: Sequence[int] = (1, 16, 128, 1024, 8192),
    number: int = 256, hidden: int = 6144, width: int = 768, formats: Sequence[str] = ("bf16", "nvfp4", "mxfp4"),
) -> Iterator[Timed]:  # fmt: skip
    """A layer's routed experts as one of four ranks holds them (a quarter of the width), in each format."""
    for format in formats:
        w13, w2 = expert_weights(format, number, hidden, width, device)
        for rows in tokens:
            yield _experts(format, w13, w2, rows, target, device)


def _experts(
    format: str, w13: ExpertWeight, w2: ExpertWeight, rows: int, target: Target | None, device: torch.device | str
) -> Timed:
    top_k = 6
    x = torch.empty(rows, w13.cols, dtype=torch.bfloat16, device=device).normal_()
    ids = torch.rand(rows, w13.num_experts).topk(top_k).indices.int()
    used = len(ids.unique())
    ids, weights = ids.to(device), torch.full((rows, top_k), 1 / top_k, device=device)

    def error(out: Tensor) -> float:
        worst = 0.0
        for t in range(0, rows, max(1, rows // 4)):
            exact = torch.zeros(w13.cols, dtype=torch.float64, device=x.device)
            for e, weight in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
                both = w13.dequant(e).double() @ x[t].double()
                exact += weight * (w2.dequant(e).double() @ (F.silu(both[0::2]) * both[1::2]))
            worst = max(worst, close(out[t], exact, 2.0**-6 * exact.abs().max()))
        return worst

    ready = prepare_experts(w13, target), prepare_experts(w2, target)

    def theirs() -> Tensor:
        return grouped(x, unpacked(w13), unpacked(w2), ids, weights)

    each = (w13.nbytes + w2.nbytes) // w13.num_experts
    return Timed(
        f"experts {format}, {rows:,} tokens",
        {"ours": lambda: moe_experts(x, *ready, ids, weights, target=target), "torch": theirs},
        lambda outs: {who: error(out) for who, out in outs.items()},
        bytes=used * each + 2 * x.numel() * BF16, operations=rows * top_k * 6 * w13.cols * w2.cols,
    )  # fmt: skip
