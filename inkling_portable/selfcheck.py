"""Whether a machine computes what it should: every implementation that the table allows here, against its reference.

A small model of random weights is run on the CPU's references, in pieces, cached, decoding and verifying drafts, and
the calls that it makes of each operation are kept. Each implementation then answers the same calls on the device, and
results, caches and whatever else a call writes are compared with those of the reference, computed in float32 from the
same values:

    largest |found - exact| / largest |exact|   of each tensor;   integers have to be equal

Experts in 4 bits are compared with plain dequantisation as at start-up (`inkling_kernels.moe_check`), and on the
calls of the model, an id of another rank among theirs.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from triton.errors import TritonError

from inkling_kernels.moe_check import TOLERANCE, self_check
from inkling_kernels.numerics import ExpertWeight, quantize_mxfp4, quantize_nvfp4
from inkling_kernels.target import Target
from inkling_portable.cache import FULL, SLIDING
from inkling_portable.config import InklingConfig, MTPConfig
from inkling_portable.dispatch import OPS, ROWS, Row, explain
from inkling_portable.engine import Engine
from inkling_portable.facts import FORMATS, Facts
from inkling_portable.llm import facts_of
from inkling_portable.model import Inkling
from inkling_portable.mtp import MultiTokenPrediction
from inkling_portable.ops import ExpertsOp, Ops, experts_op, load
from inkling_portable.sampling import SamplingParams

CPU = Target.parse("cpu")
PAGE = 16
# Sums in another order, of exponentials among other things, on values of float32.
FLOAT32_TOLERANCE = 2.0**-12
# Different shapes of an operation's arguments that are kept.
_KEPT = 6
# What a row can do to itself: not import, not compile, not launch, refuse its arguments.
_FAILURES = (ImportError, OSError, RuntimeError, TypeError, ValueError, TritonError)


@dataclass(frozen=True)
class Call:
    """The arguments of one call of an operation, as they were before it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """What came of one implementation, for experts in one format.

    `status` is `right`, `wrong` (`error` above `tolerance`) or `failed` (`message` says how). `chosen`: the table takes
    this row here. `seconds` include compilation.
    """

    op: str
    name: str
    format: str | None
    status: str
    chosen: bool
    evidence: str
    calls: int
    seconds: float
    error: float | None = None
    tolerance: float | None = None
    message: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """A form for JSON."""
        return asdict(self)


def check(target: Target, dtype: torch.dtype | None = None, rows: tuple[Row, ...] = ROWS) -> Iterator[Finding]:
    """Check every row of `rows` that holds on `target`, one after another, with activations of `dtype` (bfloat16, but
    float32 in the interpreter, whose bfloat16 is not that of any chip)."""
    dtype = dtype or (torch.float32 if target.vendor == "interpret" else torch.bfloat16)
    config = _config(256 if target.is_gpu else 64)
    facts = facts_of(config, "bf16", dtype, PAGE)
    calls = record(config, facts, dtype)
    for op in dict.fromkeys(row.op for row in rows):
        for format in FORMATS if op == "moe_experts" else (None,):
            here = replace(facts, format=format or "bf16")
            chosen = next(choice.row for choice in explain(target, here, rows=rows).choices if choice.op == op)
            # Rows that models ask for, and those that any model takes.
            kinds = (here, replace(here, batch_invariant=True))
            holding = [row for row in rows if row.op == op and any(row.problem(target, kind) is None for kind in kinds)]
            for row in holding:
                given = [_in_format(call, format) for call in calls[op]] if format else calls[op]
                yield _finding(row, target, dtype, format, given, row is chosen)


def _config(hidden: int) -> InklingConfig:
    """A dense and an expert layer, a sliding and a full one, and two prediction depths."""
    return InklingConfig(
        vocab_size=96, unpadded_vocab_size=83, hidden_size=hidden, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=hidden // 2, swa_num_attention_heads=4, swa_num_key_value_heads=4,
        swa_head_dim=hidden // 2, sliding_window_size=16, d_rel=16, rel_extent=24, log_scaling_n_floor=8,
        local_layer_ids=(0,), dense_layer_ids=(0,), intermediate_size=2 * hidden, moe_intermediate_size=hidden,
        n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=2, route_scale=2.0,
        logits_mup_width_multiplier=2.0, mtp=MTPConfig(num_layers=2, local_layer_ids=(0,)),
    )  # fmt: skip


@torch.inference_mode()
def record(config: InklingConfig, facts: Facts, dtype: torch.dtype) -> dict[str, list[Call]]:
    """The calls of each operation in a run of a random model of `config` on the CPU's references, of each shape one."""
    ops = Ops.bind(CPU, facts, {op: reference(op).name for op in OPS})
    calls: dict[str, list[Call]] = {op: [] for op in OPS}
    seen: set[tuple[str, str]] = set()

    def kept(op: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            shapes = str(_map((args, kwargs), lambda tensor: tuple(tensor.shape)))
            if len(calls[op]) < _KEPT and (op, shapes) not in seen:
                seen.add((op, shapes))
                calls[op].append(Call(*copy.deepcopy((args, kwargs))))
            return run(*args, **kwargs)

        return call

    experts = {name: replace(op, run=kept("moe_experts", op.run)) for name, op in ops.experts.items()}
    recorded: dict[str, Any] = {op: kept(op, getattr(ops, op)) for op in OPS}
    recording = replace(ops, experts=experts, **recorded)
    model = Inkling(config, recording, dtype=dtype)
    mtp = MultiTokenPrediction(config, recording, 2, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    weights = [weight for module in (model, mtp) for weight in module.tensors().items()]
    for prefix, layer in model.experts().items():
        for name in ("w13", "w2"):
            weight = getattr(layer, name)
            layer.hold(name, replace(weight, data=torch.empty(weight.data.shape, dtype=dtype)))
            weights.append((f"{prefix}.{name}", getattr(layer, name).data))
    for name, weight in weights:
        values = torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5
        weight.copy_(1 + values if "norm" in name or "global_scale" in name else values)
    engine = Engine(
        model, mtp, max_model_len=64, max_num_seqs=2, max_num_batched_tokens=24, block_size=PAGE,
        num_pages={FULL: 16, SLIDING: 16}, enable_prefix_caching=False,
    )  # fmt: skip
    for state in engine.cache.layers:
        for tensor in (state.k_pages, state.v_pages, *state.rings):
            tensor.zero_()
    for length in (37, 5):
        engine.submit(list(range(3, 3 + length)), SamplingParams(max_tokens=6, temperature=0))
    while engine.unfinished():
        engine.step()
    return calls


def reference(op: str) -> Row:
    """The row of the reference of `op`: the last one for the CPU."""
    return [row for row in ROWS if row.op == op and row.targets == ("cpu",)][-1]


def _in_format(call: Call, format: str) -> Call:
    """A call of the experts with weights of `format`, the first token's first expert on another rank."""
    x, w13, w2, ids, weights = call.args
    ids = ids.clone()
    ids[0, 0] = -1
    return Call((x, _packed(w13, format), _packed(w2, format), ids, weights), call.kwargs)


def _packed(weight: ExpertWeight, format: str) -> ExpertWeight:
    if format == "nvfp4":
        apart = weight.layout == "interleaved"
        packed = quantize_nvfp4(weight.data, separate_gate_up=apart)
        one = torch.ones(1, device=weight.device)
        return ExpertWeight("nvfp4", *packed, layout=weight.layout, input_scale=one)
    if format == "mxfp4":
        return ExpertWeight("mxfp4", *quantize_mxfp4(weight.data), layout=weight.layout)
    return weight


def _finding(
    row: Row, target: Target, dtype: torch.dtype, format: str | None, calls: list[Call], chosen: bool
) -> Finding:
    done = Finding(row.op, row.name, format, "failed", chosen, row.evidence_on(target), len(calls), 0.0)
    started = time.perf_counter()
    try:
        run, error = load(row, target), 0.0
        tolerance = getattr(run, "check_tolerance", TOLERANCE if dtype == torch.bfloat16 else FLOAT32_TOLERANCE)
        if row.op == "moe_experts":
            experts = experts_op(row, target)
            run = experts.on_loaded(dtype)
            error = _alone(experts, target, dtype, calls[0])
        exact = load(reference(row.op), CPU)
        for call in calls:
            error = max(error, _difference(run, exact, call, target))
    except _FAILURES as problem:
        text = " ".join(f"{type(problem).__name__}: {problem}".split())
        return replace(done, seconds=time.perf_counter() - started, message=text)
    status = "right" if error <= tolerance else "wrong"
    seconds = time.perf_counter() - started
    return replace(done, status=status, seconds=seconds, error=error, tolerance=tolerance)


def _alone(experts: ExpertsOp, target: Target, dtype: torch.dtype, call: Call) -> float:
    """What the start-up check finds, which must not end this one; its own limit allows for bfloat16."""
    w13, w2 = (_place(weight, target) for weight in call.args[1:3])
    error = self_check(experts.on_loaded(dtype), w13, w2, tolerance=float("inf"))
    return 0.0 if error <= getattr(experts.run, "check_tolerance", TOLERANCE) else error


@torch.inference_mode()
def _difference(run: Callable[..., Any], exact: Callable[..., Any], call: Call, target: Target) -> float:
    there = _place(copy.deepcopy((call.args, call.kwargs)), target)
    here = _map(copy.deepcopy((call.args, call.kwargs)), _wide)
    found = (run(*there[0], **there[1]), there)
    expected = (exact(*here[0], **here[1]), here)
    pairs = zip(_tensors(found), _tensors(expected), strict=True)
    return max(_off(one.cpu(), other) for one, other in pairs)


def _off(found: torch.Tensor, exact: torch.Tensor) -> float:
    if found.shape != exact.shape:
        return float("inf")
    if not exact.dtype.is_floating_point:
        return 0.0 if torch.equal(found, exact) else float("inf")
    if not exact.numel():
        return 0.0
    found, exact = found.double(), exact.double()
    error = float((found - exact).abs().max()) / max(float(exact.abs().max()), torch.finfo(torch.float32).tiny)
    return error if error == error else float("inf")


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def _place(value: Any, target: Target) -> Any:
    return _map(value, lambda tensor: tensor.to(target.device_type))


def _map(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The same nest of tuples, lists, mappings and expert weights with `function` of each tensor."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_map(each, function) for each in value)
    if isinstance(value, dict):
        return {name: _map(each, function) for name, each in value.items()}
    if isinstance(value, ExpertWeight):
        parts = {name: _map(getattr(value, name), function) for name in ("data", "scale", "scale2", "input_scale")}
        shapes = any(part is not None and not isinstance(part, torch.Tensor) for part in parts.values())
        return parts if shapes else replace(value, **parts)
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _map(value, keep)
    return found
