"""Routed experts held in another format than the checkpoint's, converted while they are read, and the error it adds.

    bf16 -> NVFP4, MXFP4      as `inkling quantize` does, but in every layer
    NVFP4 -> MXFP4            dequantised and quantised anew: E8M0 has powers of two only, of 32 values at a time
    MXFP4 -> NVFP4            the same codes, each scale twice, relative to a second scale that is a power of two: exact
                              but in blocks that are more than 2**17 below the largest of their expert's gate or up rows
    NVFP4, MXFP4 -> bf16      dequantised, rounded to the dtype of the activations

What a 4-bit checkpoint keeps unquantised (MXFP4's first expert layer) stays so. One expert at a time is unpacked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

import torch

from inkling_kernels.numerics import (
    BLOCK,
    ExpertWeight,
    Format,
    Layout,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    expand_scale2,
    pack_e2m1,
    quantize_mxfp4,
    quantize_nvfp4,
)

from .checkpoint import Checkpoint


@dataclass
class Conversion:
    """From which formats to which, and what it has added so far.

    `errors` and `squares` hold, for each tensor converted, the sum of squared differences and of squared values.
    """

    sources: tuple[Format, ...]
    target: Format
    errors: dict[str, float] = field(default_factory=dict)
    squares: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Checkpoint, target: str | None) -> Conversion | None:
        """The conversion that holds `checkpoint`'s experts in `target`; None where nothing is to be converted.

        Reads no weight. Raises ValueError for an unknown format, a model without routed experts, or a width that is no
        multiple of the format's block.
        """
        if target is None:
            return None
        if target not in get_args(Format):
            raise ValueError(f"moe_format is {target!r}; expected one of {', '.join(get_args(Format))}")
        if not checkpoint.formats:
            raise ValueError(f"moe_format is {target}, but {checkpoint.path} has no routed experts to hold in it")
        packed = set(checkpoint.formats.values()) - {"bf16"}
        sources = tuple(sorted((packed or {"bf16"}) - {target}))
        if not sources:
            return None
        for spec in checkpoint.specs:
            block = BLOCK.get(target, 1)
            if checkpoint.formats.get(spec.name) in sources and spec.shape[-1] % block:
                raise ValueError(
                    f"moe_format is {target}, whose block of {block} does not divide {spec.name}'s width of "
                    f"{spec.shape[-1]}; keep the checkpoint's format"
                )
        return cls(sources, target)  # type: ignore[arg-type]

    def convert(
        self, name: str, source: torch.Tensor | ExpertWeight, layout: Layout, dtype: torch.dtype
    ) -> ExpertWeight:
        """One expert of the tensor `name`, [1, N, K] or packed, in the target's format (`dtype` where that is bf16).

        Raises ValueError for a value that is not finite, naming its row.
        """
        wide = source.float() if isinstance(source, torch.Tensor) else source.dequant(0).unsqueeze(0)
        if not bool(torch.isfinite(wide).all()):
            row = int((~torch.isfinite(wide)).nonzero()[0, 1])
            raise ValueError(f"NaN or infinity in row {row}; it cannot be converted")
        if self.target == "bf16":
            found = ExpertWeight("bf16", wide.to(dtype), layout=layout)
        elif self.target == "mxfp4":
            found = ExpertWeight("mxfp4", *quantize_mxfp4(wide), layout=layout)
        elif isinstance(source, ExpertWeight) and source.scale is not None:
            found = ExpertWeight("nvfp4", *_nvfp4_of_mxfp4(wide, source.scale, layout), layout=layout)
        else:
            packed = quantize_nvfp4(wide, separate_gate_up=layout == "interleaved")
            found = ExpertWeight("nvfp4", *packed, layout=layout)
        difference = found.dequant(0) - wide[0]
        for sums, values in ((self.errors, difference), (self.squares, wide)):
            norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
            sums[name] = sums.get(name, 0.0) + norm * norm
        return found

    @property
    def relative_rms(self) -> float:
        """Root of the mean squared difference over that of the values, over all experts converted."""
        return _ratio(sum(self.errors.values()), sum(self.squares.values()))

    def worst(self) -> tuple[str, float]:
        """The tensor with the largest relative RMS difference."""
        ratios = {name: _ratio(error, self.squares[name]) for name, error in self.errors.items()}
        return max(ratios.items(), key=lambda item: item[1], default=("", 0.0))

    def to_dict(self) -> dict[str, Any]:
        """A form for JSON."""
        name, error = self.worst()
        return {
            "from": list(self.sources),
            "to": self.target,
            "tensors": len(self.errors),
            "relative_rms": self.relative_rms,
            "worst": {"tensor": name, "relative_rms": error},
        }

    def __str__(self) -> str:
        name, error = self.worst()
        return (
            f"routed experts converted from {' and '.join(self.sources)} to {self.target}: relative RMS error added "
            f"{self.relative_rms:.2%}, at most {error:.2%}, in {name}"
        )


def _ratio(error: float, square: float) -> float:
    return (error / square) ** 0.5 if square else 0.0


def _nvfp4_of_mxfp4(
    wide: torch.Tensor, scale: torch.Tensor, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and second scales of one expert with the values `wide` [1, N, K] and E8M0 scales [1, N, K/32]."""
    _, rows, columns = wide.shape
    # Blocks of zeros have any scale: one that must not raise that of the others.
    live = wide.view(1, rows, columns // 32, 32).ne(0).any(-1)
    exponent = torch.where(live, scale.int(), 0).amax(-1)
    exponent = exponent.view(1, rows // 2, 2).amax(1) if layout == "interleaved" else exponent.amax(1)
    # E4M3 has the powers of two from 2**-9 to 2**8. The product of the smallest with the second scale stays normal.
    scale2 = decode_e8m0((exponent - 8).clamp(min=10).to(torch.uint8))
    per_row = expand_scale2(scale2, rows)
    wanted = (decode_e8m0(scale) / per_row).clamp(2.0**-9, 2.0**8)
    found = encode_e4m3(wanted.repeat_interleave(2, dim=-1))
    steps = (found.float() * per_row).unsqueeze(-1)
    return pack_e2m1(encode_e2m1(wide.view(1, rows, columns // 16, 16) / steps).flatten(-2)), found, scale2
