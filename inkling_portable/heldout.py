"""The Python files that the small model of the package was trained on, and those that it has never seen.

Both are files of the standard library of the running Python. One in twenty is held out, by the hash of its name alone,
so every machine and every Python version draws the same line: neither the tokenizer nor the weights have met a file of
that name, whatever its content is in this version.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Installed packages lie under some Pythons' libraries; lib2to3 tests its parser with files that are no Python.
_NOT_LIBRARY = ("site-packages", "dist-packages", "lib2to3/tests/data")


def held_out(name: str) -> bool:
    """Whether the file `name` (relative to the library, with slashes) belongs to the test set: one in twenty."""
    return hashlib.sha256(name.encode()).digest()[0] % 20 == 0


def sources(held: bool | None = None) -> Iterator[tuple[str, str]]:
    """`(name, text)` of every `.py` file of the standard library that is UTF-8 and not empty, in order of their names.

    `held` chooses the files that are held out (True) or not (False); None takes both.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        folders[:] = [name for name in folders if (here / name).relative_to(root).as_posix() not in _NOT_LIBRARY]
        found += [here / name for name in files if name.endswith(".py")]
    for path in sorted(found):
        name = path.relative_to(root).as_posix()
        if held is not None and held_out(name) is not held:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text:
            yield name, text
