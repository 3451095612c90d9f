"""Scratch: memory that a node's ranks share, through which ordinary arrays are pipelined."""

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
"""The size of a buffer. With many ranks it is smaller, so that those of a node stay within `_NODE_BYTES`."""
CHUNK_BYTES = 1 << 19
"""What a pipeline moves at once: a part of the array and its copy stay in a core's cache."""
_NODE_BYTES = 1 << 24
_SMALLEST_BYTES = 1 << 17


class Scratch(Resource):
    """Three buffers for each rank, used in turn. A round is what happens between two barriers.

    Buffers of round t - 3 are read after the barrier of round t - 2 at the latest. A rank that writes in round t has
    left the barrier of round t - 1, so all ranks have finished reading them.
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
        """Why there is no memory; empty if there is, and before it has been asked for."""

    def prepare(self) -> Steps:
        """Allocate the memory on first use; return True if there is some. All ranks of the group call this together."""
        if not self.ready and not self.fault:
            node = self._link.node
            made: segment.Allocation = yield from segment.allocate(node, self._link, self._BUFFERS * self.buffer_bytes)
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
            start = index * self.buffer_bytes
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
        """Close: MPI does not write to this memory."""
        self.close()


Step = Callable[[int, int, list[Array]], None]
"""A function of the start and stop of a chunk in the array, and of all ranks' buffers."""


class Pipeline:
    """Moves an array through the scratch chunk by chunk: put, barrier, take.

    ``put`` writes a chunk to this rank's buffer. ``take`` reads all ranks' buffers after a barrier, and may write to
    this rank's. ``collect``, if given, reads after another barrier what the others' ``take`` has written. A chunk
    consists of ``rows`` pieces side by side; ``length`` is the number of elements of a row in all chunks together.

    One chunk is written while another is read. The first is put before the ranks meet, if that is possible, so that
    short arrays need a single barrier.
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
        """Put the first chunk; return False if that is not possible yet.

        It is not before the memory is there, and not while this rank has unfinished operations: all ranks count rounds
        in the order of operations.
        """
        stop = min(self._step, self._length)
        if not self._scratch.ready or len(self._link.queue):
            return False
        self._put(0, stop, self._scratch.next_buffers(self._rows * stop, self._dtype))
        return True

    def run(self, begun: bool) -> Steps:
        """Run all chunks. ``begun`` says that all ranks have put the first one before they met."""
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
