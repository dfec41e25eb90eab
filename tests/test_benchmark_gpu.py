"""The `gpu` benchmark as far as a CPU can tell: it is valid, says what it lacks, builds its cases, its gates hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
import gpu
import gpu_cases
import run as benchmark
import timing
from gate import GateError

from inkling_kernels.target import Target

ROOT = Path(__file__).resolve().parent.parent
H200 = Target.parse("sm90")
SCRIPT = ROOT / "benchmarks" / "gpu.sh"
NO_GPU = not torch.cuda.is_available()


def test_the_script_is_valid_and_names_files_that_exist() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    text = SCRIPT.read_text(encoding="utf-8")
    assert "set -euo pipefail" in text
    listed = text.split("suites=(")[1].split(")\n")[0]
    names = [each.split("]")[0] for each in listed.split("[")[1:]]
    assert len(names) > 10
    assert [name for name in names if not (ROOT / "tests" / "kernels" / f"test_{name}.py").is_file()] == []


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU")
def test_without_a_gpu_both_say_so_and_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["gpu", "--out", str(tmp_path)]) == 2
    assert "no GPU" in capsys.readouterr().out
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path / "out")}
    done = subprocess.run([SCRIPT], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert "torch sees no GPU here" in done.stderr
    assert [*tmp_path.glob("**/*.json"), *tmp_path.glob("**/*.md")] == []


def test_every_case_is_accepted_at_its_full_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without storage, up to the launches."""
    launched: list[str] = []
    monkeypatch.setattr(
        InterpretedFunction, "__getitem__", lambda self, grid: lambda *a, **k: launched.append(str(grid))
    )
    names = []
    for case in gpu.cases(H200, "meta"):
        names.append(case.name)
        before = len(launched)
        case.calls["ours"]()
        assert len(launched) > before, case.name
        assert case.bytes > 0
    assert len(names) == len(set(names)) == 27


def small() -> list[gpu_cases.Timed]:
    """Cases of every kind that the interpreter does in seconds."""
    torch.manual_seed(0)
    wanted = ("prefill 8K, sliding", "decode b1 at 8K")
    attention = [c for c in gpu_cases.attentions(None, "cpu", shrink=1024) if c.name.startswith(wanted)]
    experts = gpu_cases.experts(None, "cpu", tokens=(3,), number=8, hidden=64, width=32)
    return [*attention, *gpu_cases.streams(None, "cpu", tokens=9), *experts]


@pytest.mark.usefixtures("kernel_device")
def test_gates_pass_what_is_right_and_stop_what_is_wrong() -> None:
    for case in small():
        calls = {"ours": case.calls["ours"]}
        outs = {name: call() for name, call in calls.items()}

        def check(out: Any, case: gpu_cases.Timed = case) -> dict[str, float]:
            return gpu.passed(gpu_cases.Timed(case.name, dict.fromkeys(case.calls, lambda: out), case.gate))

        assert check(outs["ours"])["ours"] <= 1
        wrong = outs["ours"]
        wrong = (wrong[0].roll(1, 0), *wrong[1:]) if isinstance(wrong, tuple) else wrong * 1.1
        with pytest.raises(GateError, match="as far from float64"):
            check(wrong)


@pytest.mark.parametrize("layer", [0, 5])
@pytest.mark.parametrize("rows", [1, 9, 40])
def test_flex_attention_is_given_the_same_task(monkeypatch: pytest.MonkeyPatch, layer: int, rows: int) -> None:
    """Not compiled, which it needs no compiler for."""
    torch.manual_seed(1)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    spec = gpu_cases.preset("inkling-small").layer(layer)
    inputs = gpu_cases.Attention.make(spec, 2, rows, 700, "cpu")
    out = inputs.flex()()
    assert inputs.error(out) <= 1
    assert inputs.error(out.roll(1, 0)) > 1


@pytest.mark.parametrize("format", ["bf16", "nvfp4", "mxfp4"])
def test_torchs_experts_are_given_the_same_task(format: str) -> None:
    torch.manual_seed(2)
    (case,) = gpu_cases.experts(None, "cpu", tokens=(24,), number=8, hidden=64, width=32, formats=(format,))
    out = case.calls["torch"]()
    assert case.gate({"torch": out})["torch"] <= 1
    assert case.gate({"torch": out * 1.1})["torch"] > 1


def timed(asked: dict[str, float]) -> gpu_cases.Timed:
    return gpu_cases.Timed("it", {"ours": list, "flex": list}, lambda outs: {}, bytes=750, asked=asked)


def test_what_is_asked_is_judged_by_the_roof_or_by_the_other_variant() -> None:
    times = {"ours": timing.spread([1e6]), "flex": timing.spread([2e6])}
    roofs = {"bytes": 1000.0, "operations": 1.0}
    row = gpu.judged(timed({"bytes": 0.75, "flex": 1.0}), times, roofs)
    assert row["asked"] == {
        "bytes": {"asked": 0.75, "found": 0.75, "met": True},
        "flex": {"asked": 1.0, "found": 0.5, "met": True},
    }
    row = gpu.judged(timed({"bytes": 0.8, "flex": 0.4}), times, roofs)
    assert not row["asked"]["bytes"]["met"]
    assert not row["asked"]["flex"]["met"]
    assert "MISSED bytes 0.75 (0.8)" in gpu.cells(row)[-1]


def test_spread() -> None:
    assert timing.spread([3.0]) == {"median": 3.0, "p20": 3.0, "p80": 3.0, "n": 1}
    assert timing.spread(list(range(1, 10))) == {"median": 5, "p20": 2.0, "p80": 8.0, "n": 9}
