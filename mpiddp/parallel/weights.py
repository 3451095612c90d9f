"""The weight of a rank's gradients: its share of the samples, if ranks have different numbers of samples."""

from contextvars import ContextVar

import numpy as np

from mpiddp.distributed import all_reduce
from mpiddp.distributed.groups import GroupLike

current_weight: ContextVar[float | None] = ContextVar("current_weight", default=None)
"""The weight of this rank's gradients in the running step; None stands for 1 / ranks. Layers such as SyncBatchNorm,
whose backward sums over ranks, read it."""


def rank_weight(n_samples: float, total: float | None = None, group: GroupLike = None) -> float:
    """Return this rank's share of ``total`` samples. By default an all-reduce of 8 bytes finds the total."""
    if total is None:
        counted = np.array([n_samples], dtype=np.float64)
        all_reduce(counted, group=group)
        total = float(counted[0])
    if not 0 <= n_samples <= total or total <= 0:
        raise ValueError(f"a rank needs 0 to total samples and total at least 1, got {n_samples} of {total}")
    return n_samples / total
