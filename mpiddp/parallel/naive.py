"""Data parallelism in its plainest form: after backward, one all-reduce for each parameter.

`DistributedDataParallel` does the same in fewer messages, during backward; its tests compare with this.
"""

from __future__ import annotations

from contextvars import ContextVar

import numpy as np

from mpiddp.device import array_namespace
from mpiddp.distributed import ReduceOp, all_reduce, get_world_size
from mpiddp.distributed.groups import GroupLike
from mpiddp.nn import Module

current_weight: ContextVar[float | None] = ContextVar("current_weight", default=None)
"""Weight of this rank's gradients, for layers that mix ranks' gradients in backward; None: 1 / ranks."""


def rank_weight(n_samples: float, total: float | None = None, group: GroupLike = None) -> float:
    """Return this rank's share of the samples of all ranks.

    Parameters
    ----------
    n_samples : float
        Samples of this rank's mean loss.
    total : float, optional
        Samples of all ranks; by default found by an all-reduce of 8 bytes.

    Raises
    ------
    ValueError
        ``total`` is 0, or ``n_samples`` not between 0 and ``total``.
    """
    if total is None:
        counted = np.array([n_samples], dtype=np.float64)
        all_reduce(counted, group=group)
        total = float(counted[0])
    if not 0 <= n_samples <= total or total <= 0:
        raise ValueError(f"a rank needs 0 to total samples and total at least 1, got {n_samples} of {total}")
    return n_samples / total


def average_gradients(
    model: Module, weight: float | None = None, group: GroupLike = None, *, total: float | None = None
) -> None:
    """Replace every gradient of a model by its average over all ranks, after ``loss.backward()``.

    Bitwise as torch's DDP: ``g * fl(1/N)``, summed; a missing gradient counts as zeros.

    Parameters
    ----------
    model : Module
        The same parameters on all ranks.
    weight : float, optional
        Samples of this rank's mean loss, to average over samples; by default over ranks.
    group : ProcessGroup, optional
    total : float, optional
        As in `rank_weight`.

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
            parameter.grad[...] = 0  # the mean over no samples is NaN, and so is 0 times it
        all_reduce(parameter.grad, ReduceOp.PREMUL_SUM(factor), group)
