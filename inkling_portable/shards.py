"""One safetensors file: its header, and its tensors copied out through a memory map.

Layout (safetensors specification): 8 bytes little-endian header length n, n bytes of JSON mapping each tensor's name to
`dtype`, `shape` and `data_offsets` relative to byte 8 + n, then the data.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
TORCH_DTYPE = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.uint8,
}  # fmt: skip

# Copies go through pieces of this size, after which the pages just read are dropped: what is resident beyond the
# destination stays this small however large the file.
CHUNK_BYTES = 4 << 20
_MAX_HEADER = 100 << 20


class ShardError(ValueError):
    """A file that is no sound safetensors file; the message names it."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: bytes `start` to `stop` of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def rows(self) -> int:
        """Rows when seen as a matrix of its last dimension; one for vectors and scalars."""
        return prod(self.shape[:-1]) if len(self.shape) > 1 else 1

    @property
    def columns(self) -> int:
        return self.shape[-1] if self.shape else 1


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of `file`, by name. ShardError where the file is truncated, longer than its header says, or no
    safetensors file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > size - 8:
            raise ShardError(f"{file.name} is truncated: {size} bytes, its header alone needs {8 + length}")
        if length > _MAX_HEADER:
            raise ShardError(f"{file.name} is no safetensors file: it claims a header of {length} bytes")
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            raise ShardError(f"{file.name} is no safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise ShardError(f"{file.name} is no safetensors file: its header is no JSON object")
    header.pop("__metadata__", None)
    tensors = {name: _stored(file, name, entry, 8 + length) for name, entry in header.items()}
    end = max((tensor.stop for tensor in tensors.values()), default=8 + length)
    if size < end:
        lost = sum(tensor.stop > size for tensor in tensors.values())
        raise ShardError(
            f"{file.name} is truncated: {size} bytes of {end}, {lost} of its {len(tensors)} tensors are cut off; "
            "copy or download it again"
        )
    if size > end:
        raise ShardError(f"{file.name} has {size} bytes but its header accounts for {end}; copy or download it again")
    return tensors


def _stored(file: Path, name: str, entry: object, base: int) -> StoredTensor:
    damaged = ShardError(f"{file.name}: the header's entry for {name} is damaged")
    if not isinstance(entry, dict):
        raise damaged
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not (
        isinstance(dtype, str)
        and isinstance(shape, list)
        and isinstance(offsets, list)
        and len(offsets) == 2
        and all(isinstance(value, int) and value >= 0 for value in [*shape, *offsets])
    ):
        raise damaged
    start, stop = offsets
    if dtype in ITEM_BYTES and stop - start != prod(shape) * ITEM_BYTES[dtype]:
        raise damaged
    return StoredTensor(name, dtype, tuple(shape), file, base + start, base + stop)


class ShardFile:
    """A memory-mapped safetensors file. Reading copies, and drops the pages it has read."""

    def __init__(self, file: Path) -> None:
        with file.open("rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)

    def close(self) -> None:
        """Let go of the map. Unmapping is left to the last reference, which an error's traceback may hold."""
        del self._bytes, self._map

    def read_rows(self, tensor: StoredTensor, out: torch.Tensor, start: int = 0) -> None:
        """Copy rows `start`, `start + 1`, ... of `tensor`, seen as [rows, columns], into `out` [n, columns].

        `out` may have any strides, device and dtype; a value is converted once, straight from the stored dtype. Bytes
        of 8-bit floats come out unchanged where `out` is uint8.
        """
        if out.dim() != 2 or out.shape[1] != tensor.columns or start + out.shape[0] > tensor.rows:
            raise ValueError(
                f"out: shape {list(out.shape)} at row {start} does not fit {tensor.name} of {tensor.rows} rows of "
                f"{tensor.columns}"
            )
        dtype = TORCH_DTYPE[tensor.dtype]
        if dtype.itemsize == 1 and out.dtype == torch.uint8:
            dtype = torch.uint8
        row_bytes = tensor.columns * dtype.itemsize
        step = max(1, CHUNK_BYTES // max(1, row_bytes))
        direct = out.device.type == "cpu" and out.dtype == dtype and out.is_contiguous()
        target = out.detach().view(torch.uint8) if direct else None
        for row in range(0, out.shape[0], step):
            count = min(step, out.shape[0] - row)
            first = tensor.start + (start + row) * row_bytes
            piece = self._bytes[first : first + count * row_bytes]
            if target is not None:
                np.copyto(target[row : row + count].reshape(-1).numpy(), piece)
            else:
                buffer = torch.from_numpy(piece.copy())
                out[row : row + count].copy_(buffer.view(dtype).view(count, tensor.columns))
            self._drop(first, first + count * row_bytes)

    def _drop(self, start: int, stop: int) -> None:
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, stop - first)
