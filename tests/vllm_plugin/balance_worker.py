"""vLLM's balancer in the worker processes of a CPU engine, and what the tests ask of it there.

vLLM balances on GPUs alone: elsewhere its function that turns logical ids into physical ones returns them as they are,
and its placeholders for events know no time. Importing this module (`worker_extension_cls`) gives the process the
kernel, in Triton's interpreter, and an event.
"""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
from vllm.model_executor.layers.fused_moe.router import base_router
from vllm.platforms import current_platform

sys.path.append(str(Path(__file__).parent.parent))


class Event:
    """No device runs beside this process, so whatever is waited for has happened."""

    def __init__(self, *arguments: object, **options: object) -> None: ...

    def record(self, stream: object = None) -> None: ...

    wait = synchronize = record

    def elapsed_time(self, other: object) -> float:
        return 0.0


@functools.cache
def with_kernel() -> None:
    """Give this process vLLM's kernel for ids, which it defines for GPUs when the module is imported."""
    from triton_interpreter import repair

    repair()
    spread = InterpreterBuilder.create_splat

    def create_splat(self: Any, kind: Any, value: TensorHandle) -> TensorHandle:
        # The interpreter gives a comparison of two scalars the type of these, and a mask must be one of truths.
        truth = TensorHandle(value.data, tl.int1) if value.data.dtype == bool else value
        return spread(self, kind, truth)

    InterpreterBuilder.create_splat = create_splat
    with mock.patch.object(type(current_platform), "is_cuda_alike", return_value=True):
        importlib.reload(base_router)


class Extension:
    """Methods that `LLM.collective_rpc` finds in each worker."""

    model_runner: Any

    def placement(self) -> list[list[int]]:
        """The logical expert in each place, by layer."""
        (state,) = self.model_runner.eplb_state.model_states.values()
        found: list[list[int]] = state.physical_to_logical_map.tolist()
        return found


with_kernel()
torch.Event = Event
