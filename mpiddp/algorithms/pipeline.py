"""The pipeline of ordinary arrays through a node's staging memory."""

from __future__ import annotations

from collections.abc import Callable

from mpiddp.mpi.link import Link
from mpiddp.mpi.requests import Steps
from mpiddp.shm.scratch import Scratch
from mpiddp.typing import Array

CHUNK_BYTES = 1 << 19
"""An array's part and its copy stay in a core's cache."""

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
        self.factors: list[float] | None = None
        """Of the arrays (``PREMUL_SUM``), known once the ranks have met."""
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
