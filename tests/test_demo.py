"""`inkling demo`, and the line between the files that the small model was trained on and those that it never saw."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from small_checkpoint import write_small

from inkling_portable import cli, engine, heldout, llm
from inkling_portable.commands.demo import excerpts
from inkling_portable.commands.generate import acceptance

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = Path(sysconfig.get_paths()["stdlib"])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("demo") / "small")


# Held-out files.


def in_test_set(name: str) -> bool:
    """The rule, as the training results state it."""
    return int(hashlib.sha256(name.encode("ascii")).hexdigest()[:2], 16) % 20 == 0


def test_one_file_in_twenty_is_held_out_by_its_name() -> None:
    held, trained = dict(heldout.sources(held=True)), dict(heldout.sources(held=False))
    assert all(map(in_test_set, held))
    assert not any(map(in_test_set, trained))
    assert held.keys() | trained.keys() == dict(heldout.sources()).keys()
    assert 0.03 < len(held) / (len(held) + len(trained)) < 0.08


def test_the_files_are_those_of_the_library_alone() -> None:
    found = list(heldout.sources())
    names = [name for name, _ in found]
    assert {"argparse.py", "json/decoder.py", "collections/__init__.py"} <= set(names)
    assert not [name for name in names if "site-packages" in name or "dist-packages" in name]
    assert sorted(names, key=lambda name: name.split("/")) == names
    assert all(text == (LIBRARY / name).read_text(encoding="utf-8") for name, text in found[:50])
    assert all(text for _, text in found)


def test_files_beside_the_library_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.py", "b/c.py", "site-packages/d.py", "dist-packages/e.py", "b/f.txt", "lib2to3/tests/data/g.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    (tmp_path / "latin.py").write_bytes(b"\xe9")
    (tmp_path / "empty.py").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert list(heldout.sources()) == [("a.py", "1"), ("b/c.py", "1")]


def test_training_draws_the_same_line() -> None:
    """The script takes the rule from the package; a second copy could drift, and the demo would show training data."""
    script = load(ROOT / "benchmarks" / "train_tiny.py")
    assert script.held_out is heldout.held_out
    assert script.sources is heldout.sources


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_excerpts_are_held_out_code_up_to_a_block() -> None:
    found = list(excerpts(5))
    assert len({name for name, _ in found}) == 5
    for name, prompt in found:
        assert in_test_set(name)
        assert "test" not in name
        text = (LIBRARY / name).read_text(encoding="utf-8")
        assert f"\n{prompt}\n" in text
        assert re.fullmatch(r"    +(if|for|while|with) .*:", prompt.splitlines()[-1])
        assert 100 < len(prompt) <= 900


# The command.


def test_demo_completes_held_out_code_in_all_formats(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--model", str(small), "--files", "2", "--max-tokens", "6", "--json"]) == 0
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    found = json.loads(line)
    assert found["drafts"] == 2
    assert list(found["formats"]) == ["bf16", "nvfp4", "mxfp4"]
    for speed in found["formats"].values():
        assert speed["plain"] > 0
        assert speed["speculative"] > 0
        assert len(speed["accepted"]) == 2
        assert 1 <= speed["tokens_a_step"] <= 3
        assert speed["same_text"] is True
    sizes = {name: speed["weights_mib"] for name, speed in found["formats"].items()}
    assert sizes["nvfp4"] < sizes["mxfp4"] < sizes["bf16"]  # MXFP4 keeps the first expert layer in bf16
    assert [(one["name"], one["prompt"]) for one in found["files"]] == list(excerpts(2))
    for one in found["files"]:
        (direct,) = llm.LLM(small, dtype="float32").generate(
            one["prompt"], llm.SamplingParams(max_tokens=6, temperature=0.0)
        )
        assert one["completions"]["bf16"] == direct.outputs[0].text
        assert set(one["completions"]) == set(found["formats"])
        assert one["name"] in err
    assert "same text" in err


def test_demo_prints_a_table_of_80_columns(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(llm, "default_model", lambda: small)
    assert cli.main(["demo", "--files", "1", "--max-tokens", "4"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "never seen in training" in out
    table = out[out.index("Decoding one request") :].splitlines()
    assert max(len(line.rstrip()) for line in table) <= 80
    rows = [line for line in table if re.match(r"│ (bf16|nvfp4|mxfp4) ", line)]
    assert len(rows) == 3
    assert all(re.search(r"\d x │ +\d+%, \d+% │ +\d\.\d\d │ +yes │$", row) for row in rows)
    assert all(
        heading in table[2] for heading in ("MiB", "plain", "2 drafts", "faster", "accepted", "a step", "same text")
    )


def test_demo_of_a_model_without_depths_decodes_plainly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_small(tmp_path / "plain", depths=0)
    assert cli.main(["demo", "--model", str(model), "--files", "1", "--max-tokens", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["drafts"] == 0
    for speed in found["formats"].values():
        assert speed["plain"] > 0
        assert (speed["speculative"], speed["accepted"], speed["same_text"]) == (None, [], None)


def test_demo_fails_where_drafts_change_the_text(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def accept_all(drafts: list[int], logits: torch.Tensor, *rest: Any) -> list[int]:
        return [*drafts, int(logits[-1].argmax())]

    monkeypatch.setattr(engine, "verify", accept_all)
    assert cli.main(["demo", "--model", str(small), "--files", "1", "--max-tokens", "12"]) == 1
    out, err = capsys.readouterr()
    assert "NO" in out
    assert err.startswith("inkling: with drafts the text differs")


def test_acceptance_is_counted_over_verifying_steps() -> None:
    assert acceptance([{"accepted": [3, 1], "steps": 4}]) == ([0.75, 0.25], 2.0)
    assert acceptance([{"accepted": [3, 1], "steps": 4}, {}, {"accepted": [1, 1], "steps": 4}]) == ([0.5, 0.25], 1.75)
    assert acceptance([{}, {"accepted": [0, 0], "steps": 0}]) == ([], 1.0)
