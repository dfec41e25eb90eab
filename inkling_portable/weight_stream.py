"""Canonical tensors out of a stream of stored ones, for a host that reads the files itself.

`weights.load_tensors` reads a checkpoint that it has inspected. A host program such as vLLM hands over `(stored name,
tensor)` pairs in whatever order its loader has them; `assemble` yields each canonical tensor as soon as its parts are
there, so that no more is held than one tensor and its parts, and tells at the end what was missing or unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch

from inkling_kernels.numerics import ExpertWeight, Format
from inkling_portable.checkpoint import CheckpointError, stored_names
from inkling_portable.config import InklingConfig
from inkling_portable.tensor_table import Section, Spelling, TensorSpec, stored_parts, tensor_table
from inkling_portable.weights import input_scale

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)

SPELLINGS: tuple[Spelling, ...] = ("original", "transformers", "transformers_nested")


def assemble(
    config: InklingConfig, stream: Iterable[tuple[str, torch.Tensor]], sections: Collection[Section]
) -> Iterator[tuple[str, torch.Tensor | ExpertWeight]]:
    """Yield `(canonical name, tensor)` for every tensor of `sections`; layouts are those of `weights.load_tensors`,
    dtypes and device those of the stream, whose tensors are shared where their layout serves.

    Tensors of other sections and LoRA adapters are passed over. Raises `CheckpointError`: at once for a packed tensor
    that is no valid one, and at the end listing what was missing and what belongs to no Inkling model.
    """
    owners = _owners(config)
    parts: dict[str, dict[str, torch.Tensor]] = {}
    wanted = {spec.name for spec in tensor_table(config) if spec.section in sections}
    unknown: list[str] = []
    for name, tensor in stream:
        if name not in owners:
            unknown += [] if ".lora_" in name else [name]
            continue
        spec, spelling = owners[name]
        if spec.section not in sections:
            continue
        held = parts.setdefault(spec.name, {})
        held[name] = tensor
        made = _canonical(spec, spelling, config, held)
        if made is not None:
            del parts[spec.name]
            wanted.discard(spec.name)
            yield spec.name, made
    if wanted or unknown:
        counts = f"{len(wanted)} tensors are missing and {len(unknown)} are unknown"
        listed = [f"missing: {name}" for name in sorted(wanted)] + [f"unknown: {name}" for name in unknown]
        more = [f"and {len(listed) - 12} more"] if len(listed) > 12 else []
        raise CheckpointError("\n  ".join([f"The checkpoint does not hold what its config.json calls for: {counts}.",
                                           *listed[:12], *more]), sorted(wanted), unknown)  # fmt: skip


def _owners(config: InklingConfig) -> dict[str, tuple[TensorSpec, Spelling]]:
    """Stored name, in any spelling and format of the model, -> the canonical tensor that it is a part of."""
    formats: tuple[Format | None, ...] = (None, config.quantization.format) if config.quantization else (None,)
    return {
        name: (spec, spelling)
        for spelling in SPELLINGS
        for spec in tensor_table(config)
        for format in (formats if spec.experts and spelling == "original" else (None,))
        for name in stored_names(spec, spelling, format)
    }


def _canonical(
    spec: TensorSpec, spelling: Spelling, config: InklingConfig, held: dict[str, torch.Tensor]
) -> torch.Tensor | ExpertWeight | None:
    """The canonical tensor of the parts `held`, or None where some are still to come."""
    stored = stored_parts(spec, spelling)
    first = held.get(stored[0].name)
    if first is None:
        return None
    if spec.experts and first.dtype == torch.uint8 and config.quantization:
        if not held.keys() >= set(stored_names(spec, spelling, config.quantization.format)):
            return None
        return _packed(spec, config.quantization.format, stored[0].name, held)
    if not held.keys() >= {part.name for part in stored}:
        return None
    values = [held[part.name] for part in stored]
    for part, value in zip(stored, values, strict=True):
        if value.dtype not in _FLOATS:
            kind = str(value.dtype).removeprefix("torch.")
            raise CheckpointError(f"{part.name}: dtype {kind}; expected bfloat16 or another float of 16 bits or more, "
                                  "since routed experts alone may be quantised, as the configuration says")  # fmt: skip
        if value.shape != part.shape:
            raise CheckpointError(f"{part.name}: shape {list(value.shape)}, expected {list(part.shape)}")
    if stored[0].view == "halves":
        whole = values[0].unflatten(-2, (2, -1)).transpose(-3, -2).flatten(-3, -2)
    elif stored[0].view == "gate":
        whole = torch.stack(values, -2).flatten(-3, -2)
    else:
        whole = values[0].view(spec.shape)
    return ExpertWeight("bf16", whole, layout=spec.layout) if spec.experts else whole


def _packed(spec: TensorSpec, format: Format, name: str, held: dict[str, torch.Tensor]) -> ExpertWeight:
    experts, rows, columns = spec.shape
    try:
        if format == "mxfp4":
            scale = held[f"{name}_scale"].view(torch.uint8).view(experts, rows, columns // 32)
            weight = ExpertWeight("mxfp4", held[name], scale, layout=spec.layout)
        else:
            second = held[f"{name}.scale2"].float()
            second = second.flatten() if second.shape[1:] == (1,) else second
            scale = held[f"{name}.scale"].view(torch.float8_e4m3fn)
            activations = input_scale(held[f"{name}.input_amax"])
            weight = ExpertWeight("nvfp4", held[name], scale, second, spec.layout, input_scale=activations)
        weight.check_values()
    except (ValueError, RuntimeError) as error:
        raise CheckpointError(f"{name}: {error}") from None
    return weight
