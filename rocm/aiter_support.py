"""Whether AMD's AITER is here, in a version that `inkling_rocm.aiter_moe` was written for. Imports nothing of it.

The distribution is `amd-aiter`, in builds from AMD's sources also `aiter`; another distribution of that name, of tools
for asynchronous iterators, is told apart by what the package holds.
"""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path
from typing import Final

#: The first release with every parameter that the adapter passes: `tests/data/aiter.json` records them.
MINIMUM: Final = (0, 1, 7)
_DISTRIBUTIONS: Final = ("amd-aiter", "aiter")


def problem() -> str | None:
    """What is missing, as a sentence's end that begins with a verb, or None where AITER can be imported."""
    wanted = f"needs AITER {'.'.join(map(str, MINIMUM))} or later (pip install amd-aiter)"
    spec = importlib.util.find_spec("aiter")
    if spec is None:
        return f"{wanted}, which is not installed here"
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    if not any((place / "fused_moe.py").is_file() for place in places):
        return f"{wanted}, but the package `aiter` that is installed here is not AMD's"
    found = version()
    if found is None:
        return f"{wanted}, but the `aiter` at {places[0]} is of no distribution and tells no version"
    if release(found) < MINIMUM:
        return f"{wanted}, not the {found} that is installed here"
    return None


def version() -> str | None:
    """The version of the distribution that AITER came in, or None where there is none."""
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def release(text: str) -> tuple[int, ...]:
    """The release numbers at the beginning of a version: (0, 1, 7) for `0.1.7.post2.dev18+gabc`."""
    numbers: list[int] = []
    for part in text.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
