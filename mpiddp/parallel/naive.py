"""Data parallelism in its plainest form, one all-reduce a parameter after backward: tests of DDP compare with it."""

from mpiddp.device import array_namespace
from mpiddp.distributed import ReduceOp, all_reduce, get_world_size
from mpiddp.distributed.groups import GroupLike
from mpiddp.nn import Module

from .weights import rank_weight


def average_gradients(
    model: Module, weight: float | None = None, group: GroupLike = None, *, total: float | None = None
) -> None:
    """Replace every gradient of a model by its average over all ranks, after ``loss.backward()``.

    Bitwise as torch's DDP: ``g * fl(1/N)``, summed; a missing gradient counts as zeros.

    Parameters
    ----------
    model : Module
    weight : float, optional
        The number of samples of which this rank's loss is the mean. Gradients are then averaged over samples; by
        default they are averaged over ranks.
    group : ProcessGroup, optional
    total : float, optional
        Samples of all ranks; by default found by an all-reduce.

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
            parameter.grad[...] = 0  # NaN, the mean over no samples, times 0 is NaN
        all_reduce(parameter.grad, ReduceOp.PREMUL_SUM(factor), group)
