"""The ring on device arrays, for all-reduces that MPI cannot do on them although it sends from device pointers.

Kernels form the sums, and a message waits for the event of the kernel that forms its sums. Several rings run at once:
one sends while another adds.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable

from mpiddp.algorithms import ring
from mpiddp.algorithms.tags import Tag
from mpiddp.device import stream
from mpiddp.mpi.link import Channel
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.requests import Driven, Steps, When
from mpiddp.typing import Array

RINGS = 2
PART_BYTES = 1 << 23


class DeviceTransport(ring.Transport):
    """The transport by device pointers. It sends on ``later``, with a tag of its own."""

    def __init__(self, link: Channel, like: Array, tag: int) -> None:
        super().__init__(link.after(), tag)
        self._add = stream.side("add", like)

    def computing(self) -> contextlib.AbstractContextManager[None]:
        return stream.on(self._add)

    def shift(self, target: Array) -> Steps:
        yield stream.mark(self._add)  # by then earlier kernels that used target's memory have ended, too
        yield from super().shift(target)

    def close(self) -> Steps:
        """Wait for copies and kernels that have not ended, and give back the transport's memory."""
        yield stream.mark(self._add)  # in a group of one rank there was no `shift` that waited for the kernels


def all_reduce(link: Channel, x: Array, op: ReduceOp) -> Steps:
    return by_rings(DeviceTransport, link, x, op, PART_BYTES)


def by_rings(
    make: Callable[[Channel, Array, int], DeviceTransport], link: Channel, x: Array, op: ReduceOp, part_bytes: int
) -> Steps:
    """All-reduce ``x`` in pieces, which go to at most `RINGS` rings, in the same way on all ranks.

    ``make`` makes the transport of a ring. It gets the link, the ring's longest piece, and its tag.
    """
    yield stream.ready(x)
    flat = x.reshape(-1)
    longest = max(part_bytes // x.itemsize, 1) * link.size
    count = min(longest, max(-(-x.size // RINGS), min(longest, x.size), 1))
    pieces = [flat[start : start + count] for start in range(0, x.size, count)]

    def steps(index: int) -> Steps:
        transport = make(link, pieces[index], Tag.DEVICE_RING + index)
        for piece in pieces[index::RINGS]:
            yield from ring.all_reduce_around(transport, piece, op)
        yield from transport.close()

    yield concurrent(functools.partial(steps, index) for index in range(min(RINGS, len(pieces))))


def concurrent(several: Iterable[Callable[[], Steps]]) -> When:
    """Return the end of the steps that each of these functions begins, as one event.

    One may overtake another, so each needs a tag of its own for its messages.
    """
    driven = list(map(Driven, several))
    # All are tested, and not only until one is not ready, so that all make progress.
    return When(lambda: False not in [each.Test() for each in driven])
