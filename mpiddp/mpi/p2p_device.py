"""Messages of arrays on GPUs: by device pointers where MPI takes them, else through pinned memory.

A message is sent when the kernels that were queued before the call have ended.
"""

from __future__ import annotations

from collections import deque

from mpiddp.device import is_device_array, pinned, stream, transfer
from mpiddp.typing import Array

from .fifo import Letter, Transport
from .lazy import MPI
from .message import as_message
from .requests import Steps, When

by_address = False
"""True if MPI takes device pointers in messages."""


def send(x: Array, departing: deque[object], transport: Transport, to: int, tag: int) -> Steps:
    """Send ``x`` after the earlier messages to the same rank. ``departing`` has those that MPI does not have yet."""
    memory: Array | None = None
    turn = object()
    departing.append(turn)
    try:
        source = x
        if is_device_array(x) and by_address:
            yield stream.ready(x)
        elif is_device_array(x):
            memory = pinned.take(x.nbytes)
            source = memory[: x.nbytes]
            side = stream.after("down", x)
            transfer.down(memory, x, side)
            yield stream.mark(side)
        yield When(lambda: departing[0] is turn)
        request = transport.Isend(as_message(source, x.nbytes), to, tag)
    finally:
        departing.remove(turn)
    yield request
    if memory is not None:
        pinned.give(memory)


def receive(x: Array, posted: stream.Mark, message: MPI.Message | Letter, size_bytes: int) -> Steps:
    """Receive a message, and write it to ``x`` after the kernels that were queued when the receive was ``posted``."""
    if by_address and type(message) is not Letter:
        yield posted
        yield message.Irecv(as_message(x, size_bytes))
        return
    memory = pinned.take(size_bytes)
    yield message.Irecv(as_message(memory[:size_bytes], size_bytes))
    side = stream.side("up", x)
    stream.follow(side, posted)
    transfer.up(x.reshape(-1)[: size_bytes // x.itemsize], memory, side)
    yield stream.mark(side)
    pinned.give(memory)
