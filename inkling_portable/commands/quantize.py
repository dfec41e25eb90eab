"""`inkling quantize`: a copy of a checkpoint with its routed experts in 4 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def quantize(
    source: Annotated[str, typer.Argument(metavar="IN", help="Folder or hub id of a bf16 checkpoint.")],
    destination: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; absent or empty.")],
    format: Annotated[str, typer.Option(help="nvfp4 (NVIDIA ModelOpt's layout) or mxfp4 (AMD Quark's).", metavar="F")],
    separate_gate_up: Annotated[
        bool, typer.Option("--separate-gate-up", help="NVFP4: a second scale each for gate and up rows.")
    ] = False,
    max_shard_gib: Annotated[float, typer.Option(help="Largest size of one weights file, in GiB.", metavar="G")] = 5.0,
) -> None:
    """Quantise the routed experts of a checkpoint to NVFP4 or MXFP4, expert by expert, in little memory.

    Everything else stays bf16. The source may have either naming; the result has the released checkpoints' names and
    opens here, in vLLM and in SGLang. Nothing is left at OUT when it fails.
    """
    from inkling_portable.checkpoint import Checkpoint
    from inkling_portable.quantize import quantize_checkpoint

    if format not in ("nvfp4", "mxfp4"):
        raise ValueError(f"--format is {format!r}; expected nvfp4 or mxfp4")
    if separate_gate_up and format != "nvfp4":
        raise ValueError("--separate-gate-up belongs to nvfp4; mxfp4 has no second scale")
    if max_shard_gib <= 0:
        raise ValueError(f"--max-shard-gib is {max_shard_gib:g}; expected a positive number")
    quantize_checkpoint(
        source,
        destination,
        format,  # type: ignore[arg-type]
        separate_gate_up=separate_gate_up,
        max_shard_bytes=int(max_shard_gib * 2**30),
    )
    with Checkpoint.open(destination) as written:
        typer.echo(f"{destination}: {written.nbytes() / 2**20:,.1f} MiB, routed experts in {format}")
