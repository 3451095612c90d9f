"""A job of ``tests.measure.scale``: rank 0 prints, in JSON, the slowest rank's times of starting and a few short calls.

Public names of mpiddp only, so that every checkout runs it. The last time is the clock at the end of the program, which
the starter subtracts from the end of the job.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

import mpiddp as dist

if TYPE_CHECKING:
    from collections.abc import Callable

CALLS, LOOPS = 20, 5
GROUPS = 5


def slowest(call: Callable[[], object], calls: int) -> float:
    """Return the seconds of one of ``calls`` calls, on the slowest rank."""
    MPI.COMM_WORLD.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return MPI.COMM_WORLD.allreduce(time.perf_counter() - start, MPI.MAX) / calls


def main() -> None:
    figures = {"init_process_group": slowest(lambda: dist.init_process_group(timeout=120), 1)}
    groups: list[object] = []
    figures["new_group"] = slowest(lambda: groups.append(dist.new_group()), GROUPS)
    x = np.zeros(1)
    for name, call in (("all_reduce 8 B", lambda: dist.all_reduce(x)), ("barrier", dist.barrier)):
        slowest(call, CALLS)
        figures[name] = min(slowest(call, CALLS) for _ in range(LOOPS))
    figures["destroy_process_group"] = slowest(dist.destroy_process_group, 1)
    MPI.COMM_WORLD.Barrier()
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps({"mpiddp": dist.__file__, "figures": figures, "end": time.time()}), flush=True)


if __name__ == "__main__":
    main()
