"""What vLLM's options mean for the shared model: checked before a weight is read, each refusal naming its flag."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank

from inkling_kernels.numerics import Format
from inkling_kernels.target import Target
from inkling_portable.config import InklingConfig
from inkling_portable.dispatch import ROWS, forced_from_environment
from inkling_portable.facts import Facts
from inkling_portable.ops import Ops
from inkling_portable.parallel import ExpertRank, Rank
from inkling_portable.vllm_plugin.backend import PAGE_SIZES

_DTYPES = (torch.bfloat16, torch.float32)
_FP8 = ("fp8", "fp8_e4m3")
#: What vLLM calls the quantisation of a checkpoint whose experts are in a format.
_QUANTIZATION: dict[Format, str | None] = {"bf16": None, "nvfp4": "modelopt_fp4", "mxfp4": "quark"}


@dataclass(frozen=True)
class Build:
    """What a model is built from: the whole model's configuration, this rank's, and the operations bound."""

    whole: InklingConfig
    config: InklingConfig
    rank: Rank
    ops: Ops
    dtype: torch.dtype
    device: str
    format: Format
    experts: ExpertRank | None
    #: Copies of experts beside one of each, where vLLM moves experts about (`--enable-eplb`); None where it does not.
    redundant: int | None = None

    @classmethod
    def of(cls, vllm_config: VllmConfig, model_config: ModelConfig, target: Target) -> Build:
        """Read the checkpoint's configuration and vLLM's options. ValueError for what this model cannot do."""
        whole = InklingConfig.from_pretrained(model_config.model, model_config.revision)
        check(vllm_config, model_config, whole)
        parallel = vllm_config.parallel_config
        rank = Rank(parallel.tensor_parallel_size, get_tensor_model_parallel_rank())
        experts = None
        if parallel.enable_expert_parallel and rank.size > 1:
            experts = ExpertRank(rank.size, rank.rank)
        redundant = parallel.eplb_config.num_redundant_experts if experts and parallel.enable_eplb else None
        # Experts that are dealt out whole are not cut along their width, so no block of theirs can be.
        config = rank.config(whole if experts is None else whole.replace(quantization=None))
        format = format_of(whole)
        device = str(vllm_config.device_config.device)
        facts = facts_of(vllm_config, whole if experts else config, experts, format, redundant or 0)
        forced = forced_from_environment() | forced_experts(vllm_config.kernel_config.moe_backend)
        ops = Ops.bind(target, facts, forced)
        return cls(whole, config, rank, ops, model_config.dtype, device, format, experts, redundant)


def format_of(config: InklingConfig) -> Format:
    """The format of the routed experts."""
    return config.quantization.format if config.quantization else "bf16"


def check(vllm_config: VllmConfig, model_config: ModelConfig, config: InklingConfig) -> None:
    """Raise ValueError for options that the shared model does not serve."""
    cache, parallel, speculative = vllm_config.cache_config, vllm_config.parallel_config, vllm_config.speculative_config
    dtype, format = model_config.dtype, format_of(config)

    def refuse(flag: str, value: object, expected: str) -> None:
        raise ValueError(f"{flag} is {value}, which inkling-portable's model does not serve: use {expected}")

    if dtype not in _DTYPES:
        refuse("--dtype", str(dtype).removeprefix("torch."), "bfloat16 (float16 overflows in Inkling) or float32")
    # vLLM does not say it of every draft model, and then nothing was asked for.
    if model_config.quantization not in (None, _QUANTIZATION[format]):
        instead = _QUANTIZATION[format] or "none of it and leave the flag out"
        refuse("--quantization", model_config.quantization, f"{instead}: the checkpoint's experts are in {format}")
    if getattr(model_config, "quantization_config", None) is not None:
        refuse("--quantization-config", "given", "what the checkpoint holds: nothing is quantised while it is loaded")
    if cache.cache_dtype not in ("auto", "bfloat16", "float32", *_FP8):
        refuse("--kv-cache-dtype", cache.cache_dtype, f"auto or {_FP8[0]}")
    if cache.block_size is not None and cache.block_size % PAGE_SIZES[0]:
        refuse("--block-size", cache.block_size, f"a multiple of {PAGE_SIZES[0]}")
    if parallel.enable_eplb:
        if parallel.enable_elastic_ep:
            refuse("--enable-elastic-ep", True, "--enable-eplb without it: ranks that come and go are not served")
        redundant, size = parallel.eplb_config.num_redundant_experts, parallel.tensor_parallel_size
        if (config.n_routed_experts + redundant) % size:
            even = redundant + -(config.n_routed_experts + redundant) % size
            refuse(
                "--eplb-config.num_redundant_experts",
                redundant,
                f"{even}, so that {size} ranks hold equally many of {config.n_routed_experts} experts and their copies",
            )
    if parallel.enable_expert_parallel and parallel.data_parallel_size > 1:
        refuse("--enable-expert-parallel with --data-parallel-size", parallel.data_parallel_size, "one of the two")
    for phase in ("decode", "prefill"):
        size = getattr(parallel, f"{phase}_context_parallel_size")
        if size > 1:
            refuse(f"--{phase}-context-parallel-size", size, "--tensor-parallel-size")
    if speculative is not None and speculative.method == "mtp":
        depths = config.mtp.num_layers if config.mtp else 0
        drafts = speculative.num_speculative_tokens
        if drafts is not None and drafts > depths:
            refuse("num_speculative_tokens", drafts, f"at most {depths}, the model's multi-token-prediction depths")
        if parallel.pipeline_parallel_size > 1:
            refuse("--pipeline-parallel-size with MTP drafts", parallel.pipeline_parallel_size, "one of the two")


def facts_of(
    vllm_config: VllmConfig, config: InklingConfig, experts: ExpertRank | None, format: Format, redundant: int = 0
) -> Facts:
    """The facts by which the dispatch table chooses, of this rank; `config` has the width of the experts it holds, and
    there are `redundant` copies of some beside."""
    cache, dtype = vllm_config.cache_config, str(vllm_config.model_config.dtype).removeprefix("torch.")
    total = config.n_routed_experts + redundant
    # vLLM cuts blocks of other sizes into the largest pages that divide them.
    block = cache.block_size or PAGE_SIZES[0]
    return Facts(
        format=format,
        dtype=dtype,
        kv_dtype="float8_e4m3fn" if cache.cache_dtype in _FP8 else dtype,
        hidden_size=config.hidden_size,
        head_dim=config.head_dim,
        d_rel=config.d_rel,
        page_size=max(size for size in PAGE_SIZES if block % size == 0),
        num_experts=max(1, len(experts.held(total)) if experts else total),
        expert_width=config.moe_intermediate_size or 1,
        top_k=config.num_experts_per_tok or 1,
        conv_width=config.conv_kernel_size,
        ep_size=experts.size if experts else 1,
    )


def forced_experts(moe_backend: str) -> dict[str, str]:
    """The row of the table that `--moe-backend` names. ValueError where it names none."""
    if moe_backend == "auto":
        return {}
    names = list(dict.fromkeys(row.name for row in ROWS if row.op == "moe_experts"))
    if moe_backend not in names:
        raise ValueError(
            f"--moe-backend is {moe_backend}, which is none of the experts' implementations of inkling-portable: "
            f"use auto or one of {', '.join(names)}; "
            "what the flag does not know, INKLING_IMPL=moe_experts=... forces"
        )
    return {"moe_experts": moe_backend}


def asked_backends(vllm_config: VllmConfig) -> tuple[str, ...]:
    """Names of the attention backends that the user asked for."""
    asked: Any = vllm_config.attention_config
    backends = [asked.backend, *asked.backend_per_kind.values()]
    return tuple(dict.fromkeys(backend.name for backend in backends if backend is not None))
