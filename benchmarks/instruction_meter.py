"""Counts what an emulated chip executes and touches: instructions by kind, bytes of memory.

The emulator (see `tests/emulator.py`) executes a block of instructions at a time for all its waves; a block's mix is
counted once and added for every wave that enters it.
"""

from __future__ import annotations

import importlib
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SECTOR = 32


@dataclass
class Count:
    """What the launches of one call executed and touched. `requested` is what threads asked for, before any cache;
    `touched` the sectors of 32 bytes read or written at least once in a launch."""

    instructions: int = 0
    programs: int = 0
    requested: int = 0
    touched: int = 0
    kernels: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)


AMD = (
    ("matrix", ("v_mfma",)),
    ("global memory", ("global_", "buffer_", "flat_", "s_load", "s_buffer")),
    ("shared memory", ("ds_",)),
    ("scalar and control", ("s_",)),
    ("vector", ("v_",)),
)
KINDS = tuple(name for name, _ in AMD)
PTX = (
    ("matrix", ("wgmma.mma_async", "mma.sync")),
    ("global memory", ("ld.global", "st.global", "cp.async")),
    ("shared memory", ("ld.shared", "st.shared", "ldmatrix", "stmatrix")),
    ("scalar and control", ("bra", "bar", "wgmma", "fence", "ret", "exit", "ld.param")),
    ("vector", ("",)),
)


def kind(text: str, table: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
    """The class of an instruction, by what its name begins with."""
    return next((name for name, starts in table if text.startswith(starts)), "vector")


class Meter:
    """Counts what the emulator executes between `start` and `stop`. Patches the emulator's classes, once a process."""

    def __init__(self, driver: types.ModuleType) -> None:
        self.driver, self.kinds, self.requested = driver, Counter[str](), 0
        self.sectors: dict[int, np.ndarray] = {}
        self.memories: list[Any] = []
        self._watch_amd(importlib.import_module("gcnemu"))
        self._watch_ptx(importlib.import_module("ptxemu"))

    def start(self) -> None:
        self.kinds, self.requested, self.sectors, self.memories = Counter(), 0, {}, []
        self.driver.STATS.clear()

    def stop(self) -> Count:
        kernels = Counter[str]()
        for name, _, executed, _ in self.driver.STATS:
            kernels[name] += executed
        return Count(
            instructions=sum(kernels.values()),
            programs=sum(programs for _, programs, _, _ in self.driver.STATS),
            requested=self.requested,
            touched=SECTOR * sum(int(marks.sum()) for marks in self.sectors.values()),
            kernels=dict(kernels),
            kinds=dict(self.kinds),
        )

    def touch(self, memory: Any, addresses: np.ndarray, size: int) -> None:
        """Note accesses of `size` bytes each."""
        if id(memory) not in self.sectors:
            self.memories.append(memory)  # kept, so that the number names no other one
            self.sectors[id(memory)] = np.zeros(memory.size // SECTOR + 1, bool)
        self.requested += size * len(addresses)
        at = (addresses - np.uint64(memory.BASE)).astype(np.int64)
        marks = self.sectors[id(memory)]
        marks[at // SECTOR] = True
        marks[(at + (size - 1)) // SECTOR] = True

    def _watch_amd(self, machine: types.ModuleType) -> None:
        meter, execution = self, machine.Exec
        scalar, load, store, generate = execution.sload, execution.gload, execution.gstore, machine.Kernel.gen

        def gen(self: Any, address: int) -> Callable[..., None]:
            block = generate(self, address)
            mix = Counter(kind(each.op, AMD) for each in self.blocks[address])

            def counted(state: Any, *registers: Any) -> None:
                waves = state.W if state.m is None else int(state.m.sum())
                meter.kinds.update({name: number * waves for name, number in mix.items()})
                block(state, *registers)

            return counted

        def sload(self: Any, base: Any, offset: Any, n: int, x: Any) -> Any:
            address = self.rs64(base) + np.uint64(offset)
            meter.touch(self.mem, address if self.m is None else address[self.m], 4 * n)
            return scalar(self, base, offset, n, x)

        def gload(self: Any, a: Any, act: Any, w: int, n: int, x: Any, sign: bool = False) -> Any:
            meter.touch(self.mem, np.broadcast_to(a, act.shape)[np.nonzero(act)], w * n)
            return load(self, a, act, w, n, x, sign)

        def gstore(self: Any, a: Any, act: Any, values: Any, w: int, x: Any) -> Any:
            meter.touch(self.mem, np.broadcast_to(a, act.shape)[np.nonzero(act)], w * len(values))
            return store(self, a, act, values, w, x)

        machine.Kernel.gen, execution.sload, execution.gload, execution.gstore = gen, sload, gload, gstore

    def _watch_ptx(self, machine: types.ModuleType) -> None:
        meter, execution = self, machine.Exec
        load, store, copy, generate = execution.load, execution.store, execution.cpasync, machine.Kernel.gen

        def gen(self: Any, number: int, masked: bool) -> tuple[Callable[..., None], str]:
            block, source = generate(self, number, masked)
            body, _ = self.blocks[number]
            # The emulator counts one instruction for the end of a block, a jump or not.
            mix = Counter(kind(".".join((each.op, *each.mods)), PTX) for each in body)
            mix["scalar and control"] += 1

            def counted(registers: Any, special: Any, mask: Any, state: Any) -> None:
                warps = int(mask.reshape(-1, 32).any(1).sum())
                meter.kinds.update({name: number * warps for name, number in mix.items()})
                block(registers, special, mask, state)

            return counted, source

        def global_(state: Any, address: Any, guard: Any, size: int) -> None:
            meter.touch(state.mem, np.broadcast_to(address, (state.N,))[state.idx(guard)], size)

        def ld(self: Any, space: str, address: Any, w: int, nv: int, g: Any, x: Any) -> Any:
            if space != "shared":
                global_(self, address, g, w * nv)
            return load(self, space, address, w, nv, g, x)

        def st(self: Any, space: str, address: Any, values: Any, w: int, g: Any, x: Any) -> Any:
            if space != "shared":
                global_(self, address, g, w * len(values))
            return store(self, space, address, values, w, g, x)

        def cp(self: Any, to: Any, source: Any, size: int, present: Any, g: Any, x: Any) -> Any:
            read = self.idx(g)
            if present is not None:
                read = read[np.broadcast_to(present, (self.N,))[read] > 0]
            meter.touch(self.mem, np.broadcast_to(source, (self.N,))[read], size)
            return copy(self, to, source, size, present, g, x)

        machine.Kernel.gen, execution.load, execution.store, execution.cpasync = gen, ld, st, cp
