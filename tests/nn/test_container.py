"""Containers of modules, beside torch's."""

from collections import OrderedDict

import numpy as np

from mpiddp import nn


def test_containers() -> None:
    model = nn.Sequential(OrderedDict(first=nn.Linear(2, 3), second=nn.ReLU()))
    assert list(dict(model.named_children())) == ["first", "second"] and len(model) == 2
    assert isinstance(model[-1], nn.ReLU) and model(np.ones((1, 2), np.float32)).shape == (1, 3)
    model[0], model[1] = nn.Linear(5, 3), nn.Tanh()
    assert isinstance(model.second, nn.Tanh) and model(np.ones((1, 5), np.float32)).shape == (1, 3)
    modules = nn.ModuleList([nn.ReLU()]).append(nn.Tanh())
    assert [type(m).__name__ for m in modules] == ["ReLU", "Tanh"]
