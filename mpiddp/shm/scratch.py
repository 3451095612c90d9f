"""The way of ordinary arrays through a node's scratch: put in, a barrier, taken out, piece by piece.

The first piece is put there before the ranks meet where that can be done, so that short arrays need one
synchronisation. What is put is read after the barrier, and then the next piece is on its way already.
"""

from __future__ import annotations

from collections.abc import Callable

from mpiddp.mpi.link import Link
from mpiddp.mpi.work import Steps
from mpiddp.typing import Array

from .segment import Scratch

Pass = Callable[[int, int, list[Array]], None]
"""Does something with elements ``start`` to ``stop`` of an array and the slots of all ranks."""


class Passage:
    """An array's way through the scratch.

    Parameters
    ----------
    link : Link
        The group, all on one node.
    like : array
        Has the dtype of what passes.
    length : int
        Elements that pass through each row.
    put : callable
        Writes to this rank's slot.
    take : callable
        Reads from all slots after a barrier, and may write to this rank's.
    collect : callable, optional
        Reads what the others' ``take`` has written, after another barrier.
    rows : int, default 1
        How many rows of a piece lie side by side in a slot.
    piece_bytes : int, optional
        Length of a piece, all its rows together; as much as a turn may have by default.
    """

    def __init__(
        self,
        link: Link,
        like: Array,
        length: int,
        put: Pass,
        take: Pass,
        collect: Pass | None = None,
        *,
        rows: int = 1,
        piece_bytes: int | None = None,
    ) -> None:
        self._link, self._dtype, self._length, self._rows = link, like.dtype, length, rows
        self._put, self._take, self._collect = put, take, collect
        self._step = max(min(piece_bytes or Scratch.PIECE_BYTES, Scratch.PIECE_BYTES) // like.itemsize // rows, 1)

    def begin(self) -> bool:
        """Put the first piece into the scratch, and tell whether that could be done.

        It can when the scratch is there and all that this rank has done in it before is finished: the turns that all
        ranks count alike come in the order of their operations.
        """
        link, stop = self._link, min(self._step, self._length)
        if not link.scratch.ready or len(link.queue):
            return False
        self._put(0, stop, link.scratch.upcoming(self._rows * stop, self._dtype))
        return True

    def run(self, begun: bool) -> Steps:
        """Let the array pass; ``begun`` is whether all ranks have put their first piece before they met."""
        scratch = self._link.scratch
        before: tuple[int, int, list[Array]] | None = None
        for start in range(0, self._length, self._step):
            stop = min(start + self._step, self._length)
            piece = (start, stop, scratch.turn(self._rows * (stop - start), self._dtype))
            if start or not begun:
                self._put(*piece)
                yield self._link.later.Ibarrier()
            if before is not None and self._collect is not None:
                self._collect(*before)
            self._take(*piece)
            before = piece
        if before is not None and self._collect is not None:
            scratch.turn(0, self._dtype)
            yield self._link.later.Ibarrier()
            self._collect(*before)
