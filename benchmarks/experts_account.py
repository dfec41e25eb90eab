"""What one layer's routed experts cost, counted from launch plans. Computed, not measured: nothing is run.

Four ways at the released models' sizes, with tokens that are routed evenly (each takes 6 of 256 experts at random):

* `ours`: the plans of `moe_experts` on weights in bf16, NVFP4 and MXFP4 (`triton`: unpacked in registers);
* `native`: the plans of `moe_experts_native`, where the chip multiplies block scales: nothing is unpacked;
* `dequant`: packed weights of the experts that have tokens are written out in bf16 and read again by `ours` in bf16;
* `vllm`: vLLM 0.33's NVFP4 emulation (`fused_moe/experts/nvfp4_emulation_moe.py`): tokens quantised and dequantised
  before either product, codes decoded in registers with selects, tile sizes of `get_default_config` in `fused_moe.py`.

Weight bytes are those of the experts with tokens, each read from memory once: tiles of one expert follow one another
and find its rows in cache. Token bytes are each product's input and output and the final sum's, once. Operations are
those of whole tiles, and `padding` is their share that belongs to no pair. Unpacked elements count every tile that
unpacks a weight, times the vector instructions an element in the main loop of the code compiled with Triton 3.9
(`rocm/evidence/unpack.json`; of vLLM's kernel compiled the same way: `VLLM_INSTRUCTIONS`). A roofline time is the
larger of bytes over the chip's peak bandwidth and operations over its peak bf16 matrix rate (`Target.peak`), hardware
block scales at twice that rate with tokens in eight bits and four times in four. Unpacking and launches are not in it:
real times are longer; the account is for comparing techniques.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import exp, lgamma, log, log1p
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from inkling_kernels.moe_gemm_plan import MoeConfig, moe_experts_plan
from inkling_kernels.moe_native import native_config, token_kind
from inkling_kernels.numerics import BLOCK
from inkling_kernels.target import Target
from inkling_portable.config import preset

CHIPS = ("sm80", "sm90", "sm100", "sm120", "gfx942", "gfx950")
SIZES = (("inkling", 4), ("inkling", 8), ("inkling-small", 1), ("inkling-small", 2))
TOKENS = (1, 8, 64, 512, 8192)
FORMATS = ("bf16", "nvfp4", "mxfp4")
COUNTS = Path(__file__).resolve().parent.parent / "rocm" / "evidence" / "unpack.json"
# Of vLLM's kernel, tiles 16 x 64 x 128 and 128 x 128 x 64, by the method of tests/compile/unpack_count.py. Not compiled
# for sm80 (its fp8 type does not exist there) nor for sm100, where vLLM has native kernels.
VLLM_INSTRUCTIONS = {"sm90": (16.7, 21.9), "sm120": (15.7, 29.7), "gfx942": (17.8, 20.1), "gfx950": (11.7, 12.0)}


@dataclass(frozen=True)
class Shape:
    """One rank's experts: all of them, `width` of each."""

    experts: int
    top_k: int
    hidden: int
    width: int

    @property
    def elements(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden * self.width

    def bytes(self, format: str) -> float:
        """Of one expert's codes and block scales."""
        return self.elements * (2.0 if format == "bf16" else 0.5 + 1 / BLOCK[format])


@dataclass(frozen=True)
class Cost:
    """Work of one layer's experts for one step, in expectation over routings."""

    weight_bytes: float
    token_bytes: float
    operations: float
    padding: float
    instructions: float | None
    rate: int = 1

    def seconds(self, target: Target) -> float:
        """The roofline bound on `target`."""
        peak = target.peak
        if peak is None:
            raise ValueError(f"{target} has no peak rates to compute a roofline from")
        bytes_ = self.weight_bytes + self.token_bytes
        return max(bytes_ / peak.bytes_per_s, self.operations / peak.bf16_flop_per_s / self.rate)


def loads(shape: Shape, tokens: int) -> list[float]:
    """The probability that an expert has 0, 1, ... pairs: each token takes it with probability k / E."""
    p = shape.top_k / shape.experts
    ways = [lgamma(tokens + 1) - lgamma(n + 1) - lgamma(tokens - n + 1) for n in range(min(tokens, 600) + 1)]
    return [exp(way + n * log(p) + (tokens - n) * log1p(-p)) for n, way in enumerate(ways)]


def expected(shape: Shape, tokens: int, block_m: int) -> tuple[float, float]:
    """Experts that have tokens, and tiles of `block_m` pairs."""
    weights = loads(shape, tokens)
    tiles = sum(p * -(-n // block_m) for n, p in enumerate(weights))
    return shape.experts * (1 - weights[0]), shape.experts * tiles


def cost(
    shape: Shape, tokens: int, format: str, block_m: int, instructions: float | None, *, rate: int = 1,
    extra_weights: float = 0.0, token_size: float = 2.0, unpacked: str = "tiles",
) -> Cost:  # fmt: skip
    """`extra_weights`: bytes an expert beside those in `format`; `token_size`: bytes an input value; `unpacked`: by
    every tile or once an expert."""
    used, tiles = expected(shape, tokens, block_m)
    pairs = tokens * shape.top_k
    rows = tiles * block_m
    inputs = (tokens * shape.hidden + pairs * shape.width) * token_size
    outputs = pairs * (shape.width + 2 * shape.hidden) * 2 + tokens * shape.hidden * 2
    decoded = (tiles if unpacked == "tiles" else used) * shape.elements
    return Cost(
        used * (shape.bytes(format) + extra_weights), inputs + outputs, 2 * rows * shape.elements, 1 - pairs / rows,
        None if instructions is None else decoded * instructions, rate,
    )  # fmt: skip


def vllm_block_m(tokens: int) -> int:
    """`get_default_config` of vLLM 0.33 for bf16."""
    return 16 if tokens <= 32 else 32 if tokens <= 96 else 64 if tokens <= 512 else 128


def planned(shape: Shape, tokens: int, target: Target, format: str, config: MoeConfig | None = None) -> int:
    """Pairs a tile, as the launch plan has it."""
    sizes = (tokens, shape.top_k, shape.experts, shape.hidden, shape.width)
    return moe_experts_plan(*sizes, format=format, target=target, config=config).config.block_m


def costs(shape: Shape, tokens: int, format: str, target: Target, counts: dict[str, Any]) -> dict[str, Cost]:
    """Every way that exists on `target` for weights in `format`."""
    block_m = planned(shape, tokens, target, format)
    if format == "bf16":
        return {"ours": cost(shape, tokens, format, block_m, None)}
    each = counts[target.arch][format]["loop"]
    plain = 2.0 * shape.elements
    found = {
        "ours": cost(shape, tokens, format, block_m, each),
        "dequant": cost(
            shape, tokens, format, planned(shape, tokens, target, "bf16"), each, extra_weights=2 * plain,
            unpacked="experts",
        ),
    }  # fmt: skip
    if f"native_{format}" in target.capabilities:
        config = native_config(tokens * shape.top_k, shape.experts)
        eight = token_kind(format, target) == "mxfp8"
        found["native"] = cost(
            shape, tokens, format, planned(shape, tokens, target, "native", config), 0.0, rate=2 if eight else 4,
            # Tokens are read in bf16, written and read in codes.
            token_size=2 + 2 * (1.0 if eight else 0.5),
        )  # fmt: skip
    if format == "nvfp4" and target.arch in VLLM_INSTRUCTIONS:
        small, large = VLLM_INSTRUCTIONS[target.arch]
        # Tokens are read, and what they become in four bits and back is written and read.
        found["vllm"] = cost(
            shape, tokens, format, vllm_block_m(tokens), small if tokens <= 64 else large, token_size=6.0
        )
    return found


def account() -> list[dict[str, Any]]:
    """Every size, number of tokens, format and chip."""
    counts = json.loads(COUNTS.read_text(encoding="utf-8"))["counts"]["3.9.0"]
    rows: list[dict[str, Any]] = []
    for model, parts in SIZES:
        config = preset(model)
        shape = Shape(
            config.n_routed_experts, config.num_experts_per_tok, config.hidden_size,
            config.moe_intermediate_size // parts,
        )  # fmt: skip
        for tokens in TOKENS:
            for format in FORMATS:
                row: dict[str, Any] = {
                    "model": model, "tp": parts, "width": shape.width, "tokens": tokens, "format": format, "chips": {},
                }  # fmt: skip
                for chip in CHIPS:
                    target = Target.parse(chip)
                    row["chips"][chip] = {
                        way: asdict(each) | {"roofline_us": round(each.seconds(target) * 1e6, 2)}
                        for way, each in costs(shape, tokens, format, target, counts).items()
                    }
                rows.append(row)
    return rows


def _cell(ways: dict[str, dict[str, Any]]) -> str:
    names = [way for way in ("ours", "native", "dequant", "vllm") if way in ways]
    return ", ".join(f"{way} {ways[way]['roofline_us']:,.0f}" for way in names)


def run(console: Console) -> tuple[dict[str, Any], str]:
    """Print the account; returns the results and a readable report."""
    rows = account()
    head = ["experts", "tokens", "format", "weight MB: ours", "dequant", "padding", "G instructions: ours", "vllm",
            *(f"{chip} us" for chip in CHIPS)]  # fmt: skip
    table = Table(*head, title="One layer's routed experts, computed from plans: nothing was run")
    report = [f"# {table.title}", "", *(__doc__ or "").strip().splitlines()[2:], ""]
    report += ["Figures before the times are sm90's.", "", "| " + " | ".join(head) + " |", "|" + "-|" * len(head)]
    for row in rows:
        ways = row["chips"]["sm90"]
        instructions = [
            f"{ways[way]['instructions'] / 1e9:,.2f}" if way in ways and ways[way]["instructions"] else "-"
            for way in ("ours", "vllm")
        ]
        cells = [
            f"{row['model']} TP{row['tp']}, width {row['width']}", f"{row['tokens']:,}", row["format"],
            f"{ways['ours']['weight_bytes'] / 1e6:,.0f}",
            f"{ways['dequant']['weight_bytes'] / 1e6:,.0f}" if "dequant" in ways else "-",
            f"{ways['ours']['padding']:.0%}", *instructions, *(_cell(row["chips"][chip]) for chip in CHIPS),
        ]  # fmt: skip
        table.add_row(*cells)
        report.append("| " + " | ".join(cells) + " |")
    console.print(table)
    return {"device": "none", "computed": True, "rows": rows}, "\n".join(report) + "\n"
