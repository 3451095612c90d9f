"""Memory of a node through which arrays on devices pass in pieces; made when a group first needs it.

Best are regions in the GPUs' own memory that all ranks map (see `cuda_ipc`). Where that is not possible they are in
host memory of the node, pinned for every rank's GPU, whose kernels then read and write it at the host's addresses.
"""

from __future__ import annotations

import numpy as np

from mpiddp.device import ipc, pinned
from mpiddp.mpi import symmetric
from mpiddp.mpi.link import Link
from mpiddp.mpi.symmetric import Scratch
from mpiddp.mpi.work import Steps

from . import cuda_ipc

REGION_BYTES = 1 << 26
PIECE_BYTES = REGION_BYTES // 4


class DeviceScratch(Scratch):
    """As `Scratch`, whose turns it has, with regions that are arrays on the device."""

    REGION_BYTES = REGION_BYTES
    PIECE_BYTES = PIECE_BYTES

    def __init__(self) -> None:
        super().__init__()
        self._segment: cuda_ipc.Segment | None = None
        self._pinned_at = 0

    def prepare_on_device(self, link: Link) -> Steps:
        """Make the memory if nobody has, and tell whether there is some; sends on ``later`` only."""
        if not self._regions and not self.fault:
            self._segment, fault = yield from cuda_ipc.make(link.node, link.node, self.REGION_BYTES)
            if self._segment is not None:
                kind = np.dtype(np.uint8)
                self._regions = [self._segment.view(rank, 0, self.REGION_BYTES, kind) for rank in link.node.ranks]
            else:
                yield from self._pin(link, fault)
        return bool(self._regions)

    def _pin(self, link: Link, fault: str) -> Steps:
        """Share memory of the host instead, because of ``fault``."""
        found: symmetric.Allocation = yield from symmetric.allocate(link.node, link.node, self.REGION_BYTES)
        wrong = found.fault
        if found.memory is not None:
            start = np.frombuffer(found.memory, np.uint8).__array_interface__["data"][0]
            if not ipc.reads_host_memory():
                wrong = "kernels cannot use the host's addresses"
            else:
                wrong = pinned.register(start, len(found.memory))
                self._pinned_at = 0 if wrong else start
            wrong = yield from cuda_ipc.agreed(link.node, wrong)
        if wrong:
            self._unpin()
            self.fault = f"CUDA IPC: {fault}; pinned memory of the node: {wrong}"
            return
        self._memory = found.memory
        self._regions = [
            ipc.array(start + place * self.REGION_BYTES, self.REGION_BYTES, found.memory)
            for place in range(link.node.size)
        ]

    def _unpin(self) -> None:
        if self._pinned_at:
            pinned.unregister(self._pinned_at)
            self._pinned_at = 0

    def give_back(self, link: Link) -> Steps:
        """Give the memory back; the ranks of the group call together."""
        self._regions, self._views = [], {}
        self._unpin()
        self._memory = None
        segment, self._segment = self._segment, None
        if segment is not None:
            yield link.later.Ibarrier()
            segment.unmap()
            yield link.later.Ibarrier()


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
