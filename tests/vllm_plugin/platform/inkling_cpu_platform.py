"""For tests alone: vLLM's CUDA wheel on a CPU, its Triton kernels in the interpreter. Only who puts this folder on
`PYTHONPATH` gets it, since vLLM finds it by the metadata beside this file.

vLLM chooses its runner by whether Triton has an active driver, so one that is active stands in. The C++ extension that
a CUDA wheel cannot load on a CPU is asked for one function, which does nothing here; that of torchvision, which
Transformers' image processors resize with, must have two for the package to be imported. The interpreter has nothing
for CUDA's `libdevice`: what kernels of vLLM take from it is computed by `triton.language`.
"""

from __future__ import annotations

import functools
import os
import types

# Kept, since what a library defines goes away with it.
LIBRARIES: list[object] = []


@functools.cache
def activate() -> str:
    """What vLLM calls, more than once, to learn the platform's class."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch
    import triton.backends
    import triton.language as tl
    from triton.language.extra import libdevice

    native = torch.library.Library("_C", "FRAGMENT")
    native.define("init_cpu_memory_env(int[] nodes) -> ()")
    native.impl("init_cpu_memory_env", lambda nodes: None, "CompositeExplicitAutograd")
    vision = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        vision.define(f"{name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
    LIBRARIES.extend([native, vision])
    active = types.SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["inkling_test"] = types.SimpleNamespace(driver=active, compiler=None)
    # Looked up when they are called: for a launch, the interpreter puts its own functions into `tl`.
    libdevice.exp = lambda x: tl.exp(x)
    libdevice.erf = lambda x: tl.erf(x)
    libdevice.log1p = lambda x: tl.log(1 + x)
    return "inkling_cpu_platform.CpuWithWheel"


def __getattr__(name: str) -> type:
    """The class, made when vLLM asks for it: its base cannot be imported while vLLM is still choosing a platform."""
    if name != "CpuWithWheel":
        raise AttributeError(name)
    from vllm.platforms.cpu import CpuPlatform

    return type(name, (CpuPlatform,), {"__module__": __name__})
