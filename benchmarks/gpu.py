"""Our kernels on the GPU that is here, beside torch's, interleaved, each from a cold cache.

* attention: `ours` beside torch's compiled flex attention (dense keys, relative logits made before, neither timed) and
  beside the same kernel with an extent of 1, which leaves all tiles but those on the diagonal without a bias;
* convolution, norm, routing: `ours` beside torch's operation where there is one of the same work;
* experts: `ours` beside torch's grouped product, for 4-bit weights after unpacking them.

Times are medians with the 20th and 80th percentile. `of bandwidth` is the bytes that the task cannot avoid over the
time, as a part of what a copy reached here; `of matrix rate` likewise for operations. Every output is compared with
float64 first, and a case that differs stops the benchmark.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from gate import GateError, MissingError
from gpu_cases import Timed, attentions, experts, streams
from rich.console import Console
from rich.table import Table
from timing import Stopwatch

from inkling_kernels.target import Target, current_target

HEAD = ("case", "ours, us", "others, us", "of bandwidth", "of matrix rate", "asked")


def cases(target: Target, device: str) -> Iterator[Timed]:
    """All of them; inputs are made as each is reached."""
    return itertools.chain(attentions(target, device), streams(target, device), experts(target, device))


def passed(case: Timed) -> dict[str, float]:
    """Run every variant once and hold the outputs to float64; GateError where one is off."""
    errors = case.gate({name: call() for name, call in case.calls.items()})
    for who, error in errors.items():
        if not error <= 1:
            raise GateError(f"{case.name}: {who} is {error:.3g} times as far from float64 as rounding explains")
    return {who: round(error, 3) for who, error in errors.items()}


def judged(case: Timed, times: dict[str, dict[str, float]], roofs: dict[str, float]) -> dict[str, Any]:
    """A case's row: times, parts of the roofs, and whether what is asked was reached."""
    ours = times["ours"]["median"]
    parts = {
        what: round(amount / ours * 1e6 / roofs[what], 3)
        for what, amount in (("bytes", case.bytes), ("operations", case.operations))
        if amount
    }
    reached = {}
    for what, bound in case.asked.items():
        if what in parts:
            reached[what] = {"asked": bound, "found": parts[what], "met": parts[what] >= bound}
        else:
            ratio = round(ours / times[what]["median"], 3)
            reached[what] = {"asked": bound, "found": ratio, "met": ratio <= bound}
    return {"case": case.name, "us": times, "of_roof": parts, "asked": reached}


def cells(row: dict[str, Any]) -> list[str]:
    def shown(times: dict[str, float]) -> str:
        return f"{times['median']:,.1f} ({times['p20']:,.1f} to {times['p80']:,.1f})"

    others = [f"{who} {shown(times)}" for who, times in row["us"].items() if who != "ours"]
    parts = [f"{row['of_roof'][what]:.0%}" if what in row["of_roof"] else "" for what in ("bytes", "operations")]
    asked = [
        f"{'' if found['met'] else 'MISSED '}{what} {found['found']:g} ({found['asked']:g})"
        for what, found in row["asked"].items()
    ]
    return [row["case"], shown(row["us"]["ours"]), "; ".join(others), *parts, "; ".join(asked)]


def run(console: Console) -> tuple[dict[str, Any], str]:
    """Time every case on this machine's GPU; returns the results and a readable report."""
    if not torch.cuda.is_available():
        raise MissingError("torch sees no GPU here, and this case measures one")
    target = current_target()
    watch = Stopwatch()
    roofs = watch.roofs()
    rates = roofs["bytes"] / 1e12, roofs["operations"] / 1e12
    reached = f"A copy reached {rates[0]:.2f} TB/s, a matrix product {rates[1]:.0f} TFLOP/s."
    console.print(f"{target.name}: {reached}")
    rows = []
    for case in cases(target, "cuda"):
        errors = passed(case)
        rows.append(judged(case, watch.times(case.calls), roofs) | {"errors": errors})
        console.print(" | ".join(cells(rows[-1])))
        torch._dynamo.reset()
    table = Table(*HEAD, title=f"Microseconds on {target.name}: median (20th to 80th percentile)")
    page = [f"# Measured on {target.name}", "", *(__doc__ or "").strip().splitlines()[2:], ""]
    page += [reached, "", "| " + " | ".join(HEAD) + " |", "|" + "-|" * len(HEAD)]
    for row in rows:
        table.add_row(*cells(row))
        page.append("| " + " | ".join(cells(row)) + " |")
    console.print(table)
    import triton

    versions = {"triton": triton.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    return {"device": str(target), "name": target.name, "versions": versions, "roofs": roofs, "rows": rows}, (
        "\n".join(page) + "\n"
    )
