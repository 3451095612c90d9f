"""Local SGD: ranks train on their own, and `DiLoCo`, called after each step, combines their models."""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from mpiddp.arguments import whole
from mpiddp.distributed import ReduceOp, all_reduce_coalesced
from mpiddp.distributed.groups import GroupLike, known
from mpiddp.nn import Parameter
from mpiddp.optim import SGD

from .replicas import broadcast_arrays

Parameters = Iterable[Parameter] | Iterable[dict[str, Any]]
"""Parameters, or the parameter groups of an optimizer."""


def parameters_of(params: Parameters) -> list[Parameter]:
    return list(chain.from_iterable(each["params"] if isinstance(each, dict) else [each] for each in params))


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
        The number of parts of the model. Each part has one outer step in a period, ``period / fragments`` steps after
        the part before (Streaming DiLoCo). At most ``period``, and at most the number of parameters.
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
        self.period, self.warmup_steps = whole("period", period, 1), whole("warmup_steps", warmup_steps, 0)
        self._parameters = parameters_of(params)
        most = min(period, len(self._parameters))
        if not 1 <= fragments <= most:
            raise ValueError(
                f"DiLoCo: fragments has to be between 1 and {most}, at most one a step of the period ({period}) and at"
                f" most one a parameter ({len(self._parameters)}), got {fragments}"
            )
        broadcast_arrays([parameter.data for parameter in self._parameters], self.process_group)
        self._fragments = _split([parameter.data.nbytes for parameter in self._parameters], fragments)
        """The numbers of the parameters that are synchronised together."""
        self._synchronized = [0] * fragments
        """For each fragment, the local step after which it had its last outer step."""
        self._outer = [Parameter(parameter.data.copy()) for parameter in self._parameters]
        self.outer_optimizer = SGD(self._outer, lr=lr, momentum=momentum, nesterov=momentum > 0)

    def average_parameters(self, params: Parameters) -> None:
        """Count a step, and make the outer step of a fragment that is due.

        ``params`` are those that the constructor got.
        """
        if list(map(id, parameters_of(params))) != list(map(id, self._parameters)):
            raise ValueError("DiLoCo averages the parameters that it was made with, in their order; make another one")
        self.step += 1
        local = self.step - self.warmup_steps
        if local == 0:
            for parameter, outer in zip(self._parameters, self._outer, strict=True):
                outer.data[...] = parameter.data
        elif local > 0:
            count = len(self._fragments)
            for index in range(count):
                if local % self.period == (index + 1) * self.period // count % self.period:
                    self._synchronize(index)

    def synchronize(self) -> None:
        """Make the outer step of all fragments that had none in this step; nothing during the warm-up. Collective."""
        for index, step in enumerate(self._synchronized):
            if step != self.step > self.warmup_steps:
                self._synchronize(index)

    def _synchronize(self, fragment: int) -> None:
        pairs = [(self._parameters[index], self._outer[index]) for index in self._fragments[fragment]]
        gradients = []
        for parameter, outer in pairs:
            outer.grad = outer.data.copy()
            outer.grad -= parameter.data
            gradients.append(outer.grad)
        all_reduce_coalesced(gradients, ReduceOp.AVG, self.process_group)
        self.outer_optimizer.step()
        for parameter, outer in pairs:
            parameter.data[...] = outer.data
            outer.grad = None
        self._synchronized[fragment] = self.step

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, the global parameters (not copied), and the outer optimizer's state."""
        outer = [parameter.data for parameter in self._outer]
        return {"step": self.step, "outer": outer, "outer_optimizer": self.outer_optimizer.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, whose arrays are copied; ValueError for another number of parameters."""
        self.outer_optimizer.load_state_dict(state_dict["outer_optimizer"])
        self.step = state_dict["step"]
        for parameter, saved in zip(self._outer, state_dict["outer"], strict=True):
            parameter.data[...] = saved


def _split(sizes_bytes: list[int], count: int) -> list[list[int]]:
    """Cut into non-empty runs of about equal size."""
    runs: list[list[int]] = [[]]
    total, done = sum(sizes_bytes), 0
    for index, size_bytes in enumerate(sizes_bytes):
        missing, left = count - len(runs), len(sizes_bytes) - index
        full = done * count >= total * len(runs)
        if runs[-1] and missing and (full or missing == left):
            runs.append([])
        runs[-1].append(index)
        done += size_bytes
    return runs
