"""Tests with the real vLLM, on the CPU, in the environment that `.ci/vllm_environment.py` makes (`make test-vllm`).

Engines run in processes of their own, with the platform of `platform/` and, on both sides, the table's rows in torch:
vLLM's linear layers are torch's too, so greedy tokens are equal to the last one and not up to ties.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inkling_portable.dispatch import FORCE_VARIABLE, ROWS
from inkling_portable.llm import default_model

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE / "platform")]
# Elsewhere vLLM is absent, and there is nothing to run.
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
if not collect_ignore_glob:
    importlib.import_module("inkling_cpu_platform").activate()

IN_TORCH = ",".join(
    f"{op}=torch" for op in dict.fromkeys(row.op for row in ROWS if row.name == "torch" and "cpu" in row.targets)
)
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(HERE / "platform"),
    "TRITON_INTERPRET": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    FORCE_VARIABLE: IN_TORCH,
}
ENGINE = {
    "attention_backend": "CUSTOM", "dtype": "bfloat16", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8,
    "kv_cache_memory_bytes": 128 << 20, "tokenizer_mode": "hf", "disable_log_stats": False,
}  # fmt: skip


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a process with vLLM in it needs; caches go to a folder of this session."""
    return {**os.environ, **ENVIRONMENT, "VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("vllm_cache"))}


@pytest.fixture(scope="session")
def run_engine(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Run an engine over `model` in a process of its own; see `engine_process.py` for the job and its result."""

    def run(
        model: Path, steps: list[dict[str, Any]], variables: dict[str, str] | None = None, **job: Any
    ) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("engine")
        job["engine"] = ENGINE | {"model": str(model)} | job.get("engine", {})
        (folder / "job.json").write_text(json.dumps(job | {"steps": steps}))
        ran = subprocess.run(
            [sys.executable, "-P", str(HERE / "engine_process.py"), str(folder)],
            env=environment | (variables or {}), cwd=folder, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        log = ran.stdout + ran.stderr
        assert ran.returncode == 0, log[-6000:]
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return result | {"log": log}

    return run


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows for the engine of this package, which tells what is right."""
    monkeypatch.setenv(FORCE_VARIABLE, IN_TORCH)


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The small trained model."""
    return default_model()
