"""Staging memory of a group on a node, and the pipeline of ordinary arrays through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpiddp.errors import DistError
from mpiddp.mpi.link import Link, Resource
from mpiddp.mpi.requests import Steps
from mpiddp.typing import Array

from . import segment

BUFFER_BYTES = 1 << 21
"""Less if many ranks' buffers exceed `_NODE_BYTES`."""
CHUNK_BYTES = 1 << 19
"""Of a pipeline: an array's part and its copy stay in a core's cache."""
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


Step = Callable[[int, int, list[Array]], None]
"""Takes start and stop in an array, and the buffers of all ranks."""


class Pipeline:
    """An array's way through the scratch chunk by chunk: put, barrier, take.

    The first chunk is put before the ranks meet, if possible: short arrays need one synchronisation. One chunk is
    written while another is read. ``put`` writes to this rank's buffer; ``take`` reads all buffers after a barrier, and
    may write to this rank's; ``collect`` reads the results of the others' ``take``, after another barrier. A chunk has
    ``rows`` side by side, of ``length`` elements in all chunks.
    """

    def __init__(
        self,
        link: Link,
        like: Array,
        length: int,
        put: Step,
        take: Step,
        collect: Step | None = None,
        *,
        rows: int = 1,
    ) -> None:
        self._link, self._scratch = link, link.resource(Scratch)
        self._dtype, self._length, self._rows = like.dtype, length, rows
        self._put, self._take, self._collect = put, take, collect
        self._step = max(min(CHUNK_BYTES, self._scratch.buffer_bytes) // like.itemsize // rows, 1)

    def begin(self) -> bool:
        """Put the first chunk; return False if that is not possible.

        It needs the memory, and no unfinished round of this rank: ranks count rounds in the order of operations.
        """
        stop = min(self._step, self._length)
        if not self._scratch.ready or len(self._link.queue):
            return False
        self._put(0, stop, self._scratch.next_buffers(self._rows * stop, self._dtype))
        return True

    def run(self, begun: bool) -> Steps:
        """Run all chunks; ``begun``: on all ranks, before they met."""
        before: tuple[int, int, list[Array]] | None = None
        for start in range(0, self._length, self._step):
            stop = min(start + self._step, self._length)
            chunk = (start, stop, self._scratch.begin_round(self._rows * (stop - start), self._dtype))
            if start or not begun:
                self._put(*chunk)
                yield self._link.later.Ibarrier()
            if before is not None and self._collect is not None:
                self._collect(*before)
            self._take(*chunk)
            before = chunk
        if before is not None and self._collect is not None:
            self._scratch.begin_round(0, self._dtype)
            yield self._link.later.Ibarrier()
            self._collect(*before)
