"""Read and check the arguments that torch passes with a call: reduction, timeout, root, and tensors.

The texts of errors have Gloo's words, because programs may look for them.
"""

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch.distributed import ReduceOp
from torch.distributed.constants import default_pg_timeout

from mpiddp import distributed

from .errors import ArgumentError, expect

Tensors = Sequence[torch.Tensor]
T = TypeVar("T")

_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_OPS = {int(getattr(ReduceOp.RedOpType, name)): getattr(distributed.ReduceOp, name) for name in _NAMES}
_SUM = ReduceOp.SUM
UNSET = timedelta(milliseconds=-1)
_DEFAULT_S = default_pg_timeout.total_seconds()
DEFAULTS = SimpleNamespace(asyncOp=True, timeout=UNSET, reduceOp=_SUM)
"""The options of a call without an options object."""


def reduction(opts: Any) -> distributed.ReduceOp:
    op = (opts or DEFAULTS).reduceOp
    if op == _SUM:  # the usual case, tested first because the table is slower
        return distributed.ReduceOp.SUM
    return _OPS.get(int(op.op)) or distributed.ReduceOp.PREMUL_SUM(float(op.__getstate__()[1]))


def seconds(timeout: timedelta | None) -> float | None:
    """Return a timeout in seconds; None if no timeout is set, or if it is torch's default.

    A call with a timeout goes through mpiddp's queue, and raises an error when the time is over. A call without a
    timeout waits in the fastest way. When the group's timeout of 30 minutes is over, the watchdog ends the job, or
    the call raises an error if the job raises errors on all ranks.
    """
    if timeout is None or timeout == UNSET:
        return None
    found = timeout.total_seconds()
    return found if 0 < found != _DEFAULT_S else None


def root_of(opts: Any, size: int) -> int:
    root: int = opts.rootRank
    if not 0 <= root < size:
        raise ArgumentError(f"invalid root rank: {root} in a group of {size}")
    return root


def expect_alike(model: torch.Tensor, tensors: Tensors) -> None:
    for each in tensors:
        for attribute, word in (("layout", "layout"), ("dtype", "type"), ("shape", "size")):
            expected, found = getattr(model, attribute), getattr(each, attribute)
            if found != expected:
                raise ArgumentError(f"invalid tensor {word}: expected {expected}, got {found}")


def single(several: Sequence[T], what: str) -> T:
    expect(len(several) == 1, f"requires a single-element {what}, got {len(several)}")
    return several[0]
