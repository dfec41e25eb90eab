"""Test drivers that execute the code compiled for a chip on the CPU: `INKLING_TEST_DRIVER=emulator:gfx942 pytest
tests/kernels`.

They need the emulator's module `emudrv` on PYTHONPATH. It checks memory bounds and races in shared memory, and raises
on what it does not know.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def activate(backend: str, arch: int | str) -> None:
    """Make the emulated chip Triton's device; race checks on."""
    import emudrv
    import ptxemu

    _read_operands_of_running_blocks(ptxemu.Exec)
    emudrv.activate(backend, arch)


def _read_operands_of_running_blocks(machine: Any) -> None:
    """Blocks are executed together, and a `wgmma` reads the operand tiles of all of them, also of blocks that are at
    another instruction then, through whatever their registers hold. Their result is discarded; keep the read itself
    harmless."""
    if hasattr(machine, "running"):
        return
    machine.running = None
    multiply, check = machine.wgmma, machine.on_tile

    def wgmma(self: Any, n: Any, k: Any, dt: Any, at: Any, bt: Any, d: Any, a: Any, b: Any, *rest: Any) -> Any:
        if rest[-1] is not None:
            mask = np.broadcast_to(rest[-1], (self.N,))
            lane = int(mask.argmax())
            b = np.where(mask, b, np.broadcast_to(b, (self.N,))[lane])
            if not isinstance(a, list):
                a = np.where(mask, a, np.broadcast_to(a, (self.N,))[lane])
            self.running = mask[::128].copy()
        try:
            return multiply(self, n, k, dt, at, bt, d, a, b, *rest)
        finally:
            self.running = None

    def on_tile(self: Any, addresses: Any, blocks: Any) -> None:
        if self.running is not None and len(self.running) == len(blocks):
            addresses, blocks = addresses[self.running], blocks[self.running]
        if len(blocks):
            check(self, addresses, blocks)

    machine.wgmma, machine.on_tile = wgmma, on_tile


def sm80() -> None:
    activate("cuda", 80)


def sm90() -> None:
    activate("cuda", 90)


def sm100() -> None:
    activate("cuda", 100)


def sm120() -> None:
    activate("cuda", 120)


def gfx90a() -> None:
    activate("hip", "gfx90a")


def gfx942() -> None:
    activate("hip", "gfx942")


def gfx950() -> None:
    activate("hip", "gfx950")
