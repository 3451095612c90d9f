"""Prints the gains on two hosts (see `harness.hosts`) with links of limited rate: ``python -m tests.measure.hosts``.

An all_reduce on two ranks each by hierarchical, flat ring and MPI's own, with bytes of the interface.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from harness import hosts
from harness.launcher import job

RANKS_PROGRAM = Path(__file__).with_name("wire.py")


def measure(some: hosts.Hosts, size_bytes: int, rounds: int, *, cyclic: bool = False) -> dict[str, Any]:
    """Run the ranks' program on two ranks a host; return its findings, which a warning of UCX's may follow."""
    on = some.cyclic if cyclic else some.block
    done = job(RANKS_PROGRAM, size_bytes, rounds, ranks=2 * len(some.names), on=on, limit_s=300)
    if done.rc != 0:
        raise RuntimeError(str(done))
    found: dict[str, Any] = json.loads(done.stdout.partition("\n")[0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="of every host's link, as tc takes it (1gbit)")
    parser.add_argument("--mib", type=int, default=16, help="size of what is reduced (16)")
    parser.add_argument("--rounds", type=int, default=7, help="in which all take turns; the median counts (7)")
    given = parser.parse_args()
    fault = hosts.why_not()
    if fault:
        sys.exit(fault)
    # The ranks are in sessions of their own: signals reach them through this process alone.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with hosts.Hosts(2) as two:
        two.limit(given.rate)
        print(f"2 hosts, {given.rate}, {hosts.mpi_library()}, load {os.getloadavg()[0]:.1f}\n", flush=True)
        size = given.mib << 20
        print(f"| placement | all_reduce of {given.mib} MiB | ms | hierarchical is faster by | sent, in sizes |")
        print("|---" * 5 + "|", flush=True)
        for placement in ("block", "cyclic"):
            found = measure(two, size, given.rounds, cyclic=placement == "cyclic")
            for name, each in found.items():
                ratio = each["s"] / found["hierarchical"]["s"]
                sent = each["bytes"] / size
                print(f"| {placement} | {name} | {each['s'] * 1e3:.0f} | {ratio:.2f} | {sent:.2f} |", flush=True)


if __name__ == "__main__":
    main()
