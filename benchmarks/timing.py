"""Times on a GPU: variants of one operation in turns, from a cold cache; and what the device can do at most."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Call = Callable[[], Any]
# Larger than any second-level cache, and written so often that the launches behind it are waiting when it ends.
FLUSH_BYTES, FLUSHES = 2 << 30, 2


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median with the 20th and 80th percentile."""
    cuts = statistics.quantiles(values, n=5) if len(values) > 1 else [values[0]] * 4
    return {"median": statistics.median(values), "p20": cuts[0], "p80": cuts[3], "n": len(values)}


class Stopwatch:
    """Measures on the current CUDA or ROCm device."""

    def __init__(self, seconds: float = 1.0, rounds: int = 50) -> None:
        self.seconds, self.rounds = seconds, rounds
        self.scratch = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def once(self, call: Call) -> float:
        """Microseconds between two events around `call`, the cache flushed before."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(FLUSHES):
            self.scratch.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    def times(self, calls: Mapping[str, Call]) -> dict[str, dict[str, float]]:
        """Each variant's microseconds, one of each in every round: `rounds` of them, or `seconds` worth and at least
        five. Two rounds before are not kept."""
        found: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(2):
            for call in calls.values():
                self.once(call)
        begun = time.perf_counter()
        for n in range(self.rounds):
            if n >= 5 and time.perf_counter() - begun > self.seconds:
                break
            for name, call in calls.items():
                found[name].append(self.once(call))
        return {name: spread(values) for name, values in found.items()}

    def roofs(self) -> dict[str, float]:
        """Bytes a second of a copy (read and written ones) and operations a second of a bfloat16 matrix product."""
        half = FLUSH_BYTES // 2
        copy = self.times({"copy": lambda: self.scratch[:half].copy_(self.scratch[half:])})["copy"]["median"]
        size = 8192
        a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        product = self.times({"product": lambda: a @ b})["product"]["median"]
        return {"bytes": FLUSH_BYTES / copy * 1e6, "operations": 2 * size**3 / product * 1e6}
