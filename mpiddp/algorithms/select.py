"""Which algorithm runs when: the one place that decides.

Every rank decides alike, because all that is looked at here (operation, dtype, reduction, bytes, nodes of the group) is
alike. Whether an array is symmetric is not: one rank may give an ordinary array where another gives a symmetric one. So
the algorithms that work in shared memory decide about that themselves, when they have heard of all ranks' arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpiddp.mpi.link import Link
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.work import Steps
from mpiddp.typing import Array

from . import exchange, messages, native, two_shot

ALGORITHMS = {"exchange": exchange, "native": native, "two_shot": two_shot}


def choose(operation: str, link: Link, x: Array, op: ReduceOp | None = None) -> Callable[..., Steps]:
    """Return the steps of ``operation`` that are best for ``x``."""
    if link.one_node and link.size > 1 and x.nbytes >= 1 << 15:
        module: Any = two_shot
    else:
        module = native if op is None else messages.reduction(x.dtype, op)
    steps: Callable[..., Steps] = getattr(module, operation)
    return steps


def forget() -> None:
    """Forget what was chosen, because settings may have changed."""
    messages.forget()
