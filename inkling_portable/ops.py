"""The operations that a model calls, each bound once to the implementation that the dispatch table chose."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from inkling_kernels.target import Target
from inkling_portable.dispatch import ROWS, Choice, Facts, Row, forced_from_environment, resolve_all

if TYPE_CHECKING:
    from torch import Tensor


class BrokenImplementation(RuntimeError):
    """A row of the table was chosen and its implementation cannot be loaded. There is no falling back to another."""


@dataclass(frozen=True, slots=True)
class Ops:
    """One attribute per operation; the signatures are those of the reference implementations (`*_ref`).

    Built by `bind` when a model is built and kept by it. `choices` says what was chosen and why. An implementation with
    a keyword `target` plans its launches for a device: it is bound to `target` here, so that no call asks a driver.
    """

    target: Target
    facts: Facts
    choices: Mapping[str, Choice]
    embedding: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]
    qkvr_prep: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    rel_attention: Callable[..., Tensor]
    short_conv: Callable[..., Any]
    routing: Callable[..., tuple[Tensor, Tensor, Tensor]]
    moe_experts: Callable[..., Tensor]
    silu_mul: Callable[..., Tensor]
    linear: Callable[..., Tensor]
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
        forces nothing. Raises `UnsupportedOnTarget` where an operation has no row,
        ValueError when `forced` is wrong or the interpreter is wanted and not switched on, and
        `BrokenImplementation`, naming row and cause, where a chosen row does not import.
        """
        choices = resolve_all(target, facts, forced_from_environment() if forced is None else forced, rows)
        if target.vendor == "interpret":
            _require_interpreter()
        bound = {op: _for_target(load(choice.row), target) for op, choice in choices.items() if choice.row is not None}
        return cls(target, facts, choices, **bound)

    def describe(self) -> str:
        """One line an operation: its implementation, and why, for a log."""
        width = max(map(len, self.choices))
        rows = [choice.row for choice in self.choices.values() if choice.row is not None]
        return "\n".join(f"{row.op:<{width}}  {row.name}: {row.why} ({row.evidence})" for row in rows)


def load(row: Row) -> Callable[..., Any]:
    """The function that `row` names, imported. Raises `BrokenImplementation`, naming row and cause."""
    module, _, function = row.impl.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        # What an installation can do to an import: a package or name absent, a shared library that does not load, a
        # runtime that refuses. Anything else is a bug and keeps its own traceback.
        raise BrokenImplementation(
            f"{row.op}={row.name} was chosen and {row.impl} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    return found


def _for_target(found: Callable[..., Any], target: Target) -> Callable[..., Any]:
    return partial(found, target=target) if "target" in inspect.signature(found).parameters else found


def _require_interpreter() -> None:
    import triton

    if not triton.knobs.runtime.interpret:
        raise ValueError(
            "target interpret needs Triton's interpreter, which a kernel takes up when its module is imported: "
            "set TRITON_INTERPRET=1 before Python starts"
        )
