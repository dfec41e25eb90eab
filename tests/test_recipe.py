"""What is printed to serve a model: options that vLLM 0.33 has, sizes that fit, and a shell that takes it."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import replace
from typing import Any

import pytest

from inkling_kernels.target import Target
from inkling_portable import plan as plans
from inkling_portable.cli import main
from inkling_portable.config import preset
from inkling_portable.plan import Wish
from inkling_portable.recipe import Recipe, recipe
from inkling_rocm.environment import LAUNCH

# vLLM 0.33, vllm/engine/arg_utils.py and vllm/entrypoints/openai/cli_args.py.
OPTIONS = {
    "--attention-backend", "--tensor-parallel-size", "--max-model-len", "--max-num-seqs", "--gpu-memory-utilization",
    "--kv-cache-dtype", "--speculative-config", "--nnodes", "--master-addr", "--node-rank", "--headless",
}  # fmt: skip
BIG, SMALL = preset("inkling"), preset("inkling-small")


def options(command: tuple[str, ...]) -> dict[str, str | None]:
    """Option -> value (None: it has none)."""
    found: dict[str, str | None] = {}
    for at, word in enumerate(command):
        if word.startswith("--"):
            following = command[at + 1] if at + 1 < len(command) else "--"
            found[word] = None if following.startswith("--") else following
    return found


def made(target: str, wish: Wish, config: Any = BIG, **where: Any) -> Recipe:
    return recipe("owner/model", config, wish, Target.parse(target), **where)


@pytest.mark.parametrize(
    ("target", "format", "config", "size"),
    [("gfx950", "mxfp4", BIG, 4), ("gfx942", "nvfp4", BIG, 4), ("sm90", "nvfp4", SMALL, 2), ("sm100", "nvfp4", BIG, 4)],
)
def test_the_smallest_number_of_devices_that_fits(target: str, format: Any, config: Any, size: int) -> None:
    wish = Wish(format=format)
    found = made(target, wish, config)
    (command,) = found.commands
    given = options(command)
    assert command[:3] == ("vllm", "serve", "owner/model")
    assert set(given) <= OPTIONS
    assert given["--tensor-parallel-size"] == str(size)
    memory = plans.memory_of(Target.parse(target))
    assert plans.plan(config, replace(wish, size=size), memory).fits
    assert not plans.plan(config, replace(wish, size=size // 2), memory).fits
    assert given["--attention-backend"] == "CUSTOM"
    assert (given["--max-model-len"], given["--max-num-seqs"]) == ("32768", "8")
    hip = target.startswith("gfx")
    assert found.environment["VLLM_PLUGINS"] == "inkling_portable"
    assert set(LAUNCH) <= set(found.environment) if hip else found.environment.keys() == {"VLLM_PLUGINS"}


def test_several_nodes() -> None:
    found = made("gfx942", Wish(format="bf16", drafts=4, kv_itemsize=1), nodes=2, gpus=8)
    first, second = (options(command) for command in found.commands)
    assert first["--tensor-parallel-size"] == second["--tensor-parallel-size"] == "16"
    assert (first["--node-rank"], second["--node-rank"]) == ("0", "1")
    assert "--headless" in second
    assert "--headless" not in first
    assert first["--kv-cache-dtype"] == "fp8"
    drafts = json.loads(str(first["--speculative-config"]))
    assert drafts == {"method": "mtp", "num_speculative_tokens": 4}
    assert set(first) | set(second) <= OPTIONS


def test_a_shell_reads_it_back() -> None:
    found = made("gfx942", Wish(format="bf16", drafts=4), nodes=2)
    script = found.script().replace("vllm serve", "printf '%s\\n' vllm serve")
    ran = subprocess.run(["bash", "-euc", "NODE_0=10.0.0.1\n" + script], capture_output=True, text=True, check=True)
    words = [word for command in found.commands for word in command]
    assert ran.stdout.splitlines() == ["10.0.0.1" if word == "$NODE_0" else word for word in words]
    assert shlex.split(script)


def test_what_does_not_fit_is_told_with_what_would() -> None:
    with pytest.raises(
        ValueError, match=r"x 8: 2\d\d GiB on each of 130; 8 devices, nvfp4 experts, .* would fit; 16 dev"
    ):
        made("sm90", Wish(format="bf16"))
    with pytest.raises(ValueError, match="x 24: the number of query heads of full layers is 64"):
        made("sm90", Wish(format="nvfp4"), nodes=3)
    with pytest.raises(ValueError, match="nodes is 0"):
        made("sm90", Wish(), nodes=0)
    narrow = SMALL.replace(head_dim=96, swa_head_dim=96)
    with pytest.raises(ValueError, match="x 4: no implementation of rel_attention"):
        made("sm90", Wish(format="nvfp4"), narrow)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "--target", "gfx950", "--format", "mxfp4"]) == 0
    out = capsys.readouterr().out
    assert "# PATH is the folder or hub id of a checkpoint of inkling in mxfp4\n" in out
    assert "export HIP_FORCE_DEV_KERNARG=1\n" in out
    assert "vllm serve PATH \\\n    --attention-backend CUSTOM \\\n    --tensor-parallel-size 4 \\\n" in out
    arguments = ["recipe", "--target", "gfx950", "--model", "inkling-small", "--format", "nvfp4", "--json"]
    assert main(arguments) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["target"] == "hip:gfx950"
    assert record["plan"]["fits"]
    assert main(["recipe", "--target", "sm86", "--format", "bf16"]) == 2
    assert "the model fits no number of cuda:sm86 here" in capsys.readouterr().err
    assert main(["recipe", "--target", "gfx950", "--memory", "0"]) == 2
    assert "--memory is 0" in capsys.readouterr().err
