"""The readable report of the `cpu` case: its figures, its series, and what bounds each."""

from __future__ import annotations

from typing import Any


def render(results: dict[str, Any]) -> str:
    """Markdown for `benchmarks/results/cpu.md`."""
    lines = [
        "# The shared model on a CPU, beside transformers' eager Inkling",
        "",
        "Written by `python benchmarks/run.py cpu`; the machine and the versions are in `cpu.json`. One process, both",
        "implementations on one random checkpoint (hidden 512, 12 layers, window 512, 64 experts, float32), in turns.",
        "",
        "| figure | measured | to reach | |",
        "|-|-|-|-|",
    ]
    for name, entry in results["figures"].items():
        lines.append(
            f"| {name} | {entry['measured']:.2f} | {entry['target']} | {'met' if entry['met'] else '**missed**'} |"
        )
    lines += ["", "Milliseconds, median (20th to 80th percentile):", "", "| | ours | transformers |", "|-|-|-|"]
    series = results["series"]
    for name, entry in series.items():
        if isinstance(entry, dict) and "ours" in entry and isinstance(entry["ours"], dict):
            lines.append(f"| {name} | {_cell(entry['ours'])} | {_cell(entry.get('transformers'))} |")
    small = series["small model, token"]
    lines += [f"| small trained model, a token, plain | {_cell(small['plain'])} | |"]
    lines += [f"| small trained model, a token, 2 drafts | {_cell(small['2 drafts'])} | |", ""]
    return "\n".join(lines + _bounds(series)) + "\n"


def _cell(entry: dict[str, float] | None) -> str:
    if entry is None:
        return ""
    return f"{entry['median'] * 1e3:.2f} ({entry['p20'] * 1e3:.2f} to {entry['p80'] * 1e3:.2f})"


def _bounds(series: dict[str, Any]) -> list[str]:
    """What bounds each figure and how cost grows, with the measured ratios."""

    def grows(first: str, last: str, side: str = "ours") -> float:
        return float(series[last][side]["median"] / series[first][side]["median"])

    memory = next(entry for name, entry in series.items() if name.startswith("peak extra bytes"))
    theirs = "transformers"
    short, long = "prefill, 512 tokens", "prefill, 4096 tokens"
    batches = grows("decode step, batch 2", "decode step, batch 8")
    context = grows("decoded token, context 1024", "decoded token, context 16384")
    return [
        "## What bounds each, and how cost grows",
        "",
        "- **Prefill** is bound by matrix products and by the attention scores of the two full layers. Sliding layers",
        "  read at most the window and a tile for each tile of queries, so they grow with the length alone; eager",
        "  attention forms every score and every bias of a layer at once. From 512 to 4,096 tokens (8 times) ours",
        f"  takes {grows(short, long):.1f} times as long, transformers {grows(short, long, theirs):.1f} times.",
        f"- **Peak extra memory** of a 4,096-token prefill: {memory['ours'] / 2**20:,.0f} MiB against",
        f"  {memory['transformers'] / 2**20:,.0f} MiB. Ours holds a tile's scores and a chunk's activations beside the",
        "  caches; eager attention holds several tensors of heads x length x length.",
        "- **Decode at batch 1** is bound by reading the weights that the token uses, and by the fixed cost of some",
        "  sixteen calls a layer, each one operation of the model compiled for few tokens. Eager execution has several",
        "  times as many operations, each with the same fixed cost, and reads most weights with one core.",
        f"- **Batches**: a step of 8 sequences costs ours {batches:.1f} times a step of 2 (4 times the tokens). Each",
        "  further sequence adds attention of its own and experts that no other token chose, whose weights are then",
        "  read for it alone; the other weights are read once for 4 tokens.",
        "- **Context**: keys and values of the full layers are read in place, page runs as one matrix; sliding layers",
        f"  stop at the window. From 1,024 to 16,384 tokens a decoded token takes {context:.2f} times as long.",
        "- **Experts**: few tokens are bound by reading the weights of the experts that they chose, once each and on",
        "  all cores; many by the products, which are compiled tiles of 4 tokens by 4 weight rows. The eager loop has",
        "  about a dozen operations for each such expert, and products of few rows, which a library runs far below its",
        "  peak.",
    ]
