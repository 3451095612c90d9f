"""Messages from and to arrays on a device: how their bytes come to where MPI may see them.

Where MPI takes addresses of GPU memory it gets them when the kernels that were queued before have ended; everywhere
else the bytes pass through pinned memory of the host.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Any

from mpiddp.device import copies, is_device_array, pinned, stream
from mpiddp.typing import Array

from .lazy import MPI
from .message import as_message
from .work import Awaited, Steps

by_address = False
"""Whether MPI takes addresses of GPU memory in messages; set at the start, the same on all ranks."""


class Driven:
    """Steps as one thing that is waited for."""

    __slots__ = ("_awaited", "_steps")

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._awaited: Awaited | None = next(steps)

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        """Run the steps that need not wait, and tell whether that was all."""
        while self._awaited is not None and self._awaited.Test():
            self._awaited = next(self._steps, None)
        return self._awaited is None

    def Wait(self) -> None:  # noqa: N802
        """Block until all have run."""
        while not self.Test():
            os.sched_yield()


class Turn:
    """A place in the order in which messages to one rank are sent: a copy must not let a later one overtake."""

    __slots__ = ("_waiting",)

    def __init__(self, waiting: deque[Turn]) -> None:
        self._waiting = waiting
        waiting.append(self)

    def Test(self) -> bool:  # noqa: N802
        """Tell whether all before it have been sent."""
        return self._waiting[0] is self

    def Wait(self) -> None:  # noqa: N802
        """Block until they have, which others see to."""
        assert self.Test(), "a blocking send found messages on their way"

    def leave(self) -> None:
        """Let the next one go."""
        self._waiting.remove(self)


def depart(x: Array, turn: Turn, comm: MPI.Intracomm, to: int, tag: int) -> Steps:
    """Send ``x``, an array on a device or one that has to wait for such, when it is its turn."""
    memory: Array | None = None
    try:
        source = x
        if is_device_array(x) and by_address:
            yield stream.ready(x)
        elif is_device_array(x):
            memory = pinned.take(x.nbytes)
            source = memory[: x.nbytes]
            side = stream.after("down", x)
            copies.down(memory, x, side)
            yield stream.mark(side)
        yield turn
        request = comm.Isend(as_message(source, x.nbytes), to, tag)
    finally:
        turn.leave()
    yield request
    if memory is not None:
        pinned.give(memory)


class Landing:
    """An array on a device that a message is to be received into, after what was queued before.

    Parameters
    ----------
    x : array
        The array.
    """

    __slots__ = ("_begin", "_x")

    def __init__(self, x: Array) -> None:
        self._x: Any = x
        self._begin = stream.ready(x)

    def receive(self, message: MPI.Message, size_bytes: int) -> Driven:
        """Begin to receive ``message``, of ``size_bytes``, which fit."""
        return Driven(self._steps(message, size_bytes))

    def _steps(self, message: MPI.Message, size_bytes: int) -> Steps:
        if by_address:
            yield self._begin
            yield message.Irecv(as_message(self._x, size_bytes))
            return
        memory = pinned.take(size_bytes)
        yield message.Irecv(as_message(memory[:size_bytes], size_bytes))
        side = stream.side("up", self._x)
        stream.follow(side, self._begin)
        copies.up(self._x.reshape(-1)[: size_bytes // self._x.itemsize], memory, side)
        yield stream.mark(side)
        pinned.give(memory)
