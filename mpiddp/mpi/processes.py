"""Facts that /proc tells about processes of this host: about ranks, and about the processes that started them."""

import contextlib
import re
from pathlib import Path

_RANK = re.compile(rb"\0(?:OMPI_COMM_WORLD_RANK|PMI_RANK)=(\d+)\0")
UNKNOWN = -1
"""The rank of a process that has written its title over its environment, as setproctitle does."""
_SHARED = Path("/dev/shm")
_SHARED_FILE = re.compile(r"^\S+ \S+ \S+ \S+ (\d+) +/dev/shm/", re.MULTILINE)
_LEFT = ("mpich_shm_*", "sm_segment.*", "sem.mp-*")
"""Files in ``_SHARED`` that an aborted job leaves behind. MPI_Finalize removes the library's files, and MPI_Abort does
not. The process in which Python removes multiprocessing's semaphores is killed with the job."""


def started_ranks(starter: int) -> dict[str, int]:
    """Return the ranks that ``starter``, a launcher or its daemon, has started and that run, by process id.

    Other processes that it has started, such as daemons, are left out.
    """
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
    """Return a process's state as the kernel's letter, "X" if it has gone."""
    return _stat(pid)[0]


def name(pid: int) -> str:
    """Return a process's command; "" if it has ended or cannot be seen."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def parent(pid: int) -> int:
    """Return the id of a process's parent; 0 if the process has ended."""
    return int(_stat(pid)[1])


def _stat(pid: str | int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on, which the parent follows.

    For a process that has ended, return state "X" and parent "0".
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


def remove_shared_files(pid: int) -> None:
    """Remove the shared-memory files of a process that is about to be killed, because nobody else would."""
    with contextlib.suppress(OSError):
        # Files are compared by inode, because a semaphore is mapped under another name.
        used = set(map(int, _SHARED_FILE.findall(Path(f"/proc/{pid}/maps").read_text())))
        for path in (path for pattern in _LEFT for path in _SHARED.glob(pattern)):
            with contextlib.suppress(OSError):  # another process may have removed the file
                if path.stat().st_ino in used:
                    path.unlink()
