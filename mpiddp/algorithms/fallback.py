"""Reductions without shared memory: by MPI if it defines the reduction, else by `tree` or `exchange`.

Under ``MPIDDP_DETERMINISTIC=1`` all go by `exchange`.
"""

from types import ModuleType
from typing import Any

import numpy as np

from mpiddp import settings
from mpiddp.mpi.link import Link
from mpiddp.mpi.reduction import ReduceOp, mpi_op

from . import exchange, native, tree

SHORT_BYTES = 1 << 14
TREE_RANKS = 9
"""The number of ranks from which on `tree` sends fewer messages than `exchange`."""


def reduction(dtype: np.dtype[Any], op: ReduceOp) -> ModuleType:
    if mpi_op(dtype, op) is None or settings.deterministic():
        return exchange
    return native


def choose(operation: str, link: Link, dtype: np.dtype[Any], op: ReduceOp, size_bytes: int) -> ModuleType:
    module = reduction(dtype, op)
    short = size_bytes <= SHORT_BYTES and link.size >= TREE_RANKS and not link.one_node
    if module is exchange and short and hasattr(tree, operation) and not settings.deterministic():
        return tree
    return module
