"""Local SGD: ranks train on their own, and `DiLoCo`, called after each step, combines their models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mpiddp.arguments import whole
from mpiddp.device.packing import packed, unpack
from mpiddp.distributed import ProcessGroup, ReduceOp, all_reduce
from mpiddp.distributed.groups import GroupLike, known
from mpiddp.nn import Parameter
from mpiddp.optim import SGD, Optimizer
from mpiddp.typing import Array

from .replicas import broadcast_arrays

Parameters = Iterable[Parameter] | Iterable[dict[str, Any]]
"""Parameters, or the parameter groups of an optimizer."""


def parameters_of(params: Parameters) -> list[Parameter]:
    found: list[Parameter] = []
    for each in params:
        found += each["params"] if isinstance(each, dict) else [each]
    return found


def _by_dtype(params: Iterable[Parameter]) -> list[list[Array]]:
    found: dict[Any, list[Array]] = {}
    for parameter in params:
        found.setdefault(parameter.dtype, []).append(parameter.data)
    return list(found.values())


def _check(name: str, value: int, least: int) -> int:
    if whole(name, value) < least:
        raise ValueError(f"Arg ``{name}`` must be a {'positive value' if least else 'non-negative number'}.")
    return value


class DiLoCo:
    """Distributed Low-Communication training: an outer Nesterov SGD steps every H local steps.

    The outer gradient is the ranks' mean of (global - local) parameters; all ranks continue from the result. It sends 1
    / H of `DistributedDataParallel`'s bytes, and keeps the global parameters and their momentum. Optimizer state and
    buffers stay local.

    Parameters
    ----------
    params : iterable of Parameter or of dict
        They get the values of the first rank; collective.
    period : int
        H, the steps from one outer step to the next.
    fragments : int
        Parts of the model, ``period / fragments`` steps apart, each once a period (Streaming DiLoCo); at most
        ``period``, and the number of parameters.
    lr, momentum : float
        Options of the outer SGD, ``outer_optimizer``. With ``lr=1, momentum=0`` the ranks' parameters are averaged.
    warmup_steps : int
        Steps with averaged gradients before the first period; parameters must be equal at their end.
    process_group : ProcessGroup, optional

    References
    ----------
    A. Douillard et al., "DiLoCo", arXiv 2311.08105, and "Streaming DiLoCo", arXiv 2501.18512.

    Examples
    --------
    >>> averager = dist.DiLoCo(model.parameters(), period=50, fragments=4)  # doctest: +SKIP
    >>> loss_fn(model(x), y).backward()  # the model itself, not DistributedDataParallel  # doctest: +SKIP
    >>> optimizer.step()  # doctest: +SKIP
    >>> averager.average_parameters(model.parameters())  # doctest: +SKIP
    """

    def __init__(
        self,
        params: Parameters,
        period: int,
        fragments: int = 1,
        *,
        lr: float = 0.7,
        momentum: float = 0.9,
        warmup_steps: int = 0,
        process_group: GroupLike = None,
    ) -> None:
        self.process_group = known(process_group)
        self.step = 0
        self.period, self.warmup_steps = _check("period", period, 1), _check("warmup_steps", warmup_steps, 0)
        self._parameters = parameters_of(params)
        most = min(period, len(self._parameters))
        if not 1 <= fragments <= most:
            raise ValueError(
                f"DiLoCo: fragments has to be between 1 and {most}, at most one a step of the period ({period}) and at"
                f" most one a parameter ({len(self._parameters)}), got {fragments}"
            )
        broadcast_arrays([parameter.data for parameter in self._parameters], self.process_group)
        self._fragments = [_Fragment(each) for each in _split(self._parameters, fragments)]
        self._outer = [parameter for fragment in self._fragments for parameter in fragment.outer]
        self.outer_optimizer = SGD(self._outer, lr=lr, momentum=momentum, nesterov=momentum > 0)

    def average_parameters(self, params: Parameters) -> None:
        """Count a step and make the due fragment's outer step; ``params`` are the constructor's."""
        if list(map(id, parameters_of(params))) != list(map(id, self._parameters)):
            raise ValueError("DiLoCo averages the parameters that it was made with, in their order; make another one")
        self.step += 1
        local = self.step - self.warmup_steps
        if local == 0:
            for fragment in self._fragments:
                fragment.copy_local()
        elif local > 0:
            count = len(self._fragments)
            for index, fragment in enumerate(self._fragments, 1):
                if local % self.period == index * self.period // count % self.period:
                    self._synchronize(fragment)

    def synchronize(self) -> None:
        """Make the outer step of all fragments that had none in this step; nothing during the warm-up. Collective."""
        for fragment in self._fragments:
            if fragment.synchronized_at != self.step > self.warmup_steps:
                self._synchronize(fragment)

    def _synchronize(self, fragment: _Fragment) -> None:
        fragment.synchronize(self.outer_optimizer, self.process_group)
        fragment.synchronized_at = self.step

    def state_dict(self) -> dict[str, Any]:
        """Return steps, global parameters (live arrays) and the outer optimizer's state."""
        outer = [parameter.data for parameter in self._outer]
        return {"step": self.step, "outer": outer, "outer_optimizer": self.outer_optimizer.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with the same parameters and fragments; arrays are copied."""
        if len(state_dict["outer"]) != len(self._outer):
            raise ValueError(
                f"DiLoCo: the state has {len(state_dict['outer'])} parts of the model, this one has {len(self._outer)}:"
                " give the same fragments"
            )
        self.step = state_dict["step"]
        for parameter, saved in zip(self._outer, state_dict["outer"], strict=True):
            parameter.data[...] = saved
        self.outer_optimizer.load_state_dict(state_dict["outer_optimizer"])


class _Fragment:
    """Parameters that are synchronised together. The global ones are flat arrays, one for each dtype."""

    def __init__(self, parameters: list[Parameter]) -> None:
        self._parameters = parameters
        self.synchronized_at = 0
        self.outer = [Parameter(packed(arrays)) for arrays in _by_dtype(parameters)]

    def copy_local(self) -> None:
        for outer, arrays in zip(self.outer, _by_dtype(self._parameters), strict=True):
            outer.data[...] = packed(arrays)

    def synchronize(self, optimizer: Optimizer, group: ProcessGroup) -> None:
        local = _by_dtype(self._parameters)
        for outer, arrays in zip(self.outer, local, strict=True):
            outer.grad = outer.data - packed(arrays)
            all_reduce(outer.grad, ReduceOp.AVG, group)
        optimizer.step()
        for outer, arrays in zip(self.outer, local, strict=True):
            unpack(outer.data, arrays)
            outer.grad = None


def _split(parameters: list[Parameter], count: int) -> list[list[Parameter]]:
    """Cut into non-empty runs of about equal size."""
    runs: list[list[Parameter]] = [[]]
    total, done = sum(parameter.data.nbytes for parameter in parameters), 0
    for index, parameter in enumerate(parameters):
        missing, left = count - len(runs), len(parameters) - index
        full = done * count >= total * len(runs)
        if runs[-1] and missing and (full or missing == left):
            runs.append([])
        runs[-1].append(parameter)
        done += parameter.data.nbytes
    return runs
