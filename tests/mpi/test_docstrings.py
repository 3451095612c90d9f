"""The public calls say what they take, and the examples of their docstrings give what they show on two ranks."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
import types

import numpy as np
import pytest

import mpiddp as dist
from mpiddp import distributed

MODULES = [module.name for module in pkgutil.iter_modules(distributed.__path__, "mpiddp.distributed.")]
CALLS = [name for name in distributed.__all__ if isinstance(getattr(distributed, name), types.FunctionType)]
IN_COMMON = set(re.findall(r"``(\w+)``", distributed.__doc__))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["mpiddp.distributed", "mpiddp.mpi.work", *MODULES])
def test_examples_give_what_they_show(name):
    before = dist.distributed.groups.doomed()
    names = {"dist": dist, "np": np}
    result = doctest.testmod(importlib.import_module(name), extraglobs=names, optionflags=doctest.ELLIPSIS)
    for group in set(dist.distributed.groups.doomed()) - set(before):
        dist.destroy_process_group(group)
    assert result.failed == 0, "see the output"


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_says_its_arguments_and_shows_an_example(name):
    call = getattr(distributed, name)
    parameters = set(inspect.signature(call).parameters)
    said = call.__doc__
    for other in re.findall(r"arguments are those of `(\w+)`", said):
        said += getattr(distributed, other).__doc__
    missing = parameters - set(re.findall(r"\w+", said))
    if "`mpiddp.distributed`" in said:
        missing -= IN_COMMON
    assert not missing, f"{name} does not say what {missing} are"
    assert ">>> " in call.__doc__ or not parameters or name in ("set_device", "shrink_group")
