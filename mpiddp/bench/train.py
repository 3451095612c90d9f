"""``bench train``: time training steps on 1 rank, on 2, and so on up to all, in one run.

With strong scaling the ranks share a batch of fixed size; with weak scaling each rank has a batch of fixed size. Teams
of the first 1, 2, 4, ... ranks train in turns while the other ranks sleep. The number of BLAS threads of a rank is the
same in each team.

samples/s   samples of all ranks together, divided by the median time of a step on the slowest rank
efficiency  samples/s divided by those of 1 rank, divided by the number of ranks
exposed     share of the steps' time in which the backward of rank 0 only waits for communication
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from typing import Any, NamedTuple

import mpiddp.distributed as dist
from mpiddp.mpi.lazy import MPI
from mpiddp.training.options import UsageError

from .ddp import NETWORKS, Batch, Ours
from .job import Bench, job
from .results import size_range
from .timing import Clock

_WARMUP = 3
_NAP_S = 0.001
"""Seconds that a rank outside the team sleeps between two tests for the turn's end. Waiting in MPI would use a core."""


class Team(NamedTuple):
    """The first ``size`` ranks of the job, which train together. All ranks have the object."""

    size: int
    group: Any
    """The team's process group; `GroupMember.NON_GROUP_MEMBER` on ranks that are not in the team."""
    clock: Clock
    """The clock of the team's ranks, or of the other ones."""


def run(arguments: argparse.Namespace) -> int:
    with job(arguments) as here:
        if arguments.strong_batch < here.size:
            raise UsageError(f"--strong-batch {arguments.strong_batch} is that of all {here.size} ranks together")
        here.say(
            f"# SGD with momentum, float32; medians over {arguments.rounds} rounds of {arguments.iterations} steps in"
            " turns, slowest rank"
        )
        here.say("#network  scaling   ranks  samples a rank    step (ms)    samples/s  efficiency  exposed")
        teams = [_team(here, size) for size in sorted({*size_range(1, here.size, 2), here.size})]
        for network in NETWORKS:
            for scaling in ("strong", "weak"):
                batches = [
                    arguments.strong_batch // team.size if scaling == "strong" else arguments.weak_batch
                    for team in teams
                ]
                found = _measure(here, network, teams, batches, arguments)
                here.rows += [{"network": network, "scaling": scaling, **each} for each in found]
                for each in found:
                    here.say(
                        f"{network:8}  {scaling:8}{each['ranks']:7}{each['batch']:16}{each['step_s'] * 1e3:13.3f}"
                        f"{each['samples_per_s']:13.0f}{each['efficiency']:12.2f}{each['exposed']:9.2f}"
                    )
        for team in teams:
            team.clock.close()
            dist.destroy_process_group(team.group)
    return 0


def _team(here: Bench, size: int) -> Team:
    return Team(size, dist.new_group(range(size)), Clock(MPI.Intracomm(here.comm.Split(here.rank < size))))


def _measure(
    here: Bench, network: str, teams: list[Team], batches: list[int], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return a row for each team of this rank. Those of rank 0 count, which is in all teams."""
    contenders: dict[Team, Ours] = {}
    for team, batch in zip(teams, batches, strict=True):
        if here.rank < team.size:
            contenders[team] = ours = Ours(network, Batch.of(here.rank, batch), team.group)
            team.clock.each(ours.step, _WARMUP)
            ours.exposed_s.clear()
    took: defaultdict[Team, list[float]] = defaultdict(list)
    for _ in range(arguments.rounds):
        for team in teams:
            if team in contenders:
                took[team] += team.clock.each(contenders[team].step, arguments.iterations)
            _sleeping_barrier(here.comm)
    rows: list[dict[str, Any]] = []
    for team, ours in contenders.items():
        step_s, batch = statistics.median(took[team]), len(ours.batch.labels)
        row = {"ranks": team.size, "batch": batch, "step_s": step_s, "samples_per_s": batch * team.size / step_s}
        alone = rows[0]["samples_per_s"] if rows else row["samples_per_s"]
        row["efficiency"] = row["samples_per_s"] / (alone * team.size)
        row["exposed"] = sum(ours.exposed_s) / sum(took[team])
        rows.append(row)
    return rows


def _sleeping_barrier(comm: MPI.Intracomm) -> None:
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(_NAP_S)
