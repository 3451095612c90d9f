"""Prints the gains on several hosts: ``python -m tests.measure.hosts [PART...] [--rate 1gbit]``.

On two hosts (see hosts) with links of limited rate:

all_reduce   16 MiB on two ranks each by hierarchical, flat ring and MPI's own, with bytes of the interface
latency      all_reduce of 8 bytes to 1 MiB on one rank each; --against CHECKOUT: in turns with another version

"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from harness import hosts
from harness.launcher import job

RANKS_PROGRAM = Path(__file__).parent / "wire.py"


def run(some: hosts.Hosts, ranks: int, *arguments: str | Path, cyclic: bool = False, **env: str | None) -> str:
    """Run a Python program on this many ranks a host; return its output."""
    on = some.cyclic if cyclic else some.block
    done = job(*arguments, ranks=ranks * len(some.names), on=on, limit_s=300, **env)
    if done.rc != 0:
        raise RuntimeError(str(done))
    return done.stdout


def measure(some: hosts.Hosts, *arguments: str, cyclic: bool = False) -> dict[str, Any]:
    """Run the ranks' program on two ranks a host; return its findings, which a warning of UCX's may follow."""
    printed = run(some, 2, RANKS_PROGRAM, *arguments, cyclic=cyclic)
    found: dict[str, Any] = json.loads(printed.partition("\n")[0])
    return found


def row(cells: Iterable[object]) -> None:
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def all_reduce(some: hosts.Hosts, given: argparse.Namespace) -> None:
    size = given.mib << 20
    row(["placement", f"all_reduce of {given.mib} MiB", "ms", "hierarchical is faster by", "sent by a host, in sizes"])
    row(["---"] * 5)
    for placement in ("block", "cyclic"):
        found = measure(some, "all_reduce", str(size), str(given.rounds), cyclic=placement == "cyclic")
        for name, each in found.items():
            ratio = each["s"] / found["hierarchical"]["s"]
            row([placement, name, f"{each['s'] * 1e3:.0f}", f"{ratio:.2f}", f"{each['bytes'] / size:.2f}"])


def latency(some: hosts.Hosts, given: argparse.Namespace) -> None:
    versions = {"this": str(Path(__file__).parents[2])} | ({"against": given.against} if given.against else {})
    found: dict[str, list[dict[str, float]]] = {name: [] for name in versions}
    for turn in range(given.rounds):
        for name in list(versions)[:: -1 if turn % 2 else 1]:
            printed = run(some, 1, RANKS_PROGRAM, "latency", PYTHONPATH=versions[name])
            found[name].append(json.loads(printed.partition("\n")[0]))
    row(["bytes", *(f"{name}, us" for name in versions), "median ratio of turns"])
    row(["---"] * (2 + len(versions)))
    for size in found["this"][0]:
        times = [[each[size] for each in rounds] for rounds in found.values()]
        ratio = statistics.median(mine / others for mine, others in zip(times[0], times[-1], strict=True))
        row([size, *(f"{statistics.median(each):.1f}" for each in times), f"{ratio:.2f}"])


PARTS: dict[str, Callable[[hosts.Hosts, argparse.Namespace], None]] = {
    "all_reduce": all_reduce,
    "latency": latency,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (all of them)")
    parser.add_argument("--rate", default="1gbit", help="of every host's link, as tc takes it (1gbit)")
    parser.add_argument("--mib", type=int, default=16, help="size of what is reduced (16)")
    parser.add_argument("--rounds", type=int, default=7, help="in which all take turns; the median counts (7)")
    parser.add_argument("--against", metavar="CHECKOUT", help="another version, for latency")
    given = parser.parse_args()
    unknown = set(given.parts) - set(PARTS)
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    fault = hosts.why_not()
    if fault:
        sys.exit(fault)
    # The ranks are in sessions of their own: signals reach them through this process alone.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with hosts.Hosts(2) as two:
        two.limit(given.rate)
        print(f"2 hosts, {given.rate}, {hosts.mpi_library()}, load {os.getloadavg()[0]:.1f}", flush=True)
        for name in given.parts or PARTS:
            print()
            PARTS[name](two, given)


if __name__ == "__main__":
    main()
