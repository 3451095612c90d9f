"""The simplest data parallelism: one all-reduce for each parameter after backward. Tests compare DDP with it."""

from mpiddp.device import array_namespace
from mpiddp.distributed import ReduceOp, all_reduce, get_world_size
from mpiddp.distributed.groups import GroupLike
from mpiddp.nn import Module

from .weights import rank_weight


def average_gradients(
    model: Module, weight: float | None = None, group: GroupLike = None, *, total: float | None = None
) -> None:
    """Replace every gradient of a model by its average over all ranks, after ``loss.backward()``.

    As in torch's DDP, each gradient is multiplied by ``fl(1/N)``, and the products of the N ranks are summed. A missing
    gradient counts as zeros.

    Parameters
    ----------
    model : Module
    weight : float, optional
        The number of samples of which this rank's loss is the mean. Gradients are then averaged over samples; by
        default they are averaged over ranks.
    group : ProcessGroup, optional
    total : float, optional
        The number of samples of all ranks. By default an all-reduce finds it.

    References
    ----------
    "Writing Distributed Applications with PyTorch", ``average_gradients``.
    """
    size = get_world_size(group)
    factor = 1 / size if weight is None else rank_weight(weight, total, group)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = array_namespace(parameter.data).zeros_like(parameter.data)
        if factor == 0:
            parameter.grad[...] = 0  # without samples the gradient is NaN, and so is NaN times 0
        all_reduce(parameter.grad, ReduceOp.PREMUL_SUM(factor), group)
