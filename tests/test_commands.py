"""Bad input to any command: one clear sentence on stderr, exit code 2 (1 for a run that failed on the way), no
traceback, nothing on stdout, and no partial file.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from small_checkpoint import CONTEXT, VOCABULARY, write_small

from inkling_portable import checkpoint_writer, llm
from inkling_portable.cli import main

RUN = "import sys; from inkling_portable.cli import main; sys.exit(main())"
UNKNOWN_MODEL_TYPE = {"model_type": "llama"}


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("commands") / "small")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.delenv("INKLING_IMPL", raising=False)


class Refused:
    """Runs a command in this process, holds what it prints to the rules, and returns its sentence."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *args: object, code: int = 2) -> str:
        assert main([str(arg) for arg in args]) == code
        out, err = self.capsys.readouterr()
        assert out == ""
        (line,) = err.splitlines()
        assert line.startswith("inkling: ")
        assert "Traceback" not in line
        return line


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    return Refused(capsys)


# The checkpoint, for each command that takes one.


def _absent(model: Path) -> Path:
    return model / "absent"


def _not_a_folder(model: Path) -> Path:
    return model / "tokenizer.json"


def _without_config(model: Path) -> Path:
    (model / "config.json").unlink()
    return model


def _without_weights(model: Path) -> Path:
    (model / "model.safetensors").unlink()
    return model


def _broken_config(model: Path) -> Path:
    (model / "config.json").write_text("{")
    return model


def _truncated(model: Path) -> Path:
    os.truncate(model / "model.safetensors", 20_000)
    return model


def _unknown_type(model: Path) -> Path:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | UNKNOWN_MODEL_TYPE))
    return model


def _contradictory(model: Path) -> Path:
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["num_key_value_heads"] = 3
    (model / "config.json").write_text(json.dumps(config))
    return model


DAMAGE: dict[Callable[[Path], Path], Sequence[str]] = {
    _absent: ["absent does not exist", "folder"],
    _not_a_folder: ["tokenizer.json is a file", "folder"],
    _without_config: ["has no config.json"],
    _without_weights: ["model.safetensors"],
    _broken_config: ["config.json", "not valid JSON"],
    _truncated: ["model.safetensors is truncated", "download it again"],
    _unknown_type: ["model_type is 'llama'", "inkling_mm_model"],
    _contradictory: ["num_attention_heads is 4", "num_key_value_heads, 3"],
}
COMMANDS = {
    "generate": ["generate", "--prompt", "x", "--model", "MODEL"],
    "demo": ["demo", "--model", "MODEL"],
    "quantize": ["quantize", "--format", "nvfp4", "MODEL", "OUT"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_checkpoint_that_cannot_be_used(
    damage: Callable[[Path], Path], command: str, small: Path, tmp_path: Path, refused: Refused
) -> None:
    model, out = damage(Path(shutil.copytree(small, tmp_path / "model"))), tmp_path / "out"
    sentence = refused(*({"MODEL": model, "OUT": out}.get(word, word) for word in COMMANDS[command]))
    assert all(word in sentence for word in DAMAGE[damage])
    assert not out.exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_hub_repository_that_cannot_be_fetched(command: str, tmp_path: Path, refused: Refused) -> None:
    sentence = refused(*({"MODEL": "no/such-model", "OUT": tmp_path / "out"}.get(w, w) for w in COMMANDS[command]))
    assert "no/such-model is neither a local folder nor a hub repository" in sentence
    assert not (tmp_path / "out").exists()


# generate.


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["--prompt TEXT", "--prompt-token-ids IDS"]),
        (["--prompt", ""], ["--prompt is empty"]),
        (["--prompt", "x", "--prompt", ""], ["--prompt is empty"]),
        (["--prompt", "a\udcff"], ["--prompt", "UTF-8"]),
        (["--prompt-token-ids", ""], ["--prompt-token-ids is empty"]),
        (["--prompt-token-ids", "5,x"], ["'5,x'", "such as 5,17"]),
        (["--prompt-token-ids", "5,,6"], ["'5,,6'", "such as 5,17"]),
        (["--prompt-token-ids", "5.5"], ["'5.5'"]),
        (["--prompt-token-ids", "5,-1"], ["-1 is out of range", f"0..{VOCABULARY - 1}"]),
        (["--prompt-token-ids", f"5,{VOCABULARY}"], [f"{VOCABULARY} is out of range", f"0..{VOCABULARY - 1}"]),
        (["--prompt-token-ids", str(10**30)], ["out of range"]),
        (["--prompt", "x" * CONTEXT], [f"the prompt has {CONTEXT} tokens", f"at most {CONTEXT - 1}"]),
        (["--prompt", "x", "--temperature", "-1"], ["temperature is -1.0"]),
        (["--prompt", "x", "--temperature", "nan"], ["temperature is nan"]),
        (["--prompt", "x", "--temperature", "inf"], ["temperature is inf"]),
        (["--prompt", "x", "--temperature", "hot"], ["--temperature", "inkling generate --help"]),
        (["--prompt", "x", "--top-p", "0"], ["top_p is 0.0"]),
        (["--prompt", "x", "--top-k", "-2"], ["top_k is -2"]),
        (["--prompt", "x", "--seed", "-1"], ["seed is -1"]),
        (["--prompt", "x", "--stop", ""], ["stop"]),
        (["--prompt", "x", "--max-tokens", "0"], ["--max-tokens"]),
        (["--prompt", "x", "--chunk", "0"], ["--chunk"]),
        (["--prompt", "x", "--logprobs", "-1"], ["--logprobs"]),
        (["--prompt", "x", "--speculative", "-1"], ["--speculative"]),
        (["--prompt", "x", "--speculative", "3"], ["--speculative is 3", "2 multi-token-prediction depths"]),
        (["--prompt", "x", "--dtype", "float16"], ["dtype is float16", "bfloat16"]),
        (["--prompt", "x", "--device", "tpu"], ["'tpu'", "cuda:sm80", "cpu"]),
        (["--prompt", "x", "--device", "gfx1201"], ["'gfx1201'", "this machine has", "auto"]),
        (["--prompt", "x", "--stream", "--json"], ["--stream", "--json"]),
        (["--prompt", "x", "--chat"], ["no chat template"]),
        (["--prompt-token-ids", "5", "--chat"], ["--chat goes with --prompt"]),
        (["--prompt", "x", "--image", "FILE"], ["--image", "no vision tower"]),
        (["--prompt", "x", "--audio", "FILE"], ["--audio", "no audio tower"]),
        (["--prompt-token-ids", "5", "--image", "FILE"], ["--image goes with --prompt"]),
        (["--prompt", "x", "--image", "nowhere.png"], ["--image is nowhere.png, which is no file"]),
        (["--prompt", "x", "--frobnicate"], ["--frobnicate", "inkling generate --help"]),
        (["x"], ["inkling generate --help"]),
    ],
    ids=lambda value: " ".join(map(str, value))[:40] if isinstance(value, list) else None,
)
def test_generate_refuses(args: list[str], words: list[str], small: Path, refused: Refused) -> None:
    sentence = refused("generate", "--model", small, *(__file__ if arg == "FILE" else arg for arg in args))
    assert all(word in sentence for word in words), sentence


def test_what_needs_no_weights_is_refused_before_they_load(
    small: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loading(*args: object, **kwargs: object) -> None:
        pytest.fail("weights are loaded")

    monkeypatch.setattr(llm, "LLM", loading)
    for args in (
        ["--prompt-token-ids", "99999"],
        ["--prompt", "x", "--speculative", "3"],
        ["--prompt", "x", "--chat"],
        ["--prompt", "x", "--image", __file__],
        ["--prompt", "x", "--temperature", "-1"],
    ):
        refused("generate", "--model", small, *args)


def test_generate_without_a_tokenizer_or_with_a_broken_one(small: Path, tmp_path: Path, refused: Refused) -> None:
    model = Path(shutil.copytree(small, tmp_path / "model"))
    (model / "tokenizer.json").write_text('{"a": 1}')
    assert "tokenizer.json is no tokenizer" in refused("generate", "--model", model, "--prompt", "x")
    (model / "tokenizer.json").unlink()
    assert "--prompt-token-ids" in refused("generate", "--model", model, "--prompt", "x")


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("chat_template.jinja", "{% for m in", ["the chat template fails"]),
        ("chat_template.jinja", "{{ raise_exception('roles must alternate') }}", ["roles must alternate"]),
        ("tokenizer_config.json", "{", ["Transformers cannot load the tokenizer"]),
    ],
)
def test_generate_with_a_chat_template_that_fails(
    file: str, text: str, words: list[str], small: Path, tmp_path: Path, refused: Refused
) -> None:
    model = Path(shutil.copytree(small, tmp_path / "model"))
    (model / file).write_text(text)
    sentence = refused("generate", "--model", model, "--prompt", "x", "--chat")
    assert all(word in sentence for word in words), sentence


def test_drafts_need_the_depths_in_the_files(tmp_path: Path, refused: Refused, small: Path) -> None:
    """The configuration may name depths that the files do not hold: their weights must not be made up."""
    model = write_small(tmp_path / "model", depths=0)
    shutil.copyfile(small / "config.json", model / "config.json")
    sentence = refused("generate", "--model", model, "--prompt", "x", "--speculative", "1")
    assert "0 multi-token-prediction depths" in sentence


# quantize.


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["SMALL", "OUT", "--format", "int4"], ["--format is 'int4'", "nvfp4 or mxfp4"]),
        (["SMALL", "OUT"], ["--format"]),
        (["SMALL", "--format", "nvfp4"], ["OUT"]),
        (["SMALL", "OUT", "--format", "mxfp4", "--separate-gate-up"], ["--separate-gate-up", "nvfp4"]),
        (["SMALL", "OUT", "--format", "nvfp4", "--max-shard-gib", "0"], ["--max-shard-gib is 0"]),
        (["SMALL", "SMALL", "--format", "nvfp4"], ["the source itself"]),
        (["SMALL", "FULL", "--format", "nvfp4"], ["is not empty"]),
        (["SMALL", "FILE", "--format", "nvfp4"], ["is a file"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_quantize_refuses(args: list[str], words: list[str], small: Path, tmp_path: Path, refused: Refused) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "kept").write_text("kept")
    places = {"SMALL": small, "OUT": tmp_path / "out", "FULL": full, "FILE": full / "kept"}
    sentence = refused("quantize", *(places.get(arg, arg) for arg in args))
    assert all(word in sentence for word in words), sentence
    assert not (tmp_path / "out").exists()
    assert [file.read_text() for file in full.iterdir()] == ["kept"]


def test_quantize_refuses_what_is_quantised(small: Path, tmp_path: Path, refused: Refused) -> None:
    assert main(["quantize", str(small), str(tmp_path / "once"), "--format", "nvfp4"]) == 0
    refused.capsys.readouterr()
    assert "quantised already" in refused("quantize", tmp_path / "once", tmp_path / "twice", "--format", "nvfp4")
    assert "quantised already" in refused("demo", "--model", tmp_path / "once")
    assert not (tmp_path / "twice").exists()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 20th write and every later one meet a full disk."""
    write, count = os.pwrite, iter(range(10**9))

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        if next(count) >= 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, offset)

    monkeypatch.setattr(checkpoint_writer.os, "pwrite", pwrite)


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_while_quantising(
    small: Path, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentence = refused("quantize", small, tmp_path / "out", "--format", "nvfp4", code=1)
    assert "No space left on device" in sentence
    assert "nothing was left" in sentence
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    sentence = refused("demo", "--model", small, "--files", 1, "--max-tokens", 2, code=1)
    assert "No space left on device" in sentence
    assert not (tmp_path / "out").exists()
    assert not list(scratch.iterdir())


# demo and explain; more of explain's are in test_cli.py.


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["demo", "--model", "SMALL", "--files", "0"], ["--files"]),
        (["demo", "--model", "SMALL", "--files", "10000"], ["10000 held-out files", "--files"]),
        (["demo", "--model", "SMALL", "--max-tokens", "1"], ["--max-tokens"]),
        (["demo", "--model", "BARE"], ["tokenizer.json"]),
        (["demo", "x"], ["inkling demo --help"]),
        (["explain", "--target", "tpu"], ["'tpu'"]),
        (["explain", "--format", "int4"], ["'int4'"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_demo_and_explain_refuse(
    args: list[str], words: list[str], small: Path, tmp_path: Path, refused: Refused
) -> None:
    bare = Path(shutil.copytree(small, tmp_path / "bare"))
    (bare / "tokenizer.json").unlink()
    sentence = refused(*({"SMALL": small, "BARE": bare}.get(arg, arg) for arg in args))
    assert all(word in sentence for word in words), sentence


# In processes of their own: what a shell sees.


def _process(*args: object, script: str = RUN) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={"HF_HUB_OFFLINE": "1"})


def test_a_shell_sees_the_sentence_and_the_code(tmp_path: Path) -> None:
    ran = _process("generate", "--model", tmp_path, "--prompt", "x")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == f"inkling: {tmp_path} has no config.json; expected a checkpoint's folder.\n"


def test_a_shell_sees_a_failed_write(small: Path, tmp_path: Path) -> None:
    """The system itself refuses here: no file of this process may grow beyond 40,000 bytes."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000)); "
    ran = _process("quantize", small, tmp_path / "out", "--format", "mxfp4", script=limit + RUN)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith(f"inkling: cannot write the checkpoint {tmp_path / 'out'}: ")
    assert len(ran.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
