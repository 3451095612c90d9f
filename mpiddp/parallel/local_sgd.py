"""Averaging models now and then instead of gradients always: post-local SGD and hierarchical SGD."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

from mpiddp.device import array_namespace
from mpiddp.distributed import Future, ProcessGroup, ReduceOp, all_reduce, new_subgroups
from mpiddp.distributed.groups import GroupLike, default_group, member
from mpiddp.nn import Parameter
from mpiddp.optim import Optimizer
from mpiddp.typing import Array

from .bucket import GradBucket
from .comm_hooks.default import allreduce_hook, completed, group_of


def parameters_of(params: Iterable[Parameter] | Iterable[dict[str, Any]]) -> list[Parameter]:
    """Return parameters from a list of them, or of an optimizer's groups."""
    found: list[Parameter] = []
    for each in params:
        found += each["params"] if isinstance(each, dict) else [each]
    return found


def average_parameters(params: Iterable[Parameter], process_group: GroupLike = None) -> None:
    """Replace parameters by their averages over a group's ranks, in one message for each dtype."""
    by_dtype: dict[Any, list[Array]] = {}
    for parameter in params:
        by_dtype.setdefault(parameter.dtype, []).append(parameter.data)
    for arrays in by_dtype.values():
        packed = array_namespace(arrays[0]).concatenate([x.reshape(-1) for x in arrays])
        all_reduce(packed, ReduceOp.AVG, process_group)
        start = 0
        for x in arrays:
            x[...] = packed[start : start + x.size].reshape(x.shape)
            start += x.size


class ModelAverager(ABC):
    """Something that averages a model's parameters when it is time.

    Parameters
    ----------
    process_group : ProcessGroup, optional
        The ranks; all by default.

    Attributes
    ----------
    step : int
        Calls so far.
    """

    def __init__(self, process_group: GroupLike = None) -> None:
        self.process_group = member(process_group, type(self).__name__) or default_group()
        self.step = 0

    @abstractmethod
    def average_parameters(self, params: Iterable[Parameter] | Iterable[dict[str, Any]]) -> None:
        """Average if it is time, and count the step; ``params`` are parameters or an optimizer's groups."""


def _check_warmup(warmup_steps: int) -> int:
    if warmup_steps < 0:
        raise ValueError("Arg ``warmup_steps`` must be a non-negative number.")
    return warmup_steps


class PeriodicModelAverager(ModelAverager):
    """Averages parameters in every ``period``-th step after a warm-up.

    Parameters
    ----------
    period : int
        Steps from one averaging to the next.
    warmup_steps : int, default 0
        Steps without; gradients are averaged in them.
    process_group : ProcessGroup, optional
        The ranks; all by default.

    References
    ----------
    ``torch.distributed.algorithms.model_averaging.averagers.PeriodicModelAverager``.
    """

    def __init__(self, period: int, warmup_steps: int = 0, process_group: GroupLike = None) -> None:
        super().__init__(process_group)
        self.warmup_steps = _check_warmup(warmup_steps)
        if period < 1:
            raise ValueError("Arg ``period`` must be a positive value.")
        if period == 1:
            warnings.warn(
                "When period is 1, no need to use model averaging because the communication cost of all-reducing"
                " parameters will be no less than the cost of all-reducing gradients by DistributedDataParallel in the"
                " backward pass. Therefore, only DistributedDataParallel should be used for this case.",
                stacklevel=2,
            )
        self.period = period

    def average_parameters(self, params: Iterable[Parameter] | Iterable[dict[str, Any]]) -> None:
        """Average if it is time, and count the step."""
        if self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0:
            average_parameters(parameters_of(params), self.process_group)
        self.step += 1


class HierarchicalModelAverager(ModelAverager):
    """Averages parameters often in small groups and rarely in large ones.

    Parameters
    ----------
    period_group_size_dict : dict of int to int
        Period and size of the groups that average with it; both ascending, the last size that of the whole group, each
        a divisor of it. Where several periods are due, the largest group averages.
    warmup_steps : int, default 0
        Steps without.
    process_group : ProcessGroup, optional
        The ranks; all by default. Making the small groups is collective over all ranks.

    References
    ----------
    ``torch.distributed.algorithms.model_averaging.hierarchical_model_averager.HierarchicalModelAverager``.

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
        self.warmup_steps = _check_warmup(warmup_steps)
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

    def average_parameters(self, params: Iterable[Parameter] | Iterable[dict[str, Any]]) -> None:
        """Average in the largest group for which it is time, and count the step."""
        due = [group for period, group in self.period_process_group_dict.items() if self.step % period == 0]
        if self.step >= self.warmup_steps and due:
            average_parameters(parameters_of(params), due[-1])
        self.step += 1


class PostLocalSGDState:
    """The state of `post_localSGD_hook`.

    Parameters
    ----------
    process_group : ProcessGroup, optional
        Who averages gradients at first; all ranks by default.
    subgroup : ProcessGroup, optional
        Who averages them later; by default the ranks of this node, and making that group is collective over all ranks.
    start_localSGD_iter : int
        The first iteration that averages in the subgroup.
    post_local_gradient_allreduce : bool, default True
        False: gradients are not averaged at all from then on.

    References
    ----------
    T. Lin et al., "Don't use large mini-batches, use local SGD", ICLR 2020.
    ``torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook.PostLocalSGDState``.
    """

    def __init__(
        self,
        process_group: GroupLike,
        subgroup: ProcessGroup | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        self.process_group = group_of(process_group)
        self.subgroup = new_subgroups()[0] if subgroup is None else subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0
        """Iterations so far."""


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Future:  # noqa: N802 - torch's name
    """Average a bucket over all ranks, and from iteration ``start_localSGD_iter`` on over those of the subgroup.

    Goes with `PostLocalSGDOptimizer`, which averages the models of all ranks now and then.

    References
    ----------
    ``torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook.post_localSGD_hook``.
    """
    local = state.iter >= state.start_localSGD_iter
    if bucket.is_last():
        state.iter += 1
    if not local:
        return allreduce_hook(state.process_group, bucket)
    if not state.post_local_gradient_allreduce:
        return completed(bucket.buffer())
    return allreduce_hook(state.subgroup, bucket)


class PostLocalSGDOptimizer:
    """An optimizer whose steps end with a model averager's.

    Parameters
    ----------
    optim : Optimizer
        The optimizer of this rank.
    averager : ModelAverager
        Averages the parameters when it is time.

    Notes
    -----
    Goes with `post_localSGD_hook`, which stops averaging gradients over all ranks when the averager begins.

    References
    ----------
    T. Lin et al., "Don't use large mini-batches, use local SGD", ICLR 2020. ``torch.distributed.optim``.
    """

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
        """Step, then average the parameters if it is time."""
        loss = self.optim.step(closure)
        self.averager.average_parameters(self.param_groups)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state and the averager's count, ``step``."""
        return self.optim.state_dict() | {"step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` has returned; without ``step`` the averager starts anew, with a warning."""
        self.optim.load_state_dict({name: value for name, value in state_dict.items() if name != "step"})
        if "step" not in state_dict:
            warnings.warn(
                "Loaded state dict does not contain a step counter for an averager. Setting step counter to 0.",
                stacklevel=2,
            )
        self.averager.step = state_dict.get("step", 0)
