"""The command line `inkling`: its commands, and how every error becomes a sentence and an exit code.

Exit codes: 0, or what a command returns; 2 for what the user can put right (an argument, a path, a model, a device);
1 for a run that failed on the way (a full disk, no memory, an implementation that does not load); 130 on ctrl-C. Either
way one sentence on stderr and no traceback. A bug is neither, and keeps its traceback.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from inkling_portable.commands.check import check
from inkling_portable.commands.demo import demo
from inkling_portable.commands.explain import explain
from inkling_portable.commands.generate import generate
from inkling_portable.commands.plan import plan
from inkling_portable.commands.quantize import quantize
from inkling_portable.commands.recipe import recipe

#: Import roots whose ValueError or RuntimeError is a message to the user.
OUR_PACKAGES = ("inkling_portable", "inkling_kernels", "inkling_rocm")

# typer moved click inside itself; what it raises on wrong usage is the parent of BadParameter before and after.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="inkling",
    help="Run the Inkling language model on NVIDIA and AMD GPUs and on CPUs.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(demo)
app.command()(explain)
app.command()(check)
app.command()(plan)
app.command()(recipe)
app.command()(quantize)


def _version(asked: bool) -> None:
    if asked:
        from inkling_portable import __version__

        typer.echo(f"inkling {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(args: Sequence[str] | None = None) -> int:
    """Run the command that `args` (default: the process's) name and return its exit code. Prints errors to stderr."""
    try:
        result = app(args=args, prog_name="inkling", standalone_mode=False)
        # Output still in the buffer would fail at exit, out of reach, where a reader such as `head` has gone.
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        result = 130
    except BrokenPipeError:
        # Python flushes stdout once more at exit: into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (_UsageError, MemoryError, ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        verdict = judge(error)
        if verdict is None:
            raise
        result, sentence = verdict
        typer.echo(f"inkling: {sentence}", err=True)
    if result == 130:
        typer.echo("inkling: interrupted", err=True)
    return int(result or 0)


def judge(error: BaseException) -> tuple[int, str] | None:
    """The exit code and the sentence for `error`, or None where it is a bug, whose traceback is worth more.

    A ValueError, TypeError or RuntimeError counts as a message to the user when one of our packages defined its class
    or raised it: from anywhere else it means that we called something wrongly.
    """
    text = " ".join(str(error).split())
    if isinstance(error, _UsageError):
        return 2, _usage(error)
    if isinstance(error, MemoryError) or _is_torch_out_of_memory(error):
        return 1, f"out of memory: {text or 'the system refused an allocation'}"
    if _is_ours(error):
        if isinstance(error, (ValueError, TypeError)):
            return 2, text
        if isinstance(error, RuntimeError):
            return 1, text
    if isinstance(error, OSError):
        failed = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
        return 1 if failed else 2, f"{error.filename}: {error.strerror}" if error.filename and error.strerror else text
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.partition(".")[0] not in OUR_PACKAGES:
        return 1, f"this needs the Python package {error.name.partition('.')[0]!r}, which is not installed"
    return None


def _is_ours(error: BaseException) -> bool:
    raised_in = ""
    trace = error.__traceback__
    while trace is not None:
        raised_in = trace.tb_frame.f_globals.get("__name__", "")
        trace = trace.tb_next
    return any(name.partition(".")[0] in OUR_PACKAGES for name in (type(error).__module__, raised_in))


def _is_torch_out_of_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def _usage(error: BaseException) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "inkling"
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    return f"{' '.join(message.split()).rstrip('.')}; see `{command} --help`"
