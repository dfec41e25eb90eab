"""`inkling plan`: what a model needs of each device, by part, and what fits where, before anything is loaded."""

from __future__ import annotations

import json as json_module
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from inkling_kernels.target import Target
    from inkling_portable.config import InklingConfig
    from inkling_portable.plan import Plan, Wish


def plan(
    model: Annotated[
        str, typer.Option(metavar="M", help="inkling, inkling-small, or a checkpoint's folder or hub id.")
    ] = "inkling",
    target: Annotated[
        str | None, typer.Option(metavar="T", help="Device, such as hip:gfx950 or sm90; without one, all of them.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(metavar="GIB", help="Memory of one device, where it is not the data sheet's.")
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, metavar="N", help="Devices that share the model.")] = 1,
    format: Annotated[
        str | None, typer.Option(metavar="F", help="bf16, nvfp4 or mxfp4; the default is the model's own.")
    ] = None,
    max_model_len: Annotated[int, typer.Option(metavar="N", help="Tokens of a sequence.")] = 32768,
    max_num_seqs: Annotated[int, typer.Option(metavar="N", help="Sequences of that length at a time.")] = 8,
    kv_cache_dtype: Annotated[str, typer.Option(metavar="D", help="auto (bfloat16) or fp8.")] = "auto",
    speculative: Annotated[int, typer.Option(min=0, metavar="N", help="Prediction depths kept.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Say how many GiB each part of a model takes on each device, and what would fit where it does not.

    Reads config.json alone; needs no GPU. The exit code is 1 where it does not fit.
    """
    from inkling_kernels.target import Target
    from inkling_portable import plan as plans

    wish = plans.wish_of(format, max_model_len, max_num_seqs, kv_cache_dtype, speculative)
    wish = replace(wish, size=tensor_parallel_size)
    size = plans.bytes_of(memory) if memory is not None else None
    config = plans.model_config(model)
    if target is None and memory is None:
        return _everywhere(config, wish, json)
    device = Target.parse(target) if target is not None else None
    if size is None and device is not None:
        size = plans.memory_of(device)
    found = plans.plan(config, wish, size)
    missing = plans.unsupported(config, wish, device) if device is not None else None
    others = [] if found.fits or size is None else list(plans.alternatives(config, wish, size))
    if json:
        record: dict[str, Any] = {"target": device and str(device), "unsupported": missing, **found.to_dict()}
        typer.echo(json_module.dumps(record | {"alternatives": [each.to_dict() for each in others]}, indent=2))
    else:
        _print(found, device, missing, others)
    return 0 if found.fits and missing is None else 1


def _everywhere(config: InklingConfig, wish: Wish, json: bool) -> int:
    from inkling_portable import plan as plans

    found = list(plans.survey(config, wish))
    if json:
        typer.echo(json_module.dumps({str(target): lengths for target, lengths in found}, indent=2))
        return 0
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("device", "GiB", *(f"x {size}" for size in plans.SIZES)):
        table.add_column(heading, no_wrap=True)
    for target, lengths in found:
        cells = ["-" if length < 0 else "no" if length == 0 else f"{length // 1024} Ki" for length in lengths.values()]
        table.add_row(str(target), str(plans.memory_of(target) // plans.GIB), *cells)
    console = Console()
    console.print(table)
    console.print(
        f"Longest context of {wish.max_num_seqs} sequences at a time, by number of devices; -: cannot be cut so.",
        highlight=False,
    )
    return 0


def _print(found: Plan, device: Target | None, missing: str | None, others: list[Plan]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from inkling_portable.plan import GIB, USABLE, words

    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("part", no_wrap=True)
    table.add_column("GiB a device", justify="right")
    for name, size in found.parts.items():
        table.add_row(name, f"{size / GIB:.2f}")
    table.add_section()
    table.add_row("in all", f"{found.needed / GIB:.2f}")
    if found.memory is not None:
        table.add_row(f"{USABLE:.0%} of {found.memory / GIB:.0f} GiB", f"{found.memory * USABLE / GIB:.2f}")
    console = Console()
    console.print(table)
    where = f"{device} ({device.name})" if device is not None else "this memory"
    console.print(f"{words(found.wish)}: {'fits' if found.fits else 'does not fit'} {where}.", highlight=False)
    if missing:
        console.print(f"It cannot run there: {missing}.", highlight=False)
    for each in others:
        console.print(f"This would fit: {words(each.wish)}.", highlight=False)
    if not found.fits and not others:
        console.print("Nothing near it fits: take a smaller model or larger devices.", highlight=False)
