"""Staging memory of a group on a node."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddp.errors import DistError
from mpiddp.mpi.link import Link, Resource
from mpiddp.mpi.requests import Steps
from mpiddp.typing import Array

from . import segment

BUFFER_BYTES = 1 << 21
"""Less if many ranks' buffers exceed `_NODE_BYTES`."""
_NODE_BYTES = 1 << 24
_SMALLEST_BYTES = 1 << 17


class Scratch(Resource):
    """Three buffers a rank, used in rounds, one for each barrier.

    A rank that writes in round t has left the barrier of round t - 1: all ranks have read the buffers of round t - 3,
    which are read at the latest after the barrier of round t - 2.
    """

    _BUFFERS = 3
    _MAX_VIEWS = 256

    def __init__(self, link: Link) -> None:
        self._link = link
        share = max(_NODE_BYTES // link.node.size, _SMALLEST_BYTES)
        self.buffer_bytes = min(BUFFER_BYTES, 1 << share.bit_length() - 1)
        self._regions: list[Array] = []
        self._views: dict[tuple[int, int, np.dtype[Any]], list[Array]] = {}
        self._round = 0
        self.ready = False
        self.fault = ""
        """Reason of missing memory; empty before a try."""

    def prepare(self) -> Steps:
        """Allocate on first use; return True if there is memory; collective."""
        if not self.ready and not self.fault:
            node = self._link.node
            found: segment.Allocation = yield from segment.allocate(node, self._link, self._BUFFERS * self.buffer_bytes)
            self.fault = found.fault
            if found.memory is not None:
                self._regions = list(np.frombuffer(found.memory, np.uint8).reshape(node.size, -1))
                self.ready = True
        return self.ready

    def next_buffers(self, count: int, dtype: np.dtype[Any]) -> list[Array]:
        """Return those of the next `begin_round`."""
        index = self._round % self._BUFFERS
        found = self._views.get((index, count, dtype))
        if found is None:
            start = index * self.buffer_bytes
            found = [region[start : start + count * dtype.itemsize].view(dtype) for region in self._regions]
            if len(self._views) >= self._MAX_VIEWS:
                self._views.clear()
            self._views[index, count, dtype] = found
        return found

    def begin_round(self, count: int, dtype: np.dtype[Any]) -> list[Array]:
        buffers = self.next_buffers(count, dtype)
        self._round += 1
        return buffers

    def close(self) -> None:
        """Unmap the memory after its last view."""
        self.ready = False
        self._regions, self._views = [], {}

    def drop(self, error: DistError) -> None:
        """Unmap the memory: MPI does not know it."""
        self.close()
