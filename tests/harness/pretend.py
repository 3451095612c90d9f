"""Pretended nodes: the default group as if its ranks were on them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from mpiddp.algorithms.plan import Plans
from mpiddp.distributed.groups import default_group
from mpiddp.faults import monitor, this_job
from mpiddp.faults.monitor import GroupMonitor
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Link
from mpiddp.mpi.p2p import Mailbox


def connect(nodes: Sequence[int], comm: MPI.Intracomm | None = None) -> tuple[Link, GroupMonitor]:
    """Return a link in a world whose rank r is on node ``nodes[r]``, of ``comm``'s ranks, which it owns; collective."""
    job = this_job.current()
    assert job is not None, "the tests run with a process group"
    world = dataclasses.replace(job.world, nodes=tuple(nodes))
    return monitor.connect(job._replace(world=world), comm or default_group().comm.Dup(), 60.0)


@contextlib.contextmanager
def pretended_nodes(nodes: Sequence[int]) -> Iterator[None]:
    """Let the default group's rank r be on node ``nodes[r]``; collective."""
    group = default_group()
    link, watch = connect(nodes)
    pretended = {"_link": link, "_monitor": watch, "_plans": link.resource(Plans), "_mailbox": link.resource(Mailbox)}
    real = {name: getattr(group, name) for name in pretended}
    vars(group).update(pretended)
    try:
        yield
        link.close()
    finally:
        vars(group).update(real)
