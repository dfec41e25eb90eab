"""Where AITER stores each scale."""

from __future__ import annotations

import numpy as np
import torch


def place(rows: int, columns: int) -> np.ndarray:
    """`[rows, columns]`: where scale (m, n) goes. Blocks of 32 rows by 8 columns; in each, a lane holds row m % 16 and
    column n % 4, and its four bytes are the block's two halves of columns, and within those of rows."""
    m, n = np.arange(rows)[:, None], np.arange(columns)[None, :]
    block = m // 32 * (columns // 8) + n // 8
    lane = n % 4 * 16 + m % 16
    return block * 256 + lane * 4 + n % 8 // 4 * 2 + m % 32 // 16


def e8m0_shuffle(scale: torch.Tensor) -> torch.Tensor:
    assert scale.dim() == 2
    rows, columns = -(-scale.shape[0] // 256) * 256, -(-scale.shape[1] // 8) * 8
    padded = np.full((rows, columns), 0xFF, np.uint8)
    padded[: scale.shape[0], : scale.shape[1]] = scale.view(torch.uint8).numpy()
    out = np.empty_like(padded).reshape(-1)
    out[place(rows, columns)] = padded
    return torch.from_numpy(out.reshape(rows, columns)).view(scale.dtype)
