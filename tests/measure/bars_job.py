"""A job of ``tests.measure.bars``: ``bars_job.py SECONDS`` for each bar; rank 0 prints the figures in JSON.

Of the slowest rank's loops the fastest counts: the rest is noise. Public names of mpiddp only: every checkout runs it.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

import mpiddp as dist
from mpiddp import nn, optim
from mpiddp.autograd import Tensor
from mpiddp.nn import functional as F  # noqa: N812 (its customary name)

if TYPE_CHECKING:
    from collections.abc import Callable

LOOP_S = 2e-3
"""Long enough to hide the clock and the ranks' different starts."""
MESSAGES = 8
BATCH = 64


def fastest(call: Callable[[], object], budget_s: float) -> float:
    """Return the seconds of one call in the fastest loop within the budget, the same on all ranks."""
    world = MPI.COMM_WORLD

    def loop(calls: int) -> float:
        world.Barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return world.allreduce(time.perf_counter() - start, MPI.MAX)

    loop(3)
    calls = 1
    while (took := loop(calls)) < LOOP_S:
        calls *= 2
    loops = max(2, int(budget_s / took))
    return min(loop(calls) for _ in range(loops)) / calls


def reductions(shared: tuple[int, ...], ordinary: tuple[int, ...]) -> dict[str, Callable[[], object]]:
    """Return all-reduces of float32 arrays of so many MiB."""
    found: dict[str, Callable[[], object]] = {}
    for mebibytes in shared:
        array = dist.symmetric_empty(mebibytes << 18)
        array[...] = 0
        found[f"symmetric all_reduce {mebibytes} MiB"] = lambda array=array: dist.all_reduce(array)
    for mebibytes in ordinary:
        array = np.zeros(mebibytes << 18, np.float32)
        found[f"all_reduce {mebibytes} MiB"] = lambda array=array: dist.all_reduce(array)
    return found


def short() -> dict[str, Callable[[], object]]:
    x, every = np.zeros(1), np.zeros(dist.get_world_size())
    out, world = np.zeros(1), MPI.COMM_WORLD
    return {
        "all_reduce 8 B": lambda: dist.all_reduce(x),
        "mpi4py Allreduce 8 B": lambda: world.Allreduce(MPI.IN_PLACE, x),
        "broadcast 8 B": lambda: dist.broadcast(x, 0),
        "mpi4py Bcast 8 B": lambda: world.Bcast(x),
        "barrier": dist.barrier,
        "mpi4py Barrier": world.Barrier,
        "all_gather_single 8 B": lambda: dist.all_gather_single(every, x),
        "mpi4py Allgather 8 B": lambda: world.Allgather(x, every),
        "reduce_scatter_single 8 B": lambda: dist.reduce_scatter_single(out, every),
        "mpi4py Reduce_scatter_block 8 B": lambda: world.Reduce_scatter_block(every, out),
        "async all_reduce 8 B + wait": lambda: dist.all_reduce(x, async_op=True).wait(),
    }


def messages() -> dict[str, Callable[[], object]]:
    """Return messages of 8 bytes: to the next rank and from the one before, and to and fro between pairs."""
    rank, size, world = dist.get_rank(), dist.get_world_size(), MPI.COMM_WORLD
    after, before, partner = (rank + 1) % size, (rank - 1) % size, rank ^ 1
    sent, received = np.zeros((MESSAGES, 1)), np.zeros((MESSAGES, 1))
    x = np.zeros(1)

    def several() -> None:
        works = [dist.irecv(received[tag], before, tag=tag) for tag in range(MESSAGES)]
        works += [dist.isend(sent[tag], after, tag=tag) for tag in range(MESSAGES)]
        for work in works:
            work.wait()

    def batch() -> None:
        ops = [dist.P2POp(dist.irecv, received[tag], before, tag=tag) for tag in range(MESSAGES)]
        ops += [dist.P2POp(dist.isend, sent[tag], after, tag=tag) for tag in range(MESSAGES)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def requests() -> None:
        pending = [world.Irecv(received[tag], before, tag) for tag in range(MESSAGES)]
        pending += [world.Isend(sent[tag], after, tag) for tag in range(MESSAGES)]
        MPI.Request.Waitall(pending)

    def ping_pong(send: Callable[..., object], receive: Callable[..., object]) -> None:
        for sender in (0, 1):
            (send if rank % 2 == sender else receive)(x, partner)

    return {
        f"{MESSAGES} isend + {MESSAGES} irecv + wait": several,
        f"batch_isend_irecv of {2 * MESSAGES}": batch,
        f"mpi4py {MESSAGES} Isend + {MESSAGES} Irecv + Waitall": requests,
        "send/recv ping-pong": lambda: ping_pong(dist.send, dist.recv),
        "mpi4py Send/Recv ping-pong": lambda: ping_pong(world.Send, world.Recv),
    }


def step(hidden: int) -> Callable[[], object]:
    """Return a training step of 784-hidden-hidden-10 under DistributedDataParallel."""
    dist.manual_seed(0)
    layers = (nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    model = dist.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    random = np.random.default_rng(dist.get_rank())
    x = Tensor(random.standard_normal((BATCH, 784), dtype=np.float32))
    labels = random.integers(0, 10, BATCH)

    def train() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()

    return train


def main() -> None:
    budget_s = float(sys.argv[1])
    dist.init_process_group()
    calls = short() | messages() | reductions((16, 128), (1, 16))
    calls |= {f"DDP step 784-{hidden}-{hidden}-10": step(hidden) for hidden in (256, 2048)}
    seconds = {bar: fastest(call, budget_s) for bar, call in calls.items()}
    if dist.get_rank() == 0:
        print(json.dumps({"mpiddp": dist.__file__, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
