"""Where kernel tests run, decided before any kernel is imported.

* `INKLING_TEST_DRIVER=module:function` names a function that makes a Triton driver active: kernels are compiled for its
  device and launched there with tensors on the CPU. It must take no arguments.
* Otherwise a GPU, where torch sees one.
* Otherwise Triton's interpreter, its bfloat16 repaired (`tests/triton_interpreter.py`).
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch

# The models of the tests are so small that threads would wait for each other longer than they work.
torch.set_num_threads(1)

# What tests share lies beside this file; pytest's importlib mode puts no folder on the path.
sys.path.append(str(Path(__file__).parent))

DRIVER = os.environ.get("INKLING_TEST_DRIVER", "")
INTERPRETED = not DRIVER and not torch.cuda.is_available()
if INTERPRETED:
    # Triton reads it when a kernel's module is imported, which any test file may do while it is collected.
    os.environ["TRITON_INTERPRET"] = "1"


def _activate(name: str) -> None:
    module, _, function = name.partition(":")
    if not function:
        raise pytest.UsageError(f"INKLING_TEST_DRIVER is {name!r}; expected module:function")
    getattr(importlib.import_module(module), function)()


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """The device for the tensors of a kernel test; see the module for what executes the kernels."""
    if DRIVER:
        _activate(DRIVER)
        return torch.device("cpu")
    if not INTERPRETED:
        return torch.device("cuda")
    importlib.import_module("triton_interpreter").repair()
    return torch.device("cpu")
