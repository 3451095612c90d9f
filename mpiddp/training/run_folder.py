"""The folder of a run, ``--output``: the lock of the job that writes in it, and the files that describe the run."""

import fcntl
import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from mpiddp.serialization import write_atomically

from .checkpoint import sweep
from .config import Config

_PATIENCE_S = 5.0
"""Seconds to wait for the lock. The ranks of an earlier run whose launcher was killed take that long to end."""
_LOOK_S = 0.1


def locked(folder: Path) -> IO[str]:
    """Lock a run's folder for this process, and return the open file ``lock``, which holds the lock until it is closed.

    Without the lock two runs would remove each other's unfinished checkpoints and mix their metrics. On a file system
    that has no ``flock``, the function returns without a lock and says nothing. BlockingIOError if another run holds
    the lock; its text names the owner, which the file names too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file, given_up_at = (folder / "lock").open("a+"), time.monotonic() + _PATIENCE_S
    while not _taken(file):
        if time.monotonic() > given_up_at:
            file.seek(0)
            owner = file.read().strip() or "another process"
            file.close()
            raise BlockingIOError(
                f"{folder} is in use by another run, {owner}: wait for its end, or give another --output"
            )
        time.sleep(_LOOK_S)
    file.truncate(0)
    job = f", Slurm job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
    file.write(f"process {os.getpid()} on {socket.gethostname()}{job}\n")
    file.flush()
    return file


def _taken(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # the file system has no locks
        pass
    return True


def describe(config: Config, surroundings: Mapping[str, Any]) -> None:
    """Write ``config.json`` and ``run.json`` into ``config.output``.

    ``run.json`` holds ``surroundings`` (of `mpiddp.training.info`), the commits of the code and the time of the start.
    """
    assert config.output is not None, "there is a folder"
    sweep(config.output)
    commits = {"mpiddp": git_commit(Path(__file__)), "working directory": git_commit(Path.cwd())}
    described = {**surroundings, "commits": commits, "started": datetime.now(UTC).isoformat(timespec="seconds")}
    for name, values in (("config.json", config.as_dict()), ("run.json", described)):
        write_atomically(config.output / name, (json.dumps(values, indent=1) + "\n").encode())


_LIMIT_S = 5.0
"""Seconds that a git command may take. Git is slow on a network file system."""


def git_commit(path: Path) -> str | None:
    """Return the current commit of the repository of a file, with ``-dirty`` appended if tracked files are changed.

    None if git is not installed, does not track the file, or takes too long.
    """
    folder, name = (path, ".") if path.is_dir() else (path.parent, path.name)
    if not _git(folder, "ls-files", "--", name):
        return None
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
