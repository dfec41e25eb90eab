"""Environment variables for a process on AMD GPUs, with what each is for. Standard library alone.

Source: ROCm documentation, "vLLM V1 performance optimization", performance environment variables. AMD's and vLLM's own
ROCm images set both; an installation by hand does not.
"""

from __future__ import annotations

from typing import Final

#: Name -> (value, why).
LAUNCH: Final = {
    "HIP_FORCE_DEV_KERNARG": ("1", "arguments of kernels in device memory: each launch is a few microseconds shorter"),
    "SAFETENSORS_FAST_GPU": ("1", "weights are read straight to the GPU"),
}
