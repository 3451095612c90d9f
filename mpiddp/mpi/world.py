"""The running world: start of MPI, and who runs where.

`start` is called by ``init_process_group`` and makes the one `World` of the process; it lasts until the process ends,
also when process groups are destroyed and made again.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import operator
import os
import socket
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mpiddp import settings
from mpiddp.errors import EXIT_TIMEOUT, DistError
from mpiddp.faults import shutdown
from mpiddp.faults.failures import Deaths
from mpiddp.faults.liveness import Presence
from mpiddp.faults.shutdown import on_exit as on_exit
from mpiddp.faults.watchdog import Watchdog

from . import launch, lazy
from .lazy import MPI, SetupError
from .requests import All


class _Place(NamedTuple):
    """Where a rank runs, and with what."""

    started_as: int
    """Its rank among all that were started."""
    ended: bool
    """Whether its program has."""
    host: str
    boot: str
    cores: int
    threads: int | None
    thread_multiple: bool


@dataclasses.dataclass(frozen=True)
class World:
    """All ranks of the job and the nodes that they run on."""

    comm: MPI.Intracomm
    """A duplicate of MPI.COMM_WORLD, or what is left of it after ranks have died."""
    hosts: tuple[str, ...]
    """Host name of every rank."""
    nodes: tuple[int, ...]
    """Node of every rank, numbered in the order of their first ranks."""
    thread_multiple: bool
    """Whether threads may call MPI at once: without it there is no watchdog."""
    presence: Presence
    deaths: Deaths
    running: tuple[int, ...]
    """Ranks whose programs had not ended when this world was made."""

    @property
    def rank(self) -> int:
        """Rank of this process in the world."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """The number of ranks in the world."""
        return self.comm.size

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of the world on this node."""
        return tuple(rank for rank, node in enumerate(self.nodes) if node == self.nodes[self.rank])

    @property
    def local_rank(self) -> int:
        """Place of this process among the ranks of its node."""
        return self.local_ranks.index(self.rank)


_world: World | None = None
_owner_pid = 0
_leaving: shutdown.Leaving | None = None


def current() -> World | None:
    """Return the world, or None before `start`.

    Raises
    ------
    DistError
        In a forked child: MPI cannot be used there.
    """
    if _world is not None and os.getpid() != _owner_pid:
        raise DistError(
            f"this process was forked from rank {_world.rank} after MPI had started, and MPI is not fork safe; use"
            " threads (DataLoader's workers are threads), or start processes before init_process_group"
        )
    return _world


def start(rank: int = -1, world_size: int = -1, timeout_s: float | None = None) -> World:
    """Start MPI if it is not running, check the launch, and return the world; a second call returns the same.

    Parameters
    ----------
    rank, world_size : int
        What the program believes, or -1; a contradiction to MPI is an error.
    timeout_s : float, optional
        After this many seconds the job is ended; ``MPIDDP_TIMEOUT`` by default.

    Raises
    ------
    DistError
        If the launcher announced several ranks and MPI sees one, if the environment or the arguments contradict MPI, if
        MPI has been finalised already, or in a fork of an initialised process.
    """
    global _owner_pid
    world = current()
    with _limited(settings.default_timeout_s() if timeout_s is None else timeout_s):
        if world is None:
            shutdown.install()
            _check_running()
            launch.check_launcher()
            shutdown.know(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
            _owner_pid = os.getpid()
            world = _begin(_meet(MPI.COMM_WORLD.Dup()))
        elif world.deaths.happened():
            world = regroup(timeout_s)
        try:
            if len(world.running) == world.size:
                launch.check_claims(world.comm, rank, world_size)
        except MPI.Exception as error:
            world.deaths.meet(error)
            raise
    settings.correct_ranks(world.rank, world.size, world.local_rank)
    return world


def regroup(timeout_s: float | None = None) -> World:
    """Make the world anew of the ranks that live, after some have died; all of them call.

    Parameters
    ----------
    timeout_s : float, optional
        After this many seconds the job is ended; ``MPIDDP_TIMEOUT`` by default.
    """
    world = current()
    assert world is not None and _leaving is not None
    _leaving.stop()
    with _limited(settings.default_timeout_s() if timeout_s is None else timeout_s, "shrink_group"):
        world = _begin(_meet_survivors(world))
    settings.correct_ranks(world.rank, world.size, world.local_rank)
    return world


def _begin(world: World) -> World:
    """Let a world be that of this process, and watch over it."""
    global _world, _leaving
    _world = world
    if _leaving is None:
        _leaving = shutdown.Leaving(_meet_survivors)
        atexit.register(_leaving)
    _leaving.world = world
    watched = world.size > 1 and world.thread_multiple
    _leaving.stop = Watchdog(world.presence, world.deaths, shutdown.abort).stop if watched else lambda: None
    return world


def _meet_survivors(world: World) -> World:
    """Return the world of those that live, after some of another one have died."""
    world.deaths.spread()
    # The launcher's own barrier in MPI_Finalize may wait for the dead for ever.
    lazy.never_finalize()
    comm = world.comm
    while True:
        comm = MPI.Intracomm(comm.Shrink())
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        try:
            left = _meet(comm, world.presence.ended)
            shutdown.know(left.rank, left.size)
            return left
        except MPI.Exception:
            # Another one has died meanwhile. Who has not noticed comes here again, from the same communicator.
            if not Deaths(comm).happened():
                raise
            comm.Revoke()


def _meet(comm: MPI.Intracomm, ended: bool = False) -> World:
    """Return the world of all ranks of ``comm``, and find out who runs on which node.

    ``ended`` says whether this rank's program has, which then waits for the others only.
    """
    # Ranks share memory when they share a running kernel and call their host by the same name. MPI's own split by
    # shared memory loses ranks under srun (Open MPI) and joins hosts that are separated by namespaces (UCX).
    boot = Path("/proc/sys/kernel/random/boot_id")
    mine = _Place(
        started_as=MPI.COMM_WORLD.rank,
        ended=ended,
        host=socket.gethostname(),
        boot=boot.read_text() if boot.exists() else "",
        cores=settings.core_mask(),
        threads=settings.blas_threads(),
        thread_multiple=MPI.Query_thread() == MPI.THREAD_MULTIPLE,
    )
    places = comm.allgather(mine)
    pretended = settings.pretended_nodes()
    if pretended is not None and len(pretended) != MPI.COMM_WORLD.size:
        raise SetupError(
            f"MPIDDP_NODES names the nodes of {len(pretended)} ranks, but the world has {MPI.COMM_WORLD.size}"
        )
    nodes = [pretended[place.started_as] if pretended else (place.host, place.boot) for place in places]
    number = {node: index for index, node in enumerate(dict.fromkeys(nodes))}
    thread_multiple = all(place.thread_multiple for place in places)
    if comm.rank == 0:
        _warn_of_threads([place for place in places if (place.host, place.boot) == (mine.host, mine.boot)])
    deaths, questions = Deaths(comm), comm.Dup()
    deaths.concern(questions)
    All.one_by_one = deaths.survivable
    return World(
        comm=comm,
        hosts=tuple(place.host for place in places),
        nodes=tuple(number[node] for node in nodes),
        thread_multiple=thread_multiple,
        presence=Presence(questions, thread_multiple),
        deaths=deaths,
        running=tuple(rank for rank, place in enumerate(places) if not place.ended),
    )


def _warn_of_threads(places: list[_Place]) -> None:
    """Warn when the ranks of a node want more BLAS threads than they have cores."""
    cores = functools.reduce(operator.or_, (place.cores for place in places)).bit_count()
    threads = sum(place.threads or place.cores.bit_count() for place in places)
    if threads > max(cores, len(places)):
        warnings.warn(
            f"the {len(places)} ranks on {places[0].host} want {threads} BLAS threads and have {cores}"
            f" core{'s' * (cores > 1)}, which slows all of them: set OMP_NUM_THREADS={max(cores // len(places), 1)}"
            " before Python starts (`python -m mpiddp` does)",
            stacklevel=5,
        )


def _check_running() -> None:
    """Start MPI, unless it runs."""
    if MPI.Is_finalized():
        raise SetupError("MPI has been finalised in this process; call init_process_group before MPI.Finalize")
    if not MPI.Is_initialized():
        MPI.Init_thread()


@contextlib.contextmanager
def _limited(timeout_s: float, what: str = "init_process_group") -> Iterator[None]:
    """End the job when the other ranks do not come in time."""
    text = (
        f"{what} did not finish in {timeout_s:g} s: it waits for ranks that have not called it, and every rank has to"
    )
    timer = threading.Timer(min(timeout_s, threading.TIMEOUT_MAX), shutdown.abort, (text, EXIT_TIMEOUT))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
