"""The classes under vLLM's architecture names: each becomes this package's model, or vLLM's own, when it is built.

They inherit from vLLM's, so that what vLLM asks of a class (processors, interfaces) holds for both.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.models import inkling

import inkling_portable
from inkling_kernels.target import Target, current_target
from inkling_portable.vllm_plugin import model, policy
from inkling_portable.vllm_plugin.options import Build, asked_backends

logger = logging.getLogger("vllm.inkling_portable")


def _target() -> Target | None:
    """The device, None where it is a GPU that this package does not know."""
    try:
        return current_target()
    except ValueError:
        return None


def _build(vllm_config: VllmConfig, model_config: ModelConfig) -> Build | None:
    """What our model is built from, or None where vLLM's own is to run; says which in one line of the log."""
    target = _target()
    decision = policy.decide(target, asked_backends(vllm_config), policy.mode())
    if not decision.ours or target is None:
        logger.info("Inkling on %s: vLLM's own model (%s)", target, decision.reason)
        return None
    build = Build.of(vllm_config, model_config, target)
    rows = ", ".join(f"{op}={choice.row.name}" for op, choice in build.ops.choices.items() if choice.row)
    logger.info(
        "Inkling on %s (%s): inkling-portable %s (%s), experts %s; rows of its table: %s",
        target, target.name, inkling_portable.__version__, decision.reason, build.format, rows,
    )  # fmt: skip
    return build


class InklingForCausalLM(inkling.InklingForCausalLM):
    def __new__(cls, *, vllm_config: VllmConfig, prefix: str = "") -> Any:
        build = _build(vllm_config, vllm_config.model_config)
        if build is None:
            return super().__new__(cls)
        return model.PortableForCausalLM(vllm_config=vllm_config, build=build)


class InklingForConditionalGeneration(inkling.InklingForConditionalGeneration):
    def __new__(cls, *, vllm_config: VllmConfig, prefix: str = "") -> Any:
        build = _build(vllm_config, vllm_config.model_config)
        if build is None:
            return super().__new__(cls)
        return model.PortableForConditionalGeneration(vllm_config=vllm_config, build=build)


class InklingMTP(inkling.InklingMTP):
    def __new__(cls, *, vllm_config: VllmConfig, prefix: str = "") -> Any:
        speculative = vllm_config.speculative_config
        if speculative is None:
            raise ValueError("InklingMTPModel is a draft model: it needs --speculative-config")
        build = _build(vllm_config, speculative.draft_model_config)
        if build is None:
            return super().__new__(cls)
        return model.PortableMTP(vllm_config=vllm_config, build=build)
