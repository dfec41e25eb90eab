"""What one layer's attention costs, counted from launch plans and loop bounds. Computed, not measured: nothing is run.

Three ways are put side by side at the released models' sizes:

* `ours`: the plans of `rel_attention` and `rel_attention_decode`, which multiply the bias band out in registers;
* `logits`: the same tiles, but with relative logits `[tokens, heads, extent]` computed first, written and read back;
* `vllm`: vLLM 0.33's Triton kernel for ROCm (`vllm/models/inkling/amd/ops/fa4_rel_attention.py`): 4 query positions a
  program (1 when every sequence has one row), key tiles of 64 from 0 to the sequence's end whatever the window and the
  causal bound, rows padded to 16 for the matrix unit, relative logits in memory. Single-row steps on pages of 64 or
  more may take its split kernel instead, which bounds the window; the account has pages of 16.

Bytes are those that programs ask for, before any cache. Tiles are of each kernel's own size. A roofline time is the
larger of bytes over the chip's peak bandwidth and operations over its peak bf16 matrix rate, both from the vendor's
documents (`Target.peak`). Real launches are slower; the account is for comparing techniques.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from inkling_kernels.rel_attention_plan import MAX_QUERY_LEN, rel_attention_decode_plan, rel_attention_plan
from inkling_kernels.target import TARGETS, Target
from inkling_portable.config import LayerSpec, preset

CHIPS = ("sm90", "sm100", "gfx942", "gfx950")
BF16 = 2


@dataclass(frozen=True)
class Cost:
    """Work of one attention call of one layer: key tiles visited, bytes moved to and from memory, operations."""

    tiles: int
    bytes: int
    operations: int

    def seconds(self, target: Target) -> float:
        """The roofline bound on `target`."""
        peak = target.peak
        if peak is None:
            raise ValueError(f"{target} has no peak rates to compute a roofline from")
        return max(self.bytes / peak.bytes_per_s, self.operations / peak.bf16_flop_per_s)


@dataclass(frozen=True)
class Case:
    """`rows` new tokens in each of `batch` sequences that then hold `context` tokens."""

    name: str
    batch: int
    rows: int
    context: int

    @property
    def q_lens(self) -> list[int]:
        return [self.rows] * self.batch

    @property
    def kv_lens(self) -> list[int]:
        return [self.context] * self.batch


def cases() -> list[Case]:
    """Prefill of 8,192 tokens, decoding at three contexts and batches, verification of 8 drafts."""
    contexts = (("8K", 8_192), ("64K", 65_536), ("1M", 1_048_576))
    found = [Case("prefill 8K", 1, 8_192, 8_192)]
    found += [Case(f"decode {label}, batch {batch}", batch, 1, n) for label, n in contexts for batch in (1, 8, 64)]
    return found + [Case(f"verify 9 rows {label}", 1, 9, n) for label, n in contexts]


def ours(spec: LayerSpec, case: Case, target: Target) -> Cost:
    """The cost that our plan for `target` states."""
    sizes = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.extent, spec.window)
    if case.rows <= MAX_QUERY_LEN:
        decode = rel_attention_decode_plan(
            case.batch, *sizes, max_query_len=case.rows, max_kv_len=case.context, target=target
        )
        work = decode.work(case.q_lens, case.kv_lens)
    else:
        work = rel_attention_plan(case.batch * case.rows, case.batch, *sizes, target=target).work(
            case.q_lens, case.kv_lens
        )
    return Cost(work.tiles, work.bytes_read + work.bytes_written, work.operations)


def with_logits(spec: LayerSpec, case: Case, base: Cost) -> Cost:
    """`base` with the relative logits in memory: one product of all distances, one write, one read."""
    values = case.batch * case.rows * spec.num_heads * spec.extent
    return Cost(base.tiles, base.bytes + 2 * values * BF16, base.operations + 2 * values * spec.d_rel)


def vllm(spec: LayerSpec, case: Case) -> Cost:
    """vLLM 0.33's Triton kernel for ROCm, from its loop bounds."""
    block_q, block_k = (1 if case.rows == 1 else 4), 64
    padded = max(16, block_q * spec.group)
    programs = case.batch * -(-case.rows // block_q) * spec.num_kv_heads
    tiles = programs * -(-case.context // block_k)
    tokens = case.batch * case.rows
    logits = tokens * spec.num_heads * spec.extent
    keys = programs * case.context * 2 * spec.head_dim * BF16
    rows = 2 * tokens * spec.q_size * BF16
    matrix = tiles * 2 * padded * block_k * 2 * spec.head_dim
    return Cost(tiles, keys + rows + 2 * logits * BF16, matrix + 2 * logits * spec.d_rel)


def layers() -> Iterator[tuple[str, LayerSpec]]:
    """A full and a sliding layer of each released model."""
    for name in ("inkling", "inkling-small"):
        config = preset(name)
        for index in (5, 0):
            spec = config.layer(index)
            yield f"{name}, {'sliding' if spec.sliding else 'full'} {spec.num_heads}/{spec.num_kv_heads}", spec


def account(chips: Sequence[str] = CHIPS) -> list[dict[str, Any]]:
    """Every layer kind and case: the three costs, and their roofline times on each chip in microseconds."""
    targets = {chip: TARGETS[chip] if chip in TARGETS else Target.parse(chip) for chip in chips}
    found: list[dict[str, Any]] = []
    for layer, spec in layers():
        for case in cases():
            row: dict[str, Any] = {"layer": layer, "case": case.name}
            times: dict[str, dict[str, float]] = {}
            for chip, target in targets.items():
                mine = ours(spec, case, target)
                costs = {"ours": mine, "logits": with_logits(spec, case, mine), "vllm": vllm(spec, case)}
                times[chip] = {way: round(cost.seconds(target) * 1e6, 3) for way, cost in costs.items()}
                row.setdefault("costs", {way: asdict(cost) for way, cost in costs.items()})
            row["roofline_us"] = times
            found.append(row)
    return found


def run(console: Console) -> tuple[dict[str, Any], str]:
    """Print the account; returns the results and a readable report."""
    rows = account()
    head = ["layer", "case", "ours MB", "logits MB", "vllm MB", *(f"{chip} us: ours/logits/vllm" for chip in CHIPS)]
    table = Table(*head, title="One layer's attention, computed from plans and loop bounds: nothing was run")
    report = [f"# {table.title}", "", *(__doc__ or "").strip().splitlines()[2:], ""]
    report += ["| " + " | ".join(head) + " |", "|" + "-|" * len(head)]
    for row in rows:
        megabytes = [f"{row['costs'][way]['bytes'] / 1e6:,.1f}" for way in ("ours", "logits", "vllm")]
        times = [
            " / ".join(f"{row['roofline_us'][chip][way]:,.1f}" for way in ("ours", "logits", "vllm")) for chip in CHIPS
        ]
        cells = [row["layer"], row["case"], *megabytes, *times]
        table.add_row(*cells)
        report.append("| " + " | ".join(cells) + " |")
    console.print(table)
    return {"device": "none", "computed": True, "rows": rows}, "\n".join(report) + "\n"
