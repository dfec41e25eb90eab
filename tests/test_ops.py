"""Binding: what a model calls is what the table chose, loaded once, and a row that does not load is an error."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from inkling_kernels.target import Target
from inkling_portable.dispatch import OPS, ROWS, Row, UnsupportedOnTarget
from inkling_portable.facts import Facts
from inkling_portable.ops import BrokenImplementation, Ops, load

FLOATS = Facts(dtype="float32", kv_dtype="float32")
CPU, INTERPRET = Target.parse("cpu"), Target.parse("interpret")


def table(**impls: str) -> tuple[Row, ...]:
    """A table with one row for every device and operation, by default a function of the standard library."""
    return tuple(Row(op, ("cpu", "gpu"), (), None, impls.get(op, f"operator:{op}"), "k", "w", "none") for op in OPS)


STDLIB = dict.fromkeys(OPS, "math:sqrt")


@pytest.fixture(autouse=True)
def nothing_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INKLING_IMPL", raising=False)


@pytest.mark.parametrize(
    ("facts", "position"), [(Facts(dtype="float64", kv_dtype="float64"), -1), (Facts(dtype="float32"), -1), (FLOATS, 0)]
)
def test_the_cpu_is_bound_to_its_kernels_or_to_the_references(facts: Facts, position: int) -> None:
    ops = Ops.bind(CPU, facts)
    bound = {op: getattr(ops, op) for op in OPS}
    rows = {op: [row for row in ROWS if row.op == op and row.targets == ("cpu",)] for op in OPS}
    # A cache of another type than the activations has no kernel of its own.
    cached = {"qkvr_prep", "rel_attention"} if facts.dtype == "float32" else set(OPS)
    assert {op: f"{found.__module__}:{found.__name__}" for op, found in bound.items()} == {
        op: own[position if op in cached else 0].impl for op, own in rows.items()
    }
    x = torch.tensor([[3.0, 4.0]])
    torch.testing.assert_close(ops.rms_norm(x, torch.ones(2), 0.0), x / 12.5**0.5)


def test_ops_keep_and_tell_what_was_chosen() -> None:
    ops = Ops.bind(CPU, Facts())
    assert tuple(ops.choices) == OPS
    lines = ops.describe().splitlines()
    assert [line.split()[0] for line in lines] == list(OPS)
    assert all(("torch" in line or "numba" in line) and "ran cpu" in line for line in lines)
    with pytest.raises(AttributeError):
        ops.routing = None  # type: ignore[assignment, misc]


def test_a_target_without_rows_is_refused_before_anything_is_imported() -> None:
    rows = tuple(replace(each, impl="absent:f") for each in ROWS if each.op != "routing" or "gpu" not in each.targets)
    with pytest.raises(UnsupportedOnTarget, match="hip:gfx942"):
        Ops.bind(Target.parse("gfx942"), Facts(), rows=rows)


def test_only_chosen_rows_are_imported() -> None:
    absent = replace(ROWS[0], targets=("gfx950",), impl="absent.module:f")
    assert Ops.bind(CPU, Facts(), rows=(absent, *ROWS)).embedding is Ops.bind(CPU, Facts()).embedding


def test_forced_names_come_from_the_argument_or_else_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    first = next(i for i, row in enumerate(ROWS) if row.targets == ("cpu",))
    other = replace(ROWS[first], name="other", impl="math:sqrt")
    rows = (*ROWS[: first + 1], other, *ROWS[first + 1 :])
    assert Ops.bind(CPU, Facts(), rows=rows).embedding.__name__ == "embedding_ref"
    assert Ops.bind(CPU, Facts(), {"embedding": "other"}, rows).embedding.__name__ == "sqrt"
    monkeypatch.setenv("INKLING_IMPL", "embedding=other")
    assert Ops.bind(CPU, Facts(), rows=rows).embedding.__name__ == "sqrt"
    assert Ops.bind(CPU, Facts(), {}, rows).embedding.__name__ == "embedding_ref"
    monkeypatch.setenv("INKLING_IMPL", "embedding=nothing")
    with pytest.raises(ValueError, match="torch, other"):
        Ops.bind(CPU, Facts(), rows=rows)


@pytest.mark.parametrize(
    ("impl", "cause"),
    [
        ("no_such_package.module:f", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("math:no_such_function", "AttributeError: module 'math' has no attribute 'no_such_function'"),
        ("needs_a_library:f", "OSError: libamdhip64.so: cannot open shared object file"),
        ("needs_a_driver:f", "RuntimeError: 0 active drivers"),
        ("needs_another_version:f", "AttributeError: module 'triton' has no attribute 'new'"),
    ],
)
def test_a_row_that_does_not_load_is_an_error_naming_row_and_cause(
    impl: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_a_library.py").write_text("raise OSError('libamdhip64.so: cannot open shared object file')")
    (tmp_path / "needs_a_driver.py").write_text("raise RuntimeError('0 active drivers')")
    (tmp_path / "needs_another_version.py").write_text(
        "raise AttributeError(\"module 'triton' has no attribute 'new'\")"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BrokenImplementation) as caught:
        Ops.bind(CPU, Facts(), rows=table(**{**STDLIB, "routing": impl}))
    assert str(caught.value) == f"routing=k was chosen and {impl} cannot be loaded: {cause}"
    assert caught.value.__cause__ is not None


def test_a_bug_in_an_implementation_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "has_a_bug.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError):
        load(replace(ROWS[0], impl="has_a_bug:f"), CPU)


def test_the_interpreter_must_be_on_before_kernels_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        Ops.bind(INTERPRET, Facts(), rows=table(**STDLIB))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert Ops.bind(INTERPRET, Facts(), rows=table(**STDLIB)).target is INTERPRET


def test_launchers_are_bound_to_the_device_that_they_plan_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """So no call asks a driver: every kernel of the table has its target, and what plans nothing is left as it is."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for invariant in (False, True):
        ops = Ops.bind(INTERPRET, Facts(batch_invariant=invariant), {})
        for op, choice in ops.choices.items():
            assert choice.row is not None
            bound = getattr(ops, op)
            if choice.row.name == "torch":
                assert not isinstance(bound, partial)
            else:
                assert bound.keywords == {"target": INTERPRET}, op
    cpu = Ops.bind(CPU, Facts(), {})
    assert not any(isinstance(getattr(cpu, op), partial) for op in OPS)


def test_importing_ops_imports_no_implementation() -> None:
    script = (
        "import sys, inkling_portable.ops\n"
        "raise SystemExit(' '.join({'torch', 'triton', 'inkling_kernels.norm'} & set(sys.modules)) or 0)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
