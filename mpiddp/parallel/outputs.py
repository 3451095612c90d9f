"""What a wrapped model returns, with an eye on its backward: the first to run tells the reducer."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from mpiddp.autograd import Function, Tensor
from mpiddp.typing import Array

from .reducer import Reducer


class _BackwardBegins(Function):
    """The identity on an output; its backward, the first of all, tells the reducer."""

    def forward(self, x: Array, reducer: Reducer) -> Array:
        self.reducer = reducer
        return x

    def backward(self, grad: Array) -> tuple[Array, None]:
        self.reducer.begin()
        return grad, None


def announcing(output: Any, reducer: Reducer) -> Any:
    """Return ``output`` with every tensor in it replaced by one that announces its backward.

    Parameters
    ----------
    output : Any
        A tensor, or tensors in dicts, lists, tuples, named tuples and dataclasses, nested. Where something else may
        hide tensors, the first gradient announces the backward.
    reducer : Reducer
        Who is told.
    """
    if isinstance(output, Tensor):
        return _BackwardBegins.apply(output, reducer) if output.requires_grad else output
    if isinstance(output, dict):
        twin = copy.copy(output)
        for key, value in output.items():
            twin[key] = announcing(value, reducer)
        return twin
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*(announcing(value, reducer) for value in output))
    if isinstance(output, (list, tuple)):
        return type(output)(announcing(value, reducer) for value in output)
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        record: Any = copy.copy(output)
        for field in dataclasses.fields(output):
            # Object's own, because a frozen one has no other.
            object.__setattr__(record, field.name, announcing(getattr(output, field.name), reducer))
        return record
    if output is not None:
        reducer.arm()  # whatever hides in there, the first gradient tells
    return output
