"""The environment that `make` creates: torch of the active Python is used and never replaced, the rest is installed.

The script runs under stand-ins of the active Python: real virtual environments whose `torch` is a few lines of text.
"""

import importlib.util
import json
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / ".ci" / "environment.py"

# Runs the script with pip replaced by a recorder, since the real one would go to the network, and as on Debian, whose
# Python cannot put pip into an environment: seconds are saved, and the rarer way is the one tried here.
DRIVER = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("environment", sys.argv[1])
environment = importlib.util.module_from_spec(spec)
spec.loader.exec_module(environment)
calls = []
environment.can_bring_pip = lambda: False
environment.pip = lambda command, *arguments: calls.append(arguments)
sys.argv = sys.argv[1:]
try:
    environment.main()
except environment.SetupError as problem:
    calls = str(problem)
print("\\n" + json.dumps(calls))
"""


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("environment", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def add_distribution(site: Path, name: str, version: str, module: str) -> None:
    """Lay an installed distribution into a site folder: an import package and its metadata."""
    (site / module).mkdir()
    (site / module / "__init__.py").write_text(f"__version__ = {version!r}\n")
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def write_wheel(folder: Path, name: str, version: str, requires: str = "") -> None:
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "")
        wheel.writestr(f"{info}/METADATA", metadata + (f"Requires-Dist: {requires}\n" if requires else ""))
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def python_with(folder: Path, *distributions: tuple[str, str, str]) -> Path:
    """A virtual environment without pip, holding the named (distribution, version, import name)s."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name, version, module in distributions:
        add_distribution(site, name, version, module)
    return folder / "bin" / "python"


def set_up(python: Path, folder: Path, *extras: str) -> list[list[str]] | str:
    """What the script, run by `python`, asks pip for; or the problem that it reports."""
    options = [str(folder), "--torch", "torch==2.13.0", *(word for extra in extras for word in ("--extra", extra))]
    ran = subprocess.run(
        [python, "-c", DRIVER, str(SCRIPT), *options], capture_output=True, text=True, check=True, cwd=folder.parent
    )
    calls: list[list[str]] | str = json.loads(ran.stdout.splitlines()[-1])
    return calls


def probe_module(folder: Path, module: str) -> str:
    """Version and place of a module as the environment in `folder` imports it."""
    code = f"import {module}; print({module}.__version__, {module}.__file__)"
    ran = subprocess.run([folder / "bin" / "python", "-P", "-c", code], capture_output=True, text=True, check=True)
    return ran.stdout


def test_torch_of_the_active_python_is_inherited_and_held(tmp_path: Path) -> None:
    active = python_with(
        tmp_path / "rocm",
        ("torch", "2.11.0+rocm7.2", "torch"),
        ("triton-rocm", "3.6.0+git1", "triton"),
    )
    folder = tmp_path / "env"
    calls = set_up(active, folder, "test")
    hold = folder / "constraints.txt"
    # Neither torch nor triton is asked for, and the extra that names them is left out.
    assert calls == [["--constraint", str(hold), "--editable", f"{ROOT}[test]"]]
    held = hold.read_text().splitlines()
    assert held[:2] == ["torch==2.11.0+rocm7.2", "triton-rocm==3.6.0+git1"]
    assert any(line.startswith("transformers==") for line in held)  # the tests' pins, so that nothing is fetched twice
    assert probe_module(folder, "torch").startswith(f"2.11.0+rocm7.2 {tmp_path / 'rocm'}")
    assert probe_module(folder, "triton").startswith(f"3.6.0+git1 {tmp_path / 'rocm'}")


def test_pip_refuses_to_replace_the_inherited_torch(tmp_path: Path) -> None:
    """With an index that offers a newer torch, and packages that ask for it, pip keeps what is there or stops."""
    active = python_with(tmp_path / "rocm", ("torch", "2.11.0+rocm7.2", "torch"), ("triton-rocm", "3.6.0", "triton"))
    folder, index = tmp_path / "env", tmp_path / "index"
    set_up(active, folder)
    index.mkdir()
    write_wheel(index, "torch", "99.0")
    write_wheel(index, "modest", "1.0", "torch>=2.0")
    write_wheel(index, "demanding", "1.0", "torch>=90")

    def install(name: str) -> subprocess.CompletedProcess[str]:
        options = ["--isolated", "--no-index", "--find-links", str(index), "--upgrade", "--upgrade-strategy", "eager"]
        line = ["install", "--constraint", str(folder / "constraints.txt"), *options, name]
        pip = [sys.executable, "-P", "-m", "pip", "--python", str(folder / "bin" / "python")]
        return subprocess.run([*pip, *line], capture_output=True, text=True, check=False)

    assert install("modest").returncode == 0
    refused = install("demanding")
    assert refused.returncode != 0
    assert "==2.11.0+rocm7.2" in refused.stdout
    assert probe_module(folder, "torch").startswith("2.11.0+rocm7.2 ")


def test_a_cpu_torch_without_triton_gets_triton_under_the_constraint(tmp_path: Path) -> None:
    active = python_with(tmp_path / "cpu", ("torch", "2.13.0+cpu", "torch"))
    folder = tmp_path / "env"
    calls = set_up(active, folder)
    hold = str(folder / "constraints.txt")
    assert len(calls) == 2
    assert calls[0][:2] == ["--constraint", hold]
    assert calls[0][2].startswith("triton>=3.6")
    assert calls[1] == ["--constraint", hold, "--editable", str(ROOT)]


def test_without_torch_the_pinned_one_is_installed_first(tmp_path: Path) -> None:
    folder = tmp_path / "env"
    calls = set_up(python_with(tmp_path / "plain"), folder, "test", "bench")
    assert calls[0] == ["torch==2.13.0"]
    assert calls[-1][-1] == f"{ROOT}[test,bench]"
    assert "include-system-site-packages = false" in (folder / "pyvenv.cfg").read_text()


def test_a_torch_that_is_too_old_is_named_and_left_alone(tmp_path: Path) -> None:
    active = python_with(tmp_path / "old", ("torch", "2.6.0+cu124", "torch"))
    problem = set_up(active, tmp_path / "env")
    assert isinstance(problem, str)
    assert "2.6.0+cu124" in problem
    assert "torch>=2.10" in problem
    assert not (tmp_path / "env").exists()


def test_an_environment_is_reused_only_while_it_fits(tmp_path: Path) -> None:
    environment = load()
    folder = tmp_path / "env"
    venv.create(folder, symlinks=True)
    active = environment.probe(folder / "bin" / "python")
    assert not active["torch"]
    assert environment.usable(folder, active)
    assert not environment.usable(folder, active | {"torch": True})
    assert not environment.usable(folder, active | {"version": [3, 10, 0]})
    (folder / "bin" / "python").unlink()
    assert not environment.usable(folder, active)
    assert not environment.usable(tmp_path / "absent", active)


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.13.0", (2, 13, 0)), ("2.9.1+rocm6.4", (2, 9, 1)), ("2.10.0a0+b4e4ee81d3.nv25.12", (2, 10)), ("", ())],
)
def test_release_numbers_of_a_version(version: str, numbers: tuple[int, ...]) -> None:
    assert load().release(version) == numbers


def test_only_exact_requirements_are_pins() -> None:
    listed = ["ruff==0.17.6", "scipy>=1.14", "tool>=1; python_version == '3.11'"]
    assert load().pinned(listed) == ["ruff==0.17.6"]


def test_minimum_is_read_from_the_projects_own_extra() -> None:
    environment = load()
    torch, triton = environment.extra("torch")
    assert environment.minimum(torch) == (2, 10)
    assert environment.minimum(triton) == (3, 6)
