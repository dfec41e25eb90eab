"""Read an inspected checkpoint's tensors under their canonical names, one at a time.

Peak resident memory stays at the tensors held plus a few MiB: every tensor is allocated once, in its final dtype, and
filled in pieces from the memory-mapped file (`inkling_portable.shards`). 4-bit experts stay packed (`ExpertWeight`).
Whatever the file's spelling, w13 tensors arrive with rows gate0, up0, gate1, up1, ...
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from inkling_kernels.numerics import BLOCK, E2M1_MAX, E4M3_MAX, ExpertWeight

from .checkpoint import Checkpoint, CheckpointError
from .conversion import Conversion
from .tensor_table import Section, TensorSpec, stored_parts

SECTIONS: tuple[Section, ...] = ("text", "mtp", "visual", "audio")


def load_tensors(
    checkpoint: Checkpoint,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    *,
    sections: Collection[Section] = SECTIONS,
    conversion: Conversion | None = None,
    progress: bool | None = None,
) -> Iterator[tuple[str, torch.Tensor | ExpertWeight]]:
    """Yield `(canonical name, tensor)` for every tensor of `sections`, in the order of `checkpoint.specs`.

    Names are those of the released files without `model.` (`llm.layers.0.attn.wq_du.weight`, `mtp.layers.0.…`); an
    expert projection is one `ExpertWeight` under `llm.layers.N.mlp.experts.w13` or `.w2`, in the checkpoint's format or
    that of `conversion`, which keeps count of the error that it adds. Floats are in `dtype`, but
    convolutions ([C, W]), the router's weight, bias and global scale and the dense global scale are float32. `progress`
    shows a bar on stderr (None: where that is a terminal).

    Raises CheckpointError for NaN scales, naming tensor, expert and row, and ValueError for a dtype other than float32,
    float64 or bfloat16 (activations leave float16's range).
    """
    if dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"dtype: {dtype}, expected torch.bfloat16, torch.float32 or torch.float64")
    specs = [spec for spec in checkpoint.specs if spec.section in sections]
    with byte_progress(f"loading {checkpoint.path.name}", checkpoint.nbytes(sections), progress) as advance:
        for spec in specs:
            if conversion is not None and checkpoint.formats.get(spec.name) in conversion.sources:
                yield spec.name, _read_converted(checkpoint, spec, dtype, device, conversion)
            else:
                yield spec.name, read_tensor(checkpoint, spec, dtype, device)
            advance(sum(checkpoint.stored[name].nbytes for name in checkpoint.stored_names(spec)))


def read_tensor(
    checkpoint: Checkpoint, spec: TensorSpec, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor | ExpertWeight:
    """One canonical tensor, as `load_tensors` yields it."""
    format = checkpoint.formats.get(spec.name)
    if format in ("nvfp4", "mxfp4"):
        return _read_packed(checkpoint, spec, device)
    out = torch.empty(spec.shape, dtype=torch.float32 if spec.float32 else dtype, device=device)
    fill(checkpoint, spec, out)
    if format is None:
        return out
    return ExpertWeight("bf16", out, layout=spec.layout)


def fill(checkpoint: Checkpoint, spec: TensorSpec, out: torch.Tensor, expert: int | None = None) -> None:
    """Copy the unquantised tensor `spec` into `out` of its shape (contiguous), or with `expert` one expert's [N, K]."""
    rows = spec.shape[-2] if len(spec.shape) > 1 else 1
    flat = out.view(-1, spec.shape[-1])
    first = 0 if expert is None else expert * rows
    for part in stored_parts(spec, checkpoint.spelling):
        shard, stored = checkpoint.shard(part.name), checkpoint.stored[part.name]
        if part.view == "whole":
            shard.read_rows(stored, flat, first)
        elif part.view == "halves":
            # Stored as all of an expert's gate rows and then all of its up rows.
            pairs = flat.view(-1, rows // 2, 2, spec.shape[-1])
            for index in range(len(pairs)):
                for half in (0, 1):
                    shard.read_rows(stored, pairs[index, :, half], first + index * rows + half * (rows // 2))
        else:
            shard.read_rows(stored, flat.view(-1, 2, spec.shape[-1])[:, 0 if part.view == "gate" else 1])


def _read_converted(
    checkpoint: Checkpoint, spec: TensorSpec, dtype: torch.dtype, device: torch.device | str, conversion: Conversion
) -> ExpertWeight:
    experts, rows, columns = spec.shape
    target = conversion.target
    if target == "bf16":
        data, scale = torch.empty(spec.shape, dtype=dtype, device=device), None
    else:
        data = torch.empty(experts, rows, columns // 2, dtype=torch.uint8, device=device)
        kind = torch.float8_e4m3fn if target == "nvfp4" else torch.uint8
        scale = torch.empty(experts, rows, columns // BLOCK[target], dtype=kind, device=device)
    scale2 = torch.empty(experts, *(2,) * spec.interleaved, device=device) if target == "nvfp4" else None
    values = torch.empty(1, rows, columns, device=device)
    for expert in range(experts):
        if checkpoint.formats[spec.name] == "bf16":
            fill(checkpoint, spec, values[0], expert)
            source: torch.Tensor | ExpertWeight = values
        else:
            source = _read_packed(checkpoint, spec, device, expert)
        try:
            one = conversion.convert(spec.name, source, spec.layout, dtype)
        except ValueError as error:
            raise CheckpointError(f"{checkpoint.path}: {spec.name}, expert {expert}: {error}") from None
        for held, found in ((data, one.data), (scale, one.scale), (scale2, one.scale2)):
            if held is not None and found is not None:
                held[expert] = found[0]
    return ExpertWeight(target, data, scale, scale2, spec.layout)


def _read_packed(
    checkpoint: Checkpoint, spec: TensorSpec, device: torch.device | str, expert: int | None = None
) -> ExpertWeight:
    """A packed weight, or with `expert` that expert's alone, its scales checked."""
    _, rows, columns = spec.shape
    first, experts = (0, spec.shape[0]) if expert is None else (expert, 1)
    name = stored_parts(spec, checkpoint.spelling)[0].name

    def read(stored_name: str, *shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        out = torch.empty(experts, *shape, dtype=dtype, device=device)
        stored = checkpoint.stored[stored_name]
        # Vectors are one row to the file, so they are read whole.
        whole = torch.empty(stored.shape, dtype=dtype, device=device) if len(stored.shape) == 1 else None
        matrix = out.view(-1, stored.columns) if whole is None else whole.view(1, -1)
        start = first * (len(matrix) // experts) if whole is None else 0
        checkpoint.shard(stored_name).read_rows(stored, matrix, start)
        return out if whole is None else out.copy_(whole[first : first + experts].view_as(out))

    data = read(name, rows, columns // 2)
    try:
        if checkpoint.formats[spec.name] == "mxfp4":
            weight = ExpertWeight("mxfp4", data, read(f"{name}_scale", rows, columns // 32), layout=spec.layout)
        else:
            scale = read(f"{name}.scale", rows, columns // 16).view(torch.float8_e4m3fn)
            apart = checkpoint.stored[f"{name}.scale2"].shape[1:] == (2,)
            scale2 = read(f"{name}.scale2", *(2,) * apart, dtype=torch.float32)
            _check_original_shape(checkpoint, f"{name}.original_shape", spec.shape)
            activations = _input_scale(checkpoint, f"{name}.input_amax", device)
            weight = ExpertWeight("nvfp4", data, scale, scale2, spec.layout, input_scale=activations)
        weight.check_values(first)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {name}: {error}") from None
    return weight


def _input_scale(checkpoint: Checkpoint, name: str, device: torch.device | str) -> torch.Tensor:
    stored = checkpoint.stored[name]
    amax = torch.empty(stored.rows, stored.columns)
    checkpoint.shard(name).read_rows(stored, amax)
    return input_scale(amax).to(device)


def input_scale(amax: torch.Tensor) -> torch.Tensor:
    """[1] float32: ModelOpt's second scale of the activations, `amax / (6 * 448)`; where there are several, as for each
    expert, the largest, since tokens are quantised once for all experts. ValueError for one that is no magnitude."""
    amax = amax.float()
    if not amax.numel() or not bool((torch.isfinite(amax) & (amax > 0)).all()):
        bad = (~(torch.isfinite(amax) & (amax > 0))).flatten().nonzero()
        at = f"{amax.flatten()[bad[0]].item()} at {int(bad[0])}" if len(bad) else "empty"
        raise ValueError(f"input_amax: {at}, expected positive finite numbers")
    return (amax.max() / (E2M1_MAX * E4M3_MAX)).view(1)


def _check_original_shape(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    """ModelOpt records the unpacked shape; where it is one, it must be ours."""
    stored = checkpoint.stored[name]
    out = torch.empty(stored.rows, stored.columns, dtype=torch.int64)
    checkpoint.shard(name).read_rows(stored, out)
    if out.numel() == len(shape) and tuple(out.flatten().tolist()) != shape:
        raise ValueError(f"original_shape is {out.flatten().tolist()}, expected {list(shape)}")


class Advance(Protocol):
    """Called with the number of bytes done since the last call."""

    def __call__(self, done: int) -> None: ...


@contextmanager
def byte_progress(title: str, total: int, show: bool | None) -> Iterator[Advance]:
    """A progress bar in bytes on stderr; with `show` False, or None away from a terminal, nothing is shown."""
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.advance(task, done)
