"""The public API has docstrings, and the examples of all docstrings give what they show."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import types

import api
import pytest

import mpiddp

MODULES = [
    module.name
    for module in pkgutil.walk_packages(mpiddp.__path__, "mpiddp.")
    if not module.name.startswith(("mpiddp.torch", "mpiddp.bench.with_torch")) and not module.name.endswith("__main__")
]
"""All but those that need torch; examples that need several ranks are marked to be skipped."""


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_show(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0


@pytest.mark.parametrize("name", api.ROOTS)
def test_public_functions_classes_and_methods_have_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    found = {each: getattr(module, each) for each in api.public_names(module)}
    classes = {each: value for each, value in found.items() if isinstance(value, type)}
    found |= {
        f"{each}.{method}": value
        for each, of_class in classes.items()
        for method, value in vars(of_class).items()
        if method[0] != "_" and isinstance(value, types.FunctionType | property | classmethod | staticmethod)
    }
    assert not [
        each
        for each, value in found.items()
        if isinstance(value, type | types.FunctionType | property) and not inspect.getdoc(value)
    ]
