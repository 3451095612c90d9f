"""The package's layers, kept true: who may import whom, and what every module owes its reader.

The rules are functions of sources: the tests also show them sources to refuse.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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

GUARDED = {
    "cupy": ("mpiddp.device",),
    "mpi4py": (
        "mpiddp.mpi.lazy",
        "mpiddp.mpi.finalize",
        "mpiddp.bench",
        "mpiddp.examples.heat",
        "mpiddp.examples.solver",
    ),
    "torch": ("mpiddp.torch", "mpiddp.bench"),
}
"""Libraries that may be touched in one place only, by an import or by a look-up of the module."""

LAZY = {
    "mpiddp": "a name at the top level brings its part in when it is first used",
    "mpiddp.device.*": "CuPy takes seconds, ml_dtypes is an extra: imported when they are asked for",
    "mpiddp.mpi.lazy": "MPI starts with the first use of it, not with the import of mpiddp",
    "mpiddp.cli": "the command line reads the configuration before NumPy, and with it BLAS, is there",
    "mpiddp.training.user_code": "a module that the user names, such as that of a model of one's own",
    "mpiddp.training.metrics_files": "tensorboard is an extra and takes most of a second",
    "mpiddp.torch": "`import torch` loads it to find the backend, and shall not wait for the rest",
    "mpiddp.torch.backend": "as mpiddp.torch",
    "mpiddp.torch.rendezvous": "as mpiddp.torch",
    "mpiddp.bench.*": "the command line reads the options before NumPy is there; torch and matplotlib are extras",
}
"""Modules that may import inside a function (``.*``: all of a package), and why."""

TOP_LEVEL = {"mpiddp", "slurm", "tests", "README.md", "LICENSE", "pyproject.toml"}

Sources = dict[str, str]
"""Module name to source text; a package has the name of its folder."""


@dataclass(frozen=True)
class Import:
    target: str
    line: int
    typing_only: bool
    in_function: bool
    way: Literal["statement", "call", "look-up"]
    """A call imports too (``import_module``); a look-up only asks (``sys.modules``, ``find_spec``)."""


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
def imports(module: str, source: str, names: frozenset[str], packages: frozenset[str]) -> list[Import]:
    """Return imports; ``names`` tells a submodule from a name in a package."""
    found: list[Import] = []

    def visit(node: ast.AST, typing_only: bool, in_function: bool) -> None:
        def add(target: str, way: Literal["statement", "call", "look-up"] = "statement") -> None:
            found.append(Import(target, node.lineno, typing_only, in_function, way))

        match node:
            case ast.Import():
                for alias in node.names:
                    add(alias.name)
            case ast.ImportFrom():
                base = _absolute(node, module, module in packages)
                for alias in node.names:
                    inner = f"{base}.{alias.name}"
                    add(inner if inner in names else base)
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module" | "find_spec" as function)
                | ast.Attribute(attr="import_module" | "find_spec" as function),
                args=[first, *_],
            ):
                # A computed name is unknown, but it is an import all the same.
                target = first.value if isinstance(first, ast.Constant) else ""
                add(str(target), "look-up" if function == "find_spec" else "call")
            case (
                ast.Call(func=ast.Attribute(value=modules), args=[ast.Constant(value=str(name)), *_])
                | ast.Subscript(value=modules, slice=ast.Constant(value=str(name)))
                | ast.Compare(left=ast.Constant(value=str(name)), comparators=[modules])
            ) if ast.unparse(modules) in ("sys.modules", "modules"):
                add(name, "look-up")
            case ast.If() if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                for child in node.body:
                    visit(child, True, in_function)
                for child in node.orelse:
                    visit(child, typing_only, in_function)
                return
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, typing_only, inside)

    visit(ast.parse(source), False, False)
    return found


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        assert node.module is not None
        return node.module
    parts = module.split(".")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, node.module] if node.module else base)


def _part(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def _layer(part: str) -> int | None:
    return next((layer for layer, parts in enumerate(LAYERS) if part in parts), None)


def _inside(module: str, places: tuple[str, ...]) -> bool:
    return any(module == place or module.startswith(place + ".") for place in places)


def reaching_up(sources: Sources, packages: set[str]) -> Iterator[str]:
    """Yield imports of a layer that is not below (or beside) the importer's."""
    for module, source in sources.items():
        own = _layer(_part(module))
        if own is None:
            yield f"{module} is in no layer: add it to the table in design and test, or put it where it belongs"
            continue
        allowed = set(range(own + 1))
        if not _inside(module, WIDER):
            allowed = NARROWER.get(_part(module), allowed)
        for found in imports(module, source, frozenset(sources), frozenset(packages)):
            if found.target.split(".")[0] != "mpiddp" or _part(found.target) == _part(module):
                continue
            layer = _layer(_part(found.target))
            if layer not in allowed:
                yield f"{module}:{found.line} (layer {own}) imports {found.target} (layer {layer})"


def cycles(sources: Sources, packages: set[str]) -> Iterator[str]:
    """Yield circles of imports, between modules and between parts.

    An import for a type checker, or inside a function, closes a circle as well: whoever reads one module has to know
    the other.
    """
    modules: dict[str, set[str]] = {module: set() for module in sources}
    parts: dict[str, set[str]] = {f"mpiddp.{_part(module)}": set() for module in sources}
    for module, source in sources.items():
        for found in imports(module, source, frozenset(sources), frozenset(packages)):
            if found.target in sources and found.target != module:
                modules[module].add(found.target)
                if _part(found.target) != _part(module):
                    parts[f"mpiddp.{_part(module)}"].add(f"mpiddp.{_part(found.target)}")
    for graph in (modules, parts):
        for circle in _circles(graph):
            yield f"{circle[0]} is in an import circle of {len(circle)}: {' '.join(circle)}"


def _circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of nodes that reach each other, sorted."""

    def reached(node: str) -> set[str]:
        found, ahead = set[str](), [node]
        while ahead:
            following = graph[ahead.pop()] - found
            found |= following
            ahead += following
        return found

    reach = {node: reached(node) for node in graph}
    circles = {frozenset(other for other in reach[node] if node in reach[other]) for node in graph}
    return sorted(sorted(circle) for circle in circles if circle)


def unguarded(sources: Sources, packages: set[str]) -> Iterator[str]:
    for module, source in sources.items():
        for found in imports(module, source, frozenset(sources), frozenset(packages)):
            library = found.target.split(".")[0]
            if library in GUARDED and not _inside(module, GUARDED[library]):
                yield f"{module}:{found.line} uses {library}, which belongs in {' and '.join(GUARDED[library])}"


def hidden(sources: Sources, packages: set[str]) -> Iterator[str]:
    for module, source in sources.items():
        for found in imports(module, source, frozenset(sources), frozenset(packages)):
            if found.in_function and found.way != "look-up" and not _is_lazy(module):
                yield f"{module}:{found.line} imports {found.target or 'something'} inside a function"


def _is_lazy(module: str) -> bool:
    return module in LAZY or _inside(module, tuple(place.removesuffix(".*") for place in LAZY if place.endswith(".*")))


RULES = [reaching_up, cycles, unguarded, hidden]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_rule(rule):
    assert list(rule(*read_package())) == []


def test_the_package_is_what_is_read():
    sources, packages = read_package()
    assert len(sources) > 100 and len(packages) > 10


FORMS = (
    "import {}.{} as x",
    "from {} import {}",
    "def f():\n    from {} import {}",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from {} import {}",
    "import importlib\nx = importlib.import_module('{}.{}')",
    "import sys\nx = sys.modules.get('{}.{}')",
    "import sys\nx = '{}.{}' in sys.modules",
    "import sys\nx = sys.modules['{}.{}']",
)
"""Ways to reach a module, which count alike."""
REACHING = {
    "mpiddp.mpi.work": (reaching_up, "mpiddp.parallel", "ddp"),
    "mpiddp.parallel.ddp": (reaching_up, "mpiddp", "get_rank"),
    "mpiddp.shm.eager": (reaching_up, "mpiddp.faults", "calls"),
    "mpiddp.training.trainer": (reaching_up, "mpiddp.torch", "ddp"),
    "mpiddp.nn.linear": (reaching_up, "mpiddp.distributed", "groups"),
    "mpiddp.nn.collectives": (reaching_up, "mpiddp.parallel", "ddp"),
    "mpiddp.autograd.tensor": (reaching_up, "mpiddp.nn", "module"),
    "mpiddp.nn.conv": (unguarded, "cupy", "cuda"),
    "mpiddp.mpi": (unguarded, "mpi4py", "MPI"),
    "mpiddp.data.loader": (unguarded, "torch", "utils"),
}
BROKEN = {
    "up, relative": (reaching_up, {"mpiddp.mpi.work": "from ..distributed import state"}),
    "no layer": (reaching_up, {"mpiddp.utils": ""}),
    "cycle": (cycles, {"mpiddp.mpi.a": "from . import b", "mpiddp.mpi.b": "from mpiddp.mpi.a import x"}),
    "cycle for types": (
        cycles,
        {"mpiddp.mpi.a": FORMS[3].format("mpiddp.mpi", "b"), "mpiddp.mpi.b": "from .a import x"},
    ),
    "cycle through a function": (
        cycles,
        {"mpiddp.mpi.a": "def f():\n    from . import b", "mpiddp.mpi.b": "import mpiddp.mpi.a"},
    ),
    "cycle through a package": (cycles, {"mpiddp.mpi": "from .a import x", "mpiddp.mpi.a": "from mpiddp.mpi import y"}),
    "cycle of parts": (
        cycles,
        {
            "mpiddp.nn.a": "from mpiddp.optim.a import x",
            "mpiddp.optim.a": "",
            "mpiddp.optim.b": "import mpiddp.nn.c",
            "mpiddp.nn.c": "",
        },
    ),
    "hidden": (hidden, {"mpiddp.nn.linear": "class A:\n    def f(self):\n        from . import functional"}),
    "hidden, computed": (hidden, {"mpiddp.nn.linear": "import importlib\ndef f(x):\n    importlib.import_module(x)"}),
    "hidden, beside a lazy package": (hidden, {"mpiddp.training.trainer": "def f():\n    import mpiddp.nn"}),
    **{
        f"{module} {form}": (rule, {module: form.format(package, name)})
        for module, (rule, package, name) in REACHING.items()
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
    "test_slurm_train_jobs": "a batch script without Slurm",
    "test_scale": "the work of one rank of many, in all modules",
}
"""Files of tests at the top, and what they test."""
IN_JOBS = ("with_torch", "gpu", "measure")
"""Folders whose files are named after what a job does."""
WITHOUT_TESTS = {
    "": "errors nested typing",
    "algorithms": ("exchange fallback handshake native one_shot peer_access ring short tags tree two_shot"),
    "algorithms/gpu": "nccl pointers ring staged staged_ring table",
    "autograd": "arithmetic conversion product reduction shaping",
    "bench": "compare contenders ddp job sweep timing with_torch",
    "device": "conversion namespace packing pinned place transfer",
    "distributed": "parting",
    "examples": ("batches collectives elastic gradients hello messages model_parallel printing sgd"),
    "faults": "abort activity job marker monitor neighbour this_job uncaught",
    "mpi": "child_processes finalize link p2p_device requests world",
    "nn": "activation linear parameter pooling shaping state window",
    "optim": "adam sgd",
    "parallel": "wrapper",
    "shm": "cma scratch ",
    "torch": (
        "arrays backend by_device cuda ddp default dispatch errors names operations options process_group rendezvous "
        "store torch_backend work"
    ),
    "training": "ranks recovery train_step",
}
"""Modules by folder, tested in the files of other modules; the list may only get shorter."""


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
    listed = {
        f"{folder.replace('/', '.')}.{name}".lstrip(".")
        for folder, names in WITHOUT_TESTS.items()
        for name in names.split()
    }
    without = modules - tested
    assert sorted(without - listed) == [], "a module needs a file of tests with its name"
    assert sorted(listed - without) == [], "these have their tests now, or are gone: take them off the list"
