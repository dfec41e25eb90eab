"""Run Inkling checkpoints on any device: configuration, shared model, engine and command line.

Importing the package costs nothing: `LLM`, `SamplingParams` and `InklingConfig` load their modules when first used,
so the command line can print its help without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import InklingConfig
    from .llm import LLM
    from .sampling import SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "InklingConfig", "SamplingParams", "__version__"]

_HOME = {"LLM": ".llm", "SamplingParams": ".sampling", "InklingConfig": ".config"}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)
