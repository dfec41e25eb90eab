"""Create or complete the virtual environment that the Makefile works in. Standard library only; Python 3.11 or later.

Where the Python that runs this already has torch, the environment inherits that Python's packages and holds torch and
Triton at the versions found: pip, told to install a package that asks for torch, would otherwise replace a ROCm or
vendor build by the CUDA one of the index. Elsewhere the requirement given by `--torch` is installed.

    python .ci/environment.py .venv --torch torch==2.13.0 --extra test
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MINIMUM_PYTHON = (3, 11)

# Distributions that hold an import package of torch's family. ROCm builds of Triton go by names of their own.
HELD = ("torch", "torchvision", "torchaudio", "triton", "triton-rocm", "pytorch-triton-rocm", "pytorch-triton")

# Run by a Python to tell what it has, as JSON. `site` is where to find it again from another environment.
PROBE = """
import importlib.metadata, importlib.util, json, sys, sysconfig
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
held = {name: version(name) for name in json.loads(sys.argv[1])}
print(json.dumps({
    "version": list(sys.version_info[:3]),
    "held": {name: found for name, found in held.items() if found},
    "torch": importlib.util.find_spec("torch") is not None,
    "triton": importlib.util.find_spec("triton") is not None,
    "purelib": sysconfig.get_path("purelib"),
    "site": [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))],
}))
"""


class SetupError(Exception):
    """What went wrong and what to do, in a sentence."""


def probe(python: Path) -> dict[str, Any]:
    """What `python` has: its version, the distributions of torch's family, whether torch and triton can be found."""
    # -P: with the working directory on its path, a folder of this repository could answer for an installed package.
    ran = subprocess.run([python, "-P", "-c", PROBE, json.dumps(HELD)], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SetupError(f"{python} does not run: {ran.stderr.strip()}")
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def constraints(held: dict[str, str]) -> list[str]:
    """Lines of a pip constraints file that hold each distribution at the version found, local label included."""
    return [f"{name}=={version}" for name, version in sorted(held.items())]


def extra(name: str) -> list[str]:
    """The requirements of one of the project's extras, in the order of pyproject.toml."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed: list[str] = tomllib.load(file)["project"]["optional-dependencies"][name]
    return listed


def pinned(requirements: list[str]) -> list[str]:
    """Those that admit one version alone: held from the start, so that the tests replace nothing the demo fetched."""
    return [requirement for requirement in requirements if "==" in requirement.split(";")[0]]


def minimum(requirement: str) -> tuple[int, ...]:
    """The lower bound of a requirement such as `torch>=2.10`."""
    return release(requirement.split(">=")[1].split(",")[0].split(";")[0])


def release(version: str) -> tuple[int, ...]:
    """The release numbers of a version: (2, 9, 1) for `2.9.1+rocm6.4`, (2, 14) for `2.14.0a0`."""
    numbers: list[int] = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def can_bring_pip() -> bool:
    """Whether this Python can put pip into an environment. Debian's cannot; its pip then works on it from outside."""
    return importlib.util.find_spec("ensurepip") is not None


def create(folder: Path, active: dict[str, Any]) -> list[str]:
    """Create the environment unless a usable one is there. Returns the command that runs pip on it."""
    python = folder / "bin" / "python"
    inherit = active["torch"]
    own_pip = can_bring_pip()
    if not usable(folder, active):
        print(f"creating {folder}" + (", with the packages of the active Python" if inherit else ""), flush=True)
        venv.EnvBuilder(system_site_packages=inherit, with_pip=own_pip, clear=True, symlinks=True).create(folder)
        if inherit:
            # When the active Python is itself a virtual environment, `system` means the one below it.
            own = probe(python)
            lines = [f"import site; site.addsitedir({path!r})\n" for path in active["site"] if path not in own["site"]]
            Path(own["purelib"], "inherited.pth").write_text("".join(lines))
    return [str(python), "-P", "-m", "pip"] if own_pip else [sys.executable, "-m", "pip", "--python", str(python)]


def usable(folder: Path, active: dict[str, Any]) -> bool:
    """Whether `folder` holds an environment of the active Python's version, inheriting or not as is wanted now."""
    settings = folder / "pyvenv.cfg"
    if not settings.is_file():
        return False
    inherits = "include-system-site-packages = true" in settings.read_text()
    try:
        return inherits == active["torch"] and probe(folder / "bin" / "python")["version"] == active["version"]
    except (SetupError, OSError):
        return False


def pip(command: list[str], *arguments: str) -> None:
    """Run pip's install. Binary packages only, since a fresh machine has no compiler."""
    line = [*command, "install", "--disable-pip-version-check", "--only-binary", ":all:", *arguments]
    print("+", " ".join(line), flush=True)
    if subprocess.run(line, stdin=subprocess.DEVNULL, check=False).returncode:
        raise SetupError("pip could not install what the line above names, for the reason that it gives")


def main() -> None:
    """Create the environment, settle torch, install the project editable with the extras asked for."""
    parser = argparse.ArgumentParser(description="Create or complete the project's virtual environment.")
    parser.add_argument("folder", type=Path, help="the environment")
    parser.add_argument("--torch", required=True, help="requirement to install where the active Python has no torch")
    parser.add_argument("--extra", action="append", default=[], help="extra of the project to install; repeatable")
    options = parser.parse_args()

    if sys.version_info < MINIMUM_PYTHON:
        raise SetupError(f"Python {sys.version.split()[0]} is too old: 3.11 or later is needed (make PYTHON=...)")
    folder: Path = options.folder.absolute()
    active = probe(Path(sys.executable))
    torch, triton = extra("torch")
    if active["torch"] and release(active["held"].get("torch", "")) < minimum(torch):
        raise SetupError(
            f"{sys.executable} has torch {active['held'].get('torch', 'of unknown version')}, which is never replaced, "
            f"but {torch} is needed: upgrade it, or name a Python without torch (make PYTHON=...)"
        )

    command = create(folder, active)
    python = folder / "bin" / "python"
    if not probe(python)["torch"]:
        pip(command, options.torch)
    hold = folder / "constraints.txt"
    lines = constraints(probe(python)["held"]) + pinned(extra("test"))
    hold.write_text("".join(f"{line}\n" for line in lines))
    if not probe(python)["triton"]:
        pip(command, "--constraint", str(hold), triton)
    extras = f"[{','.join(options.extra)}]" if options.extra else ""
    pip(command, "--constraint", str(hold), "--editable", f"{ROOT}{extras}")


if __name__ == "__main__":
    try:
        main()
    except SetupError as problem:
        sys.exit(f"set-up failed: {problem}.")
