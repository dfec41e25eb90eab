"""Imports go one way, read from the syntax trees: every import counts, inside functions and for type checking too.

inkling_kernels <- inkling_rocm <- dispatch, ops <- the model and its friends <- engine <- cli, commands, vllm_plugin
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"inkling_kernels": "triton_kernels", "inkling_rocm": "rocm", "inkling_portable": "inkling_portable"}

KERNELS, ROCM, DISPATCH, MODEL, ENGINE, FRONT = range(6)
# A module of inkling_portable that is not named here, nor lies under a package that is, belongs to MODEL.
LAYERS = {
    "inkling_kernels": KERNELS,
    "inkling_rocm": ROCM,
    "inkling_portable.dispatch": DISPATCH,
    "inkling_portable.facts": DISPATCH,
    "inkling_portable.ops": DISPATCH,
    "inkling_portable.engine": ENGINE,
    "inkling_portable.llm": ENGINE,
    "inkling_portable.plan": ENGINE,
    "inkling_portable.recipe": ENGINE,
    "inkling_portable.selfcheck": ENGINE,
    "inkling_portable.cli": FRONT,
    "inkling_portable.commands": FRONT,
    "inkling_portable.vllm_plugin": FRONT,
}

# What each package may import besides the standard library and the layers below it.
OUTSIDE = {
    "inkling_kernels": {"torch", "triton"},
    "inkling_rocm": {"torch", "triton", "aiter"},
    "inkling_portable": {
        *("huggingface_hub", "jinja2", "numba", "numpy", "PIL", "pydantic", "rich", "safetensors", "soundfile", "soxr"),
        *("tokenizers", "torch", "transformers", "triton", "typer", "vllm"),
    },
}

# What tells one device from another. Streams, graphs and synchronisation run a device; they do not ask what it is.
DRIVER_QUESTIONS = {
    "torch.accelerator",
    "torch.cuda.device_count",
    "torch.cuda.get_arch_list",
    "torch.cuda.get_device_capability",
    "torch.cuda.get_device_name",
    "torch.cuda.get_device_properties",
    "torch.cuda.is_available",
    "torch.cuda.is_bf16_supported",
    "torch.version.cuda",
    "torch.version.hip",
    "triton.runtime.driver",
}


@dataclass(frozen=True)
class Import:
    """One imported name: who imports it, where, and whether importing `importer` runs it."""

    importer: str
    place: str
    module: str
    name: str | None
    at_import_time: bool

    @property
    def target(self) -> str:
        """The module that the statement reaches: `from package import module` means the module."""
        full = f"{self.module}.{self.name}"
        return full if self.name and full in modules() else self.module


@cache
def modules() -> dict[str, Path]:
    """Import name -> file, of every module of the three packages."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *parts]).removesuffix(".__init__")] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def runs_on_import(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that importing the module executes: not function bodies, nor what only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from runs_on_import(child)


@cache
def imports() -> tuple[Import, ...]:
    found = []
    for importer, path in modules().items():
        package = importer if path.name == "__init__.py" else importer.rpartition(".")[0]
        on_import = set(runs_on_import(tree(path)))
        for node in ast.walk(tree(path)):
            at_import_time = node in on_import
            place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                found += [Import(importer, place, alias.name, None, at_import_time) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
                module = ".".join([*base, *([node.module] if node.module else [])])
                found += [Import(importer, place, module, alias.name, at_import_time) for alias in node.names]
    return tuple(found)


def layer(module: str) -> int:
    """The layer of a module of ours: that of the longest name in LAYERS that it is or lies under."""
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((LAYERS[name] for name in names if name in LAYERS), MODEL)


def root_of(module: str) -> str:
    return module.partition(".")[0]


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute access on a plain name, else the empty string."""
    if isinstance(node, ast.Name):
        return node.id
    base = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{base}.{node.attr}" if base and isinstance(node, ast.Attribute) else ""


def within(name: str, parents: set[str]) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def test_the_reader_sees_what_it_should() -> None:
    """Guards the tests below against passing on nothing: imports known to be there are among those found."""
    assert {"inkling_kernels", "inkling_kernels.target", "inkling_portable.dispatch"} <= set(modules())
    reached = {(entry.importer, entry.target) for entry in imports()}
    assert ("inkling_portable.dispatch", "inkling_kernels.target") in reached
    assert ("inkling_portable.config", "inkling_portable.config_spelling") in reached


def test_imports_go_one_way() -> None:
    # The package's own __init__ may name any layer: the test after this one holds that it loads none.
    ours = [entry for entry in imports() if root_of(entry.module) in FOLDERS and entry.importer != "inkling_portable"]
    wrong = [
        f"{entry.place}: {entry.importer} imports {entry.target}, of a layer above its own"
        for entry in ours
        if entry.target != "inkling_portable" and layer(entry.target) > layer(entry.importer)
    ]
    assert not wrong, "\n".join([*wrong, "a new module of engine or above is entered in LAYERS"])


def test_importing_a_package_loads_the_standard_library_alone() -> None:
    for package in FOLDERS:
        loaded = {root_of(entry.target) for entry in imports() if entry.importer == package and entry.at_import_time}
        assert loaded <= sys.stdlib_module_names, f"{package}/__init__.py imports {loaded - sys.stdlib_module_names}"


def test_unknown_names_of_our_own_are_not_imported() -> None:
    """Neither folder name may be used, and an import of ours must lead to a module that exists."""
    assert not [entry.place for entry in imports() if root_of(entry.module) in {"triton_kernels", "rocm", "tests"}]
    ours = [entry for entry in imports() if root_of(entry.module) in FOLDERS]
    assert not [
        f"{entry.place}: no module {entry.module}" for entry in ours if entry.module not in {*modules(), *FOLDERS}
    ]


@pytest.mark.parametrize("package", FOLDERS)
def test_other_distributions_are_imported_where_they_may_be(package: str) -> None:
    allowed = OUTSIDE[package] | set(FOLDERS) | sys.stdlib_module_names
    mine = [entry for entry in imports() if root_of(entry.importer) == package]
    wrong = [f"{entry.place}: {entry.module}" for entry in mine if root_of(entry.module) not in allowed]
    assert not wrong, "\n".join(wrong)


def test_vllm_is_imported_by_the_plugin_alone() -> None:
    users = [entry for entry in imports() if root_of(entry.module) == "vllm"]
    wrong = [entry.place for entry in users if not within(entry.importer, {"inkling_portable.vllm_plugin"})]
    assert not wrong, "\n".join(wrong)


def test_transformers_is_imported_only_when_used() -> None:
    """It takes seconds to import, and most of what this project does needs none of it."""
    wrong = [entry.place for entry in imports() if root_of(entry.module) == "transformers" and entry.at_import_time]
    assert not wrong, "\n".join(wrong)


def test_command_line_imports_nothing_heavy() -> None:
    heavy = (
        "torch",
        "triton",
        "transformers",
        "vllm",
        "numba",
        "numpy",
        "safetensors",
        "tokenizers",
        "huggingface_hub",
        "PIL",
    )
    code = f"import inkling_portable.cli, sys; print(*(set({heavy!r}) & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert not ran.stdout.split(), f"importing inkling_portable.cli loads {ran.stdout}"


def test_only_target_asks_the_driver() -> None:
    wrong = []
    for name, path in modules().items():
        if name == "inkling_kernels.target":
            continue
        asked = {(dotted(node), node.lineno) for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
        wrong += [f"{path.relative_to(ROOT)}:{line}: {what}" for what, line in asked if within(what, DRIVER_QUESTIONS)]
    questions = {question.rpartition(".")[::2] for question in DRIVER_QUESTIONS}
    named = [entry for entry in imports() if (entry.module, entry.name) in questions]
    wrong += [
        f"{entry.place}: {entry.module}.{entry.name}" for entry in named if entry.importer != "inkling_kernels.target"
    ]
    assert not wrong, "\n".join(["take a Target instead (inkling_kernels.target.current_target):", *sorted(wrong)])


@pytest.mark.parametrize("package", ["inkling_kernels", "inkling_rocm", "inkling_portable.cpu"])
def test_every_function_but_a_kernel_is_annotated(package: str) -> None:
    """mypy is told to let kernels pass, whose parameters have no Python types; this holds the others to it."""
    wrong, marks = [], {"jit", "helper", "kernel", "overload"}
    for name, path in modules().items():
        if not within(name, {package}):
            continue
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.FunctionDef):
                continue
            if any(word in ast.unparse(mark) for mark in node.decorator_list for word in marks):
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            bare = [
                argument.arg
                for argument in arguments
                if not argument.annotation and argument.arg not in {"self", "cls"}
            ]
            if bare or node.returns is None:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} ({', '.join(bare) or 'return'})")
    assert not wrong, "\n".join(wrong)
