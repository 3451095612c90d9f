"""Shared memory lies where copies from and to ordinary arrays are fast."""

import mmap
from typing import Any

import numpy as np
import pytest

import mpiddp as dist
from mpiddp.data import shared_on_node
from mpiddp.distributed.groups import default_group
from mpiddp.mpi.requests import drive
from mpiddp.shm.eager import EagerBuffers
from mpiddp.shm.scratch import Scratch
from mpiddp.shm.segment import address_of, find

pytestmark = pytest.mark.mpi


def test_shared_arrays_begin_elsewhere_in_their_pages_than_others(world: Any) -> None:
    """A copy to an address a little behind the source's takes several times as long, counted from the page."""
    link = default_group()._link
    if not link.shares_memory:
        pytest.skip("no two ranks share a node")
    symmetric = dist.symmetric_empty(1 << 17)
    assert find(symmetric).segment
    scratch = link.resource(Scratch)
    assert drive(scratch.prepare())
    shared = [symmetric, *shared_on_node(lambda: [np.zeros(1 << 17)]), *scratch.begin_round(1 << 12, np.dtype("f8"))]
    if link.find(EagerBuffers) is not None:
        for each in link[EagerBuffers].rounds((1 << 12,), np.dtype("f8")):
            shared += each.rows
    for place in (0, 16, 64):  # of pages, of NumPy's long arrays, and of torch's
        for x in shared:
            assert 512 <= (address_of(x) - place) % mmap.PAGESIZE <= mmap.PAGESIZE - 512, (place, hex(address_of(x)))
