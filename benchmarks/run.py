"""Benchmarks by name: `python benchmarks/run.py cpu`, for example.

Each case prints a table, then its results as JSON, and writes `benchmarks/results/CASE.json` with the machine, the
versions and the commit, beside a readable `CASE.md`. A case whose correctness gate fails prints no number and exits
with 1; one that misses something to run on or to compare with exits with 2.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))
from gate import GateError, MissingError

RESULTS = Path(__file__).parent / "results"
CASES = {
    "cpu": "the shared model and engine against transformers' eager Inkling, on this machine's CPU (measured)",
    "account": "tiles, bytes, operations and roofline times of attention at the released sizes (computed)",
    "experts_account": "bytes, padding, unpacking and roofline times of the experts at the released sizes (computed)",
    "emulated": "wave instructions of attention beside vLLM's kernels for ROCm, on an emulator (counted)",
    "fp8": "perplexity of the trained small model with an 8-bit cache of keys and values, on the CPU (measured)",
    "gpu": "every kernel on this machine's GPU, beside torch's (measured; benchmarks/gpu.sh runs the tests before)",
}
MODULES = {"cpu": "cpu_case", "fp8": "fp8_case"}


def machine() -> dict[str, Any]:
    """What a reader needs to place the figures."""
    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=RESULTS.parent, capture_output=True, text=True, check=False
    )
    model = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "unknown"
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "commit": commit.stdout.strip() or "unknown",
        "date": time.strftime("%Y-%m-%d"),
    }


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.is_file() else []


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "case", choices=sorted(CASES), help="; ".join(f"{name}: {what}" for name, what in CASES.items())
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default: %(default)s)")
    parser.add_argument("--vllm-wheel", type=Path, help="emulated: a wheel of vLLM, where vLLM is not installed")
    chosen = parser.parse_args(args)
    case = importlib.import_module(MODULES.get(chosen.case, chosen.case))
    options = {"wheel": chosen.vllm_wheel} if chosen.case == "emulated" else {}
    console = Console(width=120)
    started = time.perf_counter()
    try:
        found, report = case.run(console, **options)
    except GateError as error:
        console.print(f"[red]gate failed, nothing is timed:[/red] {error}")
        return 1
    except MissingError as error:
        console.print(f"[red]not run:[/red] {error}")
        return 2
    results = {"case": chosen.case, "what": CASES[chosen.case], **found, "machine": machine()}
    results["seconds"] = round(time.perf_counter() - started, 1)
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / f"{chosen.case}.json").write_text(json.dumps(results, indent=1) + "\n")
    (chosen.out / f"{chosen.case}.md").write_text(report)
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
