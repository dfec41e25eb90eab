"""What README and CONTRIBUTING promise is there: the table of devices, the commands, the files that they link to; and
its examples run.
"""

import re
import shlex
from pathlib import Path

import pytest
import typer

from inkling_portable.cli import app, main
from inkling_portable.commands import demo
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


def examples() -> list[list[str]]:
    """The `inkling` commands of both documents, in words."""
    split = (shlex.split(line, comments=True) for document in DOCUMENTS for line in commands(document))
    return [words[1:] for words in split if words and words[0].endswith("inkling")]


@pytest.mark.parametrize("words", examples(), ids=" ".join)
def test_examples_parse(words: list[str]) -> None:
    """Options exist and take such values; files and checkpoints need not."""
    command = typer.main.get_command(app).commands[words[0]]
    assert command.make_context(words[0], words[1:]).params


@pytest.mark.parametrize("words", [words for words in examples() if not {"PATH", "IN"} & set(words)], ids=" ".join)
def test_examples_that_name_no_checkpoint_run(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert capsys.readouterr().out


def test_python_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        code = compile(block, "README.md", "exec")
        if "openai" in code.co_names:
            continue  # asks a server: tests/vllm_plugin/test_serve.py has one
        exec(code, {})
        assert capsys.readouterr().out


def test_what_the_demo_prints_is_shown_as_it_prints_it() -> None:
    """The numbers are those of some run; the headings and the formats are those of the command."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"<!-- demo:begin -->\n(.*?)<!-- demo:end -->", text, re.DOTALL)
    (headings,) = [re.split(r" *┃ *", line)[1:-1] for line in shown.splitlines() if "format" in line]
    assert headings == ["format", *demo.headings(demo.DRAFTS)]
    assert [found[1] for line in shown.splitlines() if (found := re.match(r"│ (\w+) +│", line))] == list(demo.FORMATS)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_paths_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    linked = {target for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target}
    named = set(re.findall(r"`((?:inkling_portable|triton_kernels|rocm|tests|benchmarks|\.ci)/[\w./]*\w\.\w+)`", text))
    assert not {path for path in linked | named if not (ROOT / path).exists()}
