"""Local SGD: ranks train on their own, and a *model averager*, called after each step, combines their models.

`PostLocalSGDOptimizer` calls it; `post_localSGD_hook` ends the averaging of gradients.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

from mpiddp.arguments import whole
from mpiddp.device.packing import packed, unpack
from mpiddp.distributed import Future, ProcessGroup, ReduceOp, all_reduce, new_subgroups
from mpiddp.distributed.groups import GroupLike, known
from mpiddp.nn import Parameter
from mpiddp.optim import SGD, Optimizer
from mpiddp.typing import Array

from .buckets import GradBucket
from .hooks import allreduce_hook, completed
from .replicas import broadcast_arrays

Parameters = Iterable[Parameter] | Iterable[dict[str, Any]]
"""Or an optimizer's parameter groups."""


def parameters_of(params: Parameters) -> list[Parameter]:
    found: list[Parameter] = []
    for each in params:
        found += each["params"] if isinstance(each, dict) else [each]
    return found


def average_parameters(params: Iterable[Parameter], process_group: GroupLike = None) -> None:
    """Average in one message for each dtype."""
    for arrays in _by_dtype(params):
        flat = packed(arrays)
        all_reduce(flat, ReduceOp.AVG, process_group)
        unpack(flat, arrays)


def _by_dtype(params: Iterable[Parameter]) -> list[list[Array]]:
    found: dict[Any, list[Array]] = {}
    for parameter in params:
        found.setdefault(parameter.dtype, []).append(parameter.data)
    return list(found.values())


def _check(name: str, value: int, least: int) -> int:
    if whole(name, value) < least:
        raise ValueError(f"Arg ``{name}`` must be a {'positive value' if least else 'non-negative number'}.")
    return value


class ModelAverager(ABC):
    """Combines the ranks' models in some of the steps; ``step`` counts the calls."""

    def __init__(self, process_group: GroupLike = None) -> None:
        self.process_group = known(process_group)
        self.step = 0

    @abstractmethod
    def average_parameters(self, params: Parameters) -> None:
        """Count a step and combine if it is due; ``params`` may be an optimizer's groups."""

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, and an outer optimizer's state."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.step = state_dict["step"]


class PeriodicModelAverager(ModelAverager):
    """Averages the parameters in every ``period``-th step after ``warmup_steps``, as torch's.

    Parameters
    ----------
    period, warmup_steps : int
    process_group : ProcessGroup, optional
    """

    def __init__(self, period: int, warmup_steps: int = 0, process_group: GroupLike = None) -> None:
        super().__init__(process_group)
        self.warmup_steps = _check("warmup_steps", warmup_steps, 0)
        self.period = _check("period", period, 1)
        if period == 1:
            warnings.warn(
                "When period is 1, no need to use model averaging because the communication cost of all-reducing"
                " parameters will be no less than the cost of all-reducing gradients by DistributedDataParallel in the"
                " backward pass. Therefore, only DistributedDataParallel should be used for this case.",
                stacklevel=2,
            )

    def average_parameters(self, params: Parameters) -> None:
        if self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0:
            average_parameters(parameters_of(params), self.process_group)
        self.step += 1


class HierarchicalModelAverager(ModelAverager):
    """Averages the parameters often in small groups and rarely in large ones, as torch's.

    Parameters
    ----------
    period_group_size_dict : dict of int to int
        Group sizes by period, both ascending, each size a divisor of the last, which is that of the whole group. Of
        periods due together the largest group averages.
    warmup_steps : int
    process_group : ProcessGroup, optional
        Making its small groups is collective over all ranks.

    Examples
    --------
    >>> averager = dist.HierarchicalModelAverager({2: 8, 16: 64}, warmup_steps=100)  # doctest: +SKIP
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int],
        warmup_steps: int = 0,
        process_group: GroupLike = None,
    ) -> None:
        super().__init__(process_group)
        self.warmup_steps = _check("warmup_steps", warmup_steps, 0)
        if not period_group_size_dict:
            raise ValueError("Arg ``period_group_size_dict`` must not be empty.")
        periods, sizes = list(period_group_size_dict), list(period_group_size_dict.values())
        if periods[0] <= 0:
            raise ValueError("The minimum period in arg ``period_group_size_dict`` must be a positive value.")
        if sizes[-1] != self.process_group.size():
            raise ValueError(
                f"The last value in arg ``period_group_size_dict`` {sizes[-1]} must be equal to the size of the process"
                f" group {self.process_group.size()}."
            )
        if any(one >= two for one, two in [*pairwise(periods), *pairwise(sizes)]):
            raise ValueError(
                f"periods and group sizes of ``period_group_size_dict`` must both ascend, got"
                f" {dict(period_group_size_dict)}"
            )
        self.period_process_group_dict: dict[int, ProcessGroup | None] = {
            period: self.process_group
            if size == self.process_group.size()
            else new_subgroups(size, group=self.process_group)[0]
            for period, size in period_group_size_dict.items()
        }

    def average_parameters(self, params: Parameters) -> None:
        due = [group for period, group in self.period_process_group_dict.items() if self.step % period == 0]
        if self.step >= self.warmup_steps and due:
            average_parameters(parameters_of(params), due[-1])
        self.step += 1


class DiLoCo(ModelAverager):
    """Distributed Low-Communication training: an outer Nesterov SGD steps every H local steps.

    The outer gradient is the ranks' mean of (global - local) parameters; all ranks continue from the result. It sends 1
    / H of `DistributedDataParallel`'s bytes, and keeps the global parameters and their momentum. Optimizer state and
    buffers stay local.

    Parameters
    ----------
    params : iterable of Parameter or of dict
        They get the values of the first rank; collective.
    period : int
        H.
    fragments : int
        Parts of the model, ``period / fragments`` steps apart, each once a period (Streaming DiLoCo); at most
        ``period``, and the number of parameters.
    lr, momentum : float
        Of the outer SGD, ``outer_optimizer``; ``lr=1, momentum=0`` averages parameters.
    warmup_steps : int
        Steps with averaged gradients before the first period; parameters must be equal at their end.
    process_group : ProcessGroup, optional

    References
    ----------
    A. Douillard et al., "DiLoCo", arXiv 2311.08105, and "Streaming DiLoCo", arXiv 2501.18512.

    Examples
    --------
    >>> averager = dist.DiLoCo(model.parameters(), period=50, fragments=4)  # doctest: +SKIP
    >>> optimizer = dist.PostLocalSGDOptimizer(optim.AdamW(model.parameters()), averager)  # doctest: +SKIP
    >>> loss_fn(model(x), y).backward()  # the model itself, not DistributedDataParallel  # doctest: +SKIP
    >>> optimizer.step()  # doctest: +SKIP
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
        super().__init__(process_group)
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
        self.step = state_dict["step"]
        for parameter, saved in zip(self._outer, state_dict["outer"], strict=True):
            parameter.data[...] = saved
        self.outer_optimizer.load_state_dict(state_dict["outer_optimizer"])


class _Fragment:
    """Parameters synchronised together; the global ones are flat arrays, one a dtype."""

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


class PostLocalSGDState:
    """The state of `post_localSGD_hook`.

    Parameters
    ----------
    process_group : ProcessGroup, optional
        Averages gradients at first.
    subgroup : ProcessGroup, optional
        Averages them later; by default the ranks of this node, a group made collectively by all ranks.
    start_localSGD_iter : int
        The first iteration of the subgroup; ``warmup_steps`` of the model averager.
    post_local_gradient_allreduce : bool
        False: no averages from then on.

    References
    ----------
    T. Lin et al., "Don't use large mini-batches, use local SGD", ICLR 2020.
    """

    def __init__(
        self,
        process_group: GroupLike,
        subgroup: ProcessGroup | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        self.process_group = known(process_group)
        self.subgroup = new_subgroups()[0] if subgroup is None else subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Future:  # noqa: N802 - torch's name
    """Average a bucket over all ranks, from ``start_localSGD_iter`` on over the subgroup."""
    local = state.iter >= state.start_localSGD_iter
    if bucket.is_last():
        state.iter += 1
    if not local:
        return allreduce_hook(state.process_group, bucket)
    if not state.post_local_gradient_allreduce:
        return completed(bucket.buffer())
    return allreduce_hook(state.subgroup, bucket)


class PostLocalSGDOptimizer:
    """An optimizer whose steps end with those of a model averager, as torch's."""

    def __init__(self, optim: Optimizer, averager: ModelAverager) -> None:
        self.optim, self.averager = optim, averager

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:
        """The optimizer's."""
        return self.optim.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the optimizer."""
        self.optim.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self.optim.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, then average the parameters if it is due."""
        loss = self.optim.step(closure)
        self.averager.average_parameters(self.param_groups)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state and the averager's, such as ``step``."""
        return self.optim.state_dict() | self.averager.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a `state_dict`; without ``step`` the averager starts anew, with a warning."""
        self.optim.load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})
        if "step" in state_dict:
            self.averager.load_state_dict(state_dict)
            return
        warnings.warn(
            "Loaded state dict does not contain a step counter for an averager. Setting step counter to 0.",
            stacklevel=2,
        )
        self.averager.step = 0
