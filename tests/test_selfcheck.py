"""`inkling check`: what is right passes on every kind of device that is here, and what is wrong is told by name."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from inkling_kernels.target import Target, current_target
from inkling_portable import selfcheck
from inkling_portable.cli import main
from inkling_portable.dispatch import OPS, ROWS, Row
from inkling_portable.facts import FORMATS
from inkling_portable.selfcheck import Finding, check

CPU = Target.parse("cpu")
REFERENCES = tuple(selfcheck.reference(op) for op in OPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_references_are_right(dtype: torch.dtype) -> None:
    found = list(check(CPU, dtype, REFERENCES))
    assert [(each.op, each.format) for each in found if each.op == "moe_experts"] == [
        ("moe_experts", format) for format in FORMATS
    ]
    assert {each.op for each in found} == set(OPS)
    assert all(each.status == "right" and each.chosen for each in found), found
    # Prefill, a later piece, decoding and verifying have other shapes.
    assert all(each.calls >= 2 for each in found)
    assert next(each for each in found if each.op == "rel_attention").calls == 6
    if dtype == torch.float32:
        # Of packed experts the check rounds the gated values to bfloat16, the reference does not.
        assert all(each.error == 0 for each in found)


def on_kernels(kernel_device: torch.device, rows: tuple[Row, ...]) -> list[Finding]:
    """On the interpreter, or on the GPU where there is one."""
    target = Target.parse("interpret") if kernel_device.type == "cpu" else current_target()
    return list(check(target, rows=rows))


def test_kernels_are_right_here(kernel_device: torch.device) -> None:
    ops = ("rms_norm", "routing", "silu_mul", "moe_experts")
    rows = tuple(row for row in ROWS if row.op in ops and row.name == "triton")
    found = on_kernels(kernel_device, rows)
    formats = [("moe_experts", format) for format in FORMATS]
    assert sorted((each.op, each.format or "") for each in found) == sorted([*formats, *((op, "") for op in ops[:3])])
    assert all(each.status == "right" and each.chosen for each in found), found


@pytest.mark.slow
def test_all_kernels_are_right_here(kernel_device: torch.device) -> None:
    found = on_kernels(kernel_device, ROWS)
    assert {each.op for each in found} == set(OPS)
    assert all(each.status == "right" for each in found), found
    # Those that a model has to ask for are among them, and are not what one takes that does not.
    asked = [each for each in found if each.name.startswith("fixed_")]
    assert asked
    assert not any(each.chosen for each in asked)


# One mistake each, in the terms of the references; `*` stands for the arguments.
BROKEN = {
    "rms_norm": {
        "off by a twentieth": "return norm.rms_norm_ref(*args, **kwargs) * 1.05",
        "not a number": "return norm.rms_norm_ref(*args, **kwargs) * float('nan')",
        "of another shape": "return norm.rms_norm_ref(*args, **kwargs)[:-1]",
        "refuses": "raise ValueError('warps of 64 are not mine')",
        "does not launch": "raise RuntimeError('hipErrorLaunchFailure')",
    },
    "short_conv": {"state not written": "return conv.short_conv_ref(*copy.deepcopy(args), **kwargs)"},
    "qkvr_prep": {"cache not written": "return kv.qkvr_prep_ref(*copy.deepcopy(args), **kwargs)"},
    "routing": {
        "other experts": "i, *rest = routing.routing_ref(*args, **kwargs)\n    return (i.flip(-1), *rest)",
    },
    "rel_attention": {
        "no bias": "return attn.rel_attention_ref(args[0], args[1] * 0, *args[2:], **kwargs)",
        "window one short": "kwargs['window'] = (kwargs['window'] or 65) - 1\n    "
        "return attn.rel_attention_ref(*args, **kwargs)",
    },
    "moe_experts": {
        "up taken for gate": "x, a, b, *rest = args\n    a = replace(a, data=a.data.roll(1, 1))\n    "
        "return moe.moe_experts_ref(x, a, b, *rest)",
        "experts of other ranks added": "x, a, b, ids, g = args\n    "
        "return moe.moe_experts_ref(x, a, b, ids.clamp(min=0), g)",
    },
    "silu_mul": {"halves": "x, *rest = args\n    return act.silu_mul_ref(torch.cat([x, x], 1)[:, ::2], *rest)"},
}
HEAD = (
    "import copy\nimport torch\nfrom dataclasses import replace\n"
    "from inkling_kernels import activation as act, kv_cache as kv, moe_gemm as moe, norm, rel_attention as attn\n"
    "from inkling_kernels import routing, short_conv as conv\n\n"
)


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Row]:
    """Rows that make these mistakes, by what is wrong."""
    rows, source = {}, HEAD
    for op, mistakes in BROKEN.items():
        for number, (name, body) in enumerate(mistakes.items()):
            function = f"{op}_{number}"
            source += f"def {function}(*args, **kwargs):\n    {body}\n\n\n"
            impl = f"mistakes_of_selfcheck:{function}"
            rows[f"{op}: {name}"] = replace(selfcheck.reference(op), impl=impl, name=function)
    (tmp_path / "mistakes_of_selfcheck.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    absent = replace(selfcheck.reference("embedding"), impl="no_such_module:f", name="absent")
    return rows | {"embedding: does not import": absent}


def test_mistakes_are_told(broken: dict[str, Row], capsys: pytest.CaptureFixture[str]) -> None:
    found = list(check(CPU, torch.float32, (*broken.values(), *REFERENCES)))
    by_name = {row.name: name for name, row in broken.items()}
    told: dict[str, list[Finding]] = {}
    for each in found:
        if each.name in by_name:
            told.setdefault(by_name[each.name], []).append(each)
    caught = [name for name in broken if all(each.status != "right" for each in told[name])]
    with capsys.disabled():
        print(f"\n{len(caught)} of {len(broken)} broken implementations told by the self-check")
    assert caught == list(broken)
    failed = {name for name, each in told.items() if each[0].status == "failed"}
    assert failed == {
        "rms_norm: refuses",
        "rms_norm: does not launch",
        "embedding: does not import",
    }
    assert told["rms_norm: refuses"][0].message == "ValueError: warps of 64 are not mine"
    assert "no_such_module" in str(told["embedding: does not import"][0].message)
    assert told["rms_norm: off by a twentieth"][0].error == pytest.approx(0.05, rel=1e-3)
    assert told["rms_norm: not a number"][0].error == math.inf
    # Those that are right stay right beside them.
    assert all(each.status == "right" for each in found if each.name == "torch")


def run(*args: str, rows: tuple[Row, ...], monkeypatch: pytest.MonkeyPatch) -> int:
    whole: Any = check
    monkeypatch.setattr(selfcheck, "check", partial(whole, dtype=torch.float32, rows=rows))
    return main(["check", "--target", "cpu", *args])


def test_the_command_when_all_is_right(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(rows=REFERENCES, monkeypatch=monkeypatch) == 0
    out, err = capsys.readouterr()
    count = len(OPS) + len(FORMATS) - 1
    assert f"all {count} are right" in " ".join(out.split())
    assert "torch" in out.splitlines()[-1] or "torch 2" in out
    assert err == ""
    assert max(map(len, out.splitlines())) <= 80


def test_the_command_when_something_is_wrong(
    broken: dict[str, Row], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (broken["rms_norm: off by a twentieth"], broken["rms_norm: does not launch"], *REFERENCES)
    assert run("--json", rows=rows, monkeypatch=monkeypatch) == 1
    record = json.loads(capsys.readouterr().out)
    assert (record["target"], record["ok"]) == ("cpu", False)
    assert record["versions"]["torch"] == torch.__version__
    wrong = {each["name"]: each for each in record["checks"] if each["status"] != "right"}
    assert set(wrong) == {"rms_norm_0", "rms_norm_4"}
    assert wrong["rms_norm_0"]["error"] == pytest.approx(0.05, rel=1e-3)
    assert wrong["rms_norm_0"]["evidence"] == "ran cpu"
    assert wrong["rms_norm_4"]["message"] == "RuntimeError: hipErrorLaunchFailure"
    assert run(rows=rows, monkeypatch=monkeypatch) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "2 of" in out
    assert "rms_norm rms_norm_0: off by 0.05, more than 0.000244; force another: INKLING_IMPL=rms_norm=NAME" in out


def test_a_gpu_that_is_not_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["check", "--target", "gfx942"]) == 2
    assert "device is 'gfx942', but this machine has cpu" in capsys.readouterr().err


def test_rows_are_checked_where_they_hold() -> None:
    """Rows for other devices, or other formats, are not run."""
    experts = tuple(row for row in ROWS if row.op == "moe_experts" and row.name != "numba")
    found = {(each.name, each.format) for each in check(CPU, torch.float32, experts)}
    assert {("torch", format) for format in FORMATS} <= found
    assert not {name for name, _ in found} & {"triton", "aiter"}
