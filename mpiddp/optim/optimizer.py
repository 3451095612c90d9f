"""``Optimizer``: parameter groups, state and the step, in torch's structure."""

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np

from mpiddp.autograd.function import expect_array_or_option
from mpiddp.device import array_namespace, placed
from mpiddp.typing import Array

from .flat import ContiguousRun, ContiguousRuns, Parameter, Record, Workspace

Group = dict[str, Any]
"""A parameter group, ``{"params": [...], "lr": ..., ...}``."""


class Optimizer(ABC):
    """Base of all optimizers; a subclass defines the update.

    Parameters
    ----------
    params : iterable of Parameter or of dict
        Parameters, or groups of parameters. An empty list, or a parameter given twice, raises ValueError.
    defaults : dict
        Options for groups that do not have their own.

    Attributes
    ----------
    param_groups : list of dict
        The parameter groups. Their options may be changed between steps.
    state : dict
        A dict of arrays for each parameter. The arrays may be views of larger arrays, so write into them, or use
        :meth:`load_state_dict`, but do not replace them.
    """

    def __init__(self, params: Iterable[Parameter] | Iterable[Group], defaults: dict[str, Any]) -> None:

        self.defaults = defaults
        self.state: defaultdict[Any, Record] = defaultdict(dict)
        self.param_groups: list[Group] = []
        self._runs: list[ContiguousRuns] = []
        self._workspace = Workspace()
        listed: list[Any] = list(params)
        if not listed:
            raise ValueError("optimizer got an empty parameter list")
        for group in listed if isinstance(listed[0], dict) else [{"params": listed}]:
            self.add_param_group(group)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group: ``params``, one parameter or an iterable, and options that differ from the defaults.

        Raises
        ------
        TypeError
            If ``params`` holds something that is no parameter.
        ValueError
            If a parameter is in a group already, or is no leaf.
        """
        params = param_group["params"]
        params = [params] if hasattr(params, "grad") else list(params)
        for param in params:
            if not hasattr(param, "data") or not hasattr(param, "grad"):
                raise TypeError(
                    f"optimizer can only optimize parameters, but one of the params is {type(param).__name__}"
                )
            expect_array_or_option(param.data)
            if not getattr(param, "is_leaf", True):
                raise ValueError("can't optimize a non-leaf Tensor")
        known = set(map(id, self._parameters()))
        if len({id(param) for param in params} - known) < len(params):
            raise ValueError("some parameters appear twice, or in more than one parameter group")
        self.param_groups.append({**self.defaults, **param_group, "params": params})
        self._runs.append(ContiguousRuns(self.state.__getitem__))

    def _parameters(self) -> Iterator[Any]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to None, or to zero with ``set_to_none=False``.

        Without a gradient :meth:`step` skips a parameter; with a gradient of zeros it does not.
        """
        for param in self._parameters():
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad[...] = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters in place. Parameters without a gradient stay as they are.

        ``closure``, if given, is called first to compute the gradients; its result, the loss, is returned.
        """
        loss = None if closure is None else closure()
        for group, runs in zip(self.param_groups, self._runs, strict=True):
            for run in runs.of(group["params"]):
                self._update(run, group)
        return loss

    @abstractmethod
    def _update(self, run: ContiguousRun, group: Group) -> None:
        """Update one run of parameters by the options of their group.

        A subclass converts options by ``float``. Otherwise a NumPy scalar from a schedule would turn float32 arithmetic
        into float64.
        """

    def _descent(self, p: Array, g: Array, decay: float) -> tuple[Array, Array, Array]:
        """Return the gradient with weight decay added, and two scratch arrays; the first may hold that gradient."""
        xp = array_namespace(p)
        update, product = self._workspace.like(p)
        if decay:
            g = xp.add(g, xp.multiply(p, decay, out=product), out=update)
        return g, update, product

    def state_dict(self) -> dict[str, Any]:
        """Return state and options in torch's form.

        Parameters are numbered through all groups. ``state`` has each parameter's arrays, not copied, under its number;
        ``param_groups`` has the numbers in place of the parameters.
        """
        numbers = {id(param): number for number, param in enumerate(self._parameters())}
        records = sorted((numbers[id(param)], record) for param, record in self.state.items() if record)
        return {
            "state": {number: dict(record) for number, record in records},
            "param_groups": [
                {**group, "params": [numbers[id(param)] for param in group["params"]]} for group in self.param_groups
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over state and options, learning rate included, of an optimizer of the same parameters.

        Arrays are copied to the dtype and device of their parameter; only ``step`` becomes float32 on the host.
        ValueError if the groups do not have as many parameters as this optimizer's, or if an array does not have its
        parameter's shape.
        """
        saved = state_dict["param_groups"]
        theirs, mine = ([len(group["params"]) for group in groups] for groups in (saved, self.param_groups))
        if theirs != mine:
            raise ValueError(f"loaded state dict has groups of {theirs} parameters, and the optimizer has {mine}")
        numbers = chain.from_iterable(group["params"] for group in saved)
        records = {
            param: _like(param.data, state_dict["state"][number], number)
            for param, number in zip(self._parameters(), numbers, strict=True)
            if number in state_dict["state"]
        }
        self.state.clear()
        self.state.update(records)
        for loaded, group, runs in zip(saved, self.param_groups, self._runs, strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})
            runs.forget()


def _like(data: Array, record: Record, number: int) -> Record:
    """Return a copy of a parameter's state with the memory layout of the parameter."""
    copy: Record = {}
    for name, value in record.items():
        if name == "step":
            copy[name] = np.array(value, dtype=np.float32)
            continue
        if value.shape != data.shape:
            raise ValueError(f"loaded state {name!r} of parameter {number} has shape {value.shape}, not {data.shape}")
        copy[name] = array_namespace(data).empty_like(data)
        copy[name][...] = placed(value, data)
    return copy


def check_not_negative(**options: float) -> None:
    """Raise ValueError, with torch's text, for an option that is below zero, infinite or NaN."""
    for name, value in options.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"Invalid {name}: {value}")
