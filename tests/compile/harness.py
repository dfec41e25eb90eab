"""Compile every kernel for every target without a device, and keep what was found as evidence.

    python -P tests/compile/harness.py [--targets sm90,gfx942] [--modules rel_attention] [--jobs 2] [--evidence FOLDER]

Each case runs in a process of its own, since some failures of the compiler abort it. What is compiled is what a launch
would: the launcher runs on `meta` tensors (whose address 0 is aligned, as an allocation is) with a driver that stops
after compilation. Run it under each Triton that is supported; results are merged into `compile.json` by case, target
and Triton version, and a case whose sources have not changed since is not compiled again. Exits with 1 where a case
does not keep what its file promises.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import hashlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.runtime import JITFunction
from triton.runtime.driver import driver

from inkling_kernels.compile_case import CompileCase
from inkling_kernels.target import TARGETS, Target, triton_target

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "triton_kernels"
EVIDENCE = ROOT / "rocm" / "evidence"
# A case that takes longer is reported as failed: Triton 3.6 can spend minutes on a chip that it barely knows.
SECONDS = 300
FIRST = ("sm90", "gfx942", "sm100", "gfx950")


class CompileOnly:
    """As much of a Triton driver as a launch asks for before it would load the code."""

    def __init__(self, target: Target) -> None:
        self.target = triton_target(target)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled_by(case: CompileCase, target: Target) -> list[tuple[str, Any]]:
    """(kernel's name, compiled kernel) of each launch that the case makes. Changes the process: call it in a child."""
    found = []
    stock = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = stock(self, *args, grid=grid, warmup=True, **options)
        found.append((self.fn.__name__, kernel))
        return kernel

    JITFunction.run = run
    driver.set_active(CompileOnly(target))
    case.launch(target)
    return found


def nvidia_usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) from the tool in Triton's wheel; what does not fit in registers is on the stack."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+)\s+STACK:(\d+)", text.stdout + text.stderr)
    if found is None:
        raise ValueError(f"cuobjdump says nothing of registers: {text.stdout[-300:]}")
    return int(found[1]), int(found[2])


def amd_usage(assembly: str) -> tuple[int, int]:
    """(vector registers, bytes of scratch) from the metadata in the assembly."""
    numbers = {}
    for key in ("vgpr_count", "private_segment_fixed_size"):
        found = re.search(rf"^\s*-?\s*\.{key}:\s*(\d+)", assembly, re.MULTILINE)
        if found is None:
            raise ValueError(f"the assembly does not state {key}")
        numbers[key] = int(found[1])
    return numbers["vgpr_count"], numbers["private_segment_fixed_size"]


# NVIDIA's block-scaled instructions are the others' with a kind of their own.
MATRIX = re.compile(
    r"\b((?:tcgen05\.mma|mma\.sync)(?:[\w.:]*?kind::mx\w+)?|wgmma\.mma_async|v_mfma_scale|v_mfma|v_wmma|v_swmmac)\w*[\w.:]*"
)


def narrow_addresses(ttir: str, allowed: tuple[str, ...]) -> list[str]:
    """Lines of the IR that address data with 32 bits: a run-time i32 offset on a pointer to anything but i32, whose
    root is no allowed argument; or an offset widened only after a product of two run-time i32 values."""
    lines = [line.strip() for line in ttir.splitlines()]
    # Names are unique within a region only: what counts is the definition last seen.
    made: dict[str, str] = {}

    def root(name: str) -> str:
        line = made.get(name, "")
        found = re.match(r"%\S+ = (?:tt\.splat|tt\.broadcast|tt\.expand_dims|tt\.addptr) (%[\w#]+)", line)
        return root(found[1]) if found else name.removeprefix("%")

    def constant(name: str) -> bool:
        return " arith.constant " in made.get(name, "")

    bad = []
    for line in lines:
        if found := re.match(r"(%[\w#]+)(?::\d+)? = ", line):
            made[found[1]] = line
        address = re.match(r"%\S+ = tt\.addptr (%[\w#]+), (%[\w#]+) : .*?ptr<(\w+)>>?, (\S+)", line)
        narrow = address and address[3] != "i32" and "i64" not in address[4] and not constant(address[2])
        if address and narrow and root(address[1]) not in allowed:
            bad.append(line)
        late = re.match(r"%\S+ = arith\.extsi (%[\w#]+) : (?:tensor<[\dx]*x)?i32", line)
        product = re.match(r"%\S+ = arith\.muli (%[\w#]+), (%[\w#]+)", made.get(late[1], "")) if late else None
        if product and not any(map(constant, product.groups())):
            bad.append(line)
    return [line[:160] for line in bad]


def measure(case: CompileCase, target: Target) -> list[dict[str, Any]]:
    """What the compiled code of each launch uses, and what of the case's promises it breaks."""
    measured = []
    for name, kernel in compiled_by(case, target):
        text = kernel.asm["ptx" if target.vendor == "cuda" else "amdgcn"]
        usage = nvidia_usage(kernel.asm["cubin"]) if target.vendor == "cuda" else amd_usage(text)
        narrow = narrow_addresses(kernel.asm["ttir"], case.narrow)
        measured.append(
            {
                "kernel": name,
                "registers": usage[0],
                "spill_bytes": usage[1],
                "shared_bytes": kernel.metadata.shared,
                "num_warps": kernel.metadata.num_warps,
                "instructions": dict(Counter(found[1] for found in MATRIX.finditer(text))),
                "narrow_addresses": narrow,
            }
        )
    return measured


def problems(case: CompileCase, target: Target, kernels: list[dict[str, Any]]) -> list[str]:
    found = []
    for kernel in kernels:
        if kernel["shared_bytes"] > target.shared_memory_bytes:
            found.append(f"{kernel['kernel']}: {kernel['shared_bytes']} bytes of shared memory")
        if kernel["spill_bytes"] > case.spills.get(target.arch, 0):
            found.append(f"{kernel['kernel']}: spills {kernel['spill_bytes']} bytes")
        found += [f"{kernel['kernel']}: 32-bit address: {line}" for line in kernel["narrow_addresses"]]
    wanted = case.expected_instruction(target)
    if wanted and not any(name.startswith(wanted) for kernel in kernels for name in kernel["instructions"]):
        found.append(f"no {wanted}")
    return found


def definitions(module: str) -> dict[str, ast.stmt | tuple[str, str]]:
    """What each name of a kernel module stands for at its top level: its code, docstrings left out, or the (module,
    name) of another kernel module that it is imported from."""
    tree = ast.parse((KERNELS / f"{module}.py").read_text(encoding="utf-8"))
    found: dict[str, ast.stmt | tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    for node in tree.body:
        match node:
            case ast.ImportFrom(module=str(where)) if where.startswith("inkling_kernels."):
                for alias in node.names:
                    found[alias.asname or alias.name] = (where.removeprefix("inkling_kernels."), alias.name)
            case ast.FunctionDef() | ast.ClassDef():
                found[node.name] = node
            case ast.Assign() | ast.AnnAssign():
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    found |= {each.id: node for each in ast.walk(target) if isinstance(each, ast.Name)}
    return found


def sources(module: str) -> str:
    """A hash of the code that the module's cases reach, in whatever kernel module it stands, prose left out. What they
    do not reach, such as a `_ref`, is no part of what is compiled."""
    known: dict[str, dict[str, ast.stmt | tuple[str, str]]] = {}
    reached: dict[tuple[str, str], str] = {}
    waiting = [(module, "COMPILE_CASES")]
    while waiting:
        where, name = waiting.pop()
        if where not in known:
            known[where] = definitions(where)
        meant = known[where].get(name)
        if isinstance(meant, tuple):
            waiting.append(meant)
        elif meant is not None and (where, name) not in reached:
            reached[where, name] = ast.unparse(meant)
            waiting += [(where, each.id) for each in ast.walk(meant) if isinstance(each, ast.Name)]
    if not reached:
        raise ValueError(f"{module} has no COMPILE_CASES")
    return hashlib.sha256(json.dumps(sorted(map(list, reached.items()))).encode()).hexdigest()[:16]


def modules() -> dict[str, tuple[CompileCase, ...]]:
    """Kernel modules that have cases."""
    found = {}
    for path in sorted(KERNELS.glob("*.py")):
        if re.search(r"^COMPILE_CASES\b", path.read_text(encoding="utf-8"), re.MULTILINE):
            found[path.stem] = importlib.import_module(f"inkling_kernels.{path.stem}").COMPILE_CASES
    return found


def in_child(case: CompileCase, target: Target, result: Path) -> int:
    """Compile in a child process that leaves its findings, or its error, in the file `result`; returns its id."""
    child = os.fork()
    if child:
        return child
    signal.alarm(SECONDS)
    with result.with_suffix(".log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            kernels = measure(case, target)
            result.write_text(json.dumps({"kernels": kernels, "problems": problems(case, target, kernels)}))
        finally:
            log.flush()
            os._exit(0)
    raise AssertionError("unreachable")


def finished(result: Path, status: int) -> dict[str, Any]:
    if result.exists():
        return json.loads(result.read_text())
    log = result.with_suffix(".log").read_text(errors="replace").strip().splitlines()
    died = f"signal {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else "an exception"
    return {"kernels": [], "problems": [f"did not compile: {died}: {' '.join(log[-3:])[-300:]}"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="", help="architectures, separated by commas; all where it is empty")
    parser.add_argument("--modules", default="", help="kernel modules, separated by commas; all where it is empty")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--evidence", type=Path, default=EVIDENCE, help="folder of compile.json and compile.md")
    options = parser.parse_args()
    cases = {
        name: found
        for name, found in modules().items()
        if name in (options.modules.split(",") if options.modules else [name])
    }
    wanted = options.targets.split(",") if options.targets else [t.arch for t in TARGETS if t.is_gpu]
    targets = sorted((Target.parse(name) for name in wanted), key=lambda t: (t.arch not in FIRST, t.arch))
    entries = merge(options.evidence, {})
    hashes = {name: sources(name) for name in cases}
    jobs = []
    for target in targets:
        for name, found in cases.items():
            for case in (case for case in found if case.includes(target)):
                old = entries.get((name, case.name, target.arch, triton.__version__))
                if old is None or old["sources"] != hashes[name] or old["problems"]:
                    jobs.append((name, case, target))
    running: dict[int, tuple[str, CompileCase, Target, Path, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(len(jobs) + options.jobs):
            if number < len(jobs):
                name, case, target = jobs[number]
                result = Path(folder) / f"{number}.json"
                running[in_child(case, target, result)] = (name, case, target, result, time.monotonic())
            if running and (len(running) >= options.jobs or number >= len(jobs)):
                child, status = os.wait()
                name, case, target, result, begun = running.pop(child)
                found = finished(result, status)
                key = (name, case.name, target.arch, triton.__version__)
                entries[key] = {
                    "module": name, "case": case.name, "target": target.arch, "triton": triton.__version__,
                    "row": case.row, "sources": hashes[name], "shared_limit": target.shared_memory_bytes, **found,
                }  # fmt: skip
                verdict = "; ".join(found["problems"]) or "as promised"
                sys.stdout.write(f"{target.arch:8} {name}: {case.name}: {verdict} ({time.monotonic() - begun:.0f} s)\n")
                sys.stdout.flush()
                merge(options.evidence, {key: entries[key]})
    every = [(name, case, target) for name, found in modules().items() for case in found for target in TARGETS]
    entries = merge(options.evidence, {}, {(name, case.name, t.arch) for name, case, t in every if case.includes(t)})
    failed = sum(bool(e["problems"]) for e in entries.values() if e["triton"] == triton.__version__)
    sys.stdout.write(
        f"{len(jobs)} compiled, {len(entries)} entries, {failed} with problems on Triton {triton.__version__}\n"
    )
    return int(failed > 0)


def merge(
    folder: Path, new: dict[tuple[str, ...], dict[str, Any]], cases: set[tuple[str, str, str]] | None = None
) -> dict[tuple[str, ...], dict[str, Any]]:
    """Add entries to those of the folder and return them all; several processes may do so at a time. Those of no
    (module, case, target) of `cases` are dropped, where that is given."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = folder / "compile.json"
        known = json.loads(file.read_text(encoding="utf-8"))["cases"] if file.exists() else []
        entries = {(e["module"], e["case"], e["target"], e["triton"]): e for e in known} | new
        if cases is not None:
            entries = {key: e for key, e in entries.items() if key[:3] in cases}
        if new or len(entries) < len(known):
            write(folder, [entries[key] for key in sorted(entries)])
        return entries
    finally:
        os.close(lock)


def write(folder: Path, entries: list[dict[str, Any]]) -> None:
    """`compile.json` for machines and `compile.md` for people."""
    good = sorted({e["row"] for e in entries} - {e["row"] for e in entries if e["problems"]})
    evidence = {"evidence": "compiled", "rows": good, "cases": entries}
    (folder / "compile.json").write_text(json.dumps(evidence, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    lines = [
        "# Compiled without a device",
        "",
        "Written by `make compile-all` from `compile.json`. Registers are those of a thread; spilled bytes are its",
        "stack (NVIDIA) or scratch (AMD); shared memory is a block's, beside the chip's limit. Nothing here was",
        "executed.",
        "",
        "| case | target | Triton | kernel | registers | spilled | shared | warps | matrix instructions | problems |",
        "|-|-|-|-|-|-|-|-|-|-|",
    ]
    for e in entries:
        head = f"| {e['module']}: {e['case']} | {e['target']} | {e['triton']} "
        trouble = "; ".join(e["problems"]).replace("|", "\\|")
        for k in e["kernels"]:
            used = ", ".join(f"{count} {name}" for name, count in sorted(k["instructions"].items())) or "none"
            lines.append(
                f"{head}| `{k['kernel']}` | {k['registers']} | {k['spill_bytes']} "
                f"| {k['shared_bytes']} of {e['shared_limit']} | {k['num_warps']} | {used} | {trouble} |"
            )
        if not e["kernels"]:
            lines.append(f"{head}| | | | | | | {trouble} |")
    (folder / "compile.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
