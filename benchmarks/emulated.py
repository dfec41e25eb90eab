"""Instructions executed and bytes touched by relative attention: ours beside vLLM's kernels for ROCm, on an emulator.

An emulator runs the code that Triton compiles for gfx942 and sm90 and counts what every wave executes; the counts are
the same on any machine. They say how much work a technique makes, not how long it takes: an instruction that multiplies
matrices counts as one. For gfx942 it is machine code that is counted, for sm90 PTX, which the assembler may still
change.

One sequence, 8 query heads over 2 key heads of 128, pages of 16, bfloat16. A sliding layer has window and extent 128; a
full one has the extent 1,024 of the released models. Prefill is from position 0; `decode` is one row and `verify` nine
behind 1,024 tokens.

* `ours`: `rel_attention` for prefill and `rel_attention_decode` for the rest, planned for the chip.
* `vllm`: vLLM 0.33's `inkling_fa4_rel_attention` for ROCm with the bounds its layers pass: the longest query rounded up
  to a power of two, and the split kernel for single rows where it chooses so. It reads relative logits, which another
  of its kernels makes: for prefill that one (`qkvr_rel_proj`) is counted beside it, for few rows it is part of a larger
  preparation kernel and left out. Ratios leave it out in both cases, which favours vLLM. Read from a wheel of vLLM or
  an installed vLLM, of which three small modules are imported; `vllm.platforms.rocm` asks a driver for the chip, and
  `vllm.triton_utils` hides Triton where no driver is active, so both are replaced: no gfx950, and Triton as it is.

Every output is compared with float64 before anything is written.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from gate import GateError, MissingError
from instruction_meter import KINDS, Meter
from rich.console import Console
from rich.table import Table

from inkling_kernels.target import Target
from inkling_kernels.testing import PagedBatch, paged_batch, tolerance

ROOT = Path(__file__).resolve().parent.parent
CHIPS = ("gfx942", "sm90")
HEADS, KV_HEADS, HEAD_DIM, PAGE, WINDOW, EXTENT, CONTEXT = 8, 2, 128, 16, 128, 1024, 1024
OPS = Path("vllm", "models", "inkling", "amd", "ops")
MODULES = ("rel_attention_decode", "fa4_rel_attention", "qkvr_prep")


@dataclass(frozen=True)
class Case:
    """One sequence: `rows` query rows, the last of them at position `keys - 1`; full attention where `window` is
    None."""

    name: str
    rows: int
    keys: int
    window: int | None
    target: float | None

    @property
    def title(self) -> str:
        return f"{self.name}, {'full' if self.window is None else f'window {self.window}'}"

    def batch(self) -> PagedBatch:
        # vLLM reads pages that the window has left behind, if only to mask them: they must exist and hold numbers.
        batch = paged_batch(
            [(self.rows, self.keys)], heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, page=PAGE,
            extent=self.window or EXTENT, window=self.window, dtype=torch.bfloat16, seed=self.keys + self.rows,
            unused_pages=(0, 0),
        )  # fmt: skip
        for pages in (batch.k_pages, batch.v_pages):
            pages.nan_to_num_(nan=0.0)
        return batch


# What is asked of the ratio of wave instructions, where something is.
CASES = tuple(
    Case(name, rows, keys, window, target)
    for window, prefill in ((WINDOW, 8.0), (None, 5.0))
    for name, rows, keys, target in (
        ("prefill 512", 512, 512, prefill),
        ("prefill 1,024", 1024, 1024, prefill),
        ("decode, 1 row", 1, CONTEXT + 1, None),
        ("verify, 9 rows", 9, CONTEXT + 9, 3.0),
    )
)


def exact(batch: PagedBatch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the batch's one sequence in float64 with `logits` `[T, Hq, extent]` for the bias; and the same with
    every value positive, the scale of its rounding errors."""
    (rows,), keys, group = batch.q_lens, int(batch.kv_lens), HEADS // KV_HEADS
    k, v = (x[0].double().repeat_interleave(group, 1).transpose(0, 1) for x in (batch.keys, batch.values))
    distance = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)
    bias = logits.double().transpose(0, 1).gather(2, distance.clamp(0, logits.shape[2] - 1).expand(HEADS, -1, -1))
    score = batch.q.double().transpose(0, 1) @ k.transpose(1, 2) * batch.scale
    score += torch.where((distance >= 0) & (distance < logits.shape[2]), bias, 0.0)
    seen = distance >= 0 if batch.window is None else (distance >= 0) & (distance < batch.window)
    weight = score.masked_fill(~seen, float("-inf")).softmax(-1)
    return (weight @ v).transpose(0, 1), (weight @ v.abs()).transpose(0, 1)


def gate(what: str, out: torch.Tensor, wanted: torch.Tensor, magnitude: torch.Tensor) -> float:
    """The largest error as a part of what is allowed; GateError beyond that."""
    error = (out.double() - wanted).abs() / tolerance(out.dtype, magnitude)
    worst = float(error.nan_to_num(nan=float("inf")).max())
    if worst > 1:
        raise GateError(f"{what} is {worst:.3g} times as far from float64 as rounding explains")
    return worst


@contextmanager
def vllm_folder(wheel: Path | None) -> Iterator[tuple[Path, str]]:
    """A folder that holds vLLM's `vllm/models/inkling/amd/ops`, and the version: of the wheel, else of what is
    installed."""
    if wheel is None:
        found = importlib.util.find_spec("vllm")
        if found is None or not found.submodule_search_locations:
            raise MissingError("vLLM is not installed here: name a wheel of it with --vllm-wheel PATH")
        yield Path(found.submodule_search_locations[0]).parent, version("vllm")
        return
    try:
        archive = zipfile.ZipFile(wheel)
    except (OSError, zipfile.BadZipFile) as problem:
        raise MissingError(f"--vllm-wheel is {wheel}; expected a wheel of vLLM: {problem}") from problem
    with archive, tempfile.TemporaryDirectory() as folder:
        names = [f"{(OPS / name).as_posix()}.py" for name in MODULES]
        missing = sorted(set(names) - set(archive.namelist()))
        if missing:
            raise MissingError(f"--vllm-wheel is {wheel}; it has no {missing[0]}: expected vLLM 0.33")
        archive.extractall(folder, names)
        yield Path(folder), wheel.name.split("-")[1]


def vllm_ops(folder: Path) -> dict[str, types.ModuleType]:
    """vLLM's modules of kernels, without the rest of vLLM; see the module for what is replaced."""
    import triton
    import triton.language as tl

    def replace(name: str, **content: Any) -> None:
        module = types.ModuleType(name)
        vars(module).update(content)
        sys.modules[name] = module

    def no_stream() -> None:
        raise RuntimeError("vLLM's preparation kernels are not run here")

    for name in ("vllm", "vllm.platforms", "vllm.utils", "vllm.models", "vllm.models.inkling",
                 "vllm.models.inkling.amd"):  # fmt: skip
        replace(name, __path__=[])
    replace("vllm.models.inkling.amd.ops", __path__=[str(folder / OPS)])
    replace("vllm.triton_utils", triton=triton, tl=tl)
    replace("vllm.platforms.rocm", on_gfx950=lambda: False)
    replace("vllm.utils.torch_utils", aux_stream=no_stream)
    return {name: importlib.import_module(f"vllm.models.inkling.amd.ops.{name}") for name in MODULES}


def run_ours(case: Case, batch: PagedBatch, target: Target, meter: Meter) -> dict[str, Any]:
    from inkling_kernels.rel_attention import rel_attention
    from inkling_kernels.rel_attention_decode import rel_attention_decode

    meter.start()
    if case.rows > 9:
        out = rel_attention(*batch.args, **batch.options, target=target)
    else:
        out = rel_attention_decode(*batch.args, **batch.options, max_query_len=case.rows, target=target)
    count = meter.stop()
    logits = torch.einsum("thd,de->the", batch.r.double(), batch.proj.double())
    return asdict(count) | {"error": round(gate(f"ours at {case.title}", out, *exact(batch, logits)), 3)}


def run_vllm(case: Case, batch: PagedBatch, ops: dict[str, types.ModuleType], meter: Meter) -> dict[str, Any]:
    fa4, prepare = ops["fa4_rel_attention"], ops["qkvr_prep"]
    tokens, extent = case.rows, batch.proj.shape[1]
    wanted = torch.einsum("thd,de->the", batch.r.double(), batch.proj.double())
    made = None
    if tokens >= prepare.SMALL_TOKEN_THRESHOLD:
        kv = torch.zeros(tokens, 2 * KV_HEADS * HEAD_DIM, dtype=torch.bfloat16)
        qkvr = torch.cat((batch.q.reshape(tokens, -1), kv, batch.r.reshape(tokens, -1)), 1)
        logits = torch.empty(tokens, HEADS, extent, dtype=torch.bfloat16)
        meter.start()
        prepare.qkvr_rel_proj(
            qkvr, batch.proj.contiguous(), logits, None, num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
            d_rel=16,
        )  # fmt: skip
        made = asdict(meter.stop())
        size = torch.einsum("thd,de->the", batch.r.double().abs(), batch.proj.double().abs())
        gate(f"vLLM's relative logits at {case.title}", logits, wanted, size)
    else:
        logits = wanted.to(torch.bfloat16)
    out = torch.empty(tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    meter.start()
    fa4.inkling_fa4_rel_attention(
        batch.q, batch.k_pages, batch.v_pages, block_table=batch.block_table, cache_seqlens=batch.kv_lens,
        cu_seqlens_q=batch.cu_seqlens, max_seqlen_q=fa4.bucket_max_seqlen_q(tokens), softmax_scale=batch.scale,
        causal=True, window_size=(-1, -1) if case.window is None else (case.window - 1, 0), rel_extent=extent,
        rel_logits=logits, max_kv_len=case.keys, out=out,
    )  # fmt: skip
    count = asdict(meter.stop())
    return count | {"error": round(gate(f"vLLM at {case.title}", out, *exact(batch, logits)), 3), "logits": made}


def count(chip: str, folder: Path) -> list[dict[str, Any]]:
    """Every case on one emulated chip. Changes the process: Triton keeps what it compiled for the first chip."""
    import emulator

    target = Target.parse(chip)
    # What is counted does not depend on the race checks, which the kernels' tests run with.
    meter = Meter(emulator.activate(target.vendor, int(chip[2:]) if target.vendor == "cuda" else chip, races=False))
    ops, rows = vllm_ops(folder), []
    for case in CASES:
        batch = case.batch()
        ours, theirs = run_ours(case, batch, target, meter), run_vllm(case, batch, ops, meter)
        ratio = round(theirs["instructions"] / ours["instructions"], 2)
        rows.append({"chip": chip, "case": case.title, "ours": ours, "vllm": theirs, "ratio": ratio,
                     "target": case.target})  # fmt: skip
        print(f"{chip}: {case.title}: {ours['instructions']:,} beside {theirs['instructions']:,}", file=sys.stderr)
    return rows


def hashes(folder: Path) -> dict[str, str]:
    """What the counted code was compiled from: ours as the evidence of compilation names it, vLLM's files as they
    are."""
    sys.path.append(str(ROOT / "tests" / "compile"))
    harness = importlib.import_module("harness")
    ours = {name: harness.sources(name) for name in ("rel_attention", "rel_attention_decode")}
    theirs = {f"vllm {name}": hashlib.sha256((folder / OPS / f"{name}.py").read_bytes()) for name in MODULES}
    return ours | {name: found.hexdigest()[:16] for name, found in theirs.items()}


def run(console: Console, wheel: Path | None) -> tuple[dict[str, Any], str]:
    """Count on every chip, each in a process of its own; returns the results and a readable report."""
    sys.path.append(str(ROOT / "tests"))
    emulator = importlib.import_module("emulator")
    if emulator.folder() is None:
        raise MissingError(emulator.ABSENT)
    rows: list[dict[str, Any]] = []
    with vllm_folder(wheel) as (folder, release), tempfile.TemporaryDirectory() as results:
        for chip in CHIPS:
            path = Path(results, chip)
            command = [sys.executable, __file__, chip, str(folder), str(path)]
            if subprocess.run(command, check=False, env=emulator.environment()).returncode:
                raise GateError(f"the counts on {chip} did not come to an end; the reason stands above")
            rows += json.loads(path.read_text())
        sources = hashes(folder)
    console.print(table("Wave instructions of one attention call, counted: not a time", HEAD, totals(rows)))
    console.print(table("The same by kind of instruction, and bytes", DETAILS, details(rows)))
    found = {"emulated": CHIPS, "vllm": release, "triton": version("triton"), "sources": sources, "rows": rows}
    return found, report(rows, release)


HEAD = ("chip", "case", "ours", "vLLM", "times fewer", "asked", "vLLM's logits")
DETAILS = ("chip", "case", "", *KINDS, "touched, MB", "requested, MB")


def totals(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Instructions of each case: ours, vLLM's, what is asked of their ratio, and what vLLM's relative logits take."""
    lines = []
    for row in rows:
        ours, theirs, target = row["ours"], row["vllm"], row["target"]
        made = f"{theirs['logits']['instructions']:,}" if theirs["logits"] else "left out"
        asked = "" if target is None else f"{target:g}{'' if row['ratio'] >= target else ' (missed)'}"
        lines.append([row["chip"], row["case"], f"{ours['instructions']:,}", f"{theirs['instructions']:,}",
                      f"{row['ratio']:.1f}", asked, made])  # fmt: skip
    return lines


def details(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Instructions by kind, and bytes."""
    return [
        [row["chip"], row["case"], who, *(f"{row[who]['kinds'].get(name, 0):,}" for name in KINDS),
         *(f"{row[who][what] / 1e6:.2f}" for what in ("touched", "requested"))]
        for row in rows
        for who in ("ours", "vllm")
    ]  # fmt: skip


def table(title: str, head: tuple[str, ...], lines: list[list[str]]) -> Table:
    shown = Table(*head, title=title)
    for line in lines:
        shown.add_row(*line)
    return shown


def report(rows: list[dict[str, Any]], release: str) -> str:
    """The results as a page."""

    def lines(head: tuple[str, ...], body: list[list[str]]) -> list[str]:
        return ["| " + " | ".join(head) + " |", "|" + "-|" * len(head), *("| " + " | ".join(r) + " |" for r in body)]

    text = ["# Wave instructions of attention, counted by an emulator", "", *(__doc__ or "").strip().splitlines()[2:]]
    text += ["", f"vLLM {release}, Triton {version('triton')}.", "", *lines(HEAD, totals(rows)), ""]
    text += ["By kind of instruction, and bytes:", "", *lines(DETAILS, details(rows))]
    return "\n".join(text) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Count one chip's cases: what `run.py emulated` starts.")
    parser.add_argument("chip", choices=CHIPS)
    parser.add_argument("vllm", type=Path, help="folder that holds vllm/models/inkling/amd/ops")
    parser.add_argument("out", type=Path, help="where the counts are written, as JSON")
    chosen = parser.parse_args()
    sys.path.append(str(ROOT / "tests"))
    try:
        rows = count(chosen.chip, chosen.vllm)
    except GateError as error:
        print(error, file=sys.stderr)
        return 1
    chosen.out.write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
