"""The pipeline that moves ordinary arrays through a node's scratch."""

from __future__ import annotations

from collections.abc import Callable

from mpiddp.mpi.link import Link
from mpiddp.mpi.requests import Steps
from mpiddp.shm.scratch import Scratch
from mpiddp.typing import Array

CHUNK_BYTES = 1 << 19
"""What a pipeline moves at once: a part of the array and its copy stay in a core's cache."""

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
        self.factors: list[float] | None = None
        """The ranks' factors of ``PREMUL_SUM``, known once they have met."""
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
