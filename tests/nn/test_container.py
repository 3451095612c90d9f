"""Containers of modules, beside torch's."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

from mpiddp import nn


def test_containers() -> None:
    model = nn.Sequential(OrderedDict(first=nn.Linear(2, 3), second=nn.ReLU()))
    assert list(dict(model.named_children())) == ["first", "second"] and len(model) == 2
    assert isinstance(model[-1], nn.ReLU) and isinstance(model[:1], nn.Sequential)
    assert model[:1](np.ones((1, 2), np.float32)).shape == (1, 3)
    model[1] = nn.Tanh()
    assert isinstance(model.second, nn.Tanh)
    modules = nn.ModuleList([nn.ReLU()]).append(nn.Tanh())
    assert [type(m).__name__ for m in modules] == ["ReLU", "Tanh"]


def test_module_dict_is_torchs() -> None:
    torch = pytest.importorskip("torch")

    def use(library: Any) -> list[Any]:
        modules = library.ModuleDict({"a": library.Linear(1, 2), "b": library.ReLU()})
        modules["c"] = library.Linear(2, 1, bias=False)
        modules.update([("a", library.Linear(1, 1))])  # in its place
        found = [list(modules), list(modules.keys()), len(modules), "b" in modules, "d" in modules]
        found.append([(name, type(module).__name__) for name, module in modules.items()])
        found += [list(modules.state_dict()), type(modules.pop("b")).__name__, list(modules)]
        del modules["c"]
        found += [[type(module).__name__ for module in modules.values()], modules["a"].bias is not None]
        for wrong in (lambda: modules["b"], lambda: modules.update({"pop": library.ReLU()})):
            with pytest.raises(KeyError):
                wrong()
        modules.clear()
        return [*found, len(modules), len(library.ModuleDict([("x", library.ReLU())]))]

    assert use(nn) == use(torch.nn)
