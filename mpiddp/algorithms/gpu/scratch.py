"""Staging memory of a node for device arrays, by CUDA IPC, else pinned memory of the host for every GPU."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np

from mpiddp.device import ipc, pinned, stream, transfer
from mpiddp.device.place import moved, place_of
from mpiddp.errors import DistError
from mpiddp.mpi.link import Link, Resource
from mpiddp.mpi.requests import Steps
from mpiddp.shm import segment as host_segment
from mpiddp.typing import Array

from . import cuda_ipc

PIECE_BYTES = 1 << 24


class DeviceScratch(Resource):
    """Three buffers a rank, used in rounds with a barrier between any two."""

    _BUFFERS = 3

    def __init__(self, link: Link) -> None:
        self._link = link
        self.device = 0
        self.fault = ""
        """Reason of missing memory; empty before a try."""
        self._regions: list[Array] = []
        self._segment: cuda_ipc.DeviceSegment | None = None
        self._pinned: mmap.mmap | None = None
        self._pinned_at = 0
        self._round = 0

    def prepare(self, x: Array) -> Steps:
        """Allocate on the device of ``x`` unless done; return True if there is memory, alike on all ranks."""
        if not self._regions and not self.fault:
            link, size = self._link, self._BUFFERS * PIECE_BYTES
            self.device = int(x.device.id)  # type: ignore[attr-defined]
            self._segment, fault = yield from cuda_ipc.make(link.node, link, size, self.device)
            if self._segment is not None:
                kind = np.dtype(np.uint8)
                self._regions = [self._segment.view(rank, 0, size, kind) for rank in link.node.ranks]
            else:
                yield from self._pin(size, fault)
        return bool(self._regions)

    def _pin(self, size: int, fault: str) -> Steps:
        found: host_segment.Allocation = yield from host_segment.allocate(self._link.node, self._link, size)
        wrong, memory = found.fault, found.memory
        if memory is not None:
            start = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
            if not ipc.reads_host_memory(self.device):
                wrong = "kernels cannot use the host's addresses"
            else:
                wrong = pinned.register(start, len(memory))
                self._pinned, self._pinned_at = (None, 0) if wrong else (memory, start)
            wrong = yield from cuda_ipc.agreed(self._link, wrong)
        if memory is None or wrong:
            self._unpin()
            self.fault = f"CUDA IPC: {fault}; pinned memory of the node: {wrong}"
            return
        self._regions = [
            ipc.array(start + index * size, size, memory, self.device) for index in range(self._link.node.size)
        ]

    def begin_round(self, count: int, dtype: np.dtype[Any]) -> list[Array]:
        start = self._round % self._BUFFERS * PIECE_BYTES
        self._round += 1
        return [region[start : start + count * dtype.itemsize].view(dtype) for region in self._regions]

    def passing(self, x: Array, steps: Callable[[Array], Steps]) -> Steps:
        """Run steps on flat ``x``, or on a copy on the scratch's device."""
        if place_of(x) == self.device:
            yield from steps(x.reshape(-1))
            return
        copy = moved(x, self.device)
        yield stream.ready(copy)
        yield from steps(copy.reshape(-1))
        side = stream.side("add", copy)
        transfer.across(x, copy, side)
        yield stream.mark(side)

    def _unpin(self) -> None:
        if self._pinned is not None:
            pinned.unregister(self._pinned_at)
            self._pinned = None

    def close(self) -> None:
        self._regions = []
        self._unpin()
        if self._segment is not None:
            cuda_ipc.unmap_together(self._link, [self._segment])
            self._segment = None

    def drop(self, error: DistError) -> None:
        """Unmap or unpin when no kernel here uses the memory; keep a region that peers may map."""
        if self._segment is not None:
            cuda_ipc.unmap_when_idle(self._segment)
        elif self._pinned is not None and stream.idle(self.device):
            self._unpin()
