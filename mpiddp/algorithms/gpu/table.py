"""The table of algorithms for device arrays, which `plan` asks.

There are three ways. The first one that can do a call does it.

- NCCL does what it defines as mpiddp does, in groups of ``backend="nccl"`` with a GPU for each rank.
- MPI gets device pointers where it is proven to take them: in its own collectives (`pointers`), or in messages, with
  `device_ring` for all-reduces.
- Everything else goes through pinned memory of the host: all-reduces of long arrays by `staged_two_shot` on one node
  and by `staged_ring` on several, which copy one part while another is on its way, and the rest by an algorithm of the
  host between two copies (`staged`).

A group of one rank sends nothing: its all-reduces and exchanges stay on the device.
"""

import functools
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from mpiddp import device, settings
from mpiddp.algorithms.handshake import without
from mpiddp.mpi import cuda_aware, p2p_device
from mpiddp.mpi.cuda_aware import DevicePointers, Support
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Link
from mpiddp.mpi.reduction import ReduceOp, mpi_op
from mpiddp.mpi.requests import Steps
from mpiddp.typing import Array

from . import nccl, pointers, ring, staged, staged_ring, staged_two_shot

ALGORITHMS: dict[str, ModuleType] = {
    "device_pointers": pointers,
    "device_ring": ring,
    "staged_ring": staged_ring,
    "staged_two_shot": staged_two_shot,
}

SELF_COMPARING = (staged_two_shot.all_reduce,)
"""Steps that compare the call themselves."""
SHORT_BYTES = 1 << 19
"""Up to this size all-reduces go by an algorithm of the host between two copies. With two ranks that shared an H200 it
took the least time up to 1 MiB. Under NVIDIA's MPS, where the ranks do not take turns on the GPU, it did so up to 256
KiB."""

_NO_GPU = Support(False, "no rank had imported CuPy and found a GPU when the default group was made")
_UNASKED = DevicePointers(_NO_GPU, _NO_GPU)

addresses = _UNASKED


def learn(link: Link) -> None:
    """Agree on MPI's support for device pointers, and warn if ranks share a GPU. Collective.

    MPI is asked only if a rank uses a GPU, because some libraries end the process when they are asked.
    """
    global addresses
    mine = device.choice.device_uuid() if device.in_use() else None
    used = link.now.allreduce(mine is not None, MPI.LOR)
    addresses = cuda_aware.device_pointers(link.now) if used else _UNASKED
    p2p_device.by_address = addresses.point_to_point.yes
    if not used:
        return
    told = zip(link.node.ranks, link.node.now.allgather(mine), strict=True)
    same = [rank for rank, uuid in told if uuid is not None and uuid == mine]
    if len(same) > 1 and link.ranks[link.rank] == same[0]:
        warnings.warn(
            f"ranks {', '.join(map(str, same))} share one GPU, which runs the work of one of them at a time: start"
            " no more ranks on a node than it has GPUs, and let each choose its own (mpiddp.set_device) or none",
            stacklevel=3,
        )


def choose(
    operation: str, link: Link, x: Array, op: ReduceOp | None, host: Callable[..., Steps], asked: str | None
) -> Callable[..., Steps]:
    """Return the steps for arrays like ``x``; ``host`` are those for arrays of the host."""
    through_host = staged.around(operation, host)
    if op is not None and op._merges is not None:  # only algorithms of the host can add in this reduction's own order
        return through_host
    if asked is None and nccl.does(operation, link, x.dtype, op):
        return without(getattr(nccl, operation))
    if link.size > 1 and asked is not None:
        if asked not in ALGORITHMS:
            return through_host
        _expect_possible(asked)
        steps: Callable[..., Steps] = getattr(ALGORITHMS[asked], operation)
        return steps if steps in SELF_COMPARING else without(steps)
    if operation in pointers.MESSAGES:
        if link.size > 1 and not addresses.point_to_point.yes:
            return through_host
        return without(functools.partial(pointers.by_messages, operation))
    if addresses.collectives.yes and _mpi_reduces(x.dtype, op):
        return without(getattr(pointers, operation))
    if operation == "all_reduce" and link.size == 1:
        return without(pointers.alone)
    if operation != "all_reduce" or x.nbytes <= SHORT_BYTES:
        return through_host
    if addresses.point_to_point.yes:
        return without(ring.all_reduce)
    return staged_two_shot.all_reduce if link.one_node else without(staged_ring.all_reduce)


def _mpi_reduces(dtype: np.dtype[Any], op: ReduceOp | None) -> bool:
    return op is None or (mpi_op(dtype, op) is not None and not settings.deterministic())


def _expect_possible(name: str) -> None:
    needed = {"device_ring": addresses.point_to_point, "device_pointers": addresses.collectives}.get(name)
    if needed is not None and not needed.yes:
        raise ValueError(f"all_reduce:{name} needs an MPI that takes addresses of GPU memory: {needed.reason}")
