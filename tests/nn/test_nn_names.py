"""A name of torch has torch's interface: the same parameters at the same places, with the same defaults."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import mpiddp.nn.functional as F  # noqa: N812
from mpiddp import autograd, nn, optim

torch = pytest.importorskip("torch")

PLACES: list[tuple[str, Any, Any]] = [
    ("nn", nn, torch.nn),
    ("F", F, torch.nn.functional),
    ("init", nn.init, torch.nn.init),
    ("utils", nn.utils, torch.nn.utils),
    ("optim", optim, torch.optim),
    ("lr_scheduler", optim.lr_scheduler, torch.optim.lr_scheduler),
    ("autograd", autograd, torch.autograd),
    ("autograd", autograd, torch),
]
OWN = {"dtype"}
"""Keywords that torch has at another place, after ``device``, which is not there."""
EXCEPTIONS = {
    "nn.Parameter": "data is required: a parameter of nothing has no use",
    "autograd.Tensor": "torch.Tensor(2, 3) is memory of that shape, which numpy.empty is for",
    "nn.Module.forward": "a method for subclasses",
    "nn.Sequential": "any number of modules",
    "autograd.Function.apply": "any number of inputs",
    "autograd.Function.save_for_backward": "any number of arrays",
    "F.max_pool2d": "torch's is a dispatcher without a signature",
    "nn.Module.to": "torch's takes any arguments and sorts them",
}


def names(ours: Any) -> list[str]:
    return getattr(ours, "__all__", None) or [
        name
        for name, value in vars(ours).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == ours.__name__
    ]


def pairs() -> Iterator[tuple[str, Any, Any]]:
    """Yield every public callable of ours that torch has too, methods of classes included."""
    for place, ours, theirs in PLACES:
        for name in names(ours):
            mine, other = getattr(ours, name), getattr(theirs, name, None)
            if other is None or not callable(mine):
                continue
            yield f"{place}.{name}", mine, other
            for method in vars(mine) if inspect.isclass(mine) else ():
                if not method.startswith("_") and callable(getattr(other, method, None)):
                    yield f"{place}.{name}.{method}", getattr(mine, method), getattr(other, method)


def parameters(function: Any) -> list[inspect.Parameter] | None:
    try:
        return [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    except (TypeError, ValueError):  # written in C
        return None


def differences(mine: Any, other: Any) -> list[str]:
    own, theirs = parameters(mine), parameters(other)
    if own is None or theirs is None:
        return []
    found = []
    for place, parameter in enumerate(own):
        same = next((p for p in theirs if p.name == parameter.name), None)
        if same is None:
            found += [] if parameter.name in OWN else [f"torch has no {parameter.name}"]
        elif parameter.kind is not parameter.KEYWORD_ONLY and theirs.index(same) != place:
            found.append(f"{parameter.name} is number {theirs.index(same)} of torch's, {place} here")
        elif parameter.default != same.default and parameter.name not in OWN:
            found.append(f"{parameter.name}={same.default} of torch's is {parameter.default} here")
    required = {p.name for p in theirs if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    return found + [f"torch needs {name}" for name in required - {p.name for p in own}]


CASES = list(pairs())


@pytest.mark.parametrize(("name", "mine", "other"), CASES, ids=[name for name, _, _ in CASES])
def test_interface_is_torchs(name: str, mine: Any, other: Any) -> None:
    if name not in EXCEPTIONS:
        assert not differences(mine, other)


def test_names_are_found() -> None:
    found = {name for name, _, _ in CASES}
    assert len(found) > 110 and found.issuperset(EXCEPTIONS)


def test_a_difference_is_found() -> None:
    assert differences(lambda a, b=1: 0, lambda a, b=2: 0) and differences(lambda b, a: 0, lambda a, b: 0)
    assert differences(lambda a, c=1: 0, lambda a, b=1: 0) and differences(lambda: 0, lambda a: 0)
    assert not differences(lambda a, *, c=3: 0, lambda a, b=1, c=3: 0)


@pytest.mark.parametrize("name", ["ReLU", "Dropout", "Dropout2d"])
def test_layers_take_inplace(name: str) -> None:
    assert getattr(nn, name)(inplace=True).training
