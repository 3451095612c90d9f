"""The reductions that need no shared memory: MPI's own where its result is defined, by exchange elsewhere."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy as np

from mpiddp import settings
from mpiddp.mpi.reduction import ReduceOp, mpi_op

from . import exchange, native


@functools.lru_cache(1024)
def reduction(dtype: np.dtype[Any], op: ReduceOp) -> ModuleType:
    """Return the module whose all_reduce, reduce and reduce_scatter are right for ``op`` on ``dtype``."""
    if mpi_op(dtype, op) is None or settings.deterministic():
        return exchange
    return native


def forget() -> None:
    """Forget what was chosen, because settings may have changed."""
    reduction.cache_clear()
