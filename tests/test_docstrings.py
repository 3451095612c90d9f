"""The public API has docstrings, public calls say their arguments, and all examples give what they show."""

import doctest
import importlib
import inspect
import pkgutil
import re
import types

import api
import numpy as np
import pytest

import mpiddp as dist
from mpiddp import distributed

ON_RANKS = [
    *("mpiddp.distributed", "mpiddp.mpi.work"),
    *(module.name for module in pkgutil.iter_modules(distributed.__path__, "mpiddp.distributed.")),
]
MODULES = [
    module.name
    for module in pkgutil.walk_packages(dist.__path__, "mpiddp.")
    if not module.name.startswith(("mpiddp.torch", "mpiddp.bench.with_torch"))  # need torch
    and not module.name.endswith("__main__")
    and module.name not in ON_RANKS
]
CALLS = [name for name in distributed.__all__ if isinstance(getattr(distributed, name), types.FunctionType)]


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_show(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ON_RANKS)
def test_examples_give_what_they_show_on_two_ranks(name: str) -> None:
    before = distributed.groups.doomed()
    names = {"dist": dist, "np": np}
    result = doctest.testmod(importlib.import_module(name), extraglobs=names, optionflags=doctest.ELLIPSIS)
    for group in distributed.groups.doomed():
        if group not in before:
            dist.destroy_process_group(group)
    assert result.failed == 0


@pytest.mark.parametrize("name", api.ROOTS)
def test_public_functions_classes_and_methods_have_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    public = {each: getattr(module, each) for each in api.public_names(module)}
    classes = {each: value for each, value in public.items() if isinstance(value, type)}
    public |= {
        f"{each}.{method}": value
        for each, of_class in classes.items()
        for method, value in vars(of_class).items()
        if method[0] != "_" and isinstance(value, types.FunctionType | property | classmethod | staticmethod)
    }
    assert not [
        each
        for each, value in public.items()
        if isinstance(value, type | types.FunctionType | property) and not inspect.getdoc(value)
    ]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_says_its_arguments_and_shows_an_example(name: str) -> None:
    call = getattr(distributed, name)
    parameters = set(inspect.signature(call).parameters)
    said = call.__doc__
    assert ">>> " in said or not parameters
    for other in re.findall(r"arguments are those of `(\w+)`", said):
        said += getattr(distributed, other).__doc__
    unsaid = parameters - set(re.findall(r"\w+", said))
    if "`mpiddp.distributed`" in said:
        unsaid -= set(re.findall(r"``(\w+)``", distributed.__doc__))
    assert not unsaid
