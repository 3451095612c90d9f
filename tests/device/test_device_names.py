"""Every name of CuPy that ``mpiddp.device`` and ``tests.gpu`` use: in the fake, and in CuPy if installed."""

from __future__ import annotations

import ast
import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.faking import fake_gpu

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*ROOT.glob("mpiddp/device/*.py"), *ROOT.glob("tests/gpu/*.py")])
ASKED_FOR = {"cupy.cuda.runtime.driverGetVersion", "cupy.cuda.runtime.runtimeGetVersion"}
"""Looked for before use."""


def path_of(node: ast.AST | None, known: dict[str, str]) -> str | None:
    """Return the dotted name in CuPy of an expression; None for everything else."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = path_of(node.value, known)
        return owner and f"{owner}.{node.attr}"
    if isinstance(node, ast.Subscript):
        return "cupy" if ast.unparse(node) == "sys.modules['cupy']" else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return known.get(f"{node.func.id}()")
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
        name = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
        return name if isinstance(name, str) and name.split(".")[0] == "cupy" else None
    return None


def bindings(tree: ast.AST, known: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield names, and functions as ``name()``, that stand for something of CuPy in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for each in ast.walk(node):
                found = path_of(each.value, known) if isinstance(each, ast.Return) else None
                if found:
                    yield f"{node.name}()", found
        for target in node.targets if isinstance(node, ast.Assign) else ():
            both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            for name, value in zip(target.elts, node.value.elts, strict=True) if both else [(target, node.value)]:
                found = path_of(value, known)
                if found and isinstance(name, ast.Name):
                    yield name.id, found


def names(source: str) -> set[str]:
    """Return the dotted names of CuPy that a module uses."""
    tree = ast.parse(source)
    known = {"cupy": "cupy", "cupy()": "cupy"}
    for _ in range(3):  # what a name stands for may be told by another one
        known |= dict(bindings(tree, known))
    found = {path_of(node, known) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {name for name in found if name is not None}


def missing(cupy: Any, used: set[str]) -> list[str]:
    """Return what a module in the place of CuPy does not have."""
    lacking = []
    for name in sorted(used):
        found = cupy
        for part in name.split(".")[1:]:
            found = getattr(found, part, None)
        if found is None:
            lacking.append(name)
    return lacking


@pytest.fixture(scope="module")
def used() -> set[str]:
    return set().union(*(names(path.read_text()) for path in FILES))


def test_names_are_found() -> None:
    source = """
def _cuda():
    return importlib.import_module("cupy").cuda

def f(x):
    cupy, runtime = importlib.import_module("cupy"), _cuda().runtime
    pool = cupy.get_default_memory_pool()
    runtime.getDevice()
    return _cuda().Stream(non_blocking=True), x.device.id, sys.modules["cupy"].ndarray
"""
    expected = {"cupy", "cupy.cuda", "cupy.cuda.runtime", "cupy.cuda.runtime.getDevice", "cupy.cuda.Stream"}
    assert names(source) - {"cupy"} == expected - {"cupy"} | {"cupy.get_default_memory_pool", "cupy.ndarray"}


def test_the_fake_has_what_is_used(used: set[str]) -> None:
    assert {"cupy.cuda.runtime.memcpyAsync", "cupy.cuda.nccl.get_unique_id"} <= used
    with fake_gpu() as cupy:
        importlib.import_module("cupy.cuda.nccl")
        assert missing(cupy, used - ASKED_FOR) == []
        assert missing(cupy, {"cupy.cuda.runtime.memcpy"}) == ["cupy.cuda.runtime.memcpy"]


def test_cupy_has_what_is_used(used: set[str]) -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a library that is missing
        nccl = importlib.import_module("cupy.cuda.nccl")
    assert missing(cupy, {name for name in used if nccl.available or not name.startswith("cupy.cuda.nccl.")}) == []
