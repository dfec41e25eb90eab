"""The command line: quick help, one sentence and the right exit code for every error, and `explain`."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from inkling_kernels.target import TARGETS
from inkling_portable import dispatch
from inkling_portable.cli import main
from inkling_portable.dispatch import OPS, ROWS
from inkling_portable.ops import BrokenImplementation

RUN = "import sys; from inkling_portable.cli import main; sys.exit(main())"


def inkling(*args: str, script: str = RUN) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, check=False)


@pytest.fixture(autouse=True)
def nothing_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INKLING_IMPL", raising=False)
    monkeypatch.setenv("COLUMNS", "160")


def test_help_takes_under_three_tenths_of_a_second() -> None:
    """In processor time, which other work on the machine does not stretch."""
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        ran = inkling("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert ran.returncode == 0
        assert "explain" in ran.stdout
    assert min(seconds) < 0.3, seconds


def test_help_imports_nothing_heavy() -> None:
    heavy = {"torch", "triton", "transformers", "numpy", "safetensors", "huggingface_hub", "rich"}
    script = (
        "import sys\n"
        "from inkling_portable.cli import main\n"
        "main()\n"
        f"raise SystemExit(' '.join({heavy} & set(sys.modules)) or 0)"
    )
    assert inkling("--help", script=script).returncode == 0
    assert inkling("explain", "--help", script=script).returncode == 0


def test_no_command_is_help_and_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Commands:" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.split()[0] == "inkling"


# Errors.


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["frobnicate"], ["frobnicate", "inkling --help"]),
        (["explain", "--tarket", "cpu"], ["--tarket", "inkling explain --help"]),
        (["explain", "--target"], ["--target", "argument"]),
        (["explain", "cpu"], ["cpu"]),
        (["explain", "--target", "sm75"], ["'sm75'", "cuda:sm80", "hip:gfx1201"]),
        (["explain", "--target", ""], ["''", "cuda:sm80"]),
        (["explain", "--target", "cpu", "--format", "int4"], ["format", "'int4'", "nvfp4"]),
        (["explain", "--target", "cpu", "--json", "--markdown"], ["--json", "--markdown"]),
    ],
)
def test_what_the_user_did_wrong_is_one_sentence_and_exit_code_2(
    args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("inkling: ")
    assert len(err.splitlines()) == 1
    assert all(word in err for word in words)


@pytest.mark.parametrize("text", ["rms_norm", "norms=torch", "rms_norm=nothing"])
def test_a_wrong_forced_row_is_a_user_error(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INKLING_IMPL", text)
    assert main(["explain", "--target", "cpu"]) == 2
    assert text in capsys.readouterr().err


def _raising(error: BaseException) -> Callable[..., object]:
    def stand_in(*args: object) -> object:
        raise error

    return stand_in


class ConfigErrorLike(ValueError):
    """Stands for the ValueErrors that our packages define: only its module counts."""


ConfigErrorLike.__module__ = "inkling_portable.config"


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (ConfigErrorLike("hidden_size must be\n at least 1"), 2, "hidden_size must be at least 1"),
        (FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/m"), 2, "/m: No such file or directory"),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/m"), 2, "/m: Permission denied"),
        (OSError("no file of that name on the hub"), 2, "no file of that name on the hub"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/out"), 1, "/out: No space left on device"),
        (BrokenImplementation("routing=k cannot be loaded"), 1, "routing=k cannot be loaded"),
        (MemoryError(), 1, "out of memory: the system refused an allocation"),
        (torch.OutOfMemoryError("tried to allocate 2 GiB"), 1, "out of memory: tried to allocate 2 GiB"),
        (ModuleNotFoundError("No module named 'vllm'", name="vllm.config"), 1, "this needs the Python package 'vllm'"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_every_kind_of_error_has_its_code_and_its_sentence(
    error: BaseException,
    code: int,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(dispatch, "explain", _raising(error))
    assert main(["explain", "--target", "cpu"]) == code
    err = capsys.readouterr().err
    assert err.startswith(f"inkling: {sentence}")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a tensor of another library"),
        RuntimeError("an operation of another library"),
        TypeError("a call"),
        KeyError("key"),
        ModuleNotFoundError("No module named 'inkling_portable.gone'", name="inkling_portable.gone"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_bug_keeps_its_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "explain", _raising(error))
    with pytest.raises(type(error)) as caught:
        main(["explain", "--target", "cpu"])
    assert caught.value is error


def test_ctrl_c_is_130_without_a_traceback() -> None:
    script = (
        "import os, signal, sys\n"
        "from inkling_portable import cli, dispatch\n"
        "dispatch.explain = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.exit(cli.main())"
    )
    ran = inkling("explain", "--target", "cpu", script=script)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "inkling: interrupted\n")


@pytest.mark.parametrize("echo", ["typer.echo", "sys.stdout.write"], ids=["at once", "at exit"])
def test_a_reader_that_leaves_is_no_traceback(echo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    read, write = os.pipe()
    os.close(read)
    script = f"import sys, typer; typer.echo = {echo}; {RUN}"
    command = [sys.executable, "-c", script, "explain", "--markdown"]
    ran = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (ran.returncode, ran.stderr) == (1, "")


# inkling explain.


def test_explain_for_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """What a row says of the width that eight devices leave each other."""
    arguments = ["explain", "--target", "gfx950", "--format", "mxfp4", "--json", "--tensor-parallel-size"]
    assert main([*arguments, "8"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["facts"]["expert_width"] == 384
    (experts,) = [each for each in record["operations"] if each["op"] == "moe_experts"]
    reasons = {row["name"]: row["reason"] for row in experts["passed_over"]}
    assert "needs an expert width on this rank that is a multiple of 256, not 384" in reasons["aiter"]
    assert main([*arguments, "7"]) == 2
    assert "--tensor-parallel-size is 7, which does not divide" in capsys.readouterr().err


def test_explain_prints_what_runs_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--target", "cpu", "--format", "nvfp4"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert all(op in out for op in OPS)
    assert out.count("ran cpu") == len(OPS)
    assert f"All {len(OPS)} operations have an implementation for nvfp4 experts on cpu." in out


def test_explain_prints_why_rows_were_passed_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = dispatch.Row("embedding", ("gfx950",), (), None, "m:f", "fast", "w", "none")
    real = dispatch.explain
    monkeypatch.setattr(dispatch, "explain", lambda *args: real(*args, rows=(first, *ROWS)))
    assert main(["explain", "--target", "cpu"]) == 0
    assert "fast is for gfx950" in capsys.readouterr().out


def test_explain_of_a_gpu_shows_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--target", "gfx942:sramecc+"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "hip:gfx942: AMD Instinct MI300X, 304 compute units, warps of 64, 64 KiB shared memory" in out
    assert "e4m3fnuz fp8, no fp4 in hardware" in out


def test_explain_without_a_target_is_about_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["explain", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target"] == "cpu"


def test_explain_json_is_the_explanation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--target", "sm121", "--format", "mxfp4", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["target"] == "cuda:sm121"
    assert read["facts"]["format"] == "mxfp4"
    assert [operation["op"] for operation in read["operations"]] == list(OPS)
    assert read["supported"] == all(operation["chosen"] for operation in read["operations"])
    assert all(operation["chosen"] or operation["passed_over"] for operation in read["operations"])


def test_explain_markdown_is_the_readmes_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--markdown"]) == 0
    assert capsys.readouterr().out.strip() == dispatch.support_table()


def test_explain_takes_all_targets_in_a_second_and_64_mib() -> None:
    """Found before anything loads, not after 150 GB (vllm issues 51405, 49681, 51560); through the command itself."""
    script = """
import json, sys, time
# Not getrusage: its peak outlives exec, so it would be that of the process that runs the tests.
peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
before = peak()
from inkling_portable.cli import main
codes = [main(["explain", "--target", name]) for name in sys.argv[1:]]
print(json.dumps([sum(codes), time.process_time(), peak() - before, "torch" in sys.modules]), file=sys.stderr)
"""
    ran = inkling(*map(str, TARGETS), script=script)
    failed, seconds, mib, torch_imported = json.loads(ran.stderr)
    assert not failed
    assert not torch_imported
    assert seconds < 1
    assert mib < 64
    assert all(str(target) in ran.stdout for target in TARGETS)
