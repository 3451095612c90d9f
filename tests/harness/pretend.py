"""Pretended nodes: the default group as if its ranks were on them."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from unittest import mock

from mpiddp.algorithms.plan import Plans
from mpiddp.distributed.groups import default_group
from mpiddp.faults import monitor, this_job
from mpiddp.faults.job import Job
from mpiddp.faults.monitor import GroupMonitor
from mpiddp.mpi.link import Link
from mpiddp.mpi.p2p import Mailbox


def connect(nodes: Sequence[int]) -> tuple[Link, GroupMonitor]:
    """Return a link in a world whose rank r is on node ``nodes[r]``; collective."""
    link = monitor.connect(in_world(nodes), default_group().comm.Dup(), 60.0)
    return link, link[GroupMonitor]


def in_world(nodes: Sequence[int]) -> Job:
    """Return the job as if its world's rank r were on node ``nodes[r]``."""
    job = this_job.current()
    assert job is not None, "the tests run with a process group"
    return job._replace(world=dataclasses.replace(job.world, nodes=tuple(nodes)))


@contextlib.contextmanager
def pretended_nodes(nodes: Sequence[int]) -> Iterator[None]:
    """Let the rank r of the default group, and of new groups, be on node ``nodes[r]``; collective."""
    group = default_group()
    link, watch = connect(nodes)
    job = in_world(nodes)
    pretended = {"_link": link, "_monitor": watch, "_plans": link.resource(Plans), "_mailbox": link.resource(Mailbox)}
    real = {name: getattr(group, name) for name in pretended}
    vars(group).update(pretended)
    try:
        with mock.patch.object(this_job, "current", lambda: job):
            yield
        link.close()
    finally:
        vars(group).update(real)
