"""Test drivers that execute the code compiled for a chip on the CPU.

    INKLING_TEST_DRIVER=emulator:gfx942 pytest tests/kernels

It needs the emulator, a folder with a module `emudrv`: see `folder`. That checks memory bounds and races in shared
memory, and raises on what it does not know. `tests/emulate.py` runs the tests so on each chip and keeps what passed.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent

ABSENT = (
    "the emulator is not here: name the folder that holds its emudrv.py in INKLING_EMULATOR, or put a folder with "
    "tools/emu/emudrv.py beside this repository"
)


def folder() -> Path | None:
    """Where the emulator is: in INKLING_EMULATOR, on Python's path, or in `tools/emu` of a folder beside the
    repository."""
    named = os.environ.get("INKLING_EMULATOR")
    beside = [Path(named)] if named else [*map(Path, sys.path), *sorted(ROOT.parent.glob("*/tools/emu"))]
    return next((path for path in beside if (path / "emudrv.py").is_file()), None)


def environment() -> dict[str, str]:
    """The environment of a process that compiles for an emulated chip: no interpreter, and Triton 3.9's default of
    fusing multiplications with additions said aloud, without which it warns."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"TRITON_DEFAULT_FP_FUSION": "1"}


def activate(backend: str, arch: int | str, races: bool = True) -> Any:
    """Make the emulated chip Triton's device; `races`: check shared memory for them. Returns the emulator's driver."""
    found = folder()
    if found is None:
        raise RuntimeError(ABSENT)
    sys.path.append(str(found))
    import emudrv
    import gcnemu
    import ptxemu
    import tcgen05

    _leave_waiting_blocks_alone(ptxemu.Exec, tcgen05)
    compare_halves(ptxemu)
    leave_nan_out(ptxemu)
    multiply_halves(ptxemu)
    add_small_products(gcnemu)
    emudrv.activate(backend, arch, races)
    return emudrv


def _leave_waiting_blocks_alone(machine: Any, tensor_memory: Any) -> None:
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
    tensor_memory.t_ld, tensor_memory.t_st = _own_lanes(tensor_memory.t_ld), _own_lanes(tensor_memory.t_st)


def compare_halves(machine: Any) -> None:
    """`setp` of two packed 16-bit numbers, which compilers take from sm90 on: the first predicate is that of the lower
    halves, the second of the upper ones (PTX ISA, "Half Precision Comparison Instructions: setp"). The emulator takes
    the pair for one number and the second predicate for the opposite of the first."""
    if hasattr(machine.Ops, "packed_setp"):
        return
    translate = machine.Ops.op_setp

    def packed_setp(kernel: Any, x: Any, guard: Any) -> Any:
        kind = machine.typ(x)
        if kind not in ("f16x2", "bf16x2"):
            return translate(kernel, x, guard)
        if any(mod in ("and", "or", "xor") for mod in x.mods) or "|" not in x.args[0]:
            raise machine.EmuError("unimplemented: " + x.text)
        lines = [f"whole{i} = {kernel.rd(x.args[1 + i], 'b32', x)}" for i in range(2)]
        for target, shift in zip(x.args[0].split("|"), (0, 16), strict=True):
            halves = [f"(whole{i} >> u4({shift})).astype(u2)" for i in range(2)]
            a, b = (f"bf2f({half})" if kind == "bf16x2" else f"{half}.view(np.float16)" for half in halves)
            nan, test = f"(np.isnan({a}) | np.isnan({b}))", x.mods[0]
            if test in ("num", "nan"):
                found = nan if test == "nan" else f"~{nan}"
            elif test in machine.Ops.CMP:
                found = f"(({a} {machine.Ops.CMP[test]} {b}) & ~{nan})"
            else:
                found = f"(({a} {machine.Ops.CMP[test[:-1]]} {b}) | {nan})"
            lines.append(kernel.wr(target.strip(), found, "pred", x, guard))
        return lines

    machine.Ops.op_setp = machine.Ops.packed_setp = packed_setp


def leave_nan_out(machine: Any) -> None:
    """`redux.sync.min.f32` and `.max.f32` take what is no NaN, but for `.NaN` (PTX ISA, "redux.sync"). Triton gives NaN
    from the lanes of a warp that hold another row. The emulator returns NaN where any lane has it."""
    if hasattr(machine.Exec, "extreme"):
        return
    translate = machine.Ops.op_redux

    def extreme(self: Any, op: str, value: Any, guard: Any) -> Any:
        numbers = self.warp(value).view(np.float32)
        taken = self.warp(np.ones(self.N, bool) if guard is None else guard)
        numbers = np.where(taken, numbers, np.float32(np.nan))
        found = functools.reduce({"min": machine.fmin, "max": machine.fmax}[op], numbers.T)
        return np.repeat(found.astype(np.float32), 32).view(np.uint32)

    def op_redux(kernel: Any, x: Any, guard: Any) -> Any:
        if machine.typ(x) != "f32":
            return translate(kernel, x, guard)
        if {"NaN", "abs"} & set(x.mods):
            raise machine.EmuError("unimplemented: " + x.text)
        found = f"E.extreme({x.mods[1]!r}, {kernel.rd(x.args[1], 'b32', x)}, {guard})"
        return kernel.wr(x.args[0], found, "b32", x, guard)

    machine.Exec.extreme, machine.Ops.op_redux = extreme, op_redux


def multiply_halves(machine: Any) -> None:
    """`fma.f32.bf16` and `.f16`: two 16-bit numbers, their product and sum in float32, which compilers take from sm100
    on (PTX ISA, "Mixed Precision Floating Point Instructions: fma"). The emulator takes all three for 16-bit ones."""
    if hasattr(machine.Ops, "mixed_fma"):
        return
    translate = machine.Ops.op_fma

    def mixed_fma(kernel: Any, x: Any, guard: Any) -> Any:
        kind = machine.typ(x)
        if kind not in ("f16", "bf16") or "f32" not in x.mods:
            return translate(kernel, x, guard)
        if "sat" in x.mods:
            raise machine.EmuError("unimplemented: " + x.text)
        target, *factors, addend = x.args
        a, b = (f"{kernel.rd(each, kind, x)}.astype(f4)" for each in factors)
        return kernel.wr(target, f"fma32({a}, {b}, {kernel.rd(addend, 'f32', x)})", "f32", x, guard)

    machine.Ops.op_fma = machine.Ops.mixed_fma = mixed_fma


def add_small_products(machine: Any) -> None:
    """`v_mfma_f32_4x4x4_16b`, which Triton takes for 4 rows on CDNA: sixteen products of 4 x 4 x 4. Lane `4 * block +
    i` holds row `i` of a block of A and column `i` of B and of the result, whose rows are registers; `cbsz:4 abid:n`
    takes A's block `n` for all of them. (AMD CDNA3 ISA guide, section 7.)"""
    if hasattr(machine.Exec, "small_product"):
        return
    translate = machine.G.mfma

    def mfma(self: Any, op: str) -> Any:
        if not op.startswith("v_mfma_f32_4x4x4_16b_") or self.x.m.get("blgp"):
            return translate(self, op)
        spread, block = (int(self.x.m.get(name, 0)) for name in ("cbsz", "abid"))
        d, a, b, c = (self.reg(self.x.a[i]) for i in range(4))
        if spread not in (0, 4):
            return self.bad(op)
        kind = op.rsplit("_16b_", 1)[1].removesuffix("_1k")
        added = c[1] if c else None
        if c is None and float(self.x.a[3]) != 0.0:
            return self.bad(op)
        return f"E.small_product({kind!r}, {d[1]}, {a[1]}, {b[1]}, {added}, {a[2]}, {block if spread else None})"

    def small_product(self: Any, kind: str, d: int, a: int, b: int, c: int | None, n: int, block: int | None) -> None:
        left, right = self.dec(a, n, kind), self.dec(b, n, kind)
        left, right = (x.reshape(self.W, 16, 4, -1) for x in (left, right))
        if block is not None:
            left = np.broadcast_to(left[:, block : block + 1], left.shape)
        product = np.einsum("wbik,wbjk->iwbj", left, right).reshape(4, self.W, 64).astype(np.float32)
        rows = slice(None) if self.m is None else self.m
        results = [product[i] + (0 if c is None else self.v[c + i].view(np.float32)) for i in range(4)]
        for i, result in enumerate(results):
            self.v[d + i][rows] = result.astype(np.float32).view(np.uint32)[rows]

    machine.G.mfma, machine.Exec.small_product = mfma, small_product


def _own_lanes(access: Any) -> Any:
    """Tensor memory may be read and written by a warp in its own 32 lanes: asked of running threads alone."""

    def checked(self: Any, address: Any, offset: Any, what: Any, shape: Any, split: Any, mask: Any) -> Any:
        if mask is not None:
            own = (self.S["warpid"].astype(np.int64) % 4 * 32 << 16) - offset
            address = np.where(np.broadcast_to(mask, (self.N,)), np.broadcast_to(address, (self.N,)), own)
        return access(self, address, offset, what, shape, split, mask)

    return checked


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
