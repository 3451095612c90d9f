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
"""How long the ranks of a killed launcher may take to end."""
_LOOK_S = 0.1


def locked(folder: Path) -> IO[str]:
    """Return a file with which this process has the right to write in a run's folder, by ``flock``, until it is closed.

    Two runs would remove each other's unfinished checkpoints and mix their metrics. A file system without locks has
    none, silently. The file ``lock`` names its owner, and so does BlockingIOError.
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
    except OSError:  # there are no locks
        pass
    return True


def describe(config: Config, surroundings: Mapping[str, Any]) -> None:
    """Write ``config.json`` and ``run.json`` (`mpiddp.training.info` and the commits of the code) in the folder."""
    assert config.output is not None, "there is a folder"
    sweep(config.output)
    commits = {"mpiddp": git_commit(Path(__file__)), "working directory": git_commit(Path.cwd())}
    described = {**surroundings, "commits": commits, "started": datetime.now(UTC).isoformat(timespec="seconds")}
    for name, values in (("config.json", config.as_dict()), ("run.json", described)):
        write_atomically(config.output / name, (json.dumps(values, indent=1) + "\n").encode())


_LIMIT_S = 5.0
"""How long git may take, which is slow on a network file system."""


def git_commit(path: Path) -> str | None:
    """Return the commit of a file's repository, ``-dirty`` if files differ; None without git or an unknown file."""
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
