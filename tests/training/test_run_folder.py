"""A folder has one run at a time, and knows the commit of its code."""

import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness.launcher import Program

from mpiddp.training import run_folder
from mpiddp.training.run_folder import git_commit, locked

OWNER = """
import sys, time
from pathlib import Path
from mpiddp.training.run_folder import locked
held = locked(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_another_process_is_refused_until_the_first_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_PATIENCE_S", 0.2)
    with Program([sys.executable, "-c", OWNER, str(tmp_path / "run")], {"SLURM_JOB_ID": "4711"}) as owner:
        owner.wait_for("held")
        for _ in range(2):
            said = rf"in use by another run, process {owner.pid} on \S+, Slurm job 4711: wait"
            with pytest.raises(BlockingIOError, match=said):
                locked(tmp_path / "run")
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait(10)
    mine = locked(tmp_path / "run")
    assert (tmp_path / "run" / "lock").read_text().startswith(f"process {os.getpid()} on ")
    with pytest.raises(BlockingIOError):
        locked(tmp_path / "run")
    mine.close()
    locked(tmp_path / "run").close()


def test_one_that_is_about_to_end_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = locked(tmp_path)
    monkeypatch.setattr(run_folder.time, "sleep", lambda _: first.close())
    locked(tmp_path).close()


def test_a_file_system_without_locks_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    locked(tmp_path).close()


def git(folder, *arguments):
    identity = ["-c", "user.name=n", "-c", "user.email=n@example.org"]
    done = subprocess.run(["git", *identity, "-C", folder, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_and_whether_files_differ_from_it(tmp_path, monkeypatch):
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("1")
    assert git_commit(tmp_path) is None, "nothing is known of yet"
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-q", "-m", "m")
    git(tmp_path, "tag", "-a", "v1", "-m", "v1")
    found = git_commit(tmp_path / "a.py")
    assert found == git(tmp_path, "rev-parse", "HEAD") and re.fullmatch("[0-9a-f]{40}", found)
    (tmp_path / "b.py").write_text("2")
    assert git_commit(tmp_path / "b.py") is None, "as an installed package in somebody's checkout"
    assert git_commit(tmp_path) == found
    (tmp_path / "a.py").write_text("3")
    assert git_commit(tmp_path / "a.py") == found + "-dirty"


def test_no_repository_and_no_git(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert git_commit(tmp_path) is None
