"""Processes of this host: what the system tells of ranks and of what has started them."""

import contextlib
import re
from pathlib import Path

_RANK = re.compile(rb"\0(?:OMPI_COMM_WORLD_RANK|PMI_RANK)=(\d+)\0")
UNKNOWN = -1
"""The rank of a process that has written its title over its environment, as setproctitle does."""
_SHARED = Path("/dev/shm")
_SHARED_FILE = re.compile(r"^\S+ \S+ \S+ \S+ (\d+) +/dev/shm/", re.MULTILINE)
_LEFT = ("mpich_shm_*", "sm_segment.*", "sem.mp-*")
"""Files that an aborted job leaves behind. MPI_Finalize removes the library's files, and MPI_Abort does not. Python's
process that removes multiprocessing's semaphores is killed with the job."""


def started_ranks(starter: int) -> dict[str, int]:
    """Return the running ranks, without daemons, that a launcher or its daemon has started, by process."""
    found = {pid: _rank(pid) for pid in _children(starter) if runs(pid)}
    return {pid: rank for pid, rank in found.items() if rank is not None}


def _children(pid: int) -> set[str]:
    found = set[str]()
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found |= set((thread / "children").read_text().split())
    return found


def _rank(pid: str) -> int | None:
    with contextlib.suppress(OSError):
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        announced = _RANK.search(b"\0" + environment)
        if announced is not None:
            return int(announced[1])
        return None if b"=" in environment else UNKNOWN
    return None


def runs(pid: str | int) -> bool:
    """Return True unless the process has ended or is a zombie."""
    return state(pid) not in "ZX"


def state(pid: str | int) -> str:
    """Return a process's state as the kernel's letter, "X" where it has gone."""
    return _stat(pid)[0]


def name(pid: int) -> str:
    """Return a process's command; "" where it has ended or is not to be seen."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def parent(pid: int) -> int:
    """Return the process that has started another one, or 0."""
    return int(_stat(pid)[1])


def _stat(pid: str | int) -> list[str]:
    """Return a process's state, its parent, and what follows; of one that has ended, state and parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


def remove_shared_files(pid: int) -> None:
    """Remove the files in shared memory of a process that ends at once: nobody else would."""
    with contextlib.suppress(OSError):
        # A semaphore is mapped under another name.
        used = set(map(int, _SHARED_FILE.findall(Path(f"/proc/{pid}/maps").read_text())))
        for path in (path for pattern in _LEFT for path in _SHARED.glob(pattern)):
            with contextlib.suppress(OSError):  # another process may remove it, too
                if path.stat().st_ino in used:
                    path.unlink()
