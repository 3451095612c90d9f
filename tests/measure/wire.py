"""The ranks of `tests.measure.hosts`: ``wire.py BYTES ROUNDS``; rank 0 prints JSON."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import mpiddp as dist

CONTENDERS = ("hierarchical", "ring", "native")


def sent_bytes() -> int:
    """Return this host's sent bytes, headers included."""
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[8])


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
            x[...] = dist.get_rank() + 1
            dist.barrier()
            before, begun = sent_bytes(), time.perf_counter()
            dist.all_reduce(x, algorithm=name)
            took = time.perf_counter() - begun
            dist.barrier()
            bytes_now = sent_bytes() - before
            assert (x == sum(range(1, dist.get_world_size() + 1))).all(), name
            took, bytes_now = most(took), most(bytes_now)
            if turn:  # the first makes connections
                times[name].append(took)
                sent[name] = bytes_now
    return {name: {"s": statistics.median(times[name]), "bytes": sent[name]} for name in CONTENDERS}


if __name__ == "__main__":
    dist.init_process_group()
    found = all_reduce(*map(int, sys.argv[1:]))
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()
