"""Memory of a node through which arrays on devices pass in pieces; made when a group first needs it.

Best are regions in the GPUs' own memory that all ranks map (see `cuda_ipc`). Where that is not possible they are in
host memory of the node, pinned for every rank's GPU, whose kernels then read and write it at the host's addresses.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpiddp.device import copies, ipc, pinned, stream
from mpiddp.device.place import moved, place_of
from mpiddp.mpi.link import Link
from mpiddp.mpi.work import Steps
from mpiddp.shm import segment as symmetric
from mpiddp.shm.segment import Scratch
from mpiddp.typing import Array

from . import cuda_ipc


class DeviceScratch(Scratch):
    """As `Scratch`, whose turns it has, with regions that are arrays on the device."""

    PIECE_BYTES = 1 << 24

    def __init__(self) -> None:
        super().__init__()
        self.device = 0
        """The device whose kernels use it: that of the array for which it was made."""
        self._segment: cuda_ipc.Segment | None = None
        self._pinned_at = 0

    def prepare_on_device(self, link: Link, x: Array) -> Steps:
        """Make the memory on the device of ``x`` if nobody has, and tell whether there is some.

        All ranks of ``link`` call, and come to the same end; sends on ``later`` only.
        """
        if not self._regions and not self.fault:
            self.device, size = int(x.device.id), self._SLOTS * self.PIECE_BYTES  # type: ignore[attr-defined]
            self._segment, fault = yield from cuda_ipc.make(link.node, link, size, self.device)
            if self._segment is not None:
                kind = np.dtype(np.uint8)
                self._regions = [self._segment.view(rank, 0, size, kind) for rank in link.node.ranks]
            else:
                yield from self._pin(link, size, fault)
        return bool(self._regions)

    def _pin(self, link: Link, size: int, fault: str) -> Steps:
        """Share memory of the host instead, because of ``fault``."""
        found: symmetric.Allocation = yield from symmetric.allocate(link.node, link, size)
        wrong = found.fault
        if found.memory is not None:
            start = np.frombuffer(found.memory, np.uint8).__array_interface__["data"][0]
            if not ipc.reads_host_memory(self.device):
                wrong = "kernels cannot use the host's addresses"
            else:
                wrong = pinned.register(start, len(found.memory))
                self._pinned_at = 0 if wrong else start
            wrong = yield from cuda_ipc.agreed(link, wrong)
        if wrong:
            self._unpin()
            self.fault = f"CUDA IPC: {fault}; pinned memory of the node: {wrong}"
            return
        self._memory = found.memory
        self._regions = [
            ipc.array(start + place * size, size, found.memory, self.device) for place in range(link.node.size)
        ]

    def passing(self, x: Array, steps: Callable[[Array], Steps]) -> Steps:
        """Run steps in the scratch on flat ``x``, or on a copy where the scratch is that of another device."""
        if place_of(x) == self.device:
            yield from steps(x.reshape(-1))
            return
        copy = moved(x, self.device)
        yield stream.ready(copy)
        yield from steps(copy.reshape(-1))
        side = stream.side("add", copy)
        copies.across(x, copy, side)
        yield stream.mark(side)

    def _unpin(self) -> None:
        if self._pinned_at:
            ipc.settle(self.device)  # a group that was given up may have had kernels on their way
            pinned.unregister(self._pinned_at)
            self._pinned_at = 0

    def give_back(self, link: Link) -> Steps:
        """Give the memory back; the ranks of the group call together."""
        self._regions, self._views = [], {}
        self._unpin()
        self._memory = None
        segment, self._segment = self._segment, None
        if segment is not None:
            yield from cuda_ipc.close(link, [segment])


_scratches: dict[int, DeviceScratch] = {}


def of(link: Link) -> DeviceScratch:
    """Return the scratch of a group."""
    return _scratches.setdefault(link.id, DeviceScratch())


def release(link: Link) -> Steps:
    """Give back all that the devices of a group's ranks share; they call together, and nothing is on its way."""
    scratch = _scratches.pop(link.id, None)
    if scratch is not None:
        yield from scratch.give_back(link)
    yield from cuda_ipc.release(link)
