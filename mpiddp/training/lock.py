"""``RunLock``: one run at a time in a folder. Imports the standard library only."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import IO

_PATIENCE_S = 5.0
"""Ranks may outlive their launcher by so much, where it was killed."""
_LOOK_S = 0.1
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)


class RunLock:
    """The right to write in a run's folder: held until the process ends, however it ends, or `release`.

    Two runs in one folder would remove each other's half-written checkpoints, and mix their metrics.

    Parameters
    ----------
    folder : Path
        Made where it is missing; gets a file ``lock`` that says who has it.

    Raises
    ------
    BlockingIOError
        If another process has it; the text says which.
    OSError
        If the file cannot be made.

    Notes
    -----
    ``flock``, which goes over NFS too. On a file system that knows no locks there is none, and nothing is said.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = (folder / "lock").open("a+")
        if not self._taken():
            self._file.seek(0)
            owner = self._file.read().strip() or "another process"
            self._file.close()
            raise BlockingIOError(
                f"{folder} is in use by another run, {owner}: wait for its end, or give another --output"
            )
        self._file.truncate(0)
        job = f", Slurm job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}{job}\n")
        self._file.flush()

    def release(self) -> None:
        """Give it up."""
        self._file.close()

    def _taken(self) -> bool:
        """Lock the file, or tell that it remains locked."""
        given_up_at = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _TAKEN:
                    return True
                if time.monotonic() > given_up_at:
                    return False
                time.sleep(_LOOK_S)
            else:
                return True
