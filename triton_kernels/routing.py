"""Expert-sink routing: choose the routed experts, weigh them together with the always-on shared ones.

    choice  = top_k over routed experts of sigmoid(z) + bias          equal scores: the lowest index first
    w       = softmax(logsigmoid([z[choice], z_shared])) * route_scale * global_scale

`logits` `[T, E + S]` float32 hold the routed experts' z first, then the shared ones' (the sinks); `bias` `[E]` only
selects and never weighs; `global_scale` is `[1]`. Everything is float32 whatever the activations' type: in bf16
near-ties flip.

The kernel takes the maximum `top_k` times over keys that hold a score and, below it, its index reversed: keys are
distinct, so the choice needs no rule for ties and is the same on every chip. A NaN score counts as the greatest, as
when sorting in torch; ids are in range and distinct whatever the logits are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from inkling_kernels.compile_case import NO_MATRIX, CompileCase
from inkling_kernels.ragged import check_config, check_tensor, not_powers_of_two
from inkling_kernels.target import Target

MAX_EXPERTS = 1024
LOWEST = tl.constexpr(-2147483648)


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """Tokens a program routes."""

    tokens: int = 4
    num_warps: int = 4

    def problems(self, target: Target) -> tuple[str, ...]:
        """Why this configuration cannot run there; empty where it can."""
        return tuple(not_powers_of_two(self, tokens=(1, 16), num_warps=(1, 8)))


DEFAULT = RoutingConfig()


@triton.jit
def _ordered_fn(x):
    """int32 in the order of float32 `x`, NaN above all."""
    bits = tl.where(x == x, x, float("inf")).to(tl.int32, bitcast=True)
    return tl.where(x == x, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), 0x7FFFFFFF)


@triton.jit(do_not_specialize=["tokens", "route_scale"])
def _routing_kernel(
    ids_ptr, weights_ptr, sinks_ptr, logits_ptr, bias_ptr, global_scale_ptr, tokens, route_scale, ids_row, weights_row,
    sinks_row, logits_row, logits_col, bias_col, EXPERTS: tl.constexpr, SINKS: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, SINK_IDS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = (token < tokens)[:, None]
    expert = tl.arange(0, BLOCK_E)
    routed = (expert < EXPERTS)[None, :]
    row = logits_ptr + (token * logits_row)[:, None]
    z = tl.load(row + (expert.to(tl.int64) * logits_col)[None, :], mask=live & routed, other=0.0)
    bias = tl.load(bias_ptr + expert.to(tl.int64) * bias_col, mask=expert < EXPERTS, other=0.0)
    score = 1.0 / (1.0 + tl.exp(-z)) + bias[None, :]
    key = tl.where(routed, _ordered_fn(score), LOWEST).to(tl.int64)
    key = (key << 32) | (0x7FFFFFFF - expert).to(tl.int64)[None, :]

    slot = tl.arange(0, BLOCK_K)
    is_sink = ((slot >= TOP_K) & (slot < TOP_K + SINKS))[None, :]
    sink_at = ((EXPERTS - TOP_K + slot).to(tl.int64) * logits_col)[None, :]
    chosen = tl.load(row + sink_at, mask=live & is_sink, other=0.0)
    ids = tl.zeros([BLOCK_T, BLOCK_K], tl.int32) + (EXPERTS - TOP_K + slot)[None, :]
    for k in tl.static_range(TOP_K):
        best = tl.max(key, 1)
        hit = key == best[:, None]
        here = (slot == k)[None, :]
        chosen = tl.where(here, tl.sum(tl.where(hit, z, 0.0), 1)[:, None], chosen)
        ids = tl.where(here, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)[:, None], ids)
        key = tl.where(hit, tl.full(key.shape, LOWEST, tl.int64) << 32, key)

    # logsigmoid(z) = min(z, 0) - log(1 + exp(-|z|)), which neither overflows nor loses a very negative z.
    used = (slot < TOP_K + SINKS)[None, :]
    value = tl.minimum(chosen, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(chosen)))
    value = tl.where(chosen == chosen, value, chosen)
    peak = tl.max(tl.where(used, value, float("-inf")), 1)
    share = tl.where(used, tl.exp(value - peak[:, None]), 0.0)
    share = share / tl.sum(share, 1)[:, None] * (tl.load(global_scale_ptr) * route_scale)

    kept = live & (slot < (TOP_K + SINKS if SINK_IDS else TOP_K))[None, :]
    column = slot.to(tl.int64)[None, :]
    tl.store(ids_ptr + ((token * ids_row)[:, None] + column), ids, mask=kept)
    tl.store(weights_ptr + ((token * weights_row)[:, None] + column), share, mask=live & (slot < TOP_K)[None, :])
    if SINKS > 0:
        at = (token * sinks_row)[:, None] + (column - TOP_K)
        tl.store(sinks_ptr + at, share, mask=live & is_sink)


@dataclass(frozen=True, slots=True)
class RoutingPlan:
    """A routing launch: programs, tokens a program, padded numbers of experts and of chosen values, warps."""

    grid: tuple[int]
    block_t: int
    block_e: int
    block_k: int
    num_warps: int


def routing_plan(
    tokens: int, experts: int, kept: int, target: Target | None = None, config: RoutingConfig | None = None
) -> RoutingPlan:
    """Plan `tokens` rows of `experts`, of which `kept` values (top-k and sinks) remain; pure."""
    config = config or DEFAULT
    block_e = max(16, triton.next_power_of_2(experts))
    block_k = max(2, triton.next_power_of_2(kept))
    return RoutingPlan((triton.cdiv(tokens, config.tokens),), config.tokens, block_e, block_k, config.num_warps)


def routing(
    logits: torch.Tensor,
    bias: torch.Tensor,
    global_scale: torch.Tensor,
    *,
    top_k: int,
    route_scale: float,
    target: Target | None = None,
    config: RoutingConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose and weigh experts with the Triton kernel; `ids` `[T, k]` int32 (best first), `weights`, `sink_weights`
    float32.

    `logits` `[T, E + S]`, `bias` `[E]` and `global_scale` `[1]` are float32, `logits` of any strides. Forward only.
    Raises TypeError or ValueError naming the argument, before anything is allocated or launched.
    """
    experts, sinks, config = _check(logits, bias, global_scale, top_k, route_scale, target, config)
    tokens = len(logits)
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    sink_weights = torch.empty(tokens, sinks, dtype=torch.float32, device=logits.device)
    _launch(ids, weights, sink_weights, logits, bias, global_scale, experts, top_k, route_scale, False, target, config)
    return ids, weights, sink_weights


def routing_with_sinks(
    logits: torch.Tensor,
    bias: torch.Tensor,
    global_scale: torch.Tensor,
    *,
    top_k: int,
    route_scale: float,
    target: Target | None = None,
    config: RoutingConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `routing`, with the sinks as experts `E .. E + S - 1` that every token chooses last: `ids` and `weights` `[T,
    k + S]`.

    For a grouped product over `E + S` physical experts (258 of Inkling's).
    """
    experts, sinks, config = _check(logits, bias, global_scale, top_k, route_scale, target, config)
    ids = torch.empty(len(logits), top_k + sinks, dtype=torch.int32, device=logits.device)
    weights = torch.empty(len(logits), top_k + sinks, dtype=torch.float32, device=logits.device)
    _launch(
        ids, weights, weights[:, top_k:], logits, bias, global_scale, experts, top_k, route_scale, True, target, config
    )
    return ids, weights


def _launch(
    ids: torch.Tensor,
    weights: torch.Tensor,
    sink_weights: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor,
    global_scale: torch.Tensor,
    experts: int,
    top_k: int,
    route_scale: float,
    sink_ids: bool,
    target: Target | None,
    config: RoutingConfig,
) -> None:
    tokens, sinks = len(logits), logits.shape[1] - experts
    if tokens == 0:
        return
    plan = routing_plan(tokens, experts, top_k + sinks, target, config)
    _routing_kernel[plan.grid](
        ids, weights, sink_weights, logits, bias, global_scale, tokens, float(route_scale), ids.stride(0),
        weights.stride(0), sink_weights.stride(0), *logits.stride(), bias.stride(0), EXPERTS=experts, SINKS=sinks,
        TOP_K=top_k, BLOCK_E=plan.block_e, BLOCK_K=plan.block_k, BLOCK_T=plan.block_t, SINK_IDS=sink_ids,
        num_warps=plan.num_warps, enable_fp_fusion=True,
    )  # fmt: skip


def _check(
    logits: torch.Tensor,
    bias: torch.Tensor,
    global_scale: torch.Tensor,
    top_k: int,
    route_scale: float,
    target: Target | None,
    config: RoutingConfig | None,
) -> tuple[int, int, RoutingConfig]:
    if isinstance(logits, torch.Tensor) and logits.dtype != torch.float32:
        raise TypeError(f"routing: logits are {logits.dtype}; the router computes in float32")
    check_tensor("routing", "logits", logits, (None, None), (torch.float32,))
    check_tensor("routing", "bias", bias, (None,), (torch.float32,), logits.device)
    check_tensor("routing", "global_scale", global_scale, (1,), (torch.float32,), logits.device)
    experts = len(bias)
    if experts > min(logits.shape[1], MAX_EXPERTS):
        raise ValueError(
            f"routing: bias is for {experts} experts; expected at most {MAX_EXPERTS} and {logits.shape[1]}"
        )
    if not isinstance(top_k, int) or not 0 < top_k <= experts:
        raise ValueError(f"routing: top_k is {top_k!r}; it must lie between 1 and the {experts} routed experts")
    if not isinstance(route_scale, (int, float)) or route_scale != route_scale:
        raise ValueError(f"routing: route_scale is {route_scale!r}; expected a number")
    config = config or DEFAULT
    if target is not None:
        check_config("routing", config.problems(target))
    return experts, logits.shape[1] - experts, config


def _case(name: str, experts: int, sinks: int, launch_with: Callable[..., object]) -> CompileCase:
    def launch(target: Target) -> object:
        logits = torch.empty(8192, experts + sinks, dtype=torch.float32, device="meta")
        return launch_with(
            logits, logits.new_empty(experts), logits.new_empty(1), top_k=6, route_scale=8.0, target=target
        )

    return CompileCase(name, "routing=triton", launch, instruction=NO_MATRIX)


COMPILE_CASES = (
    _case("6 of 256 with 2 sinks", 256, 2, routing),
    _case("6 of 256 with 2 sinks among them", 256, 2, routing_with_sinks),
)


def routing_ref(
    logits: torch.Tensor, bias: torch.Tensor, global_scale: torch.Tensor, *, top_k: int, route_scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `ids` `[T, k]` int32 (best first), `weights` `[T, k]` and `sink_weights` `[T, S]`, float32;
    differentiable in z.

    Raises `TypeError` where `logits` is not float32 and `ValueError` where `top_k` exceeds the routed experts.
    """
    experts = bias.shape[0]
    if logits.dtype != torch.float32:
        raise TypeError(f"routing: logits are {logits.dtype}; the router computes in float32")
    if not 0 < top_k <= experts:
        raise ValueError(f"routing: top_k is {top_k}; it must lie between 1 and the {experts} routed experts")
    scores = (torch.sigmoid(logits[:, :experts]) + bias).detach()
    # A stable descending sort keeps equal scores in index order, which topk does not promise.
    ids = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = torch.cat([logits.gather(1, ids), logits[:, experts:]], 1)
    weights = torch.softmax(F.logsigmoid(chosen), -1) * (global_scale * route_scale)
    return ids.to(torch.int32), weights[:, :top_k], weights[:, top_k:]
