"""Quantise the routed experts of a bf16 checkpoint to NVFP4 or MXFP4, streaming expert by expert.

Everything else is written in bf16 (convolutions, router bias and global scales in float32) under the released files'
names, w13 row-interleaved. Memory stays at a few experts, or the largest other tensor, whatever the checkpoint's size.

NVFP4: NVIDIA ModelOpt's tensors, one second scale per expert (or for gate and up apart). `.input_amax` is written
without calibration, as the value at which activations are scaled block by block alone.
MXFP4: AMD Quark's tensors. Its released Inkling keeps the first expert layer in bf16 and names its two weights in the
exclusion list; so does this.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, get_args

import torch

from inkling_kernels.numerics import BLOCK, ExpertWeight, quantize_mxfp4, quantize_nvfp4

from .checkpoint import INDEX_FILE, Checkpoint, CheckpointError
from .checkpoint_writer import (
    MAX_SHARD_BYTES,
    CheckpointWriter,
    Planned,
    expert_format,
    plan_tensor,
    write_nvfp4_metadata,
    write_packed,
    write_part,
)
from .config import InklingConfig, QuantizationConfig
from .tensor_table import TensorSpec, stored_parts, tensor_table
from .weights import byte_progress, fill, read_tensor

PackedFormat = Literal["nvfp4", "mxfp4"]

# Tokenizer, processor and generation files travel along; these describe the weights of the source.
_NOT_COPIED = (
    "config.json", "hf_quant_config.json", INDEX_FILE, "adapter_*", "*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf",
    ".*",
)  # fmt: skip


def quantize_checkpoint(
    source: str | Path,
    destination: str | Path,
    format: PackedFormat,
    *,
    separate_gate_up: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool | None = None,
) -> None:
    """Write the checkpoint `source` (folder or hub id, any spelling) to the folder `destination` with 4-bit experts.

    `separate_gate_up` gives gate and up their own NVFP4 second scale. `progress` as in `load_tensors`.

    Raises ValueError for an unknown format; CheckpointError for a source that cannot be used (already quantised, no
    expert layers, NaN or infinity in a weight, a width that is no multiple of the format's block) or a destination that
    is the source or not empty; CheckpointWriteError where writing fails (no space, no permission). After any error
    nothing is left at `destination`.
    """
    if format not in get_args(PackedFormat):
        raise ValueError(f"format: {format!r}, expected {' or '.join(get_args(PackedFormat))}")
    target = Path(destination)
    with Checkpoint.open(source) as checkpoint:
        if target.resolve() == checkpoint.path.resolve():
            raise CheckpointError(f"{target} is the source itself; choose another folder for the quantised checkpoint")
        config = _quantized_config(checkpoint, format)
        specs = [spec for spec in tensor_table(config) if spec.section != "mtp" or checkpoint.has_mtp]
        formats = {spec.name: expert_format(spec, config) for spec in specs if spec.experts}
        plan: list[Planned] = []
        for spec in specs:
            plan += plan_tensor(spec, "original", torch.bfloat16, formats.get(spec.name), separate_gate_up)
        files = [file for file in sorted(checkpoint.path.iterdir()) if file.is_file() and not _left_out(file.name)]
        with (
            CheckpointWriter(target, config.to_dict(), plan, max_shard_bytes=max_shard_bytes, files=files) as writer,
            byte_progress(f"quantising {checkpoint.path.name} to {format}", checkpoint.nbytes(), progress) as advance,
        ):
            for spec in specs:
                size = sum(checkpoint.stored[name].nbytes for name in checkpoint.stored_names(spec))
                if spec.experts:
                    kind = None if formats[spec.name] == "bf16" else format
                    _experts(checkpoint, writer, spec, kind, separate_gate_up, size // spec.shape[0], advance)
                else:
                    values = read_tensor(checkpoint, spec, torch.bfloat16)
                    write_part(writer, spec, stored_parts(spec, "original")[0], values)  # type: ignore[arg-type]
                    advance(size)


def _left_out(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _NOT_COPIED)


def _quantized_config(checkpoint: Checkpoint, format: PackedFormat) -> InklingConfig:
    config, path = checkpoint.config, checkpoint.path
    if config.quantization is not None:
        raise CheckpointError(f"{path} is quantised already; quantise the bf16 checkpoint that it was made from")
    experts = [spec for spec in checkpoint.specs if spec.experts]
    if not experts:
        raise CheckpointError(f"{path} has no expert layers, so there is nothing to quantise")
    for spec in experts:
        if spec.shape[-1] % BLOCK[format]:
            raise CheckpointError(
                f"{path}: {spec.name} has width {spec.shape[-1]}, no multiple of {format}'s block of {BLOCK[format]}"
            )
    excluded = _other_modules(checkpoint)
    if format == "mxfp4":
        first = [stored_parts(spec, "original")[0].name for spec in experts[:2]]
        if len(experts) == 2:
            raise CheckpointError(
                f"{path} has one expert layer, which the MXFP4 layout keeps in bf16, so nothing is left to quantise; "
                "use nvfp4"
            )
        excluded += first
    return config.replace(quantization=QuantizationConfig(format=format, excluded=tuple(excluded)))


def _other_modules(checkpoint: Checkpoint) -> list[str]:
    """The linear modules that stay unquantised, as the released files name them."""
    names: dict[str, None] = {}
    for spec in checkpoint.specs:
        if spec.experts or len(spec.shape) < 2 or spec.convolution:
            continue
        name = stored_parts(spec, "original")[0].name
        if ".shared_experts." in name:
            name = name.rpartition(".")[0]
        names[name.removesuffix(".weight").removesuffix(".proj")] = None
    return list(names)


def _experts(
    checkpoint: Checkpoint,
    writer: CheckpointWriter,
    spec: TensorSpec,
    format: PackedFormat | None,
    separate_gate_up: bool,
    size: int,
    advance: Callable[[int], None],
) -> None:
    """Read, quantise (`format` None: keep) and write one expert at a time."""
    experts, rows, columns = spec.shape
    name = stored_parts(spec, "original")[0].name
    values = torch.empty(rows, columns, dtype=torch.bfloat16 if format is None else torch.float32)
    # Allocated once: small tensors kept from each round would pin the heap between the large ones freed.
    second = torch.empty(experts, 2 if separate_gate_up and spec.interleaved else 1)
    for expert in range(experts):
        fill(checkpoint, spec, values, expert)
        if format is None:
            writer.write(name, values, expert * rows)
        else:
            try:
                weight = _pack(values.unsqueeze(0), spec, format, separate_gate_up, expert)
            except ValueError as error:
                raise CheckpointError(f"{checkpoint.path}: {name}: {error}") from None
            write_packed(writer, spec, weight, expert)
            if weight.scale2 is not None:
                second[expert] = weight.scale2[0]
        advance(size)
    if format == "nvfp4":
        write_nvfp4_metadata(writer, spec, second.squeeze(1))


def _pack(values: torch.Tensor, spec: TensorSpec, format: PackedFormat, separate: bool, expert: int) -> ExpertWeight:
    if format == "mxfp4":
        return ExpertWeight("mxfp4", *quantize_mxfp4(values, first_expert=expert), layout=spec.layout)
    packed = quantize_nvfp4(values, separate_gate_up=separate and spec.interleaved, first_expert=expert)
    return ExpertWeight("nvfp4", *packed, layout=spec.layout)
