"""Checks for processes that a rank has started.

MPI does not start in such a process, and a rank that spawns ranks of its own is killed.
"""

import os
import signal
import sys
from typing import Any, NoReturn

from mpiddp import launchers, rank_process
from mpiddp.errors import SetupError

from . import processes, stdio

_FIRST_WORD_S = 3.0
"""How long a child waits before it ends the job. The first child of rank 0 does not wait, so that it prints the reason
before the others."""


def refuse_children(launch: launchers.Launch) -> None:
    """Refuse to start MPI in a process that a rank has started, because it would start as the same rank.

    MPICH would fail in this process, and Open MPI would crash the job's ranks.
    """
    rank_pid = rank_process.started_by_rank()
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None:
        this, starter = multiprocessing.current_process(), multiprocessing.parent_process()
        if getattr(this, "_inheriting", False):
            fault = (
                "multiprocessing imports the program again in a process that it starts, and that import starts MPI: put"
                " what only ranks do under `if __name__ == '__main__':`"
            )
            # The parent of a Pool's worker is the rank, or a fork server that the rank has started.
            if "PoolWorker" in this.name and rank_pid in (os.getppid(), processes.parent(os.getppid())):
                _end_job(f"{fault}; the pool would start its workers again for ever, so the job ends here", rank_pid)
            raise SetupError(fault)
        if starter is not None and rank_pid is None and launch.size > 1:
            refuse_spawned(launch, starter, this)
    if rank_pid is not None:
        raise SetupError(
            f"rank {launch.rank} of {launch.size} (process {rank_pid}) started this program, which has inherited the"
            " launcher's variables and would be that rank a second time; start it, alone or by an mpirun of its own,"
            " with `env=mpiddp.settings.outside_of_jobs()`"
        )


def refuse_spawned(launch: launchers.Launch, rank: Any, child: Any) -> NoReturn:
    """End the rank that spawned this process, because the job would hang.

    The first child of rank 0 kills its rank at once, and prints the reason. Any other child waits a moment, and does
    the same if its rank still lives.
    """
    if launch.rank != 0 or child._identity[-1:] != (1,):
        rank.join(_FIRST_WORD_S)
    if rank.is_alive():
        _end_job(
            f"rank {launch.rank} of {launch.size} (process {rank.pid}) started this process with multiprocessing, as if"
            f" it had to start ranks; {launch.launcher.name} has started all {launch.size} of them already: delete the"
            " spawn (multiprocessing.Process, mp.spawn, a Pool), and call its function directly in every process",
            rank.pid,
        )
    os._exit(1)


def _end_job(fault: str, rank_pid: int) -> NoReturn:
    """Print ``fault``, and kill a rank of this host. The launcher then kills the other ranks."""
    sys.stderr.write(f"SetupError: {fault}\n")
    stdio.deliver()
    for each in {str(rank_pid), *processes.started_ranks(processes.parent(rank_pid))}:
        processes.remove_shared_files(int(each))
    os.kill(rank_pid, signal.SIGKILL)
    os._exit(1)
