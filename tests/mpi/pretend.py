"""Pretended nodes for a test: the default group as it would be if its ranks were on several nodes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from mpiddp.distributed.groups import default_group
from mpiddp.mpi.link import Link


@contextlib.contextmanager
def pretended_nodes(nodes: Sequence[int]) -> Iterator[None]:
    """Let the default group's rank r be on node ``nodes[r]``; all ranks call this."""
    group = default_group()
    real = group.link
    group.link = Link(dataclasses.replace(real.world, nodes=tuple(nodes)), group.comm.Dup(), 60.0)
    try:
        yield
        group.link.close()
    finally:
        group.link = real
