"""Prints the gains on two hosts (see `harness.hosts`) with links of limited rate: ``python -m tests.measure.hosts``.

An all_reduce on two ranks each by hierarchical, flat ring and MPI's own, with bytes of the interface.
"""

import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import hosts, launcher

import mpiddp as dist

RATE, MIB, ROUNDS = "1gbit", 16, 7
"""Of every host's link, as tc takes it; the size of what is reduced; turns, of which the median counts."""
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


def measure(some: hosts.Hosts, size_bytes: int, rounds: int, *, cyclic: bool = False) -> dict[str, Any]:
    """Run `all_reduce` on two ranks a host; return its findings, which a warning of UCX's may follow."""
    on = some.cyclic if cyclic else some.block
    file, ranks = Path(__file__), 2 * len(some.names)
    done = launcher.job(file, size_bytes, rounds, ranks=ranks, on=on, search=file.parents[1:3], limit_s=300)
    if done.rc != 0:
        raise RuntimeError(str(done))
    found: dict[str, Any] = json.loads(done.stdout.partition("\n")[0])
    return found


def main() -> None:
    fault = hosts.why_not()
    if fault:
        sys.exit(fault)
    # The ranks are in sessions of their own: signals reach them through this process alone.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with hosts.Hosts(2) as two:
        two.limit(RATE)
        print(f"2 hosts, {RATE}, {hosts.mpi_library()}, load {os.getloadavg()[0]:.1f}\n", flush=True)
        size = MIB << 20
        print(f"| placement | all_reduce of {MIB} MiB | ms | hierarchical is faster by | sent, in sizes |")
        print("|---" * 5 + "|", flush=True)
        for placement in ("block", "cyclic"):
            found = measure(two, size, ROUNDS, cyclic=placement == "cyclic")
            for name, each in found.items():
                ratio = each["s"] / found["hierarchical"]["s"]
                sent = each["bytes"] / size
                print(f"| {placement} | {name} | {each['s'] * 1e3:.0f} | {ratio:.2f} | {sent:.2f} |", flush=True)


def main_of_a_rank() -> None:
    dist.init_process_group()
    found = all_reduce(*map(int, sys.argv[1:]))
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if launcher.announced_size():
        main_of_a_rank()
    else:
        main()
