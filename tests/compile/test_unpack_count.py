"""Instructions that unpacking takes: counted for every target, within their bounds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inkling_kernels.target import TARGETS, Target

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE = ROOT / "rocm" / "evidence" / "unpack.json"
NEWEST = "3.9.0"
FORMATS = ("nvfp4", "mxfp4")


def bound(target: Target, format: str) -> float:
    """The most vector instructions of the main loop a weight element, scales applied."""
    if target.arch == "gfx950":
        return {"nvfp4": 3.5, "mxfp4": 1.5}[format]
    return 4.5 if target.vendor == "cuda" else 5.0


def check(counts: dict) -> None:
    for target in (target for target in TARGETS if target.arch in counts):
        for format in FORMATS:
            found = counts[target.arch][format]
            assert 0.5 < found["loop"] <= bound(target, format), (target.arch, format, found)


def test_counts_are_within_their_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    """All of the loop, which is more than what unpacking alone adds."""
    counts = json.loads(EVIDENCE.read_text(encoding="utf-8"))["counts"]
    assert set(counts[NEWEST]) == {target.arch for target in TARGETS if target.is_gpu}
    check(counts[NEWEST])
    with capsys.disabled():
        for format in FORMATS:
            figures = ", ".join(f"{arch} {found[format]['loop']}" for arch, found in counts[NEWEST].items())
            print(f"\n{format}: instructions an unpacked element: {figures}", end="")


@pytest.mark.slow
def test_the_first_chips_are_within_them_now(tmp_path: Path) -> None:
    """Compiled and counted again with the Triton that is here."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("unpack_count.py")
    command = [sys.executable, "-P", str(script), "--targets", "sm80,sm90,sm100,gfx942,gfx950", "--evidence", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    for counts in json.loads((tmp_path / "unpack.json").read_text(encoding="utf-8"))["counts"].values():
        check(counts)
