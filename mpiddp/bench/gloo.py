"""Gloo, by way of torch.distributed, as a contender: in the same processes, on the same arrays.

The one module that imports torch; `compare` loads it where torch is installed. MPI says who is which rank and at which
address they meet.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from typing import Any

import torch
import torch.distributed as td
from torch._C._distributed_c10d import TCPStore

from .buffers import Buffers
from .contenders import Call
from .job import Job

_TIMEOUT = datetime.timedelta(seconds=60)


class Gloo:
    """``torch.distributed`` with the backend "gloo", beginning with its process group.

    Parameters
    ----------
    job : Job
        The ranks; all of them make it together.
    """

    name = "gloo"

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(1)
        one_node = len(set(job.world.nodes)) == 1
        if one_node:  # the host's name may not resolve, or to an address that is not here
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        host = "127.0.0.1" if one_node else job.world.hosts[0]
        store: Any = None
        if job.rank == 0:
            store = TCPStore(host, 0, job.size, True, _TIMEOUT, wait_for_workers=False)
        port = job.comm.bcast(store.port if store else None)
        if store is None:
            store = TCPStore(host, port, job.size, False, _TIMEOUT)
        td.init_process_group("gloo", store=store, rank=job.rank, world_size=job.size, timeout=_TIMEOUT)

    def algorithm(self, b: Buffers) -> str:
        """Return nothing: Gloo does not tell."""
        return ""

    def prepare(self, b: Buffers) -> Call | None:
        """Return what does the operation once on tensors that are the arrays, where Gloo has it for the dtype."""
        try:
            x, output = torch.from_numpy(b.x), torch.from_numpy(b.output)
        except TypeError:  # a dtype that torch does not know
            return None
        if b.op == "avg":  # Gloo has no average
            return None
        op = getattr(td.ReduceOp, b.op.upper())
        root, here = b.root, b.rank == b.root
        # torch 2.13 calls these two by new names, and warns of the old ones.
        gather = getattr(td, "all_gather_single", td.all_gather_into_tensor)
        reduce_scatter = getattr(td, "reduce_scatter_single", td.reduce_scatter_tensor)
        parts = [torch.from_numpy(part) for part in b.blocks(b.x if b.operation == "scatter" else b.output)]
        calls: dict[str, Call] = {
            "all_reduce": lambda: td.all_reduce(x, op),
            "broadcast": lambda: td.broadcast(x, root),
            "reduce": lambda: td.reduce(x, root, op),
            "all_gather": lambda: gather(output, x),
            "reduce_scatter": lambda: reduce_scatter(output, x, op),
            "gather": lambda: td.gather(x, parts if here else None, root),
            "scatter": lambda: td.scatter(output, parts if here else None, root),
            "all_to_all": lambda: td.all_to_all_single(output, x),
            "send_recv": lambda: _around(b, x, output),
            "barrier": td.barrier,
        }
        call = calls[b.operation]
        try:
            call()  # the ranks are asked alike, so all find out
        except (RuntimeError, ValueError):
            return None
        return call

    @staticmethod
    def close() -> None:
        """End torch's process group."""
        with contextlib.suppress(RuntimeError):
            td.destroy_process_group()


def _around(b: Buffers, x: torch.Tensor, output: torch.Tensor) -> None:
    """Send to the next rank and receive from the one before."""
    sent = td.isend(x, (b.rank + 1) % b.size)
    td.recv(output, (b.rank - 1) % b.size)
    assert sent is not None
    sent.wait()
