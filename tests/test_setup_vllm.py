"""What the environment of the vLLM tests takes of the wheel's requirements."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parent.parent / ".ci"
METADATA = """Metadata-Version: 2.1
Name: vllm
Version: 0.33.0
Requires-Dist: regex
Requires-Dist: transformers<5.21.0,>=5.16.1
Requires-Dist: torch==2.14.0
Requires-Dist: torchvision==0.29.0
Requires-Dist: PyNvVideoCodec==2.0.4
Requires-Dist: nvidia-cutlass-dsl[cu13]==4.8.0
Requires-Dist: flashinfer-python==0.7.2.post1
Requires-Dist: numba==0.65.0
Requires-Dist: pandas; extra == "bench"
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("vllm_environment", FOLDER / "vllm_environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("environment", None)


def test_what_serves_gpus_and_extras_is_left_out(script: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "vllm-0.33.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm-0.33.0.dist-info/METADATA", METADATA)
    assert script.requirements(wheel) == ["regex", "transformers<5.21.0,>=5.16.1", "numba==0.65.0"]


def test_torchvision_follows_torch(script: ModuleType) -> None:
    assert script.vision("2.13.0+cpu") == "torchvision==0.28.*"
    assert script.vision("2.14.0") == "torchvision==0.29.*"


def test_the_projects_own_requirements_come_along(script: ModuleType) -> None:
    listed = script.project()
    assert any(line.startswith("numba") for line in listed)
    assert any(line.startswith("pytest") for line in listed)
    assert not any(line.startswith(("torch", "mypy", "ruff")) for line in listed)
