"""`inkling recipe`: the command and environment that serve a model with vLLM on given devices."""

from __future__ import annotations

import json as json_module
from typing import Annotated

import typer


def recipe(
    target: Annotated[str, typer.Option(metavar="T", help="Device, such as hip:gfx950 or sm90.")],
    model: Annotated[
        str, typer.Option(metavar="M", help="inkling, inkling-small, or a checkpoint's folder or hub id.")
    ] = "inkling",
    format: Annotated[
        str | None, typer.Option(metavar="F", help="bf16, nvfp4 or mxfp4; the default is the model's own.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, metavar="N", help="Machines.")] = 1,
    gpus: Annotated[int, typer.Option(min=1, metavar="N", help="Devices of a machine.")] = 8,
    memory: Annotated[
        float | None, typer.Option(metavar="GIB", help="Memory of one device, where it is not the data sheet's.")
    ] = None,
    max_model_len: Annotated[int, typer.Option(metavar="N", help="Tokens of a sequence.")] = 32768,
    max_num_seqs: Annotated[int, typer.Option(metavar="N", help="Sequences of that length at a time.")] = 8,
    kv_cache_dtype: Annotated[str, typer.Option(metavar="D", help="auto (bfloat16) or fp8.")] = "auto",
    speculative: Annotated[int, typer.Option(min=0, metavar="N", help="Drafts of the model's own depths.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print how to serve a model with vLLM and this package's plug-in: the command for each node, and its environment.

    Reads config.json alone; needs neither a GPU nor vLLM.
    """
    from inkling_kernels.target import Target
    from inkling_portable import plan as plans
    from inkling_portable.config import PRESETS
    from inkling_portable.recipe import recipe as made

    wish = plans.wish_of(format, max_model_len, max_num_seqs, kv_cache_dtype, speculative)
    size = plans.bytes_of(memory) if memory is not None else None
    config = plans.model_config(model)
    known = model in PRESETS
    found = made("PATH" if known else model, config, wish, Target.parse(target), nodes=nodes, gpus=gpus, memory=size)
    if json:
        typer.echo(json_module.dumps(found.to_dict(), indent=2))
        return
    for note in found.notes:
        typer.echo(f"# {note}")
    if known:
        typer.echo(f"# PATH is the folder or hub id of a checkpoint of {model}{f' in {format}' if format else ''}")
    typer.echo(found.script())
