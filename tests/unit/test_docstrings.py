"""Examples in docstrings give what they show."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import mpiddp

PACKAGES = ("autograd", "data", "nn", "optim", "parallel", "training")
"""Packages whose examples run without MPI; examples that need several ranks are marked to be skipped."""

MODULES = [
    module.name
    for package in PACKAGES
    for module in pkgutil.walk_packages([f"{mpiddp.__path__[0]}/{package}"], f"mpiddp.{package}.")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_show(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0
