"""`inkling check`: whether this machine computes what it should."""

from __future__ import annotations

import json as json_module
import os
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from inkling_portable.selfcheck import Finding


def check(
    target: Annotated[
        str, typer.Option(metavar="T", help="auto (what this machine has), cpu, interpret, or as in `explain`.")
    ] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Run every implementation of every operation that can run here on small cases and compare it with its reference.

    Experts are checked in each format against plain dequantisation. Needs no model; takes seconds, on a GPU those of
    compiling. The exit code is 1 where an implementation is wrong or fails.
    """
    if target == "interpret":
        # Triton reads this when a kernel's module is imported, which no module up to here has been.
        os.environ["TRITON_INTERPRET"] = "1"
    from inkling_kernels.target import usable_target
    from inkling_portable import selfcheck

    device = usable_target(target)
    found = []
    for each in selfcheck.check(device):
        found.append(each)
        if sys.stderr.isatty():
            typer.echo(f"inkling: {each.op} {each.name}: {each.status}", err=True)
    wrong = [each for each in found if each.status != "right"]
    if json:
        record = {"target": str(device), "name": device.name, "versions": _versions(), "ok": not wrong}
        typer.echo(json_module.dumps(record | {"checks": [each.to_dict() for each in found]}, indent=2))
    else:
        from rich.console import Console

        console = Console()
        console.print(_table(found))
        versions = ", ".join(f"{name} {version}" for name, version in _versions().items())
        outcome = f"{len(wrong)} of {len(found)} are wrong or fail" if wrong else f"all {len(found)} are right"
        console.print(f"{device}: {device.name}, {versions}: {outcome}.", highlight=False)
        for each in wrong:
            console.print(f"{each.op} {each.name}: {each.message or _excess(each)}", style="red", highlight=False)
    return 1 if wrong else 0


def _excess(finding: Finding) -> str:
    return (
        f"off by {finding.error:.3g}, more than {finding.tolerance:.3g}; force another: INKLING_IMPL={finding.op}=NAME"
    )


def _versions() -> dict[str, Any]:
    found = {"inkling-portable": _version("inkling-portable"), "torch": _version("torch"), "triton": _version("triton")}
    return {name: version for name, version in found.items() if version}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _table(found: list[Finding]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("operation", "by", "off by", "allowed", "s", "", "evidence"):
        table.add_column(heading, no_wrap=True)
    for each in found:
        table.add_row(
            " ".join(filter(None, (each.op, each.format))),
            Text(each.name, style="bold" if each.chosen else ""),
            "" if each.error is None else f"{each.error:.0e}",
            "" if each.tolerance is None else f"{each.tolerance:.0e}",
            f"{each.seconds:.1f}",
            Text(each.status, style="green" if each.status == "right" else "red"),
            each.evidence,
        )
    return table
