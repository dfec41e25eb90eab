"""Broken copies of the kernels: one line changed in a copy of the package, imported under another name."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parent.parent / "triton_kernels"


class Unchanged(ValueError):
    """The text to break is not in the file, or more than once where one place was meant."""


def broken(
    folder: Path,
    name: str,
    files: tuple[str, ...],
    file: str,
    text: str,
    instead: str,
    source_folder: Path = PACKAGE,
    prefix: str = "inkling_kernels.",
) -> dict[str, ModuleType]:
    """Copies of `files` (modules of `source_folder`, imported with `prefix`) as package `name` under `folder`, with
    every `text` of `file` replaced.

    Returns the modules by file name. `folder` is put on `sys.path` and stays there: Triton reads the sources later.
    """
    package = folder / name
    package.mkdir()
    (package / "__init__.py").touch()
    for other in files:
        source = (source_folder / f"{other}.py").read_text(encoding="utf-8")
        if other == file:
            if text not in source:
                raise Unchanged(f"{file}.py no longer contains {text!r}")
            source = source.replace(text, instead)
        (package / f"{other}.py").write_text(source.replace(prefix, f"{name}."), encoding="utf-8")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    importlib.invalidate_caches()
    return {other: importlib.import_module(f"{name}.{other}") for other in files}
