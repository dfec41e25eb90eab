"""The evidence of compilation is there, current and without problems; and the harness that makes it can tell."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from inkling_kernels.target import TARGETS, Target
from inkling_portable.dispatch import ROWS

ROOT = Path(__file__).resolve().parents[2]
HARNESS = Path(__file__).with_name("harness.py")
FIRST = ("sm90", "sm100", "gfx942", "gfx950")
OLDEST, NEWEST = "3.6.0", "3.9.0"


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    """The harness as a module; importing it compiles nothing."""
    spec = importlib.util.spec_from_file_location("compile_harness", HARNESS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entries() -> list[dict]:
    return json.loads((ROOT / "rocm" / "evidence" / "compile.json").read_text(encoding="utf-8"))["cases"]


def test_every_case_of_a_row_that_says_so_was_compiled_for_every_target(harness: ModuleType) -> None:
    """Rows of the table whose evidence is `compiled` or more: all their cases, all targets, both ends of Triton."""
    claimed = {f"{row.op}={row.name}" for row in ROWS if row.evidence in ("compiled", "emulated")}
    found = {(e["module"], e["case"], e["target"], e["triton"]): e["sources"] for e in entries()}
    missing, stale = [], []
    for module, cases in harness.modules().items():
        current = harness.sources(module)
        for case in (case for case in cases if case.row in claimed):
            for target in TARGETS:
                for version in (NEWEST, OLDEST) if case.includes(target) else ():
                    key = (module, case.name, target.arch, version)
                    if key not in found:
                        missing.append(key)
                    elif found[key] != current:
                        stale.append(key)
    assert not missing, f"{len(missing)} cases were never compiled: run `make compile-all`; the first: {missing[0]}"
    assert not stale, f"{len(stale)} cases are older than the sources: run `make compile-all`; the first: {stale[0]}"


def test_no_case_breaks_its_promises() -> None:
    assert [(e["case"], e["target"], e["triton"], e["problems"]) for e in entries() if e["problems"]] == []


def test_the_first_chips_spill_nothing() -> None:
    """Default configurations in the types that models run in."""
    spilled = [
        (e["module"], e["case"], e["target"], e["triton"], kernel["spill_bytes"])
        for e in entries()
        if e["target"] in FIRST and "float32" not in e["case"]
        for kernel in e["kernels"]
        if kernel["spill_bytes"]
    ]
    assert spilled == []


def test_planned_shared_memory_is_an_upper_bound(harness: ModuleType) -> None:
    """What a configuration says it needs at most, beside what the compiler took."""
    from inkling_kernels.rel_attention_plan import rel_attention_config, rel_attention_decode_config

    groups = {"group 8": 8, "group 4": 4}
    for e in entries():
        group = next((size for text, size in groups.items() if text in e["case"]), None)
        target, itemsize = Target.parse(e["target"]), 4 if "float32" in e["case"] else 2
        if e["module"] == "rel_attention":
            kv_itemsize = 1 if "fp8" in e["case"] else itemsize
            config = rel_attention_config(target, group=group, head_dim=128, itemsize=itemsize, kv_itemsize=kv_itemsize)
            bound = config.shared_bytes(target, group, 128, itemsize)
        elif e["module"] == "rel_attention_decode":
            rows, window = 9 if "9 rows" in e["case"] else 1, 512 if "sliding" in e["case"] else None
            decode = rel_attention_decode_config(
                target, group=group, head_dim=128, rows=rows, window=window, itemsize=itemsize
            )
            bound = decode.shared_bytes(target, group, 128, rows, itemsize)
        else:
            continue
        assert all(kernel["shared_bytes"] <= bound for kernel in e["kernels"]), (e["case"], e["target"], e["triton"])


def test_the_first_chips_compile_now(tmp_path: Path) -> None:
    """Compiled again, from nothing known, with the Triton that is here."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", str(HARNESS), "--targets", ",".join(FIRST), "--evidence", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


GOOD = """
tt.func public @k(%x_ptr: !tt.ptr<bf16>, %stride: i32) {
  %c4 = arith.constant 4 : i32
  %page = arith.extsi %page_0 : tensor<32xi32> to tensor<32xi64>
  %line = arith.muli %page, %wide : tensor<32xi64>
  %at = tt.addptr %x, %line : tensor<32x!tt.ptr<bf16>>, tensor<32xi64>
  %next = tt.addptr %x, %c4 : tensor<32x!tt.ptr<bf16>>, tensor<32xi32>
  %table = tt.addptr %table_ptr, %seq : !tt.ptr<i32>, i32
  %rows = arith.muli %tile, %c4 : i32
  %rows_0 = arith.extsi %rows : i32 to i64
"""


def test_narrow_addresses_are_found(harness: ModuleType) -> None:
    assert harness.narrow_addresses(GOOD, ()) == []
    narrow = "  %x_1 = tt.splat %x_ptr : !tt.ptr<bf16> -> tensor<32x!tt.ptr<bf16>>\n"
    narrow += "  %at_1 = tt.addptr %x_1, %o : tensor<32x!tt.ptr<bf16>>, tensor<32xi32>\n"
    assert len(harness.narrow_addresses(GOOD + narrow, ())) == 1
    assert harness.narrow_addresses(GOOD + narrow, ("x_ptr",)) == []
    late = "  %offset = arith.muli %tile, %stride : i32\n  %offset_1 = arith.extsi %offset : i32 to i64\n"
    assert len(harness.narrow_addresses(GOOD + late, ())) == 1


def test_the_hash_is_of_what_the_cases_reach_without_prose(harness: ModuleType, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(harness, "KERNELS", tmp_path)
    helper, kernel = tmp_path / "helper.py", tmp_path / "kernel.py"
    head = "from inkling_kernels.helper import x\n\n"
    tail = "def f_ref():\n    return 1\n\nCOMPILE_CASES = (f,)\n"
    helper.write_text("x = 1\ny = 1\n")
    kernel.write_text(f'"""Doc."""\n{head}def f():\n    """Doc."""\n    return x  # why\n\n{tail}')
    first = harness.sources("kernel")
    kernel.write_text(f'"""Other."""\n{head}def f():\n    return x\n\n{tail.replace("1", "2")}')
    helper.write_text("x = 1\ny = 2\n")
    assert harness.sources("kernel") == first
    helper.write_text("x = 2\n")
    assert harness.sources("kernel") != first
    helper.write_text("x = 1\n")
    kernel.write_text(f"{head}def f():\n    return x + 1\n\n{tail}")
    assert harness.sources("kernel") != first


def test_a_compiler_that_dies_is_reported(harness: ModuleType, tmp_path: Path) -> None:
    result = tmp_path / "case.json"
    result.with_suffix(".log").write_text("LLVM ERROR: no\n")
    found = harness.finished(result, 6)
    assert found["problems"] == ["did not compile: signal SIGABRT: LLVM ERROR: no"]
