"""Memory for samples, and their reception: each slot has a request, which is made once and started for each sample."""

from __future__ import annotations

from collections import deque
from itertools import repeat
from typing import Any

import numpy as np

from mpiddp.mpi.lazy import MPI

TOO_LONG = -1
"""The size of a sample that was longer than a slot."""


_LINGER = 30
"""Polls in vain after a sample before it is handed on. Calls for each sample would take longer than short samples."""


class Slots:
    """``count`` slots for samples of ``dtype``, which come from any rank of ``comm`` with ``tag``."""

    def __init__(self, comm: Any, tag: int, dtype: np.dtype[Any], count: int) -> None:
        self.bytes = np.empty((count, dtype.itemsize), np.uint8)
        self.samples = self.bytes.view(dtype)[:, 0]
        self.free = list(range(count))[::-1]
        self._posted: deque[int] = deque()
        """The slots that MPI may receive into, in this order."""
        self._requests = [comm.Recv_init([each, MPI.BYTE], MPI.ANY_SOURCE, tag) for each in self.bytes]
        self._tests = [each.Test for each in self._requests]
        self._status = MPI.Status()

    def post(self, count: int) -> None:
        """Let ``count`` more samples come."""
        slots = [self.free.pop() for _ in range(count)]
        MPI.Prequest.Startall([self._requests[slot] for slot in slots])
        self._posted += slots

    def arrived(self) -> tuple[list[int], list[int], int]:
        """Return slots and sources of samples that have arrived, and the size of the last one.

        One of another size than a slot's ends the list; one that was longer has the size `TOO_LONG`.
        """
        tests, status, size = self._tests, self._status, self.bytes.shape[1]
        sources: list[int] = []
        last = size
        try:
            for slot in self._posted:
                test = tests[slot]
                if not (test(status) or (sources and any(map(test, repeat(status, _LINGER))))):
                    break
                sources.append(status.source)
                last = status.count
                if last != size:
                    break
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            sources.append(status.source)
            last = TOO_LONG
        take = self._posted.popleft
        return [take() for _ in sources], sources, last

    def close(self) -> None:
        """Receive no more; the samples stay."""
        for slot in self._posted:
            self._requests[slot].Cancel()
            self._requests[slot].Wait()
        self.free += self._posted
        self._posted.clear()
        for request in self._requests:
            request.Free()
        self._requests, self._tests = [], []
