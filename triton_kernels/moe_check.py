"""The start-up self-check of an implementation of the routed experts, against plain dequantisation.

    largest |f(x) - exact| / largest |exact|,   exact[t] = weight[t] * W2 silu_mul(W13 x[t])

for expert 0 of the weights that a model holds and 16 tokens: `W13` and `W2` dequantised and everything computed in
float32 on the weights' device, but for the gated values, which are rounded once to the tokens' type as every
implementation rounds them. A wrong instruction, a layout read in another order or a scale applied to the wrong block
is off by about 1; rounding alone is off by a few thousandths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch

from inkling_kernels.numerics import ExpertWeight

TOKENS: Final = 16
#: Of implementations that multiply bfloat16 tokens: half a unit in the last place of the result, of the gated values,
#: and of what sums in another order add.
TOLERANCE: Final = 2.0**-6
#: Of implementations that quantise tokens to eight or four bits: an E2M1 code is off by up to a sixth of its value, and
#: errors of a sum's terms cancel.
QUANTISED_TOLERANCE: Final = 0.3


class SelfCheckFailed(RuntimeError):
    """An implementation of the experts does not compute what their weights say on this device."""


def self_check(
    experts_fn: Callable[..., torch.Tensor],
    w13: ExpertWeight,
    w2: ExpertWeight,
    *,
    tolerance: float | None = None,
) -> float:
    """Compare `experts_fn`, called as `moe_experts` is, with plain dequantisation; see the module.

    Takes milliseconds on a GPU; the weights may be on any device and hold any number of experts. `tolerance` is what
    `experts_fn` names as its own `check_tolerance`, else `TOLERANCE`. Returns the largest relative error. Raises
    `SelfCheckFailed`, naming the implementation, the format, the device and the largest difference, where it is above
    `tolerance` or not a number; ValueError where there is no expert to check with.
    """
    if w13.num_experts == 0 or w2.num_experts == 0:
        raise ValueError("self_check: the weights hold no expert; a rank without experts has nothing to check")
    if tolerance is None:
        tolerance = getattr(experts_fn, "check_tolerance", TOLERANCE)
    device, one = w13.device, (_first(w13), _first(w2))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, w13.cols, generator=generator).bfloat16().to(device)
    weights = torch.linspace(0.5, 1.5, TOKENS).unsqueeze(1).to(device)
    ids = torch.zeros(TOKENS, 1, dtype=torch.int32, device=device)
    gate_up = x.float() @ w13.dequant(0).T
    gate, up = gate_up[:, 0::2], gate_up[:, 1::2]
    inner = (gate * torch.sigmoid(gate) * up).to(x.dtype).float()
    exact = weights * (inner @ w2.dequant(0).T)
    found = experts_fn(x, *one, ids, weights).float()
    worst = (found - exact).abs().max()
    error = float(worst / exact.abs().max().clamp(min=torch.finfo(torch.float32).tiny))
    if not error <= tolerance:
        name = f"{experts_fn.__module__}:{getattr(experts_fn, '__qualname__', experts_fn)}"
        raise SelfCheckFailed(
            f"self_check: {name} on {device} in {w13.format} differs from plain dequantisation by {float(worst):.3g} "
            f"where the largest result is {float(exact.abs().max()):.3g}, a relative error of {error:.3g} above "
            f"{tolerance:.3g}; force another implementation (INKLING_IMPL=moe_experts=NAME) and report it"
        )
    return error


def _first(weight: ExpertWeight) -> ExpertWeight:
    """The first expert's part, as views."""
    cut = {name: t[:1] for name in ("data", "scale", "scale2") if (t := getattr(weight, name)) is not None}
    return replace(weight, **cut)
