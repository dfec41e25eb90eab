"""The entry point `vllm.general_plugins`: registers, touches no device, and may be called any number of times."""

from __future__ import annotations

import logging

from inkling_portable.vllm_plugin import policy, versions

#: vLLM's names of the architectures, which its configuration code keys on, and the classes that answer to them.
ARCHITECTURES = {
    "InklingForCausalLM": "inkling_portable.vllm_plugin.dispatching:InklingForCausalLM",
    "InklingForConditionalGeneration": "inkling_portable.vllm_plugin.dispatching:InklingForConditionalGeneration",
    "InklingMTPModel": "inkling_portable.vllm_plugin.dispatching:InklingMTP",
}
BACKEND = "inkling_portable.vllm_plugin.backend.PortableBackend"

# Under vLLM's name, so that what is said there appears with vLLM's own logging.
logger = logging.getLogger("vllm.inkling_portable")


def register() -> None:
    """Register the attention backend CUSTOM and the model classes, which choose when a model is built.

    An unsupported version of vLLM, or another plug-in's CUSTOM backend, is told in the log and vLLM left as it is, as
    it is with `INKLING_PORTABLE_VLLM=off`. Raises ValueError for another value of that variable.
    """
    import vllm

    if policy.mode() == "off":
        logger.info("%s=off: vLLM is left as it is", policy.VARIABLE)
        return
    if problem := versions.problem(vllm.__version__):
        logger.warning("%s", problem)
        return
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        logger.warning(
            "the attention backend CUSTOM is %s of another plug-in: inkling-portable leaves vLLM as it is; name the "
            "plug-ins to load in VLLM_PLUGINS",
            custom.get_path(),
        )
        return
    register_backend(custom, BACKEND)
    for architecture, implementation in ARCHITECTURES.items():
        ModelRegistry.register_model(architecture, implementation)
