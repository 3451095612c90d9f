"""Cross-memory attach: the kernel copies between the private memories of a node's processes.

Linux allows it between processes of one user that may trace each other. Some containers forbid it, and so does
``kernel.yama.ptrace_scope`` above 0; therefore the ranks try it once. See process_vm_readv(2).
"""

import ctypes
import errno
import os
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from mpiddp.errors import DistError
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Link, Resource
from mpiddp.mpi.requests import Steps
from mpiddp.typing import Array

from .segment import address_of, random_bits

_IOVEC = struct.Struct("@PN")
"""struct iovec: the first address and the length of a piece of memory."""
_Transfer = Callable[..., int]


def _kernel(name: str) -> _Transfer:
    function: Any = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.argtypes = (ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong)
    function.restype = ctypes.c_ssize_t
    return function  # type: ignore[no-any-return]


_readv, _writev = _kernel("process_vm_readv"), _kernel("process_vm_writev")


class UnreachableError(DistError):
    """Another rank's memory cannot be reached any more. Most likely that rank has died."""


class CrossMemory(Resource):
    """Access to the memory of the node's other ranks.

    A rank must stay in the operation until the others have read or written its memory.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._pids: list[int] = []
        self._memory: Array = np.empty(0, np.uint8)
        self.fault = ""
        """The reason why the group cannot use cross-memory attach, equal on all ranks. It is empty if the group can,
        and before the first `prepare`."""

    @property
    def asked(self) -> bool:
        """True once the ranks know whether they reach each other's memory."""
        return bool(self._pids or self.fault)

    def prepare(self) -> Steps:
        """Try cross-memory attach once. Return True, on all ranks, if each rank reaches the others of its node.

        All ranks of the group call this together; it communicates on ``later``.
        """
        if self.asked:
            return not self.fault
        node = self._link.node
        token = np.array([random_bits()])
        mine = np.array([os.getpid(), address_of(token), token[0]])
        told = np.empty((node.size, mine.size), np.int64)
        yield node.later.Iallgather(mine, told)
        worst = np.array([max(attempt(*each) for each in told.tolist())])
        yield self._link.later.Iallreduce(MPI.IN_PLACE, worst, MPI.MAX)
        if worst[0]:
            self.fault = os.strerror(int(worst[0]))
        else:
            self._pids = [int(pid) for pid in told[:, 0]]
        return not self.fault

    def buffers(self, count: int, length: int, dtype: np.dtype[Any]) -> list[Array]:
        """Return ``count`` arrays over memory that all calls share, because fresh pages from the kernel take time."""
        size_bytes = count * length * dtype.itemsize
        if self._memory.size < size_bytes:
            self._memory = np.empty(size_bytes, np.uint8)
        return list(self._memory[:size_bytes].view(dtype).reshape(count, length))

    def read(self, rank: int, there: int, here: int, size_bytes: int) -> None:
        """Copy from an address of another rank to one of this rank."""
        self._move(_readv, rank, there, here, size_bytes)

    def write(self, rank: int, there: int, here: int, size_bytes: int) -> None:
        """Copy to an address of another rank from one of this rank."""
        self._move(_writev, rank, there, here, size_bytes)

    def _move(self, transfer: _Transfer, rank: int, there: int, here: int, size_bytes: int) -> None:
        fault = _move(transfer, self._pids[rank], there, here, size_bytes)
        if fault:
            raise UnreachableError(
                f"the memory of rank {self._link.node.ranks[rank]}, process {self._pids[rank]}, cannot be reached any"
                f" more ({os.strerror(fault)}): it has ended, or has unmapped its array during the operation"
            )


def _move(transfer: _Transfer, pid: int, there: int, here: int, size_bytes: int) -> int:
    """Let the kernel copy ``size_bytes``; return the number of its error, or 0."""
    done = 0
    while done < size_bytes:  # the kernel moves 2 GiB at most in a call
        left = size_bytes - done
        moved = transfer(pid, _IOVEC.pack(here + done, left), 1, _IOVEC.pack(there + done, left), 1, 0)
        if moved <= 0:
            return ctypes.get_errno() or errno.EIO
        done += moved
    return 0


def attempt(pid: int, address: int, token: int) -> int:
    """Read a process's token; return the kernel's error, or 0."""
    found = np.zeros(1, np.int64)
    # Without the right token, this process id belongs to another process, in another namespace.
    return read(pid, address, found) or (0 if found[0] == token else errno.ESRCH)


def read(pid: int, address: int, into: Array) -> int:
    """Copy from the memory of a process, which may be out of reach; return the kernel's error, or 0."""
    return _move(_readv, pid, address, address_of(into), into.nbytes)
