"""One case an operation of the CPU kernels, against float64: what a kernel may get wrong shows in it.

Everything that must not be read is NaN. A case takes the modules of the kernels, right or broken, and returns the
largest error as a multiple of what is allowed; infinite where a result is not a number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType

import numpy as np
import torch
from attention_oracle import exact_attention, signal
from moe_oracle import oracle as exact_experts
from moe_oracle import random_packed

from inkling_kernels.numerics import ExpertWeight
from inkling_kernels.testing import paged_batch

Modules = dict[str, ModuleType]
NAN = float("nan")


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def apart(got: torch.Tensor, wanted: torch.Tensor, allowed: float = 1e-4) -> float:
    error = (got.double() - wanted.double()).abs() / allowed
    return float(error.nan_to_num(nan=float("inf")).max())


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def convolution(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One whole sequence `[T, C]`."""
    out = x.clone()
    for t, j in itertools.product(range(len(x)), range(weight.shape[1])):
        if (at := t - (weight.shape[1] - 1) + j) >= 0:
            out[t] += weight[:, j] * x[at]
    return out


def linear(modules: Modules) -> float:
    x, weight = normal(1, 6, 70), normal(2, 51, 70)
    return apart(modules["rows"].linear(x, weight), x.double() @ weight.double().t())


def rms_norm(modules: Modules) -> float:
    x, weight = normal(1, 3, 37) * 0.02, normal(2, 37)
    return apart(modules["rows"].rms_norm(x, weight, 1e-3), norm(x.double(), weight.double(), 1e-3))


def silu_mul(modules: Modules) -> float:
    x, scale = normal(1, 3, 74) * 3, normal(2, 3, 37)
    gate, up = x.double()[:, ::2], x.double()[:, 1::2]
    return apart(modules["rows"].silu_mul(x, scale), gate * torch.sigmoid(gate) * up * scale)


def routing(modules: Modules) -> float:
    """Scores tie in threes, the bias decides for one expert, and two sinks share the weights."""
    z = normal(3, 5, 14)
    z[:, 3] = z[:, 7] = z[:, 9] = 2.5
    bias, scale = normal(4, 12) * 0.1, torch.tensor([1.5])
    bias[3] = bias[7] = bias[9] = 0.3
    bias[5] = 2.0
    got = modules["rows"].routing(z, bias, scale, top_k=4, route_scale=2.0)
    wanted = [[], [], []]
    for row in z.double():
        scores = torch.sigmoid(row[:12]) + bias.double()
        ids = sorted(range(12), key=lambda e: (-float(scores[e]), e))[:4]
        shares = torch.softmax(torch.nn.functional.logsigmoid(torch.cat([row[ids], row[12:]])), 0) * 3.0
        for part, values in zip(wanted, (torch.tensor(ids), shares[:4], shares[4:]), strict=True):
            part.append(values)
    return max(apart(mine, torch.stack(part)) for mine, part in zip(got, wanted, strict=True))


def short_conv(modules: Modules) -> float:
    """Three sequences in uneven steps; then one without a slot, whose past nobody has; padding behind; a residual."""
    weight, lengths, ring = normal(1, 5, 4), (9, 6, 13), 5
    xs, state = [normal(10 + b, n, 5) for b, n in enumerate(lengths)], torch.full((6, ring, 5), NAN)[1:]
    slots, done, outs, worst = int32(3, 0, 2), [0, 0, 0], [[], [], []], 0.0
    for rows in ((2, 1, 7), (1, 3, 0), (6, 1, 1), (0, 1, 5)):
        x = torch.cat([own[d : d + n] for own, d, n in zip(xs, done, rows, strict=True)] + [torch.ones(2, 5)])
        done = [d + n for d, n in zip(done, rows, strict=True)]
        residual = normal(7, len(x), 5)
        cu = int32(0, *itertools.accumulate(rows))
        y = modules["conv"].short_conv(x, weight, state, slots, cu, int32(*done), residual) - residual
        for own, part in zip(outs, y[:-2].split(rows), strict=True):
            own.append(part)
        worst = max(worst, apart(y[-2:], torch.zeros(2, 5)))
    for x, own in zip(xs, outs, strict=True):
        worst = max(worst, apart(torch.cat(own), convolution(x.double(), weight.double())))
    before = state.clone()
    y = modules["conv"].short_conv(xs[0][:3], weight, state, int32(-1), int32(0, 3), int32(8))
    return max(worst, apart(y, convolution(xs[0][:3].double(), weight.double())),
               apart((state - before)[[0, 2, 3]], torch.zeros(3, ring, 5)))  # fmt: skip


def qkvr_prep(modules: Modules) -> float:
    """Two sequences across the floor of the log scaling, into shuffled pages; the last row is not kept."""
    heads, kv_heads, dim, d_rel, page, floor = 3, 2, 8, 16, 4, 5
    q_size, kv = heads * dim, kv_heads * dim
    weight, q_norm, k_norm = normal(1, 2 * kv, 4), normal(2, dim), normal(3, dim)
    xs = [normal(20 + b, n, q_size + 2 * kv + heads * d_rel) for b, n in enumerate((9, 6))]
    k_pages, v_pages = (torch.full((kv_heads, 7, page, dim), NAN).permute(1, 2, 0, 3) for _ in "kv")
    state, tables = torch.full((2, 3, 2 * kv), NAN), ((5, 2, 6), (1, 4))
    worst, done = 0.0, [0, 0]
    for rows in ((7, 5), (2, 1)):
        x = torch.cat([own[d : d + n] for own, d, n in zip(xs, done, rows, strict=True)])
        positions = [(b, d + i) for b, (d, n) in enumerate(zip(done, rows, strict=True)) for i in range(n)]
        done = [d + n for d, n in zip(done, rows, strict=True)]
        slots = [tables[b][p // page] * page + p % page for b, p in positions]
        slots[-1] = -1 if done[1] == 6 else slots[-1]
        q, r, *_ = modules["conv"].qkvr_prep(
            x, weight, q_norm, k_norm, 1e-5, state, int32(1, 0), int32(0, *itertools.accumulate(rows)), int32(*done),
            (k_pages, v_pages), torch.tensor(slots), num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, d_rel=d_rel,
            log_scaling_n_floor=floor, log_scaling_alpha=0.5,
        )  # fmt: skip
        for row, (b, p) in enumerate(positions):
            own, tau = xs[b][p].double(), 1 + 0.5 * np.log(max((p + 1) / floor, 1))
            wanted = norm(own[:q_size].view(heads, dim), q_norm.double(), 1e-5) * tau
            worst = max(worst, apart(q[row], wanted), apart(r[row], own[q_size + 2 * kv :].view(heads, d_rel) * tau))
    for b, x in enumerate(xs):
        k, v = convolution(x[:, q_size : q_size + 2 * kv].double(), weight.double()).split(kv, 1)
        k = norm(k.view(-1, kv_heads, dim), k_norm.double(), 1e-5)
        for p in range(len(x) - b):
            at = tables[b][p // page], p % page
            worst = max(worst, apart(k_pages[at], k[p]), apart(v_pages[at], v[p].view(kv_heads, dim)))
    return max(worst, 0.0 if k_pages[4, 1].isnan().all() and k_pages[0].isnan().all() else float("inf"))


def rel_attention(modules: Modules) -> float:
    """Decoding, verifying and starting sequences; groups of 3 and 6 heads; a window, and an extent within it."""
    worst = 0.0
    for heads, window, extent in ((6, None, 24), (12, 21, 40), (6, 9, 5)):
        lengths = [(1, 50), (3, 33), (5, 5), (1, 1), (2, 0), (4, 70)]
        sizes = {"heads": heads, "kv_heads": 2, "head_dim": 20, "page": 16, "extent": extent, "window": window}
        # A broken kernel may read any page that a table names.
        batch = paged_batch(lengths, **sizes, seed=heads, unused_pages=(0, 0))
        out = modules["attention"].rel_attention(*batch.args, **batch.options)
        worst = max(worst, signal(out, exact_attention(batch)))
    return worst


def moe_experts(modules: Modules) -> float:
    """Few tokens and many; widths and sizes that no tile divides; an expert without tokens and pairs held elsewhere."""
    worst = 0.0
    for tokens, hidden, width in ((3, 36, 10), (7, 50, 33), (90, 300, 30)):
        w13, w2, x = normal(1, 6, 2 * width, hidden) * 0.3, normal(2, 6, hidden, width) * 0.3, normal(3, tokens, hidden)
        rng = np.random.default_rng(tokens)
        ids = np.stack([rng.permutation([-1, 0, 1, 3, 4, 5])[:3] for _ in range(tokens)]).astype(np.int32)
        weights = normal(4, tokens, 3)
        gated = ExpertWeight("bf16", w13, layout="interleaved"), ExpertWeight("bf16", w2)
        got = modules["experts"].moe_experts(x, *gated, torch.from_numpy(ids), weights)
        wanted = exact_experts(x.numpy(), w13.numpy(), w2.numpy(), ids, weights.numpy())
        worst = max(worst, apart(got, torch.from_numpy(wanted), 1e-3))
    for format in ("nvfp4", "mxfp4"):
        rng = np.random.default_rng(5)
        (w13, exact13), (w2, exact2) = (
            random_packed(rng, format, 3, *shape) for shape in ((64, 64, "interleaved"), (64, 32, "plain"))
        )
        x, ids, weights = normal(3, 2, 64), np.array([[2, 0], [0, 1]], np.int32), normal(4, 2, 2)
        got = modules["experts"].moe_experts(x, w13, w2, torch.from_numpy(ids), weights)
        wanted = exact_experts(x.numpy(), exact13, exact2, ids, weights.numpy())
        worst = max(worst, apart(got, torch.from_numpy(wanted), 1e-4 * float(np.abs(wanted).max())))
    return worst


CASES: dict[str, Callable[[Modules], float]] = {
    case.__name__: case
    for case in (linear, rms_norm, silu_mul, routing, short_conv, qkvr_prep, rel_attention, moe_experts)
}
