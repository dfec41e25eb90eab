"""Test drivers that execute the code compiled for a chip on the CPU.

    INKLING_TEST_DRIVER=emulator:gfx942 pytest tests/kernels
    python -P tests/emulator.py gfx942 sm90 [-k EXPRESSION] [--modules rel_attention,norm]

The second runs the core cases of the kernel tests on each chip and records in `rocm/evidence/emulated.json` what
passed. Both need the emulator's module `emudrv` on PYTHONPATH. It checks memory bounds and races in shared memory, and
raises on what it does not know.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
EVIDENCE = ROOT / "rocm" / "evidence" / "emulated.json"
# bfloat16 stands for the other types, and what differs in lengths alone is left to the interpreter.
CORE = "core and not dtype0 and not dtype2 and not a11 and not captured"


def activate(backend: str, arch: int | str) -> None:
    """Make the emulated chip Triton's device; race checks on."""
    import emudrv
    import ptxemu
    import tcgen05

    _leave_waiting_blocks_alone(ptxemu.Exec, tcgen05)
    emudrv.activate(backend, arch)


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


def record(arch: str, expression: str, modules: list[str]) -> bool:
    """Run the kernel tests of `modules` on a chip and add the run to the evidence. Returns whether they passed."""
    import triton

    sys.path.append(str(ROOT / "tests" / "compile"))
    import harness

    files = [
        str(path) for name in modules for path in [ROOT / "tests" / "kernels" / f"test_{name}.py"] if path.exists()
    ]
    environment = os.environ | {"INKLING_TEST_DRIVER": f"emulator:{arch}"}
    environment.pop("TRITON_INTERPRET", None)
    hashes = {name: harness.sources(name) for name in modules}
    begun = time.monotonic()
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-k", expression, *files]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=ROOT)
    sys.stdout.write(f"{arch}: {done.stdout.strip().splitlines()[-1]}\n")
    passed = re.search(r"(\d+) passed", done.stdout)
    if done.returncode or passed is None:
        sys.stdout.write(done.stdout[-3000:] + done.stderr[-3000:])
        return False
    known = json.loads(EVIDENCE.read_text(encoding="utf-8"))["runs"] if EVIDENCE.exists() else []
    cases = harness.modules()
    runs = [run for run in known if (run["target"], run["modules"]) != (arch, modules)]
    runs.append(
        {
            "target": arch, "triton": triton.__version__, "modules": modules,
            "sources": hashes,
            "rows": sorted({case.row for name in modules for case in cases.get(name, ())}), "expression": expression,
            "passed": int(passed[1]), "seconds": round(time.monotonic() - begun),
        }
    )  # fmt: skip
    runs.sort(key=lambda run: (run["modules"], run["target"]))
    rows = sorted({row for run in runs for row in run["rows"]})
    text = json.dumps({"evidence": "emulated", "rows": rows, "runs": runs}, indent=1, sort_keys=True)
    EVIDENCE.parent.mkdir(parents=True, exist_ok=True)
    EVIDENCE.write_text(text + "\n", encoding="utf-8")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+", choices=("sm80", "sm90", "sm100", "sm120", "gfx90a", "gfx942", "gfx950"))
    parser.add_argument("-k", default=CORE, help="which tests, as for pytest")
    parser.add_argument("--modules", default="rel_attention,rel_attention_decode", help="kernel files, by commas")
    options = parser.parse_args()
    passed = [record(arch, options.k, options.modules.split(",")) for arch in options.targets]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
