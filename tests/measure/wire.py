"""The ranks of measure_hosts: ``wire.py all_reduce BYTES ROUNDS``, or ``latency``.

Rank 0 prints JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import mpiddp as dist
from mpiddp.algorithms import plan

CONTENDERS = ("hierarchical", "ring", "native")


def sent_bytes() -> int:
    """Return this host's sent bytes, headers included."""
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[8])


def latency() -> dict[str, float]:
    """Return the median time (us) of an all-reduce by its bytes."""
    found = {}
    for size_bytes, rounds in ((8, 300), (1 << 10, 300), (1 << 16, 300), (1 << 20, 40)):
        x, times = np.zeros(size_bytes // 8), []
        for _ in range(rounds):
            begun = time.perf_counter()
            dist.all_reduce(x)
            times.append(1e6 * (time.perf_counter() - begun))
        found[str(size_bytes)] = statistics.median(times)
    return found


def most(value: float) -> float:
    x = np.array([value])
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return float(x[0])


def all_reduce(size_bytes: int, rounds: int) -> dict[str, Any]:
    """Return time (s) and bytes sent by the busiest host of one all-reduce by each algorithm, taking turns."""
    x = dist.symmetric_empty(size_bytes // 4)
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    sent: dict[str, float] = {}
    for turn in range(rounds + 1):
        for name in CONTENDERS:
            os.environ["MPIDDP_ALGORITHM"] = f"all_reduce:{name}"
            plan.forget()
            x[...] = dist.get_rank() + 1
            dist.barrier()
            before, begun = sent_bytes(), time.perf_counter()
            dist.all_reduce(x)
            took = time.perf_counter() - begun
            dist.barrier()
            bytes_now = sent_bytes() - before
            assert (x == sum(range(1, dist.get_world_size() + 1))).all(), name
            del os.environ["MPIDDP_ALGORITHM"]
            plan.forget()
            took, bytes_now = most(took), most(bytes_now)
            if turn:  # the first makes connections
                times[name].append(took)
                sent[name] = bytes_now
    return {name: {"s": statistics.median(times[name]), "bytes": sent[name]} for name in CONTENDERS}


if __name__ == "__main__":
    dist.init_process_group()
    found = all_reduce(*map(int, sys.argv[2:])) if sys.argv[1] == "all_reduce" else latency()
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()
