"""The dispatch table: its form, its choices, its reasons, and what it claims to have seen."""

from __future__ import annotations

import ast
import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inkling_kernels.target import CAPABILITIES, TARGETS, Target
from inkling_portable import dispatch
from inkling_portable.dispatch import (
    OPS,
    ROWS,
    Row,
    UnsupportedOnTarget,
    explain,
    forced_from_environment,
    resolve,
    resolve_all,
    support_table,
)
from inkling_portable.facts import FORMATS, Facts

ROOT = Path(__file__).parents[1]
FOLDERS = {"inkling_kernels": "triton_kernels", "inkling_rocm": "rocm", "inkling_portable": "inkling_portable"}
CPU, H200, MI300X, MI355X = (Target.parse(name) for name in ("cpu", "sm90", "gfx942", "gfx950"))


def width_of_256(facts: Facts) -> str | None:
    """A condition such as AITER's second stage has."""
    if facts.expert_width % 256 == 0:
        return None
    return f"needs an expert width that is a multiple of 256, not {facts.expert_width}"


def row(name: str, *targets: str, op: str = "experts", needs: tuple[str, ...] = (), when: object = None) -> Row:
    return Row(op, targets, needs, when, f"nowhere:{name}", name, "because", "none")  # type: ignore[arg-type]


FAKE = (
    row("native", "sm100", "sm103", needs=("native_nvfp4",)),
    row("aiter", "gfx950", needs=("native_mxfp4", "mfma_scale"), when=width_of_256),
    row("scaled", "gfx950", "sm90", needs=("native_mxfp4",)),
    row("unpack", "gpu"),
    row("torch", "cpu"),
    row("torch", "cpu", op="norm"),
)


# The table that ships.


def test_rows_are_grouped_by_operation_in_order() -> None:
    assert tuple(dict.fromkeys(each.op for each in ROWS)) == OPS
    changes = sum(one.op != other.op for one, other in itertools.pairwise(ROWS))
    assert changes == len(OPS) - 1, "the rows of an operation stand together"


@pytest.mark.parametrize("each", ROWS, ids=lambda each: f"{each.op}={each.name}")
def test_a_row_says_what_it_must(each: Row) -> None:
    families = set().union(*(target.families for target in TARGETS))
    assert each.targets
    assert set(each.targets) <= families
    assert set(each.needs) <= set(CAPABILITIES)
    assert each.when is None or each.when.__doc__
    assert each.why
    assert "|" not in each.why, "a cell of a Markdown table"
    assert each.evidence in ("none", "compiled", "emulated") or each.evidence.startswith("ran ")


@pytest.mark.parametrize("each", ROWS, ids=lambda each: each.impl)
def test_an_implementation_is_a_function_of_the_tree(each: Row) -> None:
    """Read from the source, since importing a row may need a device or a package that this machine lacks."""
    module, _, function = each.impl.partition(":")
    package, _, rest = module.partition(".")
    source = (ROOT / FOLDERS[package] / Path(*rest.split("."))).with_suffix(".py")
    defined = {node.name for node in ast.parse(source.read_text()).body if isinstance(node, ast.FunctionDef)}
    assert function in defined


@pytest.mark.parametrize("op", OPS)
def test_every_operation_ends_with_a_cpu_row_for_any_facts(op: str) -> None:
    last = [each for each in ROWS if each.op == op][-1]
    assert (last.targets, last.needs, last.when) == (("cpu",), (), None)


def _evidence() -> list[dict]:
    files = [*(ROOT / "benchmarks" / "results").glob("*.json"), *(ROOT / "rocm" / "evidence").glob("*.json")]
    return [content for file in files if isinstance(content := json.loads(file.read_text()), dict)]


@pytest.mark.parametrize("each", [each for each in ROWS if each.evidence != "none"], ids=lambda r: f"{r.op}={r.name}")
def test_evidence_is_on_file(each: Row) -> None:
    if each.evidence.startswith("ran "):
        device = each.evidence.removeprefix("ran ")
        assert any(content.get("device") == device for content in _evidence()), f"no results file of device {device!r}"
    else:
        seen = [content for content in _evidence() if content.get("evidence") == each.evidence]
        assert any(f"{each.op}={each.name}" in content["rows"] for content in seen), f"no file says {each.evidence}"


# Resolving, on the table that ships.


@pytest.mark.parametrize("format_", FORMATS)
def test_every_operation_resolves_on_the_cpu(format_: str) -> None:
    choices = resolve_all(CPU, Facts(format=format_, dtype="float32"))
    assert tuple(choices) == OPS
    assert all(choice.row is not None and choice.row.targets == ("cpu",) for choice in choices.values())


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_a_target_has_a_row_or_an_error_that_lists_every_row(target: Target) -> None:
    for choice in explain(target, Facts()).choices:
        if choice.row is not None:
            assert choice.row.problem(target, Facts()) is None
            assert resolve(choice.op, target, Facts()) == choice
            continue
        with pytest.raises(UnsupportedOnTarget) as caught:
            resolve(choice.op, target, Facts())
        assert caught.value.missing == (choice,)
        assert [each for each, _ in choice.passed_over] == [each for each in ROWS if each.op == choice.op]
        said = [f"{each.name} {reason}" for each, reason in choice.passed_over]
        assert all(text in str(caught.value) for text in [str(target), target.name, choice.op, *said])


def test_the_whole_table_explains_itself_fast_small_and_alone() -> None:
    """No weights, no torch, no implementation imported; under a second and 64 MiB for all devices together."""
    script = """
import json, sys, time
# Not getrusage: its peak outlives exec, so it would be that of the process that runs the tests.
peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
before, start = peak(), time.process_time()
from inkling_kernels.target import TARGETS
from inkling_portable.dispatch import ROWS, explain
from inkling_portable.facts import FORMATS, Facts
loaded = time.process_time() - start
explained = [explain(target, Facts(format=f)).to_dict() for target in TARGETS for f in FORMATS]
seconds, mib = time.process_time() - start, peak() - before
heavy = {"torch", "triton", "numba", "numpy", "pydantic", "rich", "typer"}
heavy |= {row.impl.partition(":")[0] for row in ROWS}
print(json.dumps([loaded, seconds, mib, sorted(heavy & set(sys.modules)), len(explained)]))
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded, seconds, mib, imported, count = json.loads(ran.stdout)
    assert imported == []
    assert count == len(TARGETS) * len(FORMATS)
    assert loaded < 0.3
    assert seconds < 1
    assert mib < 64


# Resolving, on a table made for it.


def test_the_first_row_that_holds_wins() -> None:
    got = {str(target): explain(target, Facts(), rows=FAKE).choices[0].row for target in TARGETS}
    names = {where: found.name if found else None for where, found in got.items()}
    assert names.pop("cpu") == "torch"
    assert {where for where, name in names.items() if name == "native"} == {"cuda:sm100", "cuda:sm103"}
    assert names.pop("hip:gfx950") == "aiter"
    assert {name for where, name in names.items() if where not in ("cuda:sm100", "cuda:sm103")} == {"unpack"}


def test_reasons_say_family_capability_and_condition() -> None:
    choice = resolve("experts", MI355X, Facts(expert_width=384), rows=FAKE)
    assert choice.row is FAKE[2]
    assert choice.passed_over == (
        (FAKE[0], "is for sm100, sm103"),
        (FAKE[1], "needs an expert width that is a multiple of 256, not 384"),
    )
    reasons = dict(resolve("experts", H200, Facts(), rows=FAKE).passed_over)
    assert reasons[FAKE[2]] == f"needs native_mxfp4 ({CAPABILITIES['native_mxfp4']})"


def test_the_interpreter_takes_the_rows_of_every_gpu() -> None:
    choice = resolve("experts", Target.parse("interpret"), Facts(), rows=FAKE)
    assert choice.row is FAKE[3]


def test_missing_operations_are_one_error() -> None:
    with pytest.raises(UnsupportedOnTarget) as caught:
        resolve_all(H200, Facts(), rows=(row("torch", "cpu"), row("torch", "cpu", op="norm"), row("k", "gpu", op="c")))
    assert [choice.op for choice in caught.value.missing] == ["experts", "norm"]
    assert caught.value.target is H200
    assert "experts (torch is for cpu), norm (torch is for cpu)" in str(caught.value)


def test_a_forced_row_is_held_to_its_conditions() -> None:
    assert resolve("experts", MI355X, Facts(), forced="unpack", rows=FAKE).row is FAKE[3]
    with pytest.raises(UnsupportedOnTarget, match="multiple of 256, not 384") as caught:
        resolve("experts", MI355X, Facts(expert_width=384), forced="aiter", rows=FAKE)
    reasons = dict(caught.value.missing[0].passed_over)
    assert reasons[FAKE[0]] == "is for sm100, sm103", "forcing hides no other reason"
    assert reasons[FAKE[3]] == "is set aside: experts=aiter is forced"
    with pytest.raises(UnsupportedOnTarget, match="native is for sm100, sm103"):
        resolve("experts", H200, Facts(), forced="native", rows=FAKE)


def test_forcing_one_operation_leaves_the_others() -> None:
    free, forced = resolve_all(CPU, Facts()), resolve_all(CPU, Facts(), {"rms_norm": "torch"})
    assert forced.pop("rms_norm").row != free.pop("rms_norm").row
    assert [choice.row for choice in forced.values()] == [choice.row for choice in free.values()]


def test_unknown_names_are_errors_that_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no operation 'norms', only embedding, linear, rms_norm"):
        explain(CPU, Facts(), {"norms": "torch"})
    with pytest.raises(ValueError, match=r"rms_norm=cuda: the implementations of rms_norm are triton, numba, torch"):
        resolve("rms_norm", CPU, Facts(), forced="cuda")
    with pytest.raises(ValueError, match=r"no operation 'norms'"):
        resolve("norms", CPU, Facts())


@st.composite
def tables(draw: st.DrawFn) -> tuple[Row, ...]:
    families = st.sampled_from(sorted({family for target in TARGETS for family in target.families}))
    needs = st.lists(st.sampled_from(sorted(CAPABILITIES)), max_size=2, unique=True).map(tuple)
    return tuple(
        Row("op", tuple(draw(st.lists(families, min_size=1, max_size=3, unique=True))), draw(needs),
            draw(st.sampled_from([None, width_of_256])), f"m:f{i}", f"n{i % 3}", "w", "none")
        for i in range(draw(st.integers(1, 6)))
    )  # fmt: skip


@given(tables(), st.sampled_from(TARGETS), st.sampled_from([96, 256, 384, 768]), st.sampled_from([None, "n0"]))
@settings(max_examples=200, deadline=None)
def test_resolving_is_a_search_for_the_first_row(
    rows: tuple[Row, ...], target: Target, width: int, forced: str | None
) -> None:
    def holds(each: Row) -> bool:
        own = {"cpu"} if target.arch == "cpu" else {target.arch, target.vendor, "gpu"}
        family = any(name in own for name in each.targets)
        capable = all(need in target.capabilities for need in each.needs)
        return family and capable and (each.when is None or width % 256 == 0) and forced in (None, each.name)

    expected = next((i for i, each in enumerate(rows) if holds(each)), None)
    (choice,) = explain(target, Facts(expert_width=width), forced and {"op": forced}, rows).choices
    assert choice.row is (None if expected is None else rows[expected])
    assert [each for each, _ in choice.passed_over] == list(rows[:expected])
    assert all(reason for _, reason in choice.passed_over)


# Facts, and the environment.


@pytest.mark.parametrize(
    ("field", "value"),
    [("format", "int4"), ("format", None), ("dtype", "bf16"), ("kv_dtype", "fp8"), ("head_dim", 0), ("page_size", -16)],
)
def test_facts_refuse_a_value_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field) as caught:
        Facts(**{field: value})  # type: ignore[arg-type]
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [True, 1.0, "16", None])
def test_sizes_are_integers(value: object) -> None:
    with pytest.raises(TypeError, match="page_size"):
        Facts(page_size=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "forced"),
    [
        (None, {}),
        ("", {}),
        (" , ", {}),
        ("rms_norm=torch", {"rms_norm": "torch"}),
        (" rms_norm = torch , routing=torch,", {"rms_norm": "torch", "routing": "torch"}),
    ],
)
def test_the_environment_forces_rows(monkeypatch: pytest.MonkeyPatch, text: str | None, forced: dict[str, str]) -> None:
    monkeypatch.delenv("INKLING_IMPL", raising=False)
    if text is not None:
        monkeypatch.setenv("INKLING_IMPL", text)
    assert forced_from_environment() == forced


@pytest.mark.parametrize("text", ["torch", "=torch", "rms_norm=", "rms_norm=a,rms_norm=b", "rms_norm"])
def test_a_malformed_environment_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("INKLING_IMPL", text)
    with pytest.raises(ValueError, match="INKLING_IMPL"):
        forced_from_environment()


# What people read.


def test_an_explanation_is_json() -> None:
    explanation = explain(MI355X, Facts(format="mxfp4", expert_width=384), rows=FAKE)
    read = json.loads(json.dumps(explanation.to_dict()))
    assert (read["target"], read["supported"], read["facts"]["expert_width"]) == ("hip:gfx950", False, 384)
    experts, norm = read["operations"]
    assert experts["chosen"] == {"name": "scaled", "impl": "nowhere:scaled", "why": "because", "evidence": "none"}
    assert [passed["name"] for passed in experts["passed_over"]] == ["native", "aiter"]
    assert norm["chosen"] is None


def test_the_support_table_has_a_line_for_every_target_and_row(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = support_table().splitlines()
    assert [line.split("`")[1] for line in lines if line.startswith("| `")] == [str(target) for target in TARGETS]
    assert sum(line.startswith(tuple(f"| {op} |" for op in OPS)) for line in lines) == len(ROWS)
    assert len({line.count("|") for line in lines[: len(TARGETS) + 2]}) == 1
    (cpu,) = [line for line in lines if line.startswith("| `cpu`")]
    assert cpu.count("ran cpu") == len(FORMATS)
    first, second, *others = (each for each in ROWS if each.targets == ("cpu",))
    rows = (replace(first, evidence="ran H200"), replace(second, evidence="compiled"), *others)
    monkeypatch.setattr(dispatch, "explain", lambda target, facts: explain(target, facts, rows=rows))
    (cpu,) = [line for line in support_table().splitlines() if line.startswith("| `cpu`")]
    assert "compiled; ran H200; ran cpu" in cpu


def test_the_readme_holds_the_support_table() -> None:
    begin, end = "<!-- support:begin -->", "<!-- support:end -->"
    readme = (ROOT / "README.md").read_text()
    assert readme.count(begin) == readme.count(end) <= 1
    if begin in readme:
        shown = readme.split(begin)[1].split(end)[0].strip()
        assert shown == support_table(), (
            "put the output of `inkling explain --markdown` between the markers of README.md"
        )
