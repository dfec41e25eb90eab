"""The routed experts in numpy, float64, an expert and a token at a time; packed weights made of codes and scales."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import torch
from on_device import on_device

from inkling_kernels.numerics import ExpertWeight

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
BLOCK = {"nvfp4": 16, "mxfp4": 32}
NAN_SCALE = {"nvfp4": 0x7F, "mxfp4": 0xFF}


def oracle(x: np.ndarray, w13: np.ndarray, w2: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Row 2i of `w13[e]` gates row 2i + 1; an id of -1 adds nothing."""
    x, w13, w2, weights = (a.astype(np.float64) for a in (x, w13, w2, weights))
    out = np.zeros_like(x)
    for t, row in enumerate(ids):
        for k, e in enumerate(row):
            if e >= 0:
                gate, up = w13[e, 0::2] @ x[t], w13[e, 1::2] @ x[t]
                out[t] += weights[t, k] * (w2[e] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def experts_on_device(launch: Callable[..., torch.Tensor], device: torch.device) -> Callable[..., torch.Tensor]:
    """`launch` for tensors and weights of the CPU, wherever it runs; see `on_device`."""

    def parts(weight: ExpertWeight) -> tuple:
        return weight.format, weight.data, weight.scale, weight.scale2, weight.layout

    moved = on_device(
        lambda x, w13, w2, *rest, **options: launch(x, ExpertWeight(*w13), ExpertWeight(*w2), *rest, **options), device
    )
    return lambda x, w13, w2, *rest, **options: moved(x, parts(w13), parts(w2), *rest, **options)


def values(format: str, codes: np.ndarray, scale: np.ndarray, scale2: np.ndarray | None) -> np.ndarray:
    """float64 weights `[E, N, K]` of codes, of scale bytes a block, and of second scales `[E]` or `[E, 2]` (gate, up).
    A code times its scale overflows as float32 does."""
    with np.errstate(over="ignore"):
        if format == "nvfp4":
            factor = scale.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        else:
            factor = np.where(scale == 255, np.nan, 2.0 ** (scale.astype(np.float64) - 127))
        found = (E2M1[codes] * factor.repeat(BLOCK[format], -1)).astype(np.float32).astype(np.float64)
    if scale2 is None:
        return found
    rows = np.arange(codes.shape[1])
    by_row = scale2[:, rows % 2] if scale2.ndim == 2 else scale2[:, None].repeat(len(rows), 1)
    return found * by_row[..., None]


def stored(
    format: str, codes: np.ndarray, scale: np.ndarray, scale2: np.ndarray | None, layout: str, *, padding: int = 0
) -> ExpertWeight:
    """The same as it lies in memory. With `padding` it is a slice of a larger weight: that many more rows and blocks,
    whose scales are NaN."""
    experts, rows, columns = codes.shape
    block = BLOCK[format]
    wide = np.full((experts, rows + padding, columns // block + padding), NAN_SCALE[format], np.uint8)
    wide[:, :rows, : columns // block] = scale
    data = np.full((experts, rows + padding, (columns + padding * block) // 2), 0x77, np.uint8)
    data[:, :rows, : columns // 2] = codes[..., 0::2] | codes[..., 1::2] << 4
    return ExpertWeight(
        format,  # type: ignore[arg-type]
        torch.from_numpy(data)[:, :rows, : columns // 2],
        torch.from_numpy(wide)[:, :rows, : columns // block],
        None if scale2 is None else torch.from_numpy(scale2),
        layout=layout,  # type: ignore[arg-type]
    )


def random_packed(
    rng: np.random.Generator, format: str, experts: int, rows: int, columns: int, layout: str, *, padding: int = 0
) -> tuple[ExpertWeight, np.ndarray]:
    """A weight with ordinary scales, negative ones among NVFP4's, and its float64 values."""
    codes = rng.integers(0, 16, (experts, rows, columns)).astype(np.uint8)
    shape = (experts, rows, columns // BLOCK[format])
    scale2 = None
    if format == "nvfp4":
        scale = (rng.integers(0x20, 0x40, shape) | rng.integers(0, 2, shape) << 7).astype(np.uint8)
        scale2 = rng.uniform(0.05, 0.3, (experts, 2) if layout == "interleaved" else experts).astype(np.float32)
    else:
        scale = rng.integers(122, 127, shape).astype(np.uint8)
    return (
        stored(format, codes, scale, scale2, layout, padding=padding),
        values(format, codes, scale, scale2),
    )
