"""The package's layers, kept true: who may import whom, and what every module owes its reader.

The rules are functions of sources: the tests also show them sources to refuse. Ruff holds which modules may import
CuPy, mpi4py and torch, and which may import inside of a function (pyproject.toml).
"""

import ast
import functools
import importlib.util
import subprocess
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

LAYERS = (
    (
        *("arguments", "cores", "errors", "launchers", "moved", "nested", "rank_process", "settings", "serialization"),
        *("typing", "device"),
    ),
    ("mpi",),
    ("shm",),
    ("faults",),
    ("algorithms",),
    ("distributed",),
    ("autograd", "nn", "optim"),
    ("parallel", "data", "elastic"),
    ("training",),
    ("", "bench", "examples", "cli", "__main__", "torch"),
)
"""The parts of mpiddp, lowest first; "" is ``mpiddp/__init__.py``, which sees everything and is for users only."""

LEARNING = next(layer for layer, parts in enumerate(LAYERS) if "autograd" in parts)
NARROWER = {"autograd": {0}, "nn": {0, LEARNING}, "optim": {0, LEARNING}}
"""Parts that may import fewer layers than those below: learning knows nothing of MPI."""
WIDER = ("mpiddp.nn.collectives",)
"""Their modules that may import all layers below: collectives with gradients know both."""

TOP_LEVEL = {"mpiddp", "slurm", "tests", "README.md", "LICENSE", "pyproject.toml"}

Sources = dict[str, str]
"""Module name to source text; a package has the name of its folder."""


@functools.cache
def read_package() -> tuple[Sources, set[str]]:
    """Return the sources of the imported mpiddp, installed or not, and which of them are packages."""
    spec = importlib.util.find_spec("mpiddp")
    assert spec is not None and spec.submodule_search_locations is not None
    root = Path(next(iter(spec.submodule_search_locations)))
    sources, packages = {}, set()
    for file in sorted(root.rglob("*.py")):
        parts = ("mpiddp", *file.relative_to(root).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts = parts[:-1]
            packages.add(".".join(parts))
        sources[".".join(parts)] = file.read_text()
    return sources, packages


@functools.cache
def imports(module: str, source: str, names: frozenset[str], packages: frozenset[str]) -> list[tuple[str, int]]:
    """Return what is imported and in which line; ``names`` tells a submodule from a name in a package."""
    found: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                found += [(alias.name, node.lineno) for alias in node.names]
            case ast.ImportFrom():
                name = "." * node.level + (node.module or "")
                base = importlib.util.resolve_name(name, module if module in packages else module.rpartition(".")[0])
                inner = [f"{base}.{alias.name}" for alias in node.names]
                found += [(each if each in names else base, node.lineno) for each in inner]
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
                found.append((name, node.lineno))
    return found


def _part(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def _layer(part: str) -> int | None:
    return next((layer for layer, parts in enumerate(LAYERS) if part in parts), None)


def reaching_up(sources: Sources, packages: set[str]) -> Iterator[str]:
    """Yield imports of a layer that is not below (or beside) the importer's."""
    for module, source in sources.items():
        own = _layer(_part(module))
        if own is None:
            yield f"{module} is in no layer: add it to the table in design and test, or put it where it belongs"
            continue
        allowed = set(range(own + 1))
        if module not in WIDER:
            allowed = NARROWER.get(_part(module), allowed)
        for target, line in imports(module, source, frozenset(sources), frozenset(packages)):
            if target.split(".")[0] != "mpiddp" or _part(target) == _part(module):
                continue
            layer = _layer(_part(target))
            if layer not in allowed:
                yield f"{module}:{line} (layer {own}) imports {target} (layer {layer})"


def cycles(sources: Sources, packages: set[str]) -> Iterator[str]:
    """Yield circles of imports, between modules and between parts.

    An import for a type checker, or inside a function, closes a circle as well: whoever reads one module has to know
    the other.
    """
    modules: dict[str, set[str]] = {module: set() for module in sources}
    parts: dict[str, set[str]] = {f"mpiddp.{_part(module)}": set() for module in sources}
    for module, source in sources.items():
        for target, _ in imports(module, source, frozenset(sources), frozenset(packages)):
            if target in sources and target != module:
                modules[module].add(target)
                if _part(target) != _part(module):
                    parts[f"mpiddp.{_part(module)}"].add(f"mpiddp.{_part(target)}")
    for graph in (modules, parts):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            yield f"a circle of imports: {' '.join(error.args[1])}"


RULES = [reaching_up, cycles]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_rule(rule):
    sources, packages = read_package()
    assert len(sources) > 100 and len(packages) > 10 and list(rule(sources, packages)) == []


FORMS = ("from {} import {}", "import importlib\nx = importlib.import_module('{}.{}')")
REACHING = {
    "mpiddp.mpi.work": ("mpiddp.parallel", "ddp"),
    "mpiddp.shm.eager": ("mpiddp.faults", "calls"),
    "mpiddp.nn.linear": ("mpiddp.distributed", "groups"),
    "mpiddp.nn.collectives": ("mpiddp.parallel", "ddp"),
}
BROKEN = {
    "up, relative": (reaching_up, {"mpiddp.mpi.work": "from ..distributed import state"}),
    "no layer": (reaching_up, {"mpiddp.utils": ""}),
    "cycle": (cycles, {"mpiddp.mpi.a": "from . import b", "mpiddp.mpi.b": "from mpiddp.mpi.a import x"}),
    "cycle through a package": (cycles, {"mpiddp.mpi": "from .a import x", "mpiddp.mpi.a": "from mpiddp.mpi import y"}),
    "cycle of parts": (
        cycles,
        {"mpiddp.nn.a": "from mpiddp.optim import b", "mpiddp.optim": "", "mpiddp.optim.b": "import mpiddp.nn"}
        | {"mpiddp.nn": ""},
    ),
    **{
        f"{module} {form}": (reaching_up, {module: form.format(*place)})
        for module, place in REACHING.items()
        for form in FORMS
    },
}


@pytest.mark.parametrize("name", BROKEN)
def test_rule_refuses(name):
    rule, sources = BROKEN[name]
    assert list(rule(sources, {"mpiddp", "mpiddp.mpi", "mpiddp.nn"}))


def test_top_level_of_the_repository():
    # Tracked files only: whoever follows the README has a train.py beside them.
    git = ["git", "-C", str(Path(__file__).parents[1]), "ls-files"]
    listed = subprocess.run(git, capture_output=True, text=True, check=False).stdout.splitlines()
    if not listed:
        pytest.skip("no checkout, or no git")
    assert {name for line in listed if not (name := Path(line).parts[0]).startswith(".")} <= TOP_LEVEL


NOT_OF_A_MODULE = {
    "test_api": "the public names of all modules",
    "test_architecture": "the sources of all modules",
    "test_count": "tests.count",
    "test_docstrings": "the docstrings of all modules",
    "test_import": "what an import of mpiddp starts",
    "test_documents_jobs": "the documents",
    "test_harness_jobs": "tests.harness",
    "test_hosts_jobs": "jobs on several hosts",
    "test_slurm_jobs": "the batch scripts in a Slurm",
    "test_scale": "the work of one rank of many, in all modules",
}
"""Files of tests at the top, and what they test."""
IN_JOBS = ("with_torch", "gpu", "measure")
"""Folders whose files are named after what a job does."""
WITHOUT_TESTS = 83
"""Modules that are tested in the files of others, at most. A commit that needs more raises this, and says why."""


def test_tests_mirror_the_package():
    """The tests of mpiddp/a/b.py are in tests/a/test_b.py and test_b_*.py, those of all of mpiddp/a in test_a*.py."""
    here = Path(__file__).parent
    sources, packages = read_package()
    modules = {name.partition(".")[2] for name in sources.keys() - packages if not name.endswith("__main__")}
    tested = set()
    for file in here.rglob("test_*.py"):
        path = file.relative_to(here)
        if path.parts[0] in IN_JOBS or path.stem in NOT_OF_A_MODULE:
            continue
        words = path.stem.split("_")[1:]
        names = [".".join((*path.parent.parts, "_".join(words[:count]))) for count in range(len(words), 0, -1)]
        of_module = next((name for name in names if name in modules), None)
        of_folder = words[0] == path.parent.name or not packages.isdisjoint(f"mpiddp.{name}" for name in names)
        assert of_module or of_folder, f"tests/{path} is named after no module of mpiddp/{path.parent}"
        tested.add(of_module)
    without = sorted(modules - tested)
    assert len(without) == WITHOUT_TESTS, f"a new module needs a file of tests with its name: {without}"
