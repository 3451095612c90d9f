"""torch's groups without some ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mpiddp import distributed as mpiddp


def shrink_group(ranks_to_exclude: Sequence[int] = ()) -> None:
    """Make torch's default group anew without failed ranks, and without ``ranks_to_exclude``.

    Ranks are numbered anew in the old order, all other groups end, and a DistributedDataParallel has to wrap its module
    again. ValueError if there is no such rank, or this one is to be excluded.

    Examples
    --------
    >>> try:  # doctest: +SKIP
    ...     loss.backward()
    ... except RankFailedError as error:
    ...     shrink_group(error.ranks)
    ...     model = DistributedDataParallel(model.module)
    """
    backend = dist.get_backend()
    timeout = c10d._get_default_group().timeout
    mpiddp.shrink_group(ranks_to_exclude)
    dist.destroy_process_group()
    dist.init_process_group(backend, init_method="mpi://", timeout=timeout)
