"""For tests alone: vLLM's CUDA wheel on a CPU, its Triton kernels in the interpreter. Only who puts this folder on
`PYTHONPATH` gets it, since vLLM finds it by the metadata beside this file.

vLLM chooses its runner by whether Triton has an active driver, so one that is active stands in; the C++ extension that
a CUDA wheel cannot load on a CPU is asked for one function, which does nothing here.
"""

from __future__ import annotations

import functools
import os
import types


@functools.cache
def activate() -> str:
    """What vLLM calls, more than once, to learn the platform's class."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch
    import triton.backends

    library = torch.library.Library("_C", "FRAGMENT")
    library.define("init_cpu_memory_env(int[] nodes) -> ()")
    library.impl("init_cpu_memory_env", lambda nodes: None, "CompositeExplicitAutograd")
    globals()["_library"] = library
    active = types.SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["inkling_test"] = types.SimpleNamespace(driver=active, compiler=None)
    return "inkling_cpu_platform.CpuWithWheel"


def __getattr__(name: str) -> type:
    """The class, made when vLLM asks for it: its base cannot be imported while vLLM is still choosing a platform."""
    if name != "CpuWithWheel":
        raise AttributeError(name)
    from vllm.platforms.cpu import CpuPlatform

    return type(name, (CpuPlatform,), {"__module__": __name__})
