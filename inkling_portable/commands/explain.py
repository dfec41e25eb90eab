"""`inkling explain`: which implementation of each operation a device would run, and why no earlier one."""

from __future__ import annotations

import json as json_module
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from inkling_kernels.target import Target
    from inkling_portable.dispatch import Explanation


def explain(
    target: Annotated[
        str | None,
        typer.Option(metavar="T", help="Device, such as hip:gfx942, sm90 or cpu; the default is this machine's."),
    ] = None,
    format: Annotated[
        str, typer.Option(metavar="F", help="Format of the expert weights: bf16, nvfp4 or mxfp4.")
    ] = "bf16",
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="Devices that share each of Inkling's experts.")
    ] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the README's table of all devices.")] = False,
) -> int:
    """Say which implementation of each operation a device runs, and why. Needs no GPU, no model and no weights.

    The variable INKLING_IMPL=op=impl,op2=impl forces implementations, which are held to the same conditions.
    """
    from inkling_kernels.target import Target, current_target
    from inkling_portable import dispatch
    from inkling_portable.facts import Facts

    if json and markdown:
        raise ValueError("--json and --markdown exclude each other; give one of them")
    if markdown:
        typer.echo(dispatch.support_table())
        return 0
    device = current_target() if target is None else Target.parse(target)
    facts = Facts(format=format)
    if facts.expert_width % tensor_parallel_size:
        raise ValueError(
            f"--tensor-parallel-size is {tensor_parallel_size}, which does not divide the experts' width of "
            f"{facts.expert_width}"
        )
    facts = replace(facts, expert_width=facts.expert_width // tensor_parallel_size)
    explanation = dispatch.explain(device, facts, dispatch.forced_from_environment())
    if json:
        typer.echo(json_module.dumps(explanation.to_dict(), indent=2))
    else:
        _print(explanation)
    return 0


def _print(explanation: Explanation) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    target, choices = explanation.target, explanation.choices
    table = Table(show_lines=True)
    for heading in ("operation", "implementation", "why", "passed over"):
        table.add_column(heading)
    for choice in choices:
        passed = Text("\n".join(f"{row.name} {reason}" for row, reason in choice.passed_over))
        if choice.row is None:
            table.add_row(choice.op, Text("none", style="bold red"), "", passed)
        else:
            why = Text.assemble(choice.row.why, "\n", (choice.row.evidence_on(explanation.target), "dim"))
            table.add_row(choice.op, Text(choice.row.name, style="bold"), why, passed)
    console = Console()
    console.print(f"{target}: {_device(target)}", highlight=False)
    console.print(table)
    given = f"{explanation.facts.format} experts on {target}"
    if explanation.missing:
        count = len(explanation.missing)
        outcome = f"{count} of {len(choices)} operations have no implementation for {given}: no model can run there."
    else:
        outcome = f"All {len(choices)} operations have an implementation for {given}."
    console.print(outcome, highlight=False)


def _device(target: Target) -> str:
    """The facts that decide rows and launch plans, in one line."""
    if not target.is_gpu:
        return target.name
    native = [name for name in ("native_nvfp4", "native_mxfp4") if name in target.capabilities]
    fp4 = " and ".join(name.removeprefix("native_").upper() for name in native)
    return (
        f"{target.name}, {target.compute_units} compute units, warps of {target.warp_width}, "
        f"{target.shared_memory_bytes // 1024} KiB shared memory, "
        f"{target.fp8_kind or 'no'} fp8, {fp4 or 'no fp4'} in hardware"
    )
