"""Write a checkpoint: safetensors shards, index and config.json, of which nothing partial ever bears its final name.

The layout is planned from shapes before the first byte, so tensors may come in any order and piece by piece. Files grow
under temporary names in the destination; when the last byte is there they are renamed, config.json last. On any error
every file written is removed again, and the destination too where it was created here.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from inkling_kernels.numerics import BLOCK, ExpertWeight, Format, as_e4m3

from .checkpoint import INDEX_FILE, SINGLE_FILE, CheckpointError
from .config import InklingConfig
from .shards import CHUNK_BYTES, ITEM_BYTES, TORCH_DTYPE
from .tensor_table import Section, Spelling, StoredPart, TensorSpec, stored_parts, tensor_table
from .weights import SECTIONS

MAX_SHARD_BYTES = 5 << 30
UNCALIBRATED_AMAX = 448.0 * 6.0
"""`input_amax` written without calibration: it makes ModelOpt's activation scale, amax / (448 * 6), one."""

_STORED = {torch.bfloat16: "BF16", torch.float32: "F32"}


class CheckpointWriteError(RuntimeError):
    """Writing failed: no space, no permission, or tensors that do not add up to the checkpoint planned."""


@dataclass(frozen=True)
class Planned:
    """A stored tensor to come."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass
class _Slot:
    planned: Planned
    shard: int
    start: int
    written: int = 0


class CheckpointWriter:
    """A checkpoint being written to the folder `path`, which must be absent or empty.

    Use it as a context manager: leaving normally completes the checkpoint (CheckpointWriteError where a planned tensor
    is not complete), leaving by an exception removes it. `files` are copied along under their own names.
    """

    def __init__(
        self,
        path: str | Path,
        config: Mapping[str, Any],
        plan: Sequence[Planned],
        *,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        files: Iterable[Path] = (),
    ) -> None:
        if max_shard_bytes <= 0:
            raise ValueError(f"max_shard_bytes: {max_shard_bytes}, expected a positive number")
        self.path, self._config, self._files = Path(path), dict(config), list(files)
        self._shards = _pack(plan, max_shard_bytes)
        self._slots: dict[str, _Slot] = {}
        self._descriptors: list[int] = []
        self._temporary: dict[Path, Path] = {}
        self._created: list[Path] = []

    def __enter__(self) -> CheckpointWriter:
        try:
            with self._errors():
                self._begin()
        except (CheckpointError, CheckpointWriteError):
            self._discard()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                with self._errors():
                    self._complete()
                return
            except BaseException:
                self._discard()
                raise
        self._discard()

    def shape(self, name: str) -> tuple[int, ...]:
        """The planned shape of the stored tensor `name`."""
        return self._slots[name].planned.shape

    def write(self, name: str, values: torch.Tensor, start: int = 0) -> None:
        """Write `values` as rows `start`, ... of the planned tensor `name`, seen as a matrix of its last dimension.

        Values are cast to the planned dtype. Each row must be written exactly once.
        """
        slot = self._slots[name]
        dtype, shape = TORCH_DTYPE[slot.planned.dtype], slot.planned.shape
        columns = shape[-1] if shape else 1
        rows = values.reshape(-1, columns)
        if (start + len(rows)) * columns > prod(shape):
            raise ValueError(f"{name}: rows {start} to {start + len(rows)} do not fit shape {list(shape)}")
        row_bytes = columns * dtype.itemsize
        step = max(1, CHUNK_BYTES // max(1, row_bytes))
        for row in range(0, len(rows), step):
            piece = rows[row : row + step].detach().to("cpu", dtype).contiguous()
            data = piece.view(torch.uint8).numpy().reshape(-1).data
            with self._errors():
                _write_all(self._descriptors[slot.shard], data, slot.start + (start + row) * row_bytes)
            slot.written += len(data)

    def _begin(self) -> None:
        if self.path.exists():
            if not self.path.is_dir():
                raise CheckpointError(f"{self.path} is a file; expected a folder that is absent or empty")
            if there := sorted(self.path.iterdir()):
                raise CheckpointError(
                    f"{self.path} is not empty (it has {there[0].name}); choose another folder or empty it"
                )
        for folder in [*reversed(self.path.parents), self.path]:
            if not folder.exists():
                folder.mkdir()
                self._created.append(folder)
        needed = sum(slot.nbytes for shard in self._shards for slot in shard)
        free = shutil.disk_usage(self.path).free
        if needed > free:
            raise CheckpointWriteError(f"{self.path} needs {_size(needed)} but its disk has {_size(free)} free")
        for index, shard in enumerate(self._shards):
            header = _header(shard)
            final = self.path / _shard_name(index, len(self._shards))
            self._descriptors.append(os.open(self._partial(final), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666))
            _write_all(self._descriptors[index], memoryview(header), 0)
            start = len(header)
            for planned in shard:
                self._slots[planned.name] = _Slot(planned, index, start)
                start += planned.nbytes

    def _complete(self) -> None:
        short = [slot for slot in self._slots.values() if slot.written != slot.planned.nbytes]
        if short:
            slot = short[0]
            raise CheckpointWriteError(
                f"{len(short)} of {len(self._slots)} tensors are incomplete, the first is {slot.planned.name}: "
                f"{slot.written} of {slot.planned.nbytes} bytes were given"
            )
        for file in self._files:
            shutil.copyfile(file, self._partial(self.path / file.name))
        if len(self._shards) > 1:
            count = len(self._shards)
            index = {
                "metadata": {"total_size": sum(slot.planned.nbytes for slot in self._slots.values())},
                "weight_map": {name: _shard_name(slot.shard, count) for name, slot in sorted(self._slots.items())},
            }
            self._write_json(self.path / INDEX_FILE, index)
        self._write_json(self.path / "config.json", self._config)
        while self._descriptors:
            descriptor = self._descriptors.pop()
            # Some filesystems report a full disk only here.
            os.fsync(descriptor)
            os.close(descriptor)
        for final, partial in list(self._temporary.items()):
            partial.rename(final)

    def _write_json(self, file: Path, content: Mapping[str, Any]) -> None:
        self._partial(file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def _partial(self, final: Path) -> Path:
        return self._temporary.setdefault(final, final.with_name(f".{final.name}.partial"))

    def _discard(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())
        for final, partial in self._temporary.items():
            partial.unlink(missing_ok=True)
            # The folder was empty at the start: what bears a final name was renamed by the failed completion.
            final.unlink(missing_ok=True)
        for folder in reversed(self._created):
            if not any(folder.iterdir()):
                folder.rmdir()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointWriteError(
                f"cannot write the checkpoint {self.path}: {error.strerror or error}; nothing was left there"
            ) from error


def _size(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _pack(plan: Sequence[Planned], limit: int) -> list[list[Planned]]:
    """Consecutive tensors into shards of at most `limit` bytes; a larger tensor gets a shard of its own."""
    shards: list[list[Planned]] = [[]]
    size = 0
    for planned in plan:
        if shards[-1] and size + planned.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(planned)
        size += planned.nbytes
    return shards


def _shard_name(index: int, count: int) -> str:
    return SINGLE_FILE if count == 1 else f"model-{index + 1:05}-of-{count:05}.safetensors"


def _header(shard: Sequence[Planned]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for planned in shard:
        stop = offset + planned.nbytes
        entries[planned.name] = {"dtype": planned.dtype, "shape": list(planned.shape), "data_offsets": [offset, stop]}
        offset = stop
    body = json.dumps(entries, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body


def plan_tensor(
    spec: TensorSpec, spelling: Spelling, dtype: torch.dtype, format: Format | None, separate_gate_up: bool
) -> list[Planned]:
    """The stored tensors of `spec`, `dtype` being that of weights which are not always float32."""
    parts = stored_parts(spec, spelling)
    if format in (None, "bf16"):
        stored = "F32" if spec.stored_float32 else _STORED[dtype]
        return [Planned(part.name, stored, part.shape) for part in parts]
    if spelling != "original":
        raise ValueError(f"spelling: {spelling!r} has no names for packed experts, use 'original'")
    name, (experts, rows, columns) = parts[0].name, spec.shape
    if columns % BLOCK[format]:
        raise ValueError(f"{name}: width {columns} is not a multiple of {format}'s block of {BLOCK[format]}")
    codes = Planned(name, "U8", (experts, rows, columns // 2))
    if format == "mxfp4":
        return [codes, Planned(f"{name}_scale", "U8", (experts * rows, columns // 32))]
    return [
        codes,
        Planned(f"{name}.scale", "F8_E4M3", (experts, rows, columns // 16)),
        Planned(f"{name}.scale2", "F32", (experts, 2) if separate_gate_up and spec.interleaved else (experts,)),
        Planned(f"{name}.input_amax", "F32", (1,)),
        Planned(f"{name}.original_shape", "I64", (3,)),
    ]


def write_checkpoint(
    path: str | Path,
    config: InklingConfig,
    tensors: Iterable[tuple[str, torch.Tensor | ExpertWeight]],
    *,
    dtype: torch.dtype = torch.bfloat16,
    spelling: Spelling = "original",
    sections: Collection[Section] = SECTIONS,
    separate_gate_up: bool = False,
    config_dict: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    files: Iterable[Path] = (),
) -> None:
    """Write canonical `tensors` (as `load_tensors` yields them, in any order) as a checkpoint of `config`.

    `dtype` (bfloat16 or float32) is that of all weights but the convolutions, router bias and global scales, which are
    float32. Experts are packed where `config.quantization` says so and must then come as `ExpertWeight` of that format,
    with `scale2` [E, 2] for w13 where `separate_gate_up`. `config_dict` replaces `config.to_dict()` as config.json (for
    spelling 'transformers', pass the text-only configuration that Transformers would write).

    Raises ValueError for a tensor that is unknown, given twice or of another shape or format, CheckpointWriteError for
    one that never comes and for whatever the disk refuses. On any error the destination is as it was.
    """
    if dtype not in _STORED:
        raise ValueError(f"dtype: {dtype}, expected torch.bfloat16 or torch.float32")
    specs = {spec.name: spec for spec in tensor_table(config) if spec.section in sections}
    formats = {name: expert_format(spec, config) for name, spec in specs.items() if spec.experts}
    plan = [
        planned
        for name, spec in specs.items()
        for planned in plan_tensor(spec, spelling, dtype, formats.get(name), separate_gate_up)
    ]
    seen: set[str] = set()
    content = config.to_dict() if config_dict is None else config_dict
    with CheckpointWriter(path, content, plan, max_shard_bytes=max_shard_bytes, files=files) as writer:
        for name, value in tensors:
            if name not in specs:
                raise ValueError(f"{name} is no tensor of this configuration")
            if name in seen:
                raise ValueError(f"{name} was given twice")
            seen.add(name)
            _write_value(writer, specs[name], value, formats.get(name), spelling)


def expert_format(spec: TensorSpec, config: InklingConfig) -> Format:
    """The format in which `config` says that the expert weight `spec` is stored."""
    quantization = config.quantization
    if quantization is None or quantization.excludes(stored_parts(spec, "original")[0].name):
        return "bf16"
    return quantization.format


def _write_value(
    writer: CheckpointWriter,
    spec: TensorSpec,
    value: torch.Tensor | ExpertWeight,
    format: Format | None,
    spelling: Spelling,
) -> None:
    if format in ("nvfp4", "mxfp4"):
        if not isinstance(value, ExpertWeight) or value.format != format:
            given = value.format if isinstance(value, ExpertWeight) else "a tensor"
            raise ValueError(f"{spec.name}: {given}, expected an ExpertWeight of format {format}")
        write_packed(writer, spec, value)
        return
    if isinstance(value, ExpertWeight) and value.format != "bf16":
        raise ValueError(f"{spec.name}: {value.format}, but the configuration keeps it unquantised")
    _check_layout(spec, value)
    for part in stored_parts(spec, spelling):
        write_part(writer, spec, part, value.data if isinstance(value, ExpertWeight) else value)


def _check_layout(spec: TensorSpec, value: torch.Tensor | ExpertWeight) -> None:
    shape = (value.num_experts, value.rows, value.cols) if isinstance(value, ExpertWeight) else tuple(value.shape)
    if shape != spec.shape:
        raise ValueError(f"{spec.name}: shape {list(shape)}, expected {list(spec.shape)}")
    if isinstance(value, ExpertWeight):
        value.require_layout(spec.layout, spec.name)


def write_part(writer: CheckpointWriter, spec: TensorSpec, part: StoredPart, values: torch.Tensor) -> None:
    """Write the rows of the whole canonical tensor `values` that the stored tensor `part` holds."""
    columns = spec.shape[-1]
    if part.view == "whole":
        writer.write(part.name, values)
    elif part.view == "halves":
        rows = spec.shape[-2]
        for index, expert in enumerate(values):
            for half in (0, 1):
                writer.write(part.name, expert[half::2], index * rows + half * (rows // 2))
    else:
        writer.write(part.name, values.reshape(-1, 2, columns)[:, 0 if part.view == "gate" else 1])


def write_packed(writer: CheckpointWriter, spec: TensorSpec, weight: ExpertWeight, expert: int | None = None) -> None:
    """Write a packed expert weight: all of it, or with `expert` one that holds that expert alone.

    Second scales and metadata of a weight written expert by expert are left to `write_nvfp4_metadata`.
    """
    name, first = stored_parts(spec, "original")[0].name, (expert or 0) * spec.shape[1]
    weight.require_order("pairs", name)
    if expert is None:
        _check_layout(spec, weight)
    writer.write(name, weight.data, first)
    if weight.scale is not None and weight.format == "nvfp4":
        writer.write(f"{name}.scale", as_e4m3(weight.scale), first)
    elif weight.scale is not None:
        writer.write(f"{name}_scale", weight.scale, first)
    if weight.scale2 is not None and expert is None:
        write_nvfp4_metadata(writer, spec, weight.scale2, weight.input_scale)


def write_nvfp4_metadata(
    writer: CheckpointWriter, spec: TensorSpec, scale2: torch.Tensor, input_scale: torch.Tensor | None = None
) -> None:
    """Write the second scales of all experts, [E] or [E, 2] as planned, and what ModelOpt writes beside them:
    `input_scale` as the largest magnitude of an activation, `UNCALIBRATED_AMAX` where there is none."""
    name = stored_parts(spec, "original")[0].name
    planned = writer.shape(f"{name}.scale2")
    if len(planned) < scale2.dim():
        raise ValueError(f"{name}: second scales of gate and up apart, expected one an expert or separate_gate_up=True")
    writer.write(f"{name}.scale2", scale2 if len(planned) == scale2.dim() else scale2.unsqueeze(1).expand(planned))
    writer.write(f"{name}.input_amax", (torch.ones(1) if input_scale is None else input_scale) * UNCALIBRATED_AMAX)
    writer.write(f"{name}.original_shape", torch.tensor(spec.shape))
