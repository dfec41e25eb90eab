"""The kernels' tests on emulated chips, one of each vendor; and what decides that a run of them is evidence."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import emulate
import emulator
import pytest

from inkling_portable.dispatch import ROWS


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[tuple[str, str], Future[emulate.Outcome]]]:
    """The core of every suite on every chip of CI, one process a chip at a time."""
    if emulator.folder() is None:
        pytest.skip(emulator.ABSENT)
    pools = {target: ThreadPoolExecutor(1) for target in emulate.FIRST}
    yield {
        (module, target): pools[target].submit(emulate.run, suite, target, drawn=False)
        for module, suite in emulate.SUITES.items()
        for target in emulate.FIRST
    }
    for pool in pools.values():
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("target", emulate.FIRST)
@pytest.mark.parametrize("module", emulate.SUITES)
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
    """Rows of the table: all their kernel files, one chip of each vendor at least."""
    runs = json.loads((emulate.EVIDENCE / "emulated.json").read_text(encoding="utf-8"))["runs"]
    known = {(run["module"], run["target"]): run for run in runs}
    claimed = {f"{row.op}={row.name}" for row in ROWS if row.evidence == "emulated"}
    for module, cases in emulate.harness.modules().items():
        for target in emulate.FIRST if claimed & {case.row for case in cases} else ():
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


def test_the_page_lists_what_was_not_run_or_not_executed() -> None:
    cannot = [{"test": "test_a", "why": "unimplemented: x"}]
    page = emulate.page([{"module": "norm", "target": "sm100", "passed": 3, "cannot": cannot}])
    assert "| `norm` | not run | not run | 3, 1 not executed |" in page
    assert "- sm100, `norm`: `test_a`: `unimplemented: x`" in page


def test_the_emulator_is_looked_for_where_it_says(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
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
