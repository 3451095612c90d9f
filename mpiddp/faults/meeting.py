"""The first meeting of a communicator's ranks, in `init_process_group`: every wait polls, and names missing ranks.

Before all ranks have come, no message can be sent, because on the program's communicator it might be matched with a
receive of the program. So each rank that waits binds an abstract Unix socket. The socket's name shows the ranks of its
host that it waits, and for which ranks. Nothing is known of ranks on other hosts before they have come.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mpiddp import settings
from mpiddp.errors import DistTimeoutError
from mpiddp.mpi import processes
from mpiddp.mpi.lazy import MPI
from mpiddp.typing import Array

from . import abort
from .failures import Failures
from .where_socket import bound

_SPINS, _SLEEP_S, _LONGEST_SLEEP_S = 1000, 50e-6, 0.002
_PREFIX = f"mpiddp_init-{os.getuid()}-"
_MAX_NAMED = 8


class Meeting:
    """The waits for the other ranks of ``comm``. A wait that lasts for ``limit_s`` raises `DistTimeoutError`.

    The requests that were begun before the error are kept, because ranks that come late still wait for them, and MPI
    may still write to their memory. The next meeting of the same communicator goes on with these requests.
    """

    def __init__(self, comm: MPI.Intracomm, limit_s: float) -> None:
        self._comm = comm
        self._began = time.monotonic()
        self._limit_s = limit_s
        self._next_s = settings.warn_after_s() or math.inf
        self._steps: list[tuple[MPI.Request, Any]] = next((steps for each, steps in _begun if each == comm), [])
        self._taken = 0
        ranks = comm.Get_group()
        self._world_ranks = [int(rank) for rank in MPI.Group.Translate_ranks(ranks, None, MPI.COMM_WORLD.Get_group())]
        self._sum = zlib.crc32(repr(self._world_ranks).encode())

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Show the other ranks of this host that this rank waits, and let `abort.time_limit` name the missing ranks."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                shown = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                shown.bind(f"\0{_PREFIX}{os.getpid()}-{self._sum}")
            abort.absent = self.missing
            stack.callback(setattr, abort, "absent", str)
            if all(steps is not self._steps for _, steps in _begun):
                _begun.append((self._comm, self._steps))
            yield
            _begun[:] = [each for each in _begun if each[1] is not self._steps]

    def gather(self) -> None:
        """Wait until all ranks that are alive have come."""
        if Failures(self._comm).survivable:
            with contextlib.suppress(MPI.Exception):  # if a rank has failed, Shrink leaves it out
                self._step(lambda: (self._comm.Iagree(np.ones(1, np.int32)), None))
        else:
            self._step(lambda: (self._comm.Ibarrier(), None))

    def duplicate(self) -> MPI.Intracomm:
        """Return a duplicate of the communicator."""
        # All ranks meet first, because Open MPI makes no other communicator while a duplication waits for ranks.
        self.gather()
        made = MPI.Intracomm(self._step(lambda: self._comm.Idup()[::-1]))
        made.Set_errhandler(MPI.ERRORS_RETURN)
        return made

    def allgather(self, comm: MPI.Intracomm, value: Any) -> list[Any]:
        """Return the values of all ranks of ``comm``, the duplicate."""

        def gathered(mine: Array, parts: Array) -> Array:
            all_parts: Array = self._step(lambda: (comm.Iallgather(mine, parts), parts))
            return all_parts

        mine = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = gathered(np.array([mine.size]), np.empty(comm.size, np.int64))
        parts = gathered(np.resize(mine, sizes.max()), np.empty((comm.size, sizes.max()), np.uint8))
        return [pickle.loads(part[:size].tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def _step(self, begin: Callable[[], tuple[MPI.Request, Any]]) -> Any:
        """Begin a request, unless it was begun before; wait for it, and return its value."""
        if self._taken == len(self._steps):
            self._steps.append(begin())
        request, value = self._steps[self._taken]
        self._taken += 1
        self.wait(request)
        self._began = time.monotonic()  # the limit begins anew, because all ranks have come so far
        return value

    def wait(self, request: MPI.Request) -> None:
        polls, sleep_s = 0, _SLEEP_S
        while not request.Test():
            polls += 1
            if polls < _SPINS:
                os.sched_yield()
                continue
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
            waited_s = time.monotonic() - self._began
            if waited_s > self._limit_s:
                raise DistTimeoutError(f"{abort.unmet('init_process_group', self._limit_s)}{self.missing()}")
            if waited_s > self._next_s:
                self._next_s *= 2
                if self._reports():
                    abort.write(f"mpiddp: {waited_s:.0f} s in init_process_group{self.missing()}\n")

    def _reports(self) -> bool:
        """Return True on the lowest rank of this host that waits. It reports for all of them."""
        here, present = self._ranks_here(), _present()
        first = next((rank for rank, pid in here.items() if present.get(pid) == self._sum), self._comm.rank)
        return first == self._comm.rank

    def _ranks_here(self) -> dict[int, int]:
        """Return the process ids of this host's ranks, by rank, as far as the launcher's children show their ranks."""
        pids = {rank: int(pid) for pid, rank in processes.started_ranks(os.getppid()).items()}
        return {rank: pids[each] for rank, each in enumerate(self._world_ranks) if each in pids}

    def missing(self) -> str:
        """Return a colon and lines about the ranks that have not come; "" if there are none."""
        here, present, lines = self._ranks_here(), _present(), []
        for rank, pid in here.items():
            if rank != self._comm.rank and present.get(pid) != self._sum:
                elsewhere = "calls it with another communicator" if pid in present else "has not called it"
                number = f"{self._world_ranks[rank]} of the world, " if self._world_ranks[rank] != rank else ""
                lines.append(f"  rank {rank} ({number}pid {pid}) {elsewhere}")
        if len(lines) > _MAX_NAMED:
            lines[_MAX_NAMED:] = [f"  and {len(lines) - _MAX_NAMED} more"]
        gone = self._comm.size - len(here) - (self._comm.rank not in here)
        if gone:
            lines.append(f"  of {gone} rank{'s' * (gone > 1)} it is not known: on other hosts, or ended")
        return ":\n" + "\n".join(lines) if lines else ""


_begun: list[tuple[MPI.Intracomm, list[tuple[MPI.Request, Any]]]] = []
"""The meetings that have not ended, each with its communicator, its requests and their memory."""


def _present() -> dict[int, int]:
    """Return the ids of this host's processes that wait in a meeting, each with the checksum of the ranks that meet."""
    return {int(pid): int(number) for pid, number in bound(rf"{_PREFIX}(\d+)-(\d+)")}
