"""What the distribution holds, and how its three packages are found: wheel, editable, and the name that clashes."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"triton_kernels": "inkling_kernels", "rocm": "inkling_rocm", "inkling_portable": "inkling_portable"}
SITE = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]

# The rule by which vLLM (0.33, vllm/utils/import_utils.py) settles `triton_kernels`: a trial import of the top-level
# name, any failure counting as absence, then its own copy, put under that name.
VLLM_RULE = """
import importlib, importlib.util, sys
def usable(name):
    try:
        if importlib.util.find_spec(name) is None:
            return False
        importlib.import_module(name)
    except Exception:
        return False
    return True
if not usable("triton_kernels") and usable("engine.third_party.triton_kernels"):
    sys.modules["triton_kernels"] = importlib.import_module("engine.third_party.triton_kernels")
"""

# The four modules of it that vLLM's expert layers import (fused_moe/experts/gpt_oss_triton_kernels_moe.py).
VLLM_IMPORTS = """
import sys
import triton_kernels.swiglu
from triton_kernels.matmul_ogs import matmul_ogs
from triton_kernels.tensor import Bitmatrix
from triton_kernels.routing import routing
print(triton_kernels.__file__, sys.modules["triton_kernels.swiglu"].__file__)
"""


def python(code: str, cwd: Path, *path: Path | str) -> subprocess.CompletedProcess[str]:
    """Run code with exactly `path` before the standard library: no site folder, hence no editable install, is seen."""
    code = f"import sys\nsys.path[:0] = {[str(entry) for entry in path]!r}\n{code}"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False, cwd=cwd
    )


def where(cwd: Path, *path: Path | str, before: str = "") -> dict[str, str]:
    """The first folder of each of the three packages, imported in a process of its own."""
    code = "import json, inkling_kernels, inkling_rocm, inkling_portable\n"
    code += "found = (inkling_kernels, inkling_rocm, inkling_portable)\n"
    code += "print(json.dumps({module.__name__: list(module.__path__)[0] for module in found}))"
    ran = python(before + code, cwd, *path)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, str] = json.loads(ran.stdout)
    return found


def build(source: Path, kind: str, out: Path) -> Path:
    """Build with the backend of pyproject.toml, in this environment: no index is asked for the build's needs."""
    out.mkdir()
    code = f"import setuptools.build_meta as backend; backend.build_{kind}({str(out)!r})"
    # From a subprocess in the sources, as a front end does. -P: the sources are not to be importable.
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False, cwd=source)
    assert ran.returncode == 0, ran.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the build reads: setuptools leaves build/ and *.egg-info beside its sources."""
    copy = tmp_path_factory.mktemp("sources") / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, copy)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder)
    return copy


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build(sources, "wheel", tmp_path_factory.mktemp("wheel") / "dist"))


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


def sources_in(folder: Path) -> set[Path]:
    """Files of a package folder that belong in the wheel: all but what Python and numba leave behind."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder) for path in found if path.parent.name != "__pycache__"}


def test_wheel_holds_every_file_of_the_three_folders_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    held = {name for name in wheel.namelist() if not name.endswith("/")}
    expected = {f"{FOLDERS[name]}/{path.as_posix()}" for name in FOLDERS for path in sources_in(ROOT / name)}
    assert {name for name in held if ".dist-info/" not in name} == expected
    assert {name.split("/")[0] for name in held if ".dist-info/" not in name} == set(FOLDERS.values())


def test_wheel_is_pure_and_carries_the_licence(wheel: zipfile.ZipFile) -> None:
    assert Path(str(wheel.filename)).name.endswith("-py3-none-any.whl")
    (licence,) = [name for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
    assert b"Apache License" in wheel.read(licence)
    (scripts,) = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    assert "inkling = inkling_portable.cli:main" in wheel.read(scripts).decode()


def test_wheel_stays_small(wheel: zipfile.ZipFile) -> None:
    packed = sum(entry.compress_size for entry in wheel.infolist())
    assert packed < 15_000_000, f"{packed:,} bytes: the embedded model was to stay under 15 MB"


def test_metadata_asks_for_torch_by_extra_alone(metadata: Message) -> None:
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    names = {re.split(r"[^\w-]", line)[0] for line in required}
    assert "transformers" in names
    assert not names & {"torch", "triton", "vllm", "amd-aiter"}
    assert set(metadata.get_all("Provides-Extra", [])) >= {"torch", "vllm", "rocm", "bench", "test"}


def test_version_is_the_one_in_the_package(metadata: Message, wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    ran = python(
        "import inkling_portable; print(inkling_portable.__version__, 'torch' in sys.modules)", tmp_path, tmp_path
    )
    assert ran.stdout.split() == [metadata["Version"], "False"]


def test_listed_packages_are_those_of_the_tree() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = set()
    for folder, name in FOLDERS.items():
        for module in (ROOT / folder).rglob("*.py"):
            found.add(".".join([name, *module.parent.relative_to(ROOT / folder).parts]))
    # inkling_rocm is listed before it has a module: it holds documents and evidence too.
    assert set(listed) == found | {"inkling_rocm"}


def test_packages_import_from_the_wheel(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    wheel.extractall(site)
    assert where(elsewhere, site, *SITE) == {name: str(site / name) for name in FOLDERS.values()}


def test_packages_import_from_an_editable_install(sources: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    zipfile.ZipFile(build(sources, "editable", tmp_path / "dist")).extractall(site)
    activate = f"import site; site.addsitedir({str(site)!r})\n"
    # The install's own folder first: another editable install of the project has a finder of the same name.
    found = where(elsewhere, site, *SITE, before=activate)
    assert found == {name: str(sources / folder) for folder, name in FOLDERS.items()}

    # Modules added after the install are found, in the folder without __init__.py too.
    new = [sources / "triton_kernels" / "added_later.py", sources / "rocm" / "added_later.py"]
    for path in new:
        path.write_text("")
    try:
        ran = python(f"{activate}import inkling_kernels.added_later, inkling_rocm.added_later", elsewhere, site, *SITE)
    finally:
        for path in new:
            path.unlink()
    assert ran.returncode == 0, ran.stderr


def test_rocm_folder_does_not_answer_for_amds_package(tmp_path: Path) -> None:
    """A folder without __init__.py gives way to a real package of the same name anywhere later on the path."""
    assert not (ROOT / "rocm" / "__init__.py").exists()
    (tmp_path / "rocm").mkdir()
    (tmp_path / "rocm" / "__init__.py").write_text("AMD = True\n")
    ran = python("import rocm; print(rocm.AMD)", tmp_path, ROOT, tmp_path)
    assert ran.stdout.strip() == "True", ran.stderr


@pytest.mark.parametrize("name", ["triton_kernels", "triton_kernels.numerics"])
def test_clashing_name_is_refused_with_advice(name: str, tmp_path: Path) -> None:
    code = f"try:\n    import {name}\nexcept ImportError as error:\n    print(error, 'triton_kernels' in sys.modules)"
    message = python(code, tmp_path, ROOT).stdout
    assert "import it as `inkling_kernels`" in message
    assert message.rstrip().endswith("False")


def write_stand_in(folder: Path) -> Path:
    """A package with the modules and names that vLLM takes from Triton's `triton_kernels`."""
    modules = {"__init__": "", "swiglu": "", "matmul_ogs": "matmul_ogs", "tensor": "Bitmatrix", "routing": "routing"}
    (folder / "triton_kernels").mkdir(parents=True)
    for module, name in modules.items():
        (folder / "triton_kernels" / f"{module}.py").write_text(f"{name} = object()\n" if name else "")
    return folder / "triton_kernels"


@pytest.mark.parametrize("installed_too", [False, True], ids=["bundled", "bundled and installed"])
def test_vllm_finds_its_own_copy_with_this_repository_on_the_path(installed_too: bool, tmp_path: Path) -> None:
    host = tmp_path / "host"
    bundled = write_stand_in(host / "engine" / "third_party")
    path = [ROOT, host]
    if installed_too:
        # Behind this repository on the path, the installed package is out of reach; the bundled one serves.
        write_stand_in(tmp_path / "site")
        path.append(tmp_path / "site")
    ran = python(VLLM_RULE + VLLM_IMPORTS, tmp_path, *path)
    assert ran.stdout.split() == [str(bundled / "__init__.py"), str(bundled / "swiglu.py")], ran.stderr


def test_an_installed_triton_kernels_before_this_repository_is_untouched(tmp_path: Path) -> None:
    installed = write_stand_in(tmp_path / "site")
    ran = python(VLLM_RULE + VLLM_IMPORTS, tmp_path, tmp_path / "site", ROOT)
    assert ran.stdout.split() == [str(installed / "__init__.py"), str(installed / "swiglu.py")], ran.stderr


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: the stand-in above serves")
def test_vllm_itself_finds_its_copy_with_this_repository_on_the_path(tmp_path: Path) -> None:
    ask = "from vllm.utils.import_utils import has_triton_kernels\nassert has_triton_kernels()\n"
    ran = python(ask + VLLM_IMPORTS, tmp_path, ROOT, *SITE)
    assert ran.returncode == 0, ran.stderr
    assert all(not path.startswith(str(ROOT / "triton_kernels")) for path in ran.stdout.split())
