"""One run at a time in a folder, whatever way the one before has ended."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sys
from pathlib import Path

import pytest
from harness.launcher import Program

from mpiddp.training import lock
from mpiddp.training.lock import RunLock

OWNER = """
import sys, time
from pathlib import Path
from mpiddp.training.lock import RunLock
held = RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_another_process_is_refused_until_the_first_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_PATIENCE_S", 0.2)
    with Program([sys.executable, "-c", OWNER, str(tmp_path / "run")], {"SLURM_JOB_ID": "4711"}) as owner:
        owner.wait_for("held")
        for _ in range(2):
            said = rf"in use by another run, process {owner.pid} on \S+, Slurm job 4711: wait"
            with pytest.raises(BlockingIOError, match=said):
                RunLock(tmp_path / "run")
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait(10)
    mine = RunLock(tmp_path / "run")
    assert (tmp_path / "run" / "lock").read_text().startswith(f"process {os.getpid()} on ")
    with pytest.raises(BlockingIOError):
        RunLock(tmp_path / "run")
    mine.release()
    RunLock(tmp_path / "run").release()


def test_one_that_is_about_to_end_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = RunLock(tmp_path)
    monkeypatch.setattr(lock.time, "sleep", lambda _: first.release())
    RunLock(tmp_path).release()


def test_a_file_system_without_locks_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    RunLock(tmp_path).release()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        RunLock(tmp_path / "file" / "run")
