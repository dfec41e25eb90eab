"""The routed experts in numpy, float64, an expert and a token at a time; packed weights made of codes and scales."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import ml_dtypes
import numpy as np
import torch
from on_device import on_device

from inkling_kernels.act_quant import dequantise_activations, quantise_activations
from inkling_kernels.numerics import ExpertWeight
from inkling_kernels.target import Target, current_target

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


def quantised(x: np.ndarray, kind: str, scale2: torch.Tensor | None) -> np.ndarray:
    """`x`, rounded to bfloat16, as `quantise_activations` (which has tests of its own) leaves it."""
    codes, scales = quantise_activations(torch.from_numpy(x).float().bfloat16().float(), kind, scale2)
    return dequantise_activations(codes, scales, kind, scale2).double().numpy()


def native_oracle(
    x: np.ndarray, exact: Sequence[np.ndarray], ids: np.ndarray, gammas: np.ndarray, kind: str,
    inputs: Sequence[torch.Tensor | None],
) -> np.ndarray:  # fmt: skip
    """`oracle` of tokens quantised to `kind`: a pair at a time, products on quantised activations, the gated values
    rounded to bfloat16. `inputs`: the input scales of w13 and w2."""
    out = np.zeros(x.shape)
    x = quantised(x, kind, inputs[0])
    for t, row in enumerate(ids):
        for k, e in enumerate(row):
            if e >= 0:
                gate, up = exact[0][e, 0::2] @ x[t], exact[0][e, 1::2] @ x[t]
                inner = quantised((gate / (1 + np.exp(-gate)) * up)[None], kind, inputs[1])[0]
                out[t] += gammas[t, k] * (exact[1][e] @ inner)
    return out


def kernel_target(device: torch.device) -> Target | None:
    """The chip that kernels run on or are emulated for; None in the interpreter."""
    if device.type == "cuda":
        return current_target()
    name = os.environ.get("INKLING_TEST_DRIVER", "").partition(":")[2]
    return Target.parse(name) if name else None


def experts_on_device(launch: Callable[..., torch.Tensor], device: torch.device) -> Callable[..., torch.Tensor]:
    """`launch` for tensors and weights of the CPU, wherever it runs; see `on_device`."""

    def parts(weight: ExpertWeight) -> tuple:
        return tuple(getattr(weight, each.name) for each in fields(ExpertWeight))

    target = kernel_target(device)

    def run(x: torch.Tensor, w13: tuple, w2: tuple, *rest: torch.Tensor, **options: Any) -> torch.Tensor:
        return launch(x, ExpertWeight(*w13), ExpertWeight(*w2), *rest, target=target, **options)

    moved = on_device(run, device)
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


# Where a code of "words" has its bits, sign first, in its half of the word; code 2j + h is the j-th of half h.
WORD_BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))


def in_words(codes: np.ndarray) -> np.ndarray:
    """Codes `[..., K]` -> bytes `[..., K / 2]` of little-endian words, a bit at a time."""
    eights = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32)
    words = np.zeros(eights.shape[:-1], np.uint32)
    for i in range(8):
        for bit, place in zip((3, 2, 1, 0), WORD_BITS[i // 2], strict=True):
            words |= (eights[..., i] >> np.uint32(bit) & 1) << np.uint32(16 * (i % 2) + place)
    return words.astype("<u4").view(np.uint8)


def stored(
    format: str, codes: np.ndarray, scale: np.ndarray, scale2: np.ndarray | None, layout: str, *, padding: int = 0,
    order: str = "pairs",
) -> ExpertWeight:  # fmt: skip
    """The same as it lies in memory. With `padding` it is a slice of a larger weight: that many more rows and blocks,
    whose scales are NaN."""
    experts, rows, columns = codes.shape
    block = BLOCK[format]
    wide = np.full((experts, rows + padding, columns // block + padding), NAN_SCALE[format], np.uint8)
    wide[:, :rows, : columns // block] = scale
    data = np.full((experts, rows + padding, (columns + padding * block) // 2), 0x77, np.uint8)
    pairs = codes[..., 0::2] | codes[..., 1::2] << 4
    data[:, :rows, : columns // 2] = pairs if order == "pairs" else in_words(codes)
    return ExpertWeight(
        format,  # type: ignore[arg-type]
        torch.from_numpy(data)[:, :rows, : columns // 2],
        torch.from_numpy(wide)[:, :rows, : columns // block],
        None if scale2 is None else torch.from_numpy(scale2),
        layout=layout,  # type: ignore[arg-type]
        order=order,  # type: ignore[arg-type]
    )


def random_packed(
    rng: np.random.Generator, format: str, experts: int, rows: int, columns: int, layout: str, *, padding: int = 0,
    order: str = "pairs",
) -> tuple[ExpertWeight, np.ndarray]:  # fmt: skip
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
        stored(format, codes, scale, scale2, layout, padding=padding, order=order),
        values(format, codes, scale, scale2),
    )
