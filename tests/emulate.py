"""Run the kernels' tests on emulated chips and keep what passed as evidence.

    python -P tests/emulate.py [--targets sm90,gfx942] [--modules norm,routing] [--evidence FOLDER] [--all]

Each kernel file's tests run as they are, a process for each chip, with the emulator's checks of memory bounds and of
races in shared memory. What passed is merged into `emulated.json`, beside a readable `emulated.md`. A run whose kernel,
tests, emulator and Triton have not changed since is not repeated, but for `--all`. A test that stops at an instruction
which the emulator does not know is listed under `cannot`, with the instruction; any other failure makes the command
exit with 1 and is not recorded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent / "compile"))
import emulator
import harness

ROOT = emulator.ROOT
EVIDENCE = ROOT / "rocm" / "evidence"
TARGETS = ("sm80", "sm90", "sm100", "sm120", "gfx90a", "gfx942", "gfx950")
# What CI runs, in minutes: one chip of each vendor.
FIRST = ("sm90", "gfx942")
# What an emulator does not know, in its own words. Everything else that it reports is a fault of the kernel.
LIMITS = re.compile(
    r"EmuError: (unimplemented|operand|dest|address|label|int imm|mma type|mfma type|multi-block mfma|4x4 mfma|dpp |"
    r"wgmma d type|tcgen05 (M=|shape|f16)|no-swizzle|\.local depot|\d+ params)[^\n]*"
)


@dataclass(frozen=True)
class Suite:
    """The tests of a kernel file that run on an emulator: an expression as for `pytest -k`, and why not the others."""

    tests: tuple[str, ...]
    expression: str
    without: str
    targets: tuple[str, ...] = TARGETS

    @property
    def files(self) -> list[Path]:
        return [ROOT / "tests" / "kernels" / f"test_{name}.py" for name in self.tests]


# The reference is no kernel, and its gradients are tested where it is.
_KERNEL = "not torch and not gradients"
# bfloat16 stands for the other types; captured graphs need a driver that captures.
_ATTENTION = "core and not dtype0 and not dtype2 and not captured"
_NO_TYPES = "float32 and float16; what differs in lengths alone, which the interpreter covers"
SUITES: dict[str, Suite] = {
    "rel_attention": Suite(("rel_attention", "own_tiles"), _ATTENTION, _NO_TYPES),
    "rel_attention_decode": Suite(("rel_attention_decode",), _ATTENTION, _NO_TYPES),
    "kv_cache": Suite(("kv_cache", "cache_fp8"), _KERNEL, "gradients"),
    "short_conv": Suite(("short_conv", "paged_conv"), _KERNEL, "gradients"),
    "norm": Suite(("norm",), _KERNEL, "gradients"),
    "embedding": Suite(("embedding",), _KERNEL, "gradients"),
    "activation": Suite(("activation",), _KERNEL, "gradients"),
    "logits": Suite(("logits",), _KERNEL, "gradients"),
    "linear": Suite(("batch_invariant",), "not torch and (core or one_tile)", "plans"),
    "routing": Suite(("routing",), _KERNEL, "gradients"),
    "expert_sort": Suite(("expert_sort",), _KERNEL, ""),
    "moe_gemm": Suite(
        ("moe_gemm", "moe_gemm_fp4"),
        "not torch and (halves or packed or leaves or telling or tile_shapes or (parts and mxfp4) "
        "or (widths_and_padding and (32 or 96 or 224)))",
        "routings drawn at random, which the interpreter covers",
    ),
    "act_quant": Suite(("act_quant",), "codes or spoils", "", ("sm100", "sm120", "gfx950")),
    "moe_native": Suite(
        ("moe_native",),
        "telling or spoils",
        "routings drawn at random; sm100, whose block scales the emulator does not know",
        ("sm120", "gfx950"),
    ),
}


# Batches drawn at random, of which many are compiled for: what CI leaves to `make emulate`.
DRAWN = "any_shape or any_ids or ragged or choice_and_weights"


@dataclass
class Outcome:
    """What became of a suite on a chip."""

    passed: list[str]
    cannot: list[dict[str, str]]
    failed: dict[str, str]
    seconds: int


def run(suite: Suite, target: str, *, drawn: bool = True) -> Outcome:
    """Run a suite on an emulated chip; without the batches `drawn` at random, its core cases."""
    expression = suite.expression if drawn else f"({suite.expression}) and not ({DRAWN})"
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "-k",
                   expression, *map(str, suite.files)]  # fmt: skip
        environment = emulator.environment() | {"INKLING_TEST_DRIVER": f"emulator:{target}"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=ROOT)
        outcome = sorted_out(ET.parse(report).getroot() if report.exists() else ET.Element("none"))
    if not outcome.passed and not outcome.cannot and not outcome.failed:
        outcome.failed["collection"] = (done.stdout + done.stderr)[-3000:]
    outcome.seconds = round(time.monotonic() - begun)
    return outcome


def sorted_out(report: ET.Element) -> Outcome:
    """What pytest's JUnit report says. A skip counts as a failure: nothing here has a reason to skip."""
    outcome = Outcome([], [], {}, 0)
    for case in report.iter("testcase"):
        name = str(case.get("name"))
        bad = [each for each in case if each.tag in ("failure", "error", "skipped")]
        text = "\n".join(f"{each.get('message')}\n{each.text}" for each in bad)
        limit = LIMITS.search(text)
        if not bad:
            outcome.passed.append(name)
        elif limit:
            outcome.cannot.append({"test": name, "why": limit[0].removeprefix("EmuError: ")[:200]})
        else:
            outcome.failed[name] = text[-1200:]
    return outcome


def digest(paths: Iterable[Path]) -> str:
    """A hash of files, names included."""
    found = hashlib.sha256()
    for path in sorted(paths):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def identity(module: str, target: str) -> dict[str, str]:
    """What a run depends on: one of the same identity need not be repeated."""
    folder = emulator.folder()
    if folder is None:
        raise SystemExit(f"{emulator.ABSENT}.")
    suite = SUITES[module]
    return {
        "module": module,
        "target": target,
        "sources": harness.sources(module),
        "tests": digest(suite.files),
        "emulator": digest([*folder.glob("*.py"), Path(emulator.__file__)]),
        "triton": triton.__version__,
        "expression": suite.expression,
    }


def rows_of(module: str) -> list[str]:
    """The rows of the dispatch table that launch a kernel file's kernels."""
    return sorted({case.row for case in harness.modules().get(module, ())})


def write(folder: Path, runs: list[dict[str, Any]]) -> None:
    runs.sort(key=lambda run: (run["module"], TARGETS.index(run["target"])))
    rows = sorted({row for run in runs for row in run["rows"]})
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"evidence": "emulated", "rows": rows, "runs": runs}, indent=1, sort_keys=True)
    (folder / "emulated.json").write_text(text + "\n", encoding="utf-8")
    (folder / "emulated.md").write_text(page(runs), encoding="utf-8")


def page(runs: list[dict[str, Any]]) -> str:
    """The evidence as a table: tests passed, and those that the emulator could not execute."""
    by = {(run["module"], run["target"]): run for run in runs}

    def cell(module: str, target: str) -> str:
        run = by.get((module, target))
        if run is None:
            return "not run" if target in SUITES[module].targets else "-"
        return f"{run['passed']}" + (f", {len(run['cannot'])} not executed" if run["cannot"] else "")

    lines = [HEAD, "| kernel file | " + " | ".join(TARGETS) + " | left out |", "|" + "-|" * (len(TARGETS) + 2)]
    for module in sorted({run["module"] for run in runs}):
        cells = [cell(module, target) for target in TARGETS]
        lines.append(f"| `{module}` | " + " | ".join(cells) + f" | {SUITES[module].without} |")
    unknown = [(run["target"], run["module"], each) for run in runs for each in run["cannot"]]
    lines += ["", "Not executed, because the emulator does not know what the code asks for:", ""]
    lines += [f"- {target}, `{module}`: `{each['test']}`: `{each['why']}`" for target, module, each in unknown]
    lines += [] if unknown else ["- nothing"]
    return "\n".join(lines) + "\n" + FOOT


HEAD = """\
# Executed on emulated chips

Written by `make emulate` from `emulated.json`. The kernels' own tests ran on the code that Triton compiles for each
chip, executed by an emulator that checks memory bounds and races in shared memory. Tests passed:
"""
FOOT = """
Timing, memory order beyond barriers and the order in which loads complete are not modelled. The layouts of operands in
tensor memory and of 8-bit operands on gfx950 agree with Triton's and were never seen on hardware. Addresses more than
2^31 elements away are tested on the interpreter alone: the emulator copies every buffer.
"""


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(TARGETS), help="chips, by commas (default: %(default)s)")
    parser.add_argument("--modules", default=",".join(SUITES), help="kernel files, by commas (default: all)")
    parser.add_argument("--evidence", type=Path, default=EVIDENCE, help="folder (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="repeat runs whose sources have not changed, too")
    options = parser.parse_args(args)
    targets, modules = options.targets.split(","), options.modules.split(",")
    for what, given, known in (("target", targets, TARGETS), ("module", modules, tuple(SUITES))):
        if unknown := [each for each in given if each not in known]:
            parser.error(f"unknown {what} {unknown[0]!r}; known: {', '.join(known)}")
    path = options.evidence / "emulated.json"
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []
    failures = 0
    for module in modules:
        for target in (each for each in targets if each in SUITES[module].targets):
            about = identity(module, target)
            if not options.all and any(about.items() <= run.items() for run in runs):
                print(f"{target} {module}: as before")
                continue
            outcome = run(SUITES[module], target)
            print(f"{target} {module}: {len(outcome.passed)} passed, {len(outcome.cannot)} not executed, "
                  f"{len(outcome.failed)} failed, {outcome.seconds} s", flush=True)  # fmt: skip
            for name, text in outcome.failed.items():
                print(f"-- {name}\n{text}")
            failures += bool(outcome.failed)
            runs = [run for run in runs if (run["module"], run["target"]) != (module, target)]
            if not outcome.failed:
                runs.append(about | {"rows": rows_of(module), "passed": len(outcome.passed),
                                     "cannot": outcome.cannot, "seconds": outcome.seconds})  # fmt: skip
            write(options.evidence, runs)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
