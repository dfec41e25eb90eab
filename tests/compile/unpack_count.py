"""Count the instructions that unpacking 4-bit experts takes in the compiled code, without a device.

    python -P tests/compile/unpack_count.py [--targets sm90,gfx942] [--evidence FOLDER]

Counted are all vector instructions of the main loop of the second product (`_grouped_kernel`, tiles of a small batch)
but those that move data to or from memory, multiply matrices, wait or branch: decoding, scales, addresses, copies. Two
figures a weight element: `loop`, all of them, and `marginal`, what the second half of a tile's rows adds, which leaves
out what does not grow with them (the tokens' addresses, the loop itself). Results are merged into `unpack.json` by
Triton version and target.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import triton

from inkling_kernels.compile_case import CompileCase
from inkling_kernels.moe_gemm import moe_experts, weight_on_meta
from inkling_kernels.moe_gemm_fp4 import prepare_experts
from inkling_kernels.moe_gemm_plan import MoeConfig, moe_config
from inkling_kernels.target import TARGETS, Target

sys.path.append(str(Path(__file__).parent))
harness = importlib.import_module("harness")

MATRIX = re.compile(r"(HMMA|HGMMA|QGMMA|OMMA|QMMA|UTC\w*MMA|v_mfma|v_wmma)")
# Everything that is no arithmetic on vector registers, by the beginning of its name.
APART = {
    "cuda": re.compile(
        r"LD|ST|ATOM|RED|BAR|WARP|DEPBAR|BRA|BSSY|BSYNC|NOP|SYNC|ARRIVES|R2UR|S2R|ERRBAR|MEMBAR|FENCE|CCTL|UTC|ELECT|"
        r"CS2R|PLOP3|VOTE|HMMA|HGMMA"
    ),
    "hip": re.compile(r"s_|ds_|buffer_|global_|flat_|scratch_|v_mfma|v_wmma"),
}


def cuda_loops(cubin: bytes) -> list[list[str]]:
    """Instructions of each loop: from the target of a backward branch to the branch. Waits that the compiler put
    behind the kernel's end are no loops."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    lines = [(int(at, 16), line) for at, line in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(\S.*?);", text)]
    place = {at: i for i, (at, _) in enumerate(lines)}
    found = []
    for i, (at, line) in enumerate(lines):
        branch = re.search(r"\bBRA(?:\.\w+)*\s.*?0x([0-9a-f]+)", line)
        if branch and int(branch[1], 16) < at:
            body = [line for _, line in lines[place[int(branch[1], 16)] : i + 1]]
            found.append([re.sub(r"^@!?U?P\w+\s+", "", line).split()[0].partition(".")[0] for line in body])
    return [loop for loop in found if "EXIT" not in loop]


def hip_loops(assembly: str) -> list[list[str]]:
    """The same from AMD's assembly."""
    lines, labels, found = assembly.splitlines(), {}, []
    for i, line in enumerate(lines):
        if label := re.match(r"(\.LBB\d+_\d+):", line):
            labels[label[1]] = i
        branch = re.match(r"\s+s_c?branch\S*\s+(\.LBB\d+_\d+)", line)
        if branch and branch[1] in labels:
            body = (each.split()[0] for each in lines[labels[branch[1]] : i + 1] if each.startswith("\t"))
            found.append([name for name in body if re.match(r"[a-z]+_", name)])
    return found


def main_loop(kernel: Any, target: Target) -> Counter[str]:
    """Names and numbers of the counted instructions of the loop that multiplies matrices."""
    loops = cuda_loops(kernel.asm["cubin"]) if target.vendor == "cuda" else hip_loops(kernel.asm["amdgcn"])
    loops = [loop for loop in loops if any(MATRIX.match(name) for name in loop)]
    if not loops:
        raise ValueError(f"{target}: no loop with matrix instructions in the compiled code")
    return Counter(name for name in min(loops, key=len) if not APART[target.vendor].match(name))


def loop_of(target: Target, format: str, block_n: int) -> tuple[Counter[str], int]:
    """The loop of the second product with tiles of `block_n` weight rows, and elements a lane."""
    chosen = moe_config(6, 256, target, format=format)
    config = MoeConfig(chosen.block_m, block_n, chosen.block_k, chosen.group_m, chosen.num_warps, chosen.num_stages)

    def launch(target: Target) -> torch.Tensor:
        x = torch.empty(8, 6144, dtype=torch.bfloat16, device="meta")
        shapes = ((1536, 6144, "interleaved"), (6144, 768, "plain"))
        weights = [prepare_experts(weight_on_meta(format, 256, *shape), target) for shape in shapes]
        ids = torch.empty(8, 6, dtype=torch.int32, device="meta")
        return moe_experts(x, *weights, ids, torch.empty(8, 6, device="meta"), target=target, config=config)

    kernels = harness.compiled_by(CompileCase(f"{format}, {block_n} rows", "moe_experts=triton", launch), target)
    down = [kernel for name, kernel in kernels if name == "_grouped_kernel"][1]
    return main_loop(down, target), block_n * config.block_k // (config.num_warps * target.warp_width)


def count(target: Target) -> dict[str, dict[str, Any]]:
    """Both figures and the loop's instructions of each format on `target`. Changes the process's driver."""
    found = {}
    for format in ("nvfp4", "mxfp4"):
        rows = moe_config(6, 256, target, format=format).block_n
        (half, few), (whole, many) = (loop_of(target, format, each) for each in (rows // 2, rows))
        found[format] = {
            "loop": round(whole.total() / many, 2),
            "marginal": round((whole.total() - half.total()) / (many - few), 2),
            "instructions": dict(whole.most_common(12)),
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="", help="architectures, separated by commas; all where it is empty")
    parser.add_argument("--evidence", type=Path, default=harness.EVIDENCE, help="folder of unpack.json")
    options = parser.parse_args()
    file = options.evidence / "unpack.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"counts": {}}
    counts = known["counts"].setdefault(triton.__version__, {})
    names = options.targets.split(",") if options.targets else [t.arch for t in TARGETS if t.is_gpu]
    # A process has one device, so each target has a process.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for name, found in zip(names, pool.imap(count, map(Target.parse, names)), strict=True):
            counts[name] = found
            figures = (f"{format} {c['marginal']} (loop {c['loop']})" for format, c in found.items())
            sys.stdout.write(f"{name:8} {', '.join(figures)}\n")
            sys.stdout.flush()
    options.evidence.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
