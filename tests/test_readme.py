"""What README and CONTRIBUTING promise is there: the table of devices, the commands, the files that they link to."""

import re
from pathlib import Path

import pytest

from inkling_portable.cli import app
from inkling_portable.dispatch import support_table

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "CONTRIBUTING.md")


def commands(document: str) -> list[str]:
    """The lines of a document's shell examples."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]


def test_support_table_is_the_dispatch_tables() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (between,) = re.findall(r"<!-- support:begin -->\n(.*?)<!-- support:end -->", text, re.DOTALL)
    assert between.strip() == support_table().strip(), "run `make readme`"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_exist(document: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"\bmake ([a-z-]+)\b", "\n".join(commands(document)))) | set(
        re.findall(r"`make ([a-z-]+)[ `]", (ROOT / document).read_text(encoding="utf-8"))
    )
    assert named
    assert not {target for target in named if not re.search(rf"^{target}:", makefile, re.MULTILINE)}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_subcommands_exist(document: str) -> None:
    known = {entry.name or getattr(entry.callback, "__name__", "") for entry in app.registered_commands}
    named = {found[1] for line in commands(document) if (found := re.match(r"(?:\.venv/bin/)?inkling ([a-z]+)", line))}
    assert named
    assert named <= known


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_paths_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    linked = {target for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target}
    named = set(re.findall(r"`((?:inkling_portable|triton_kernels|rocm|tests|benchmarks|\.ci)/[\w./]*\w\.\w+)`", text))
    assert not {path for path in linked | named if not (ROOT / path).exists()}
