"""Prints what several hosts gain: ``PYTHONPATH=.:tests python -m launch.measure_hosts [--rate 1gbit]``.

Two hosts with two ranks each, of network namespaces on this machine (see hosts), with the rate of their links limited.
All-reduce of 16 MiB by mpiddp's hierarchical algorithm, a flat ring and the MPI library's own, with bytes counted by
the network interface; then training with buckets of several sizes and with compressed gradients.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from launch import hosts

RANKS_PROGRAM = Path(__file__).parent / "wire.py"


def measure(some: hosts.Hosts, *arguments: str, cyclic: bool = False) -> dict[str, Any]:
    """Run the ranks' program on two ranks a host, and return what it found."""
    command = [sys.executable, RANKS_PROGRAM, *arguments]
    with some.start(2 * len(some.names), command, cyclic=cyclic) as program:
        done = program.wait(300)
    if done.rc != 0:
        raise RuntimeError(str(done))
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="of every host's link, as tc takes it (1gbit)")
    parser.add_argument("--mib", type=int, default=16, help="size of the all-reduce (16)")
    parser.add_argument("--rounds", type=int, default=7, help="in which all take turns; the median counts (7)")
    given = parser.parse_args()
    fault = hosts.why_not()
    if fault:
        sys.exit(fault)
    size = given.mib << 20
    with hosts.Hosts(2) as two:
        two.limit(given.rate)
        print(f"2 hosts x 2 ranks, {given.rate}, {hosts.mpi_library()}\n")
        print(
            f"| placement | all_reduce of {given.mib} MiB | ms | hierarchical is faster by | sent by a host, in sizes |"
        )
        print("|---|---|---|---|---|")
        for placement in ("block", "cyclic"):
            found = measure(two, "all_reduce", str(size), str(given.rounds), cyclic=placement == "cyclic")
            for name, each in found.items():
                ratio = each["s"] / found["hierarchical"]["s"]
                print(f"| {placement} | {name} | {each['s'] * 1e3:.0f} | {ratio:.2f} | {each['bytes'] / size:.2f} |")
        print("\n| bucket_cap_mb, hook | ms a step | exposed communication | loss after 4 epochs |\n|---|---|---|---|")
        for name, each in measure(two, "train").items():
            print(f"| {name} | {each['s'] * 1e3:.1f} | {each['exposed']:.0%} | {each['loss']:.4f} |")


if __name__ == "__main__":
    main()
