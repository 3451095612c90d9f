"""Open MPI's mpirun at a Ctrl-C: it sends its ranks SIGCONT, after 0.25 s SIGTERM, and after another 0.25 s SIGKILL.

The ranks get no SIGINT, and their output is lost. So rank 0 writes its report to the stderr of mpirun itself, if mpirun
runs on its host.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Sequence

from mpiddp import launchers
from mpiddp.mpi import processes

_DAEMONS = ("prted", "orted", "srun", "slurmstepd")
"""Other processes that start ranks. Nobody would read a report on their stderr."""
_END_S = 8
"""Seconds for mpirun to end by itself after an abort."""
_HANDLED = (signal.SIGCONT, signal.SIGTERM)


def _left_to_the_watchdog(number: int, frame: object) -> None:
    """Do nothing: the watchdog receives the signal."""


def end_after_this_process(hosts: Sequence[str]) -> None:
    """Start a shell that ends mpirun if it still runs some time after this process has aborted the job.

    Otherwise mpirun would wait for ever for the daemon of a host that is out of reach. A shell does it, because mpirun
    kills this process.
    """
    pid, launch = os.getppid(), launchers.launch()
    if launch is None or not launch.launcher.waits_for_lost_hosts or len(set(hosts)) < 2:
        return
    if processes.name(pid) in ("", *_DAEMONS):
        return  # mpirun is on another host, or cannot be seen
    looks = f"n={2 * _END_S}; while [ $n -gt 0 ]; do kill -0 $0 || exit; n=$((n - 1)); sleep 0.5; done"
    command = ["/bin/sh", "-c", f"{looks}; kill -TERM $0; sleep 2; kill -KILL $0", str(pid)]
    with contextlib.suppress(OSError):
        quiet = subprocess.DEVNULL
        subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)


class Mpirun:
    def __init__(self, rank: int) -> None:
        self._pid = os.getppid()
        self._ranks: dict[str, int] = {}
        self._handled: list[signal.Signals] = []
        launch = launchers.launch()
        if launch is None or launch.launcher.passes_interrupts:
            return
        if threading.current_thread() is not threading.main_thread():
            return
        self._ranks = processes.started_ranks(self._pid)
        reads = processes.name(self._pid) not in ("", *_DAEMONS)  # if so, the parent is mpirun itself, on this host
        for number in _HANDLED[: 2 if rank == 0 and reads else 1]:
            if signal.getsignal(number) in (signal.SIG_DFL, _left_to_the_watchdog):
                signal.signal(number, _left_to_the_watchdog)
                self._handled.append(number)

    def handles_termination(self) -> bool:
        return signal.SIGTERM in self._handled and signal.getsignal(signal.SIGTERM) is _left_to_the_watchdog

    def all_run(self) -> bool:
        """Return True if all ranks of this host run. Otherwise mpirun itself prints why the job ends."""
        return all(map(processes.runs, self._ranks))

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            output = os.open(f"/proc/{self._pid}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
            os.write(output, text.encode(errors="replace"))
            os.close(output)

    def release(self) -> None:
        """Restore the default actions, from any thread."""
        for number in self._handled:
            if signal.getsignal(number) is _left_to_the_watchdog:
                ctypes.pythonapi.PyOS_setsig(int(number), None)
        self._handled.clear()

    def terminate(self) -> None:
        """End this process, from any thread."""
        ctypes.pythonapi.PyOS_setsig(int(signal.SIGTERM), None)
        os.kill(os.getpid(), signal.SIGTERM)
