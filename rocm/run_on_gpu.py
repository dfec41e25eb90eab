"""What a person with an AMD GPU runs, and the evidence that it leaves. Standard library alone; minutes.

    python -P rocm/run_on_gpu.py            writes rocm/evidence/ran-<architecture>.json

1. `inkling check`: every implementation that the table allows on this GPU, in every format, against its reference.
2. `inkling generate` with the built-in model in bf16, NVFP4 and MXFP4: the GPU's tokens against those of the CPU.
3. The tests marked `gpu`, where pytest is installed.

The file names the device, the versions and the commit, what was compared and what came of it, failures included, and
the rows of the table (`op=implementation`) that were right: what "ran DEVICE" in the table rests on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from inkling_rocm.environment import LAUNCH

ROOT = Path(__file__).resolve().parent.parent
FORMATS = ("bf16", "nvfp4", "mxfp4")
PROMPTS = ("def add(a, b):", "class Stack:", "import os\n")
TOKENS = 32


class Refused(Exception):
    """Why nothing can be shown here, in a sentence."""


def run(*command: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    print("+", " ".join(command), flush=True)  # noqa: T201
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=ROOT)


def inkling(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return run(
        sys.executable,
        "-P",
        "-c",
        "from inkling_portable.cli import main; raise SystemExit(main())",
        *arguments,
        env=env,
    )


def checked(env: dict[str, str]) -> dict[str, Any]:
    """What `inkling check` says of this machine's GPU, which has to be AMD's."""
    ran = inkling("check", "--json", env=env)
    if ran.returncode not in (0, 1) or not ran.stdout.strip():
        raise Refused(f"`inkling check` says: {ran.stderr.strip() or ran.stdout.strip()}")
    found: dict[str, Any] = json.loads(ran.stdout)
    if not found["target"].startswith("hip:"):
        raise Refused(
            f"torch sees no AMD GPU here, only {found['target']} ({found['name']}): is its ROCm build installed?"
        )
    return found


def generated(format: str, env: dict[str, str]) -> dict[str, Any]:
    """The built-in model's tokens on the GPU beside those on the CPU, in float32."""
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    options = ["--json", "--max-tokens", str(TOKENS), "--dtype", "float32", "--moe-format", format]
    found: dict[str, Any] = {"format": format, "tokens": TOKENS * len(PROMPTS)}
    tokens: dict[str, list[list[int]]] = {}
    for device in ("auto", "cpu"):
        ran = inkling("generate", *prompts, *options, "--device", device, env=env)
        if ran.returncode:
            return found | {"same": False, "error": f"{device}: {ran.stderr.strip().splitlines()[-1:]}"}
        tokens[device] = [json.loads(line)["token_ids"] for line in ran.stdout.splitlines()]
    return found | {"same": tokens["auto"] == tokens["cpu"]}


def tested(env: dict[str, str]) -> dict[str, Any]:
    """The summary of the tests marked `gpu`."""
    if importlib.util.find_spec("pytest") is None:
        return {"ran": False, "summary": "pytest is not installed (pip install '.[test]')"}
    ran = run(sys.executable, "-P", "-m", "pytest", "-q", "-m", "gpu", env=env)
    lines = ran.stdout.strip().splitlines()
    # 5: no test was collected.
    return {"ran": ran.returncode != 5, "passed": ran.returncode in (0, 5), "summary": lines[-1] if lines else ""}


def commit() -> str | None:
    ran = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    return ran.stdout.strip() or None


def main(arguments: list[str] | None = None) -> int:
    """Run all three, write the file, say what to do with it. 0 where all was right, 1 where not, 2 without a GPU."""
    parser = argparse.ArgumentParser(description="Check Inkling on this machine's AMD GPU and leave evidence.")
    parser.add_argument("--out", type=Path, default=ROOT / "rocm" / "evidence", help="folder for the file")
    parser.add_argument("--no-tests", action="store_true", help="leave out the tests marked gpu")
    options = parser.parse_args(arguments)
    env = {name: value for name, (value, _) in LAUNCH.items()} | dict(os.environ)
    try:
        check = checked(env)
    except Refused as problem:
        print(f"run_on_gpu: {problem}", file=sys.stderr)  # noqa: T201
        return 2
    arch = check["target"].removeprefix("hip:")
    right = sorted({f"{each['op']}={each['name']}" for each in check["checks"] if each["status"] == "right"})
    wrong = {f"{each['op']}={each['name']}" for each in check["checks"] if each["status"] != "right"}
    evidence = {
        "evidence": "ran",
        "device": check["name"],
        "target": check["target"],
        "versions": check["versions"],
        "commit": commit(),
        "rows": [row for row in right if row not in wrong],
        "checks": check["checks"],
        "generation": [generated(format, env) for format in FORMATS],
        "tests": {"ran": False, "summary": "left out"} if options.no_tests else tested(env),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"ran-{arch}.json"
    file.write_text(json.dumps(evidence, indent=1) + "\n", encoding="utf-8")
    fine = (
        check["ok"] and all(each["same"] for each in evidence["generation"]) and evidence["tests"].get("passed", True)
    )
    counts = (
        f"{len(check['checks']) - sum(each['status'] != 'right' for each in check['checks'])} of {len(check['checks'])}"
    )
    print(f"{check['name']}: {counts} checks right; written to {file}: please open a pull request with it.")  # noqa: T201
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
