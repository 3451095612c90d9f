"""Whatever end a job has, none of its shared memory stays behind."""

import os
import time
from pathlib import Path

import pytest
from harness import launcher

pytestmark = pytest.mark.core


@pytest.mark.parametrize("way", ["memfd", "files"])
def test_a_killed_rank_leaves_no_shared_memory(way: str) -> None:
    before = set(Path("/dev/shm").glob("mpiddp-*"))
    done = launcher.job("killed", way, ranks=3)
    assert "going" in done.stdout and done.rc != 0, done
    left, end = set(Path("/dev/shm").glob("mpiddp-*")) - before, time.monotonic() + 10
    # Another job's file goes as soon as its ranks have opened it.
    while left and time.monotonic() < end:
        time.sleep(0.05)
        left &= set(Path("/dev/shm").glob("mpiddp-*"))
    assert not left


def test_an_exception_leaves_none_of_mpis_memory() -> None:
    with launcher.start("aborts", ranks=2) as job:
        while job.poll() is None:
            time.sleep(0.05)
        names = job.output[0].split()
        left = [name for name in names if Path(name).exists()]
        done = job.wait(10)
    assert done.rc == 1 and names, done
    # Open MPI: each rank has files of its own, and may be ended before it has removed them.
    assert not [name for name in left if "mpich" in name], done


def test_what_a_killed_job_leaves_is_removed_and_no_semaphore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "SHARED", tmp_path)
    left, semaphore = tmp_path / "mpich_shm_1", tmp_path / "sem.mp-4"
    for path in (left, semaphore):
        path.write_bytes(bytes(4096))
        os.utime(path, (time.time() - 60, time.time() - 60))
    launcher.remove_segments(time.time() - 90)
    assert not left.exists()
    assert semaphore.exists(), "it may be that of any program of this user; whether it lives is not to be seen"
