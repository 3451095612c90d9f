"""Scratch: memory that a node's ranks share. Arrays outside of symmetric memory can be pipelined through it."""

from typing import Any

import numpy as np

from mpiddp.errors import DistError
from mpiddp.mpi.link import Link, Resource
from mpiddp.mpi.requests import Steps
from mpiddp.typing import Array

from . import segment

BUFFER_BYTES = 1 << 21
"""The largest size of a buffer. With many ranks on a node it is smaller, so that the buffers of a round stay within
`_NODE_BYTES`; but it is at least `_SMALLEST_BYTES`."""
_NODE_BYTES = 1 << 24
_SMALLEST_BYTES = 1 << 17


class Scratch(Resource):
    """Three buffers for each rank, used in turn.

    In each round a rank writes to its own buffer, enters a barrier, and then reads the buffers of the others. It may
    read some of them only after the barrier of the next round. Round t uses the buffers of round t - 3 again. No rank
    overwrites what another still reads: a rank writes in round t only after the barrier of round t - 1, and every rank
    enters that barrier only after it has read all that it needs of round t - 3.
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
        """The reason why there is no memory; empty if there is some, and before the first `prepare`."""

    def prepare(self) -> Steps:
        """Allocate the memory on first use; return True if there is some. All ranks of the group call this together."""
        if not self.ready and not self.fault:
            node = self._link.node
            region_bytes = self._BUFFERS * self.buffer_bytes + segment.ALIGNMENT_BYTES
            made: segment.Allocation = yield from segment.allocate(node, self._link, region_bytes)
            self.fault = made.fault
            if made.memory is not None:
                self._regions = list(np.frombuffer(made.memory, np.uint8).reshape(node.size, -1))
                self.ready = True
        return self.ready

    def next_buffers(self, count: int, dtype: np.dtype[Any]) -> list[Array]:
        """Return all ranks' buffers of the next round, each as ``count`` elements of ``dtype``."""
        index = self._round % self._BUFFERS
        buffers = self._views.get((index, count, dtype))
        if buffers is None:
            start = segment.SKEW_BYTES + index * self.buffer_bytes
            buffers = [region[start : start + count * dtype.itemsize].view(dtype) for region in self._regions]
            if len(self._views) >= self._MAX_VIEWS:
                self._views.clear()
            self._views[index, count, dtype] = buffers
        return buffers

    def begin_round(self, count: int, dtype: np.dtype[Any]) -> list[Array]:
        """Begin a round, and return its buffers as `next_buffers` does."""
        buffers = self.next_buffers(count, dtype)
        self._round += 1
        return buffers

    def close(self) -> None:
        """Give up the memory; it is unmapped when its last view is gone."""
        self.ready = False
        self._regions, self._views = [], {}

    def drop(self, error: DistError) -> None:
        """Close at once, because no pending message writes to this memory."""
        self.close()
