"""The ring on device arrays through pinned host memory.

While sums are formed, each part is received, copied up to the device, added to by a kernel, copied down to the host and
sent on. A finished sum is sent on from the host's memory into which it was received. Several rings run at once, with a
stream for each kind of work.
"""

import itertools
from collections import deque

from mpiddp.algorithms import ring
from mpiddp.algorithms.local_reduce import accumulated_in, bounds
from mpiddp.device import pinned, stream, transfer
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Channel
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.requests import READY, Awaited, Steps
from mpiddp.typing import Array

from .ring import DeviceTransport, by_rings

PART_BYTES = 1 << 22
"""The longest part. With 2 and 4 rings, and parts of 1 and 4 MiB, 2 rings and parts of 4 MiB took the least time on an
H200 that 2 and 4 ranks shared."""


class StagedTransport(DeviceTransport):
    """The transport that sends from one buffer of pinned memory and receives into another one."""

    def __init__(self, link: Channel, longest: Array, tag: int) -> None:
        super().__init__(link, longest, tag)
        self._down, self._up = (stream.side(role, longest) for role in ("down", "up"))
        edges = bounds(longest.size, link.size, longest.itemsize)
        elements = max(end - start for start, end in itertools.pairwise(edges))
        nbytes = elements * accumulated_in(longest.dtype).itemsize
        self._coming, self._going = pinned.take(nbytes), pinned.take(nbytes)
        self._copied_down: Awaited = READY
        self._loaded_bytes = 0
        self._copied: deque[Awaited] = deque([READY, READY])

    def load(self, x: Array) -> None:
        stream.follow(self._down, stream.mark(self._add))
        transfer.down(self._going, x, self._down)
        self._copied_down, self._loaded_bytes = stream.mark(self._down), x.nbytes

    def shift(self, target: Array) -> Steps:
        """Send and receive as `Transport.shift` says.

        If `load` is not called before the next shift, that sends the host's copy of ``target``.
        """
        reusable = stream.mark(self._add)  # queued kernels may use the memory of target
        yield self._copied_down
        yield self._copied.popleft()  # this is the last copy from the buffer that receives now
        outgoing = [self._going[: self._loaded_bytes], MPI.BYTE]
        incoming = [self._coming[: target.nbytes], MPI.BYTE]
        yield ring.exchange(self._comm, self.rank, self.size, self._tag, outgoing, incoming)
        stream.follow(self._up, reusable)
        transfer.up(target, self._coming, self._up)
        copied = stream.mark(self._up)
        stream.follow(self._add, copied)
        self._copied.append(copied)
        self._coming, self._going = self._going, self._coming
        self._copied_down, self._loaded_bytes = READY, target.nbytes

    def close(self) -> Steps:
        yield self._copied_down
        yield self._copied[-1]
        pinned.give(self._coming)
        pinned.give(self._going)


def all_reduce(link: Channel, x: Array, op: ReduceOp) -> Steps:
    return by_rings(StagedTransport, link, x, op, PART_BYTES)
