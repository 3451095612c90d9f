"""Local SGD: each rank trains its own copy of a model, and `DiLoCo` combines the copies every few steps."""

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
    """Distributed Low-Communication training: after every H local steps, an outer SGD step combines the ranks' models.

    Each rank keeps a copy of the global parameters. The outer gradient is the mean over ranks of global minus local
    parameters. The outer SGD (Nesterov) updates the global parameters, and all ranks continue from the result. A rank
    sends 1 / H of the bytes that `DistributedDataParallel` sends. The local optimizer's state and the buffers stay
    different on each rank.

    Parameters
    ----------
    params : iterable of Parameter or of dict
        The parameters of the model. They get the values of the first rank, so all ranks make the object together.
    period : int
        H, the number of local steps from one outer step to the next.
    fragments : int
        The number of parts into which the model is cut, at most ``period`` and the number of parameters. Each part has
        one outer step in a period, ``period / fragments`` steps after the part before it (Streaming DiLoCo).
    lr, momentum : float
        Options of the outer SGD, ``outer_optimizer``. With ``lr=1, momentum=0`` the ranks' parameters are averaged.
    warmup_steps : int
        Number of steps before the first period. In these steps the program has to average gradients itself, so that the
        parameters are equal on all ranks at the end.
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
        """For each fragment, the numbers of its parameters."""
        self._synchronized = [0] * fragments
        """For each fragment, the number of the step after which it had its last outer step."""
        self._outer = [Parameter(parameter.data.copy()) for parameter in self._parameters]
        self.outer_optimizer = SGD(self._outer, lr=lr, momentum=momentum, nesterov=momentum > 0)

    def average_parameters(self, params: Parameters) -> None:
        """Count a local step, and make the outer steps that are due after it. All ranks call this after each step.

        ``params`` are the parameters that the constructor got; ValueError for others.
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
        """Make an outer step of each fragment that had none after the last local step. All ranks call this together.

        During the warm-up this does nothing.
        """
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
        """Return the number of steps, the global parameters (without a copy), and the outer optimizer's state."""
        outer = [parameter.data for parameter in self._outer]
        return {"step": self.step, "outer": outer, "outer_optimizer": self.outer_optimizer.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the result of `state_dict`, whose arrays are copied.

        ValueError if the number of parameters differs.
        """
        self.outer_optimizer.load_state_dict(state_dict["outer_optimizer"])
        self.step = state_dict["step"]
        for parameter, saved in zip(self._outer, state_dict["outer"], strict=True):
            parameter.data[...] = saved


def _split(sizes_bytes: list[int], count: int) -> list[list[int]]:
    """Cut the parameters into ``count`` non-empty runs of about equal size, and return the numbers in each run."""
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
