"""Create or complete the environment of the vLLM tests: the released CUDA wheel of vLLM beside torch for the CPU.

    python .ci/vllm_environment.py .venv-vllm --torch torch==2.13.0 --vllm vllm==0.33.0

The wheel says what it requires. What needs a GPU is left out of that, as is torch, which is what `--torch` says (or
what the active Python has, see environment.py); the wheel itself is then installed without its dependencies. Standard
library only; Python 3.11 or later.
"""

import argparse
import email
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from environment import ROOT, SetupError, constraints, create, extra, pip, probe, release

# Requirements of the wheel that serve GPUs or video alone, by the beginning of their names. torch's family: the builds
# that an index offers beside another torch do not load with it.
FOR_GPUS = (
    *("torch", "nvidia", "flashinfer", "apache-tvm-ffi", "tilelang", "nvtx", "quack-kernels", "tokenspeed", "humming"),
    *("fastsafetensors", "instanttensor", "pynvvideocodec"),
)
# What the tests need beyond vLLM's own requirements and this project's. Of transformers it is vLLM that says which.
TESTS = ("pytest", "hypothesis", "ml_dtypes", "pip", "scipy", "setuptools")


def requirements(wheel: Path) -> list[str]:
    """What vLLM requires on a CPU, from the metadata of its wheel."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        listed = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    return [line for line in listed if "extra ==" not in line and not line.lower().startswith(FOR_GPUS)]


def project() -> list[str]:
    """What this project requires itself, and what its tests need."""
    import tomllib

    with (ROOT / "pyproject.toml").open("rb") as file:
        own: list[str] = tomllib.load(file)["project"]["dependencies"]
    return own + [line for line in extra("test") if re.split(r"[<>=!~ ]", line)[0] in TESTS]


def vision(torch: str) -> str:
    """The torchvision made for this torch (0.28 for 2.13): Transformers' image processors resize with it."""
    return f"torchvision==0.{release(torch)[1] + 15}.*"


def main() -> None:
    """Create the environment, settle torch, install vLLM's requirements and wheel, then the project editable."""
    parser = argparse.ArgumentParser(description="Create or complete the virtual environment of the vLLM tests.")
    parser.add_argument("folder", type=Path, help="the environment")
    parser.add_argument("--torch", required=True, help="requirement to install where the active Python has no torch")
    parser.add_argument("--vllm", required=True, help="the vLLM to install, such as vllm==0.33.0")
    options = parser.parse_args()

    folder: Path = options.folder.absolute()
    command = create(folder, probe(Path(sys.executable)))
    python = folder / "bin" / "python"
    if not probe(python)["torch"]:
        pip(command, options.torch)
    hold = folder / "constraints.txt"
    hold.write_text("".join(f"{line}\n" for line in constraints(probe(python)["held"])))
    if not probe(python)["triton"]:
        pip(command, "--constraint", str(hold), extra("torch")[1])
    with tempfile.TemporaryDirectory(dir=folder) as place:
        fetch = [*command, "download", "--no-deps", "--only-binary", ":all:", "--dest", place, options.vllm]
        print("+", " ".join(fetch), flush=True)
        if subprocess.run(fetch, stdin=subprocess.DEVNULL, check=False).returncode:
            raise SetupError(f"pip could not fetch {options.vllm}, for the reason that it gives")
        wheel = next(Path(place).glob("*.whl"))
        pip(command, "--constraint", str(hold), *requirements(wheel), *project())
        pip(command, "--no-deps", str(wheel))
    pip(command, "--no-deps", vision(probe(python)["held"]["torch"]))
    pip(command, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))


if __name__ == "__main__":
    try:
        main()
    except SetupError as problem:
        sys.exit(f"set-up failed: {problem}.")
