"""The operations that a model calls, each bound once to the implementation that the dispatch table chose."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from inkling_kernels.target import Target
from inkling_portable.dispatch import ROWS, Choice, Row, forced_from_environment, resolve, resolve_all
from inkling_portable.facts import Facts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from inkling_kernels.numerics import ExpertWeight


class BrokenImplementation(RuntimeError):
    """A row of the table was chosen and its implementation cannot be loaded. There is no falling back to another."""


@dataclass(frozen=True, slots=True)
class ExpertsOp:
    """The implementation of `moe_experts` for weights of one format.

    `run` is called as the reference is, with weights that went through `prepare`, where there is one, at load.
    """

    row: Row
    run: Callable[..., Tensor]
    prepare: Callable[[ExpertWeight], ExpertWeight] | None

    def on_loaded(self, dtype: torch.dtype) -> Callable[..., Tensor]:
        """`run` on weights as loaded and tokens taken as `dtype`, under its own name: what a self-check calls."""

        @functools.wraps(self.run)
        def run(x: Tensor, w13: ExpertWeight, w2: ExpertWeight, ids: Tensor, weights: Tensor) -> Tensor:
            if self.prepare is not None:
                w13, w2 = self.prepare(w13), self.prepare(w2)
            return self.run(x.to(dtype), w13, w2, ids, weights)

        return run


@dataclass(frozen=True, slots=True)
class Ops:
    """One attribute per operation; the signatures are those of the reference implementations (`*_ref`).

    Built by `bind` when a model is built and kept by it. `choices` says what was chosen and why. An implementation with
    a keyword `target` plans its launches for a device: it is bound to `target` here, so that no call asks a driver.
    `experts` holds, by format, what runs the routed experts: that of `facts`, which `moe_experts` is, and beside a
    packed one also bf16, because checkpoints in 4 bits keep single layers unquantised.
    """

    target: Target
    facts: Facts
    choices: Mapping[str, Choice]
    experts: Mapping[str, ExpertsOp]
    embedding: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]
    qkvr_prep: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    rel_attention: Callable[..., Tensor]
    short_conv: Callable[..., Any]
    routing: Callable[..., tuple[Tensor, Tensor, Tensor]]
    moe_experts: Callable[..., Tensor]
    silu_mul: Callable[..., Tensor]
    logits: Callable[..., tuple[Tensor, Tensor]]

    @classmethod
    def bind(
        cls,
        target: Target,
        facts: Facts,
        forced: Mapping[str, str] | None = None,
        rows: tuple[Row, ...] = ROWS,
    ) -> Ops:
        """Choose and import the implementation of every operation for `target` and `facts`.

        `forced` maps operations to names of implementations; None takes those that `INKLING_IMPL` forces and `{}`
        forces nothing. Where the experts forced for packed weights do not take bf16 ones, single bf16 layers run on
        what the table has for them. Raises `UnsupportedOnTarget` where an operation has no row,
        ValueError when `forced` is wrong or the interpreter is wanted and not switched on, and
        `BrokenImplementation`, naming row and cause, where a chosen row does not import.
        """
        forced = forced_from_environment() if forced is None else forced
        choices = resolve_all(target, facts, forced, rows)
        if target.vendor == "interpret":
            _require_interpreter()
        bound = {op: load(choice.row, target) for op, choice in choices.items() if choice.row is not None}
        chosen = {facts.format: choices["moe_experts"].row}
        if facts.format != "bf16":
            chosen["bf16"] = _bf16_experts(target, facts, forced.get("moe_experts"), rows)
        experts = {format: experts_op(row, target) for format, row in chosen.items() if row is not None}
        return cls(target, facts, choices, experts, **bound)

    def describe(self) -> str:
        """One line an operation: its implementation, and why, for a log."""
        width = max(map(len, self.choices))
        rows = [choice.row for choice in self.choices.values() if choice.row is not None]
        return "\n".join(f"{row.op:<{width}}  {row.name}: {row.why} ({row.evidence_on(self.target)})" for row in rows)


def _bf16_experts(target: Target, facts: Facts, forced: str | None, rows: tuple[Row, ...]) -> Row | None:
    facts = replace(facts, format="bf16")
    takes = any(r.op == "moe_experts" and r.name == forced and r.problem(target, facts) is None for r in rows)
    return resolve("moe_experts", target, facts, forced if takes else None, rows).row


def experts_op(row: Row, target: Target) -> ExpertsOp:
    """What `row`, of `moe_experts`, names, imported. Raises `BrokenImplementation`, naming row and cause."""
    prepare = None if row.prepare is None else _named(row, row.prepare, target)
    return ExpertsOp(row, load(row, target), prepare)


def load(row: Row, target: Target) -> Callable[..., Any]:
    """The function that `row` names, imported and bound to `target`. Raises `BrokenImplementation`, naming row and
    cause."""
    return _named(row, row.impl, target)


def _named(row: Row, name: str, target: Target) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        # What an installation can do to an import: a package or name absent, a shared library that does not load, a
        # runtime that refuses. Anything else is a bug and keeps its own traceback.
        raise BrokenImplementation(
            f"{row.op}={row.name} was chosen and {name} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if "target" not in inspect.signature(found).parameters:
        return found
    return functools.update_wrapper(functools.partial(found, target=target), found)


def _require_interpreter() -> None:
    import triton

    if not triton.knobs.runtime.interpret:
        raise ValueError(
            "target interpret needs Triton's interpreter, which a kernel takes up when its module is imported: "
            "set TRITON_INTERPRET=1 before Python starts"
        )
