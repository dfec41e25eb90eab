"""Where AITER stores each byte of the codes."""

from __future__ import annotations

import numpy as np
import torch


def place(rows: int, columns: int) -> np.ndarray:
    """`[rows, columns]`: where byte (n, k) of an expert goes. Blocks of 16 rows by 32 bytes, in each the first 16 bytes
    of all its rows and then the others."""
    n, k = np.arange(rows)[:, None], np.arange(columns)[None, :]
    block = n // 16 * (columns // 32) + k // 32
    return block * 512 + k % 32 // 16 * 256 + n % 16 * 16 + k % 16


def shuffle_weight(x: torch.Tensor, layout=(16, 16), use_int4=False) -> torch.Tensor:
    assert layout == (16, 16)
    assert not use_int4
    raw = x.view(torch.uint8).numpy()
    out = np.empty_like(raw).reshape(*raw.shape[:-2], -1)
    out[..., place(*raw.shape[-2:])] = raw
    found = torch.from_numpy(out.reshape(raw.shape)).view(x.dtype)
    found.is_shuffled = True
    return found
