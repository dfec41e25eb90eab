"""The `emulated` benchmark: its oracle, its gate, where it takes vLLM's kernels from, and what its meter counts."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import emulator
import pytest
import torch
from attention_oracle import exact_attention

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
import emulated
import instruction_meter
import run as benchmark
from gate import GateError, MissingError

OPS = emulated.OPS.as_posix()


@pytest.mark.parametrize("window", [None, 5])
def test_the_oracle_is_the_one_of_the_kernels_tests(window: int | None) -> None:
    batch = emulated.Case("", 9, 40, window, None).batch()
    logits = torch.einsum("thd,de->the", batch.r.double(), batch.proj.double())
    out, magnitude = emulated.exact(batch, logits)
    known = exact_attention(batch)
    torch.testing.assert_close(out, known.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(magnitude, known.magnitude, rtol=1e-12, atol=1e-12)


def test_a_wrong_result_stops_the_benchmark() -> None:
    wanted = torch.ones(3, 4, dtype=torch.float64)
    assert emulated.gate("it", wanted.bfloat16(), wanted, wanted) == 0
    for bad in (1.02, float("nan"), float("inf")):
        out = wanted.bfloat16()
        out[1, 2] = bad
        with pytest.raises(GateError, match="it is"):
            emulated.gate("it", out, wanted, wanted)


def wheel(path: Path, names: tuple[str, ...]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(
                f"vllm/models/inkling/amd/ops/{name}.py", f"from vllm.triton_utils import tl\nWHO = {name!r}\n"
            )
    return path


@pytest.fixture
def without_vllm() -> Iterator[None]:
    """Whatever a test imports under vLLM's name is forgotten behind it."""
    held = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "vllm"}
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.modules.update(held)


@pytest.mark.usefixtures("without_vllm")
def test_vllm_is_read_from_a_wheel_and_nothing_else_of_it_is_imported(tmp_path: Path) -> None:
    path = wheel(tmp_path / "vllm-0.33.0-cp38-abi3-linux_x86_64.whl", emulated.MODULES)
    with emulated.vllm_folder(path) as (folder, release):
        ops = emulated.vllm_ops(folder)
    assert release == "0.33.0"
    assert {name: module.WHO for name, module in ops.items()} == {name: name for name in emulated.MODULES}
    assert sys.modules["vllm.platforms.rocm"].on_gfx950() is False


def test_what_is_no_wheel_of_vllm_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.whl").write_text("no archive")
    for path, message in (
        (tmp_path / "absent.whl", "absent.whl"),
        (tmp_path / "text.whl", "expected a wheel of vLLM"),
        (wheel(tmp_path / "vllm-1-x.whl", ("qkvr_prep",)), "it has no vllm/models"),
    ):
        with pytest.raises(MissingError, match=message), emulated.vllm_folder(path):
            pass
    monkeypatch.setattr(emulated.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingError, match="--vllm-wheel"), emulated.vllm_folder(None):
        pass


def test_without_an_emulator_it_says_so_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INKLING_EMULATOR", str(tmp_path))
    assert benchmark.main(["emulated", "--out", str(tmp_path)]) == 2
    assert "INKLING_EMULATOR" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "table", "name"),
    [
        ("v_mfma_f32_16x16x16_bf16", instruction_meter.AMD, "matrix"),
        ("v_add_f32", instruction_meter.AMD, "vector"),
        ("buffer_load_dwordx4", instruction_meter.AMD, "global memory"),
        ("s_load_dwordx2", instruction_meter.AMD, "global memory"),
        ("s_waitcnt", instruction_meter.AMD, "scalar and control"),
        ("ds_read_b128", instruction_meter.AMD, "shared memory"),
        ("wgmma.mma_async.sync.aligned", instruction_meter.PTX, "matrix"),
        ("wgmma.wait_group.sync", instruction_meter.PTX, "scalar and control"),
        ("ld.shared.v4.b32", instruction_meter.PTX, "shared memory"),
        ("cp.async.cg.shared.global", instruction_meter.PTX, "global memory"),
        ("fma.rn.f32", instruction_meter.PTX, "vector"),
    ],
)
def test_instructions_are_counted_by_kind(text: str, table: tuple, name: str) -> None:
    assert instruction_meter.kind(text, table) == name


COUNT = """
import sys, json, torch
sys.path[:0] = [{benchmarks!r}, {tests!r}]
import emulator
from dataclasses import asdict
from instruction_meter import Meter
vendor, arch = {chip!r}
meter = Meter(emulator.activate(vendor, arch))
from inkling_kernels.activation import silu_mul
found = []
for rows in (4, 8):
    meter.start()
    silu_mul(torch.ones(rows, 64, dtype=torch.bfloat16))
    found.append(asdict(meter.stop()))
print(json.dumps(found))
"""


@pytest.mark.skipif(emulator.folder() is None, reason=emulator.ABSENT)
@pytest.mark.parametrize("chip", [("cuda", 90), ("hip", "gfx942")], ids=str)
def test_the_meter_counts_every_instruction_once_and_bytes_as_they_are(chip: tuple[str, int | str]) -> None:
    """silu_mul reads `rows * 64` bfloat16 and writes half as many."""
    code = COUNT.format(benchmarks=str(Path(emulated.__file__).parent), tests=str(Path(__file__).parent), chip=chip)
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=emulator.environment(), check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for rows, count in zip((4, 8), json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert sum(count["kinds"].values()) == count["instructions"] == sum(count["kernels"].values())
        assert rows * 96 * 2 <= count["touched"] <= rows * 96 * 2 + 1024
        assert count["requested"] >= rows * 96 * 2


def test_reports_say_what_was_missed() -> None:
    side = {"instructions": 10, "kinds": {"matrix": 1}, "touched": 1e6, "requested": 2e6}
    row = {"chip": "sm90", "case": "verify", "ours": side, "vllm": side | {"instructions": 20, "logits": None}}
    page = emulated.report([row | {"ratio": 2.0, "target": 3.0}], "0.33.0")
    assert "| sm90 | verify | 10 | 20 | 2.0 | 3 (missed) | left out |" in page
    assert "| sm90 | verify | ours | 1 | 0 | 0 | 0 | 0 | 1.00 | 2.00 |" in page
