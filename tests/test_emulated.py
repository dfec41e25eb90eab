"""The kernels' tests on emulated chips, one of each vendor; and what decides that a run of them is evidence."""

from __future__ import annotations

import json
import sys
import types
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import emulate
import emulator
import ml_dtypes
import numpy as np
import pytest

from inkling_portable.dispatch import EMULATED, ROWS

CORE = [(name, target) for name, suite in emulate.SUITES.items() for target in emulate.FIRST if target in suite.targets]


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[tuple[str, str], Future[emulate.Outcome]]]:
    """The core of every suite on every chip of CI, one process a chip at a time."""
    if emulator.folder() is None:
        pytest.skip(emulator.ABSENT)
    pools = {target: ThreadPoolExecutor(1) for target in emulate.FIRST}
    yield {
        (module, target): pools[target].submit(emulate.run, suite, target, drawn=False)
        for module, target in CORE
        for suite in [emulate.SUITES[module]]
    }
    for pool in pools.values():
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(("module", "target"), CORE)
def test_the_compiled_kernels_pass_their_tests(
    runs: dict[tuple[str, str], Future[emulate.Outcome]], module: str, target: str
) -> None:
    outcome = runs[module, target].result()
    assert outcome.failed == {}
    assert outcome.cannot == []
    assert outcome.passed


def test_every_kernel_file_has_a_suite() -> None:
    assert set(emulate.harness.modules()) <= set(emulate.SUITES)


def test_rows_that_say_emulated_were_so_and_since_the_last_change() -> None:
    """Rows of the table: all their kernel files, on every chip that an emulator knows."""
    assert emulate.TARGETS == EMULATED
    runs = json.loads((emulate.EVIDENCE / "emulated.json").read_text(encoding="utf-8"))["runs"]
    known = {(run["module"], run["target"]): run for run in runs}
    claimed = {f"{row.op}={row.name}" for row in ROWS if row.evidence == "emulated"}
    for module, cases in emulate.harness.modules().items():
        claims = claimed & {case.row for case in cases}
        for target in emulate.SUITES[module].targets if claims else ():
            run = known.get((module, target), {})
            assert run.get("sources") == emulate.harness.sources(module), f"{module} on {target}: run `make emulate`"


def test_what_the_emulator_cannot_do_is_no_fault_of_the_kernel_and_no_pass() -> None:
    report = ET.fromstring("""<testsuites><testsuite>
      <testcase name="good"/>
      <testcase name="unknown"><failure message="ptxemu.EmuError: unimplemented: tcgen05.cp">trace</failure></testcase>
      <testcase name="race"><failure message="ptxemu.EmuError: race RAW on shared byte 4">trace</failure></testcase>
      <testcase name="wrong"><failure message="assert 1 == 2">trace</failure></testcase>
      <testcase name="setup"><error message="fixture failed">trace</error></testcase>
      <testcase name="skipped"><skipped message="not here"/></testcase>
    </testsuite></testsuites>""")
    outcome = emulate.sorted_out(report)
    assert outcome.passed == ["good"]
    assert outcome.cannot == [{"test": "unknown", "why": "unimplemented: tcgen05.cp"}]
    assert set(outcome.failed) == {"race", "wrong", "setup", "skipped"}


def test_what_failed_is_no_evidence_and_what_is_known_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = {"sm90": emulate.Outcome(["a", "b"], [], {}, 3), "gfx942": emulate.Outcome(["a"], [], {"b": "wrong"}, 3)}
    asked, sources = [], ["one"]
    monkeypatch.setattr(emulate, "run", lambda suite, target: asked.append(target) or results[target])
    monkeypatch.setattr(
        emulate, "identity", lambda module, target: {"module": module, "target": target, "sources": sources[0]}
    )
    arguments = ["--targets", "sm90,gfx942", "--modules", "norm", "--evidence", str(tmp_path)]
    assert emulate.main(arguments) == 1
    runs = json.loads((tmp_path / "emulated.json").read_text())["runs"]
    assert [(run["target"], run["passed"], run["sources"]) for run in runs] == [("sm90", 2, "one")]
    results["gfx942"] = emulate.Outcome(["a", "b"], [], {}, 3)
    assert emulate.main(arguments) == 0
    assert asked == ["sm90", "gfx942", "gfx942"]
    sources[0] = "two"
    results["sm90"] = emulate.Outcome([], [], {"a": "wrong"}, 3)
    assert emulate.main(arguments) == 1
    found = json.loads((tmp_path / "emulated.json").read_text())
    assert [(run["target"], run["sources"]) for run in found["runs"]] == [("gfx942", "two")]
    assert found["rows"] == ["rms_norm=triton"]
    assert "| `norm` | not run | not run |" in (tmp_path / "emulated.md").read_text()


@pytest.mark.skipif(emulator.folder() is None, reason=emulator.ABSENT)
@pytest.mark.parametrize(("block", "added"), [(None, True), (0, False), (3, True)])
def test_products_of_four_by_four(block: int | None, added: bool) -> None:
    """Sixteen of them, or block `block` of A with every block of B, which the emulator does not know by itself."""
    sys.path.append(str(emulator.folder()))
    import gcnemu

    emulator.add_small_products(gcnemu)
    rng = np.random.default_rng(0)
    left, right = (rng.integers(-8, 8, (16, 4, 4)).astype(np.float32) for _ in range(2))
    start = rng.integers(-8, 8, (4, 64)).astype(np.float32)
    registers = np.zeros((16, 1, 64), np.uint32)
    for first, values in ((0, left), (2, right)):
        halves = values.astype(ml_dtypes.bfloat16).view(np.uint16).reshape(64, 2, 2)
        registers[first : first + 2, 0] = np.ascontiguousarray(halves).view(np.uint32)[..., 0].T
    registers[8:12, 0] = start.view(np.uint32)
    machine = types.SimpleNamespace(W=1, m=None, v=registers, dec=lambda *args: gcnemu.Exec.dec(machine, *args))
    gcnemu.Exec.small_product(machine, "bf16", 4, 0, 2, 8 if added else None, 2, block)
    for lane in range(64):
        of = lane // 4
        for row in range(4):
            exact = left[of if block is None else block][row] @ right[of][lane % 4] + (start[row, lane] if added else 0)
            assert registers[4 + row, 0, lane : lane + 1].view(np.float32)[0] == exact


# Of each thread's numbers in two rows of 32 words, r2 and r3, a word r6.
PROGRAM = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry program(.param .u64 program_param_0, .param .u64 program_param_1) .reqntid 32 {
  .reg .pred %p<3>;
  .reg .b16 %rs<3>;
  .reg .b32 %r<8>;
  .reg .b64 %rd<8>;
  ld.param.u64 %rd1, [program_param_0];
  ld.param.u64 %rd2, [program_param_1];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd3, %r1, 4;
  add.s64 %rd4, %rd1, %rd3;
  add.s64 %rd5, %rd2, %rd3;
  ld.global.b32 %r2, [%rd4];
  ld.global.b32 %r3, [%rd4+128];
BODY
  st.global.b32 [%rd5], %r6;
  ret;
}
"""
HALVES = """
  setp.TEST.KIND %p1|%p2, %r2, %r3;
  selp.b32 %r4, 1, 0, %p1;
  selp.b32 %r5, 2, 0, %p2;
  or.b32 %r6, %r4, %r5;
"""


def executed(body: str, words: np.ndarray) -> np.ndarray:
    """What `PROGRAM` with this body leaves of 64 words, on the emulator as it is corrected here."""
    sys.path.append(str(emulator.folder()))
    import gcnemu  # noqa: F401  the emulator's modules import each other in this order
    import ptxemu

    emulator.compare_halves(ptxemu)
    emulator.leave_nan_out(ptxemu)
    emulator.multiply_halves(ptxemu)
    memory = ptxemu.Memory(1 << 16)
    source, out = memory.put(words.view(np.uint32)), memory.put(np.zeros(32, np.uint32))
    ptxemu.Kernel(PROGRAM.replace("BODY", body), "program").launch(memory, (1, 1, 1), (source, out), 0)
    return memory.get(out)


@pytest.mark.skipif(emulator.folder() is None, reason=emulator.ABSENT)
@pytest.mark.parametrize("kind", ["bf16x2", "f16x2"])
@pytest.mark.parametrize("test", ["lt", "ne", "geu", "num"])
def test_halves_are_compared_apart(kind: str, test: str) -> None:
    rng = np.random.default_rng(1)
    numbers = rng.choice(np.array([0.5, -1.0, 2.0, np.nan, np.inf], np.float32), 128)
    stored = numbers.astype(ml_dtypes.bfloat16 if kind == "bf16x2" else np.float16).view(np.uint16)
    found = executed(HALVES.replace("TEST", test).replace("KIND", kind), stored)
    a, b = numbers[:64], numbers[64:]
    nan = np.isnan(a) | np.isnan(b)
    exact = {"lt": a < b, "ne": (a != b) & ~nan, "geu": (a >= b) | nan, "num": ~nan}[test].reshape(32, 2)
    np.testing.assert_array_equal(found, exact[:, 0] + 2 * exact[:, 1])


@pytest.mark.skipif(emulator.folder() is None, reason=emulator.ABSENT)
@pytest.mark.parametrize(("op", "extreme"), [("max", np.nanmax), ("min", np.nanmin)])
def test_nan_has_no_part_in_extremes_of_a_warp(op: str, extreme: Callable[..., float]) -> None:
    numbers = np.random.default_rng(2).standard_normal(64).astype(np.float32)
    numbers[16:32] = np.nan
    found = executed(f"redux.sync.{op}.f32 %r6, %r2, -1;", numbers).view(np.float32)
    np.testing.assert_array_equal(found, np.full(32, extreme(numbers[:32])))
    numbers[:16] = np.nan
    assert np.isnan(executed(f"redux.sync.{op}.f32 %r6, %r2, -1;", numbers).view(np.float32)).all()


@pytest.mark.skipif(emulator.folder() is None, reason=emulator.ABSENT)
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_halves_are_multiplied_and_added_in_float32(kind: str) -> None:
    rng = np.random.default_rng(3)
    halves = rng.standard_normal(64).astype(ml_dtypes.bfloat16 if kind == "bf16" else np.float16)
    added = rng.standard_normal(32).astype(np.float32)
    body = f"mov.b32 {{%rs1, %rs2}}, %r2;\n fma.rn.f32.{kind} %r6, %rs1, %rs2, %r3;"
    found = executed(body, np.concatenate([halves.view(np.float32), added])).view(np.float32)
    exact = halves[::2].astype(np.float64) * halves[1::2].astype(np.float64) + added
    np.testing.assert_array_equal(found, exact.astype(np.float32))


def test_the_page_lists_what_was_not_run_or_not_executed() -> None:
    cannot = [{"test": "test_a", "why": "unimplemented: x"}]
    page = emulate.page([{"module": "norm", "target": "sm100", "passed": 3, "cannot": cannot}])
    assert "| `norm` | not run | not run | 3, 1 not executed |" in page
    assert "- sm100, `norm`: `test_a`: `unimplemented: x`" in page


def test_the_emulator_is_looked_for_where_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INKLING_EMULATOR", str(tmp_path))
    assert emulator.folder() is None
    (tmp_path / "emudrv.py").touch()
    assert emulator.folder() == tmp_path
    monkeypatch.setattr(emulator, "ROOT", tmp_path / "repository")
    monkeypatch.setattr("sys.path", [])
    monkeypatch.delenv("INKLING_EMULATOR")
    assert emulator.folder() is None
    beside = tmp_path / "anything" / "tools" / "emu"
    beside.mkdir(parents=True)
    (beside / "emudrv.py").touch()
    assert emulator.folder() == beside
