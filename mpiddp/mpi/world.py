"""The world: all ranks with their hosts, processes and nodes, and checks of how they were launched."""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
import socket
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mpiddp import launchers, settings
from mpiddp.cores import blas_threads, core_mask
from mpiddp.errors import SetupError

from . import library
from .lazy import MPI


@dataclasses.dataclass(frozen=True)
class World:
    """All ranks of the job, or its survivors. Ranks are numbers in the job, and tuples are in the order of ranks."""

    comm: MPI.Intracomm
    hosts: tuple[str, ...]
    pids: tuple[int, ...]
    nodes: tuple[int, ...]
    """Each rank's node. Nodes are numbered in the order of their first ranks."""
    thread_multiple: bool
    running: tuple[int, ...]
    """The ranks whose programs had not ended when `gather` was called."""
    outer: tuple[int, ...]
    """Each rank's number in MPI's world, for errors; empty if all ranks have the same number in the job."""
    crowded: bool
    """True if some host has more of these ranks than cores that they may use."""

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks. Groups share these ints, since ints of their own would take four times the memory."""
        return tuple(range(self.size))

    @property
    def job(self) -> str:
        """The job's name: the host and the process id of rank 0."""
        return f"{self.hosts[0]}.{self.pids[0]}"

    @functools.cached_property
    def local_ranks(self) -> tuple[int, ...]:
        mine = self.nodes[self.rank]
        return tuple(rank for rank, node in enumerate(self.nodes) if node == mine)

    @functools.cached_property
    def local_rank(self) -> int:
        return self.local_ranks.index(self.rank)


def start_mpi() -> None:
    """Start MPI, unless the program has. SetupError if MPI has ended, or sees one rank where several were launched."""
    if MPI.Is_finalized():
        raise SetupError("MPI has been finalised in this process; call init_process_group before MPI.Finalize")
    if not MPI.Is_initialized():
        MPI.Init_thread()
    launch = launchers.launch()
    if launch is not None and launch.size > 1 and MPI.COMM_WORLD.size == 1:
        raise SetupError(
            f"{launch.launcher.name} started {launch.size} ranks, but each sees a world of its own: this process runs"
            f" on {library_name()} ({MPI.__file__}), which does not understand that launcher; {launch.launcher.cure}"
        )


class _RankInfo(NamedTuple):
    started_as: int
    """The rank in MPI.COMM_WORLD."""
    ended: bool
    host: str
    pid: int
    boot: str
    cores: int
    threads: int | None
    thread_multiple: bool


def gather(comm: MPI.Intracomm, allgather: Callable[[Any], list[Any]], *, ended: bool = False) -> World:
    """Gather the ranks of ``comm``, which call this together. ``ended`` means that this program has come to its end.

    Ranks with the same boot id of the kernel and the same host name share memory. MPI's own split by shared memory
    loses ranks under srun (Open MPI), and joins hosts that namespaces separate (UCX).
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    mine = _RankInfo(
        started_as=MPI.COMM_WORLD.rank,
        ended=ended,
        host=socket.gethostname(),
        pid=os.getpid(),
        boot=boot.read_text() if boot.exists() else "",
        cores=core_mask(),
        threads=blas_threads(),
        thread_multiple=MPI.Query_thread() == MPI.THREAD_MULTIPLE,
    )
    infos: list[_RankInfo] = allgather(mine)
    pretended = settings.pretended_nodes()
    if pretended is not None and len(pretended) != MPI.COMM_WORLD.size:
        raise SetupError(
            f"MPIDDP_NODES names the nodes of {len(pretended)} ranks, but the world has {MPI.COMM_WORLD.size}"
        )
    hosts: dict[tuple[str, str], list[_RankInfo]] = {}
    for info in infos:
        hosts.setdefault((info.host, info.boot), []).append(info)
    nodes = [pretended[info.started_as] if pretended else (info.host, info.boot) for info in infos]
    number = {node: index for index, node in enumerate(dict.fromkeys(nodes))}
    outer = tuple(info.started_as for info in infos)
    if comm.rank == 0:
        _warn_of_threads(hosts[mine.host, mine.boot])
    return World(
        comm=comm,
        hosts=tuple(info.host for info in infos),
        pids=tuple(info.pid for info in infos),
        nodes=tuple(number[node] for node in nodes),
        thread_multiple=all(info.thread_multiple for info in infos),
        running=tuple(rank for rank, info in enumerate(infos) if not info.ended),
        outer=() if outer == tuple(range(comm.size)) else outer,
        crowded=any(len(ranks) > _cores(ranks) for ranks in hosts.values()),
    )


def _cores(infos: list[_RankInfo]) -> int:
    return functools.reduce(operator.or_, (info.cores for info in infos)).bit_count()


def _warn_of_threads(infos: list[_RankInfo]) -> None:
    cores = _cores(infos)
    threads = sum(info.threads or info.cores.bit_count() for info in infos)
    if threads > max(cores, len(infos)):
        warnings.warn(
            f"the {len(infos)} ranks on {infos[0].host} want {threads} BLAS threads and have {cores}"
            f" core{'s' * (cores > 1)}, which slows all of them: set OMP_NUM_THREADS={max(cores // len(infos), 1)}"
            " before Python starts (`python -m mpiddp` does)",
            stacklevel=7,
        )


def thread_level() -> str:
    """Return MPI's support of threads, such as "MULTIPLE"."""
    levels = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    return next(level for level in levels if getattr(MPI, f"THREAD_{level}") == MPI.Query_thread())


def library_name() -> str:
    return library.short_name(MPI.Get_library_version())


class Claims(NamedTuple):
    """The program's statements about its ranks, in `init_process_group`."""

    rank: int = -1
    world_size: int = -1
    own_comm: bool = False
    on_error: str = "abort"
    assigned_by_mpi: bool = False
    """True if the backend is "mpi", with which torch ignores rank and size, and warns."""


def check_claims(comm: MPI.Intracomm, claims: Claims, environment: Mapping[str, int]) -> None:
    """Raise SetupError, on all ranks, if one rank's claims or ``environment`` contradict MPI, or if ranks differ.

    All ranks must agree on ``on_error``, on giving a communicator or none, and on the variables that select algorithms.
    """
    if claims.assigned_by_mpi and (claims.rank, claims.world_size) != (-1, -1) and comm.size > 1:
        warnings.warn(
            f"For MPI backend, world_size ({claims.world_size}) and rank ({claims.rank}) are ignored since they are"
            " assigned by the MPI runtime.",
            stacklevel=5,
        )
        claims = claims._replace(rank=-1, world_size=-1)
    given = " and ".join(["comm="] * claims.own_comm + [f'on_error="{claims.on_error}"'])
    told = comm.allgather((_contradiction(comm, claims, environment), given, settings.choosing_algorithms()))
    for contradiction, *_ in told:
        if contradiction:
            raise SetupError(contradiction)
    compared = (
        ("calls init_process_group with", "with", "give comm= and on_error= on all ranks of a communicator, or none"),
        ("has", "has", "ranks that select different algorithms cannot meet: set these variables on all ranks, or none"),
    )
    for item, (does, too, cure) in enumerate(compared, start=1):
        different = next((rank for rank, each in enumerate(told) if each[item] != told[0][item]), 0)
        if different:
            raise SetupError(f"rank 0 {does} {told[0][item]}, rank {different} {too} {told[different][item]}; {cure}")


def _contradiction(comm: MPI.Intracomm, claims: Claims, announced: Mapping[str, int]) -> str:
    for name, value, true in (
        ("world_size", claims.world_size, comm.size),
        ("rank", claims.rank, comm.rank),
        ("WORLD_SIZE", announced.get("WORLD_SIZE", -1), comm.size),
        ("RANK", announced.get("RANK", -1), comm.rank),
    ):
        if value in (-1, true):
            continue
        where = "in the environment" if name.isupper() else "given to init_process_group"
        if comm.size > 1:
            actual = f"this is rank {comm.rank} of MPI's {comm.size}"
            cure = "leave it out" if name.islower() else f"delete what sets {name}, it is filled in here"
        else:
            ranks = max(claims.world_size, announced.get("WORLD_SIZE", -1), 2)
            actual = "MPI's world has 1 rank"
            cure = (
                f"start with `mpirun -np {ranks} python {Path(sys.argv[0]).name or 'run.py'}` and delete the spawn"
                " (mp.spawn, torchrun) or what else sets it"
            )
        return f"{name}={value} {where}, but {actual}; ranks come from MPI: {cure}"
    return ""
