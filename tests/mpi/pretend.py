"""Pretended nodes and GPUs for a test: the default group as it would be if its ranks had them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from harness import faking

from mpiddp.algorithms.gpu.cuda_ipc import Segments
from mpiddp.algorithms.gpu.scratch import DeviceScratch
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


@contextlib.contextmanager
def pretended_gpus() -> Iterator[Any]:
    """Let the ranks have the fake GPU, and leave the default group without memory of it; all ranks call this."""
    with faking.fake_gpu() as cupy:
        yield cupy
        release(default_group().link)


def release(link: Link) -> None:
    """Free the memory that the GPUs of a group's ranks share; all ranks call."""
    link.resource(DeviceScratch).close()
    link.resource(Segments).close()
