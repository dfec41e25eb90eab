"""The script for a person with an AMD GPU: what it writes, and what it says where there is none. Nothing is run."""

from __future__ import annotations

import json
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from inkling_portable.dispatch import ROWS
from inkling_rocm import run_on_gpu
from inkling_rocm.environment import LAUNCH

ROOT = Path(__file__).parents[2]


class Machine:
    """Stands for the commands: answers each as a machine with some GPU would."""

    def __init__(self, target: str = "hip:gfx942", wrong: str | None = None, differing: str | None = None) -> None:
        self.target, self.wrong, self.differing = target, wrong, differing
        self.environments: list[dict[str, str]] = []

    def __call__(self, *arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        self.environments.append(env)
        if arguments[0] == "check":
            return self.answer(self.check(), int(self.wrong is not None))
        options = dict(pairwise(arguments))
        device, format = options["--device"], options["--moe-format"]
        assert options["--dtype"] == "float32"
        tokens = [1, 2, 3 + (device == "auto" and format == self.differing)]
        lines = [json.dumps({"token_ids": tokens}) for _ in run_on_gpu.PROMPTS]
        return self.answer("\n".join(lines), 0)

    def check(self) -> str:
        kept = [row for row in ROWS if set(row.targets) & {"gpu", "gfx942"}]
        checks = [
            {"op": row.op, "name": row.name, "format": format, "status": "wrong" if row.op == self.wrong else "right"}
            for row in kept
            for format in (("bf16", "nvfp4") if row.op == "moe_experts" else (None,))
        ]
        record = {"target": self.target, "name": "AMD Instinct MI300X", "versions": {"torch": "2.10.0+rocm7.1"}}
        return json.dumps(record | {"ok": self.wrong is None, "checks": checks})

    @staticmethod
    def answer(text: str, code: int) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], code, text, "")


def run(machine: Machine, out: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(run_on_gpu, "inkling", machine)
    code = run_on_gpu.main(["--out", str(out), "--no-tests"])
    (file,) = out.glob("*.json")
    assert file.name == "ran-gfx942.json"
    return code, json.loads(file.read_text())


def test_the_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("HIP_FORCE_DEV_KERNARG", raising=False)
    machine = Machine()
    code, found = run(machine, tmp_path / "new", monkeypatch)
    assert code == 0
    assert (found["device"], found["target"], found["evidence"]) == ("AMD Instinct MI300X", "hip:gfx942", "ran")
    assert "rms_norm=triton" in found["rows"]
    assert found["commit"]
    assert [each["format"] for each in found["generation"]] == ["bf16", "nvfp4", "mxfp4"]
    assert all(each["same"] for each in found["generation"])
    assert all(
        environment[name] == value for environment in machine.environments for name, (value, _) in LAUNCH.items()
    )
    assert "checks right; written to" in capsys.readouterr().out


def test_failures_are_evidence_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, found = run(Machine(wrong="routing"), tmp_path, monkeypatch)
    assert code == 1
    assert "routing=triton" not in found["rows"]
    assert [each["status"] for each in found["checks"] if each["op"] == "routing"] == ["wrong"]
    code, found = run(Machine(differing="nvfp4"), tmp_path, monkeypatch)
    assert code == 1
    assert {each["format"]: each["same"] for each in found["generation"]} == {
        "bf16": True,
        "nvfp4": False,
        "mxfp4": True,
    }


def test_without_an_amd_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_on_gpu, "inkling", Machine("cuda:sm90"))
    assert run_on_gpu.main(["--out", str(tmp_path)]) == 2
    assert "torch sees no AMD GPU here, only cuda:sm90" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(
        run_on_gpu, "inkling", lambda *_, env: subprocess.CompletedProcess([], 2, "", "inkling: no such")
    )
    assert run_on_gpu.main(["--out", str(tmp_path)]) == 2
    assert "inkling: no such" in capsys.readouterr().err


def test_the_container_sets_what_the_launcher_sets() -> None:
    text = (ROOT / "rocm" / "Dockerfile").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("ENV ")]
    assert dict(word.split("=") for word in line.split()[1:]) == {name: value for name, (value, _) in LAUNCH.items()}
    # Whatever is held is held in an image that has it, and the extras that would bring another torch are not asked for.
    assert "--constraint /opt/held.txt" in text
    assert "[torch]" not in text
