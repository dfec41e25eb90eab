"""Calls a kernel's launcher with tensors of the CPU, wherever the kernel runs.

Tests that one implementation passes on the CPU then hold for a kernel on any device, strides, overlaps and in-place
writes included: what travels is the storage behind the tensors, there and back, guards and all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def on_device(launch: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """`launch`, taking tensors of the CPU and giving results there. In host memory it is called as it is."""
    if device.type == "cpu":
        return launch

    def call(*args: Any, **kwargs: Any) -> Any:
        there: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

        def send(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(send(each) for each in value)
            if not isinstance(value, torch.Tensor):
                return value
            storage = value.untyped_storage()
            copy = there.setdefault(storage.data_ptr(), (storage, storage.to(device=device)))[1]
            empty = torch.empty(0, dtype=value.dtype, device=device)
            return empty.set_(copy, value.storage_offset(), value.shape, value.stride())

        def receive(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(receive(each) for each in value)
            return value.cpu() if isinstance(value, torch.Tensor) else value

        out = launch(*(send(arg) for arg in args), **{name: send(arg) for name, arg in kwargs.items()})
        for storage, copy in there.values():
            storage.copy_(copy)
        return receive(out)

    return call
