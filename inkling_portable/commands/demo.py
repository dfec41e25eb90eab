"""`inkling demo`: the small built-in model completes real code that it has never seen, in all three formats."""

from __future__ import annotations

import hashlib
import json as json_module
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from inkling_portable.request import RequestOutput

DRAFTS = 2
FORMATS: tuple[Literal["bf16", "nvfp4", "mxfp4"], ...] = ("bf16", "nvfp4", "mxfp4")
# A prompt is about this many characters of a file, and begins no earlier than at this one, after licence and imports.
PROMPT_CHARACTERS, BEGINNING = 900, 1500
# Lines of a prompt's end and of a completion's beginning that are shown.
SHOWN_LINES = 6


@dataclass
class Speed:
    """What one format did over all files. Speeds are of decoding one request at a time, in tokens a second.

    `accepted` is the part of the drafts accepted at each position, `tokens_a_step` what a verifying step yields.
    Without drafts `speculative` is None, `accepted` empty and `same_text` None.
    """

    weights_mib: float
    plain: float
    speculative: float | None = None
    accepted: list[float] = field(default_factory=list)
    tokens_a_step: float = 1.0
    same_text: bool | None = None


@dataclass
class Completed:
    """A held-out file, the part of it that was given, and what each format made of it."""

    name: str
    prompt: str
    completions: dict[str, str] = field(default_factory=dict)


def demo(
    model: Annotated[
        str | None, typer.Option(metavar="PATH", help="Another bf16 checkpoint; the default is the built-in one.")
    ] = None,
    files: Annotated[int, typer.Option(min=1, metavar="N", help="Held-out files to complete.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Tokens to generate for each.")] = 64,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout, last; the rest goes to stderr.")
    ] = False,
) -> int:
    """Complete code of this Python's standard library that the built-in model was not trained on.

    In bf16, NVFP4 and MXFP4, once plainly and once with drafts from the model's own prediction layers, which are faster
    and write the same text. The exit code is 1 where they do not.
    """
    import torch
    from rich.console import Console

    from inkling_portable.checkpoint import Checkpoint
    from inkling_portable.llm import default_model
    from inkling_portable.quantize import quantize_checkpoint

    chosen = [Completed(name, prompt) for name, prompt in excerpts(files)]
    # Products of the built-in model are so small that threads would wait for each other longer than they work.
    threads = torch.get_num_threads() if model is not None else 1
    source = default_model() if model is None else Path(model)
    with Checkpoint.open(source) as checkpoint:
        source, config = checkpoint.path, checkpoint.config
        if checkpoint.quantized:
            raise ValueError(f"{source} is quantised already; give the bf16 checkpoint that it was made from")
        if not (source / "tokenizer.json").is_file():
            raise ValueError(f"{source} has no tokenizer.json, which turns the code into tokens")
        drafts = min(DRAFTS, config.mtp.num_layers) if config.mtp and checkpoint.has_mtp else 0
    console = Console(stderr=json)
    speeds: dict[str, Speed] = {}
    with _threads(threads), tempfile.TemporaryDirectory(prefix="inkling-demo-") as scratch:
        for name in FORMATS:
            busy = console.status(f"{name}: completing code") if console.is_terminal else nullcontext()
            with busy:
                folder = source
                if name != "bf16":
                    folder = Path(scratch) / name
                    quantize_checkpoint(source, folder, name, progress=False)
                speeds[name] = _run(folder, chosen, drafts, max_tokens, name)
    _show(console, chosen, speeds, drafts, threads, built_in=model is None)
    if json:
        record = {
            "model": str(source),
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "threads": threads,
            "drafts": drafts,
            "files": [asdict(each) for each in chosen],
            "formats": {name: asdict(speed) for name, speed in speeds.items()},
        }
        typer.echo(json_module.dumps(record))
    differing = [name for name, speed in speeds.items() if speed.same_text is False]
    if differing:
        raise RuntimeError(
            f"with drafts the text differs from plain decoding in {', '.join(differing)}; it never should"
        )
    return 0


def excerpts(count: int) -> Iterator[tuple[str, str]]:
    """`(name, prompt)` of the first `count` held-out files that have a block to complete, tests left out.

    A prompt ends with a line of a function that opens a block. The order is that of the names' hashes: as good as
    drawn, and the same everywhere. ValueError where this Python's library has not `count` of them, as where it comes
    without sources.
    """
    from inkling_portable.heldout import sources

    ordered = sorted(sources(held=True), key=lambda item: hashlib.sha256(item[0].encode()).digest())
    found = 0
    for name, text in ordered:
        opening = re.compile(r"^ {4,}(?:if|for|while|with) .*:$", re.MULTILINE).search(text, BEGINNING)
        if "test" in name or opening is None:
            continue
        start = text.find("\n", max(opening.end() - PROMPT_CHARACTERS, 0)) + 1
        yield name, text[start : opening.end()]
        found += 1
        if found == count:
            return
    raise ValueError(
        f"{count} held-out files were asked for, and the library of this Python ({sys.prefix}) has {found} with a "
        "block to complete; ask for fewer (--files) or use a Python that comes with its sources"
    )


def _run(folder: Path, chosen: list[Completed], drafts: int, max_tokens: int, name: str) -> Speed:
    """Complete every file with the checkpoint `folder`, plainly and with drafts in turn."""
    from inkling_portable.checkpoint import Checkpoint
    from inkling_portable.commands.generate import acceptance
    from inkling_portable.llm import LLM
    from inkling_portable.sampling import SamplingParams

    with Checkpoint.open(folder) as checkpoint:
        size = checkpoint.nbytes() / 2**20
    # float32, because one row and three are then rounded so nearly alike that no two tokens change places.
    modes = {
        n: LLM(folder, dtype="float32", max_num_seqs=1, num_speculative_tokens=n)
        for n in ([0, drafts] if drafts else [0])
    }
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    for llm in modes.values():
        llm.generate("import", SamplingParams(max_tokens=4, temperature=0.0))
    outputs: dict[int, list[RequestOutput]] = {n: [] for n in modes}
    for each in chosen:
        for n, llm in modes.items():
            (output,) = llm.generate(each.prompt, params)
            if output.outputs[0].error:
                raise RuntimeError(output.outputs[0].error)
            outputs[n].append(output)
        each.completions[name] = outputs[0][-1].outputs[0].text
    speed = Speed(size, _rate(outputs[0]))
    if drafts:
        speed.speculative = _rate(outputs[drafts])
        speed.accepted, speed.tokens_a_step = acceptance([output.timings for output in outputs[drafts]])
        pairs = zip(outputs[0], outputs[drafts], strict=True)
        speed.same_text = all(one.outputs[0].token_ids == two.outputs[0].token_ids for one, two in pairs)
    return speed


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads inside."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _rate(outputs: list[RequestOutput]) -> float:
    """Tokens a second of decoding, prompts left out."""
    tokens = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
    seconds = sum(output.timings["total"] - output.timings["first_token"] for output in outputs)
    return tokens / seconds if tokens else 0.0


def _show(
    console: Console, chosen: list[Completed], speeds: dict[str, Speed], drafts: int, threads: int, built_in: bool
) -> None:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    for each in chosen:
        text = Text("\n".join(each.prompt.splitlines()[-SHOWN_LINES:]), style="dim")
        by_text: dict[str, list[str]] = {}
        for name, completion in each.completions.items():
            by_text.setdefault(completion, []).append(name)
        for completion, names in by_text.items():
            lines = completion.splitlines()
            shown = [*lines[:SHOWN_LINES], "…"] if len(lines) > SHOWN_LINES else lines
            text.append(f"\n── {', '.join(names)} ──", style="cyan not dim")
            text.append("\n".join(shown), style="bold not dim")
        console.print(
            Panel(text, title=f"{each.name}{', never seen in training' if built_in else ''}", title_align="left")
        )
    table = Table(title="Decoding one request at a time, in tokens a second", title_justify="left")
    table.add_column("format")
    for heading in headings(drafts):
        table.add_column(heading, justify="right")
    for name, speed in speeds.items():
        row = [name, f"{speed.weights_mib:.1f}", f"{speed.plain:.0f}"]
        if speed.speculative is not None:
            faster = f"{speed.speculative / speed.plain:.2f} x" if speed.plain else "-"
            accepted = ", ".join(f"{part:.0%}" for part in speed.accepted) or "-"
            row += [f"{speed.speculative:.0f}", faster, accepted, f"{speed.tokens_a_step:.2f}"]
            row.append("yes" if speed.same_text else "NO")
        table.add_row(*row)
    console.print(table)
    console.print(
        f"On the CPU, {threads} thread{'s' if threads > 1 else ''}, arithmetic in float32. Drafts come from the "
        "model's own prediction layers and are checked by the model: 'accepted' is how many pass at each position, "
        "'a step' the tokens that a check yields. They change the speed, not the text.",
        highlight=False,
    )


def headings(drafts: int) -> tuple[str, ...]:
    """Those of the table of speeds, after the format."""
    return ("MiB", "plain", f"{drafts} drafts", "faster", "accepted", "a step", "same text")
