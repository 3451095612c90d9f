"""The running world: start of MPI, who runs where, and an end that leaves nobody behind.

`start` is called by ``init_process_group`` and makes the one `World` of the process; it lasts until the process ends,
also when process groups are destroyed and made again. It checks that the launcher and MPI tell the same story, installs
the exception hook that ends the job when one rank fails, and the exit that waits for ranks which are still working.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from mpiddp import settings
from mpiddp.errors import DistError

from .library import MPI
from .presence import Presence
from .watchdog import Watchdog


class SetupError(DistError):
    """The job was started in a way that cannot work; every rank meets it, rank 0 alone prints it."""


@dataclasses.dataclass(frozen=True)
class World:
    """All ranks of the job and the nodes that they run on."""

    comm: MPI.Intracomm
    """A duplicate of MPI.COMM_WORLD."""
    hosts: tuple[str, ...]
    """Host name of every rank."""
    nodes: tuple[int, ...]
    """Node of every rank, numbered in the order of their first ranks."""
    thread_multiple: bool
    """Whether threads may call MPI at once: without it there is no watchdog."""
    presence: Presence

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
on_exit: list[Callable[[], bool]] = []
"""What goes on while a rank waits for the others at its end: each is polled and answers whether it has finished."""


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


def start(rank: int = -1, world_size: int = -1) -> World:
    """Start MPI if it is not running, check the launch, and return the world; a second call returns the same.

    Parameters
    ----------
    rank, world_size : int
        What the program believes, or -1; a contradiction to MPI is an error.

    Raises
    ------
    DistError
        If the launcher announced several ranks and MPI sees one, if the environment or the arguments contradict MPI, if
        MPI has been finalised already, or in a fork of an initialised process.
    """
    global _world, _owner_pid
    world = current()
    if world is None:
        _install_exception_hook()
        if MPI.Is_finalized():
            raise SetupError("MPI has been finalised in this process; call init_process_group before MPI.Finalize")
        if not MPI.Is_initialized():
            MPI.Init_thread()
        _agree(_launch_fault())
        world = _world = _meet()
        _owner_pid = os.getpid()
        atexit.register(_leave, world, _start_watchdog(world))
    _agree(_contradiction(rank, world_size))
    settings.correct_ranks(world.rank, world.size, world.local_rank)
    return world


def _start_watchdog(world: World) -> Watchdog | None:
    if world.size == 1 or not world.thread_multiple:
        return None
    return Watchdog(world.presence, abort)


def _meet() -> World:
    """Duplicate the world and find out who runs on which node."""
    comm = MPI.COMM_WORLD.Dup()
    host = socket.gethostname()
    # Ranks share memory when they share a running kernel and call their host by the same name. MPI's own split by
    # shared memory loses ranks under srun (Open MPI) and joins hosts that are separated by namespaces (UCX).
    boot = Path("/proc/sys/kernel/random/boot_id")
    identity = (host, boot.read_text() if boot.exists() else "")
    identities = comm.allgather(identity)
    nodes: tuple[object, ...] | None = settings.pretended_nodes()
    if nodes is not None and len(nodes) != comm.size:
        raise SetupError(f"MPIDDP_NODES names the nodes of {len(nodes)} ranks, but the world has {comm.size}")
    nodes = nodes or tuple(identities)
    number = {node: index for index, node in enumerate(dict.fromkeys(nodes))}
    return World(
        comm=comm,
        hosts=tuple(name for name, _ in identities),
        nodes=tuple(number[node] for node in nodes),
        thread_multiple=MPI.Query_thread() == MPI.THREAD_MULTIPLE,
        presence=Presence(comm.Dup()),
    )


def _library_name() -> str:
    return MPI.Get_library_version().split(",")[0].split("\n")[0].strip()


def _launch_fault() -> str | None:
    """Say what is wrong when a launcher announced several ranks and MPI sees one."""
    found = settings.launch()
    if found is None or found.size == MPI.COMM_WORLD.size or MPI.COMM_WORLD.size > 1:
        return None
    cure = (
        "start with the plugin of your MPI library, `srun --mpi=pmix` (Open MPI) or `srun --mpi=pmi2` (MPICH), out of"
        " those that `srun --mpi=list` shows"
        if found.launcher == "srun"
        else "start with the mpirun that belongs to this library"
    )
    return (
        f"{found.launcher} started {found.size} ranks, but each sees a world of its own: this process runs on"
        f" {_library_name()} ({getattr(MPI, '__file__', '')}), which does not understand that launcher; {cure}"
    )


def _contradiction(rank: int, world_size: int) -> str | None:
    """Say what contradicts MPI among the arguments and the environment."""
    comm = MPI.COMM_WORLD
    announced = settings.rank_variables()
    for name, value, true in (
        ("world_size", world_size, comm.size),
        ("rank", rank, comm.rank),
        ("WORLD_SIZE", announced.get("WORLD_SIZE", -1), comm.size),
        ("RANK", announced.get("RANK", -1), comm.rank),
    ):
        if value not in (-1, true):
            ranks = world_size if world_size > 1 else announced.get("WORLD_SIZE", 2)
            where = "in the environment" if name.isupper() else "given to init_process_group"
            actual = f"MPI's world has {comm.size} rank{'s' * (comm.size > 1)} and this is rank {comm.rank}"
            return (
                f"{name}={value} {where}, but {actual}; ranks come from MPI: start with"
                f" `mpirun -np {max(ranks, 2)} python {Path(sys.argv[0]).name or 'run.py'}` and delete the spawn"
                " (mp.spawn, torchrun) and what sets the variable"
            )
    return None


def _agree(fault: str | None) -> None:
    """Raise the first rank's fault on every rank, so that nobody waits for one that gave up."""
    faults = [text for text in MPI.COMM_WORLD.allgather(fault) if text]
    if faults:
        raise SetupError(faults[0])


def label() -> str:
    """Return ``[rank r/N host]``, by which a line of output names its process."""
    if _world is not None:
        rank, size = _world.rank, _world.size
    elif MPI.Is_initialized() and not MPI.Is_finalized():
        rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    else:
        rank, size = 0, 1
    return f"[rank {rank}/{size} {socket.gethostname()}]"


def abort(text: str, code: int) -> NoReturn:
    """Print ``text`` under this rank's name, in one piece, and end the whole job with the exit code ``code``."""
    stream = sys.__stderr__ or sys.stderr
    stream.write("".join(f"{label()} {line}\n" for line in text.splitlines()))
    for each in (sys.stdout, stream):
        each.flush()
    # The launcher reads our pipe while it kills us: give it a moment. If Abort cannot get through, leave anyway.
    time.sleep(0.05)
    backstop = threading.Timer(5.0, os._exit, (code,))
    backstop.daemon = True
    backstop.start()
    MPI.COMM_WORLD.Abort(code)
    os._exit(code)


def _install_exception_hook() -> None:
    """Let an uncaught exception on one rank end the job at once, with that rank's traceback."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        alone = not MPI.Is_initialized() or MPI.Is_finalized() or MPI.COMM_WORLD.size == 1
        announced = settings.launch()
        if isinstance(error, SetupError) and (announced.rank if announced else 0) != 0:
            # Rank 0 prints what all of us know. It needs a moment: a launcher kills the rest when the first one ends.
            time.sleep(1.0)
            os._exit(1)
        if alone or os.getpid() != (_owner_pid or os.getpid()):
            previous(kind, error, trace)
        elif isinstance(error, SetupError):
            abort(f"{kind.__name__}: {error}", 1)
        elif issubclass(kind, KeyboardInterrupt):
            abort("interrupted (Ctrl-C)", 130)
        else:
            abort("".join(traceback.format_exception(kind, error, trace)), getattr(error, "exit_code", 1))

    sys.excepthook = hook


def _leave(world: World, watchdog: Watchdog | None) -> None:
    """Wait, at the end of the program, until every rank has come to its end; then let MPI be finalised."""
    if os.getpid() != _owner_pid or MPI.Is_finalized():
        return
    world.presence.left = True
    everybody_left = world.comm.Ibarrier()
    pause_s = 1e-5
    # Both are asked every time: what this rank submitted and did not wait for may be what the others wait for.
    while not all([everybody_left.Test(), *(finished() for finished in on_exit)]):
        world.presence.pump()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    if watchdog is not None:
        watchdog.stop()
