"""Where this package's model stands in for vLLM's own: a pure function of device, options and one variable.

vLLM's Inkling runs on sm90, sm100 and sm103 (FlashAttention 4) and on gfx950 (its Gluon kernels); there it stays unless
`--attention-backend CUSTOM` asks for ours. Elsewhere it fails or crawls, and ours runs unasked. Facts: vLLM 0.33
`vllm_flash_attn/cute/interface.py`, `models/inkling/amd/attention.py`, vllm#51405.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from inkling_kernels.target import Target

#: The environment variable that overrides the policy, and its values.
VARIABLE: Final = "INKLING_PORTABLE_VLLM"
MODES: Final = ("auto", "full", "off")

#: The name under which our attention is chosen: the one member that vLLM keeps for others' backends.
BACKEND: Final = "CUSTOM"

_THEIRS: Final = ("sm90", "sm100", "sm103", "gfx950")
_WHY_OURS: Final = {
    "sm80": "vLLM's own Inkling has no paged attention below sm90",
    "sm86": "vLLM's own Inkling has no paged attention below sm90",
    "sm89": "vLLM's own Inkling has no paged attention below sm90",
    "sm120": "vLLM's own Inkling has no paged attention on sm120",
    "sm121": "vLLM's own Inkling has no paged attention on sm121",
    "cpu": "vLLM's own Inkling does not run on a CPU",
    "interpret": "vLLM's own Inkling does not run on a CPU",
}
_SLOW: Final = "vLLM's own Inkling has its kernels for gfx950 alone and walks the whole context elsewhere"


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether this package's model runs, and why."""

    ours: bool
    reason: str


def mode() -> str:
    """The value of `INKLING_PORTABLE_VLLM`, `auto` where it is not set. ValueError where it is none of `MODES`."""
    value = os.environ.get(VARIABLE) or "auto"
    if value not in MODES:
        raise ValueError(f"{VARIABLE} is {value!r}; expected one of {', '.join(MODES)}")
    return value


def decide(target: Target | None, backends: tuple[str, ...] = (), mode: str = "auto") -> Decision:
    """Whose model runs on `target` (None: a GPU that this package does not know).

    `backends` are the attention backends asked for explicitly, by name: `--attention-backend` and the values of
    `backend_per_kind`. Raises ValueError where our model is to run and another backend was asked for, since it attends
    with its own kernels.
    """
    others = [name for name in backends if name != BACKEND]
    if mode == "off":
        return Decision(False, f"{VARIABLE}=off")
    if mode == "full":
        reason = f"{VARIABLE}=full"
    elif len(others) < len(backends):
        reason = f"--attention-backend {BACKEND}"
    elif target is None:
        return Decision(False, "this GPU is none of those that inkling-portable knows")
    elif target.arch in _THEIRS:
        return Decision(False, f"vLLM's own Inkling is made for {target}; --attention-backend {BACKEND} takes ours")
    else:
        reason = f"{_WHY_OURS.get(target.arch, _SLOW)}"
    if others:
        raise ValueError(
            f"--attention-backend is {others[0]}, but inkling-portable's model runs here ({reason}) and its relative "
            f"attention has kernels of its own: leave the flag out or give {BACKEND}, "
            f"or set {VARIABLE}=off to run vLLM's own model"
        )
    if target is None:
        raise ValueError(f"{reason} asks for inkling-portable's model, but it does not know this GPU")
    return Decision(True, reason)
