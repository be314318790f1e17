"""The house rules that a machine can check: import order, doors, sizes, names (ARCHITECTURE.md, "The house")."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path
from re import findall

import pytest

import cleave_dask

PACKAGE = "cleave_dask"
ROOT = Path(cleave_dask.__file__).parent

# A module imports from its own layer and from those before it, also inside functions and for type checking only.
BASE = ("_version", "errors", "config", "formatting", "resources")
LAYERS = (BASE, ("graph",), ("fleet",), ("planning",), ("runtime",), ("simulation",), ("views",), ("cli", "__main__"))

# Who may import a heavy dependency, and what for. A new line here is a design decision, not a fix.
DOORS: dict[str, dict[str, str]] = {
    "torch": {
        "graph/capture*.py": "trace the module's step",
        "graph/building.py": "builds modules, optimizers and batches from a recipe",
        "graph/losses.py": "joins a module and its criterion",
        "graph/torch_ops.py": "names and classifies ATen ops",
        "runtime/interpreter.py": "runs the ops between levels on the server",
        "runtime/kernels_torch.py": "multiplies tiles on devices that have torch",
        "runtime/logits_torch.py": "a head by vocabulary, on the server and on devices that have torch",
        "runtime/wire_torch.py": "tensors to frames and back, bfloat16 included",
        "runtime/server*.py": "keeps weights and optimizer state",
        "runtime/*trainer.py": "takes the user's module and optimizer",
        "runtime/optimizers.py": "runs any torch.optim optimizer in place",
        "runtime/export.py": "writes weights that other tools load",
        "views/scalars.py": "writes TensorBoard's files",
        "simulation/hollow_server.py": "a server whose tensors are on the meta device",
    },
    "transformers": {"graph/*": "architectures from a config; attention kept whole"},
    "distributed": {
        "runtime/*": "server, device, scheduler plugin, trainer",
        "simulation/*": "the local fleet is a Dask cluster",
        "cli/*": "connects to a scheduler, or starts one",
        "views/dashboard.py": "the page is served by Dask's own dashboard",
        "views/layout.py": "in the look of Dask's pages",
        "views/report.py": "in the look of Dask's pages",
    },
    "cryptography": {"runtime/certificates.py": "the authority, keys and certificates"},
    "zarr": {"runtime/zarr_files.py": "the files of the tile store"},
    "bokeh": {"views/*": "the dashboard page"},
}

MODULE_LINES = 400
FUNCTION_LINES = 50
LONG_ON_PURPOSE: frozenset[str] = frozenset()  # "runtime/server.py" or "runtime/server.py:Server.step", with a reason

HEAVY = ("torch", "transformers", "zarr", "bokeh")


@dataclass(frozen=True)
class Import:
    """One imported name, as if it had been written `import target`."""

    target: str
    line: int
    runs: bool  # False: only type checkers read it


@dataclass(frozen=True)
class Module:
    """A source file of the package."""

    path: Path

    @property
    def file(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def name(self) -> str:
        parts = [PACKAGE, *self.path.relative_to(ROOT).with_suffix("").parts]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @cached_property
    def imports(self) -> list[Import]:
        guards = [
            node for node in ast.walk(self.tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        ]
        quiet = {id(node) for guard in guards for child in guard.body for node in ast.walk(child)}
        return [
            Import(target, getattr(node, "lineno", 0), runs=id(node) not in quiet)
            for node in ast.walk(self.tree)
            for target in imported(node)
        ]


def imported(node: ast.AST) -> Iterator[str]:
    """Dotted names that a node imports: `import a.b`, `from a import b`, `import_module("a.b")`."""
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=str(module), names=names, level=0):
            yield from (f"{module}.{alias.name}" for alias in names)
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(module)), *_],
        ):
            yield module


MODULES = [Module(path) for path in sorted(ROOT.rglob("*.py"))]
BY_NAME = {module.name: module for module in MODULES}
INNER = [module for module in MODULES if module.name != PACKAGE]  # the package itself only re-exports


def own_module(target: str) -> str | None:
    """The module of this package that an import loads: `from cleave_dask import plan` loads planning.planner."""
    package, _, name = target.partition(".")
    if package != PACKAGE:
        return None
    if name in cleave_dask._LAZY:
        return cleave_dask._LAZY[name]
    while target not in BY_NAME and "." in target:
        target = target.rpartition(".")[0]
    return target


def layer(module: str) -> int:
    """Position in the import order; the package itself comes after everything."""
    parts = module.split(".")
    if len(parts) == 1:
        return len(LAYERS)
    for position, names in enumerate(LAYERS):
        if parts[1] in names:
            return position
    pytest.fail(f"{module} has no place in the import order: put it in a folder of ARCHITECTURE.md, 'The house'")


@pytest.mark.parametrize("module", INNER, ids=lambda module: module.file)
def test_imports_point_one_way(module: Module) -> None:
    here = layer(module.name)
    wrong = [
        f"{module.file}:{item.line} imports {own}"
        for item in module.imports
        if (own := own_module(item.target)) and layer(own) > here
    ]
    assert not wrong, f"move it down or make it an argument: {wrong}"


def test_modules_import_in_no_circle() -> None:
    edges = {
        module.name: {own for item in module.imports if item.runs and (own := own_module(item.target))} - {module.name}
        for module in INNER
    }
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        pytest.fail(f"imports go round: {' <- '.join(error.args[1])}")


def outside(target: str) -> str:
    """The third-party package behind an import; `dask.distributed` is another name of distributed."""
    return "distributed" if target.startswith("dask.distributed") else target.partition(".")[0]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.file)
def test_dependencies_enter_through_their_doors(module: Module) -> None:
    wrong = [
        f"{module.file}:{item.line} imports {item.target}"
        for item in module.imports
        if (doors := DOORS.get(outside(item.target))) and not any(fnmatch(module.file, door) for door in doors)
    ]
    assert not wrong, f"only the modules in DOORS may: {wrong}"


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Qualified name and length in lines of every function below a node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            assert child.end_lineno is not None
            yield prefix + child.name, child.end_lineno - child.lineno + 1
        inner = f"{prefix}{child.name}." if isinstance(child, ast.ClassDef | ast.FunctionDef) else prefix
        yield from functions(child, inner)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.file)
def test_modules_and_functions_stay_short(module: Module) -> None:
    sizes = [(module.file, len(module.source.splitlines()), MODULE_LINES)]
    sizes += [(f"{module.file}:{name}", lines, FUNCTION_LINES) for name, lines in functions(module.tree)]
    long = [
        f"{name}: {lines} lines, {limit} at most"
        for name, lines, limit in sizes
        if lines > limit and name not in LONG_ON_PURPOSE
    ]
    assert not long


def test_no_name_is_both_a_module_and_an_export() -> None:
    modules = {name.split(".")[1] for name in BY_NAME if "." in name}
    assert modules & set(cleave_dask.__all__) == set()


def test_lazy_exports_are_those_that_type_checkers_see() -> None:
    block = next(node for node in BY_NAME[PACKAGE].tree.body if isinstance(node, ast.If))
    typed = {target.rpartition(".")[2]: target.rpartition(".")[0] for node in block.body for target in imported(node)}
    assert typed == cleave_dask._LAZY
    assert set(cleave_dask._LAZY) <= set(cleave_dask.__all__)


@pytest.mark.parametrize("name", cleave_dask.__all__)
def test_export_exists(name: str) -> None:
    assert getattr(cleave_dask, name) is not None
    assert name in dir(cleave_dask)


def test_every_error_is_exported() -> None:
    errors = import_module(f"{PACKAGE}.errors")
    names = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert names <= set(cleave_dask.__all__)


def loaded_by(statement: str, packages: tuple[str, ...]) -> list[str]:
    """Which of the packages a fresh interpreter has loaded after a statement."""
    report = f"{statement}; import json, sys; print(json.dumps([p for p in {packages!r} if p in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    loaded: list[str] = json.loads(done.stdout)
    return loaded


@pytest.mark.parametrize("module", ["cleave_dask.runtime.device", "cleave_dask.cli"])
def test_a_device_imports_nothing_heavy(module: str) -> None:
    """Every `dask worker` loads the command line too: it is an entry point of Dask's."""
    assert loaded_by(f"import {module}", HEAVY) == []


def test_the_package_imports_nothing_heavy() -> None:
    assert loaded_by("import cleave_dask", (*HEAVY, "distributed", "dask")) == []


def test_every_export_is_in_the_reference() -> None:
    lines = (ROOT.parent / "docs" / "reference.md").read_text().splitlines()
    listed = {line.removeprefix("::: ") for line in lines if line.startswith(":::")}
    assert listed == {*(f"{module}.{name}" for name, module in cleave_dask._LAZY.items()), f"{PACKAGE}.errors"}


def test_every_command_is_in_the_documents() -> None:
    commands = import_module(f"{PACKAGE}.cli").cleave.commands
    page = (ROOT.parent / "docs" / "getting-started.md").read_text()
    assert [name for name in commands if f"`cleave {name}`" not in page] == []


@pytest.mark.parametrize("page", sorted((ROOT.parent / "docs").glob("*.md")), ids=lambda page: page.name)
def test_links_of_a_document_stay_among_the_documents(page: Path) -> None:
    """The site has nothing but docs/: name other files of the repository without a link."""
    links = [link.partition("#")[0] for link in findall(r"\]\(([^)\s]+)\)", page.read_text())]
    inside = [link for link in links if link and "://" not in link and not link.startswith("mailto:")]
    assert [link for link in inside if not (page.parent / link).is_file() or link.startswith("..")] == []
