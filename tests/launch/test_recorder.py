"""The flight recorder of jobs that hang: all ranks write it, and `flight` finds where they part."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from harness.launcher import Completed, mpirun, python, side_by_side, start

PROGRAM = """
import os, sys, time
import numpy as np
import mpiddp as dist

dist.init_process_group()
rank, x = dist.get_rank(), np.ones(4)
sys.stdout.write(f"pid of {rank}: {os.getpid()}.\\n")
sys.stdout.flush()
for _ in range(3):
    dist.all_reduce(x)
group = dist.new_group([0, 1])
if rank < 2:
    dist.barrier(group)
if rank == 0:
    dist.send(x, 1, tag=3)
if rank == 1:
    dist.recv(x, 0, tag=3)
dist.all_reduce(np.ones(200_000), async_op=True).wait()

def save():
    time.sleep(60)

if sys.argv[1] == "mismatch" and rank == 1:
    dist.broadcast(x, 0)
if sys.argv[1] == "missing" and rank == 1:
    save()
if sys.argv[1] == "error" and rank == 1:
    raise KeyError("mine")
dist.all_reduce(x)
dist.all_reduce(np.ones(100_000))
"""
# Exit code, and what rank 1 does.
CASES = {
    "missing": (
        110,
        "never began #6; last all_reduce #5 of 200000 float64 elements with SUM, which has ended\n",
    ),
    "mismatch": (
        111,
        "broadcast #6 of 4 float64 elements and group rank 0 as root, which ",
    ),
    "error": (
        1,
        "never began #6; last all_reduce #5 of 200000 float64 elements with SUM, which has ended\n",
    ),
}


def ended(folder: Path, case: str) -> Completed:
    settings = {"MPIDDP_TIMEOUT": "3", "MPIDDP_FLIGHT_RECORDER": f"{folder}/{case}/rank_"}
    return mpirun(3, PROGRAM, case, env=settings)


def asked(folder: Path) -> tuple[Completed, Completed]:
    """Ask a job that waits for rank 1, by the command and by a signal."""
    prefix = folder / "asked" / "rank_"
    with start(3, PROGRAM, "missing", env={"MPIDDP_FLIGHT_RECORDER": str(prefix)}) as job:
        job.wait_for("pid of 0: ")
        time.sleep(2)
        pid = re.search(r"pid of 0: (\d+)\.", "".join(job.output))
        assert pid, job.output
        answer = python(None, "-m", "mpiddp", "where", f"{os.uname().nodename}.{pid[1]}")
        read = python(None, "-m", "mpiddp", "flight", *map(str, sorted(prefix.parent.iterdir())))
        for path in prefix.parent.iterdir():
            path.unlink()
        os.kill(int(pid[1]), signal.SIGUSR2)
        job.wait_for("flight recorder: 3 of 3 ranks wrote", 30)
        assert len(list(prefix.parent.iterdir())) == 3
    return answer, read


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorder")


@pytest.fixture(scope="module")
def jobs(folder):
    calls = {case: partial(ended, folder, case) for case in CASES}
    with side_by_side(calls | {"asked": partial(asked, folder)}) as futures:
        yield futures


@pytest.mark.parametrize("case", CASES)
def test_every_rank_writes_and_flight_finds_where_they_part(jobs, folder, case) -> None:
    job, (code, found) = jobs[case].result(), CASES[case]
    assert job.rc == code or case == "error", job
    prefix = f"{folder}/{case}/rank_"
    assert f"flight recorder: 3 of 3 ranks wrote {prefix}*; `python -m mpiddp flight {prefix}*` shows" in job.stderr, (
        job
    )
    files = sorted((folder / case).iterdir())
    assert [path.name for path in files] == ["rank_0", "rank_1", "rank_2"]
    read = python(None, "-m", "mpiddp", "flight", *map(str, files))
    assert re.search(rf"part at #6\n    rank 1 \(node \S+, pid \d+\)  +program.py:\d+ in \S+ +{found}", read.stdout), (
        read
    )
    assert "group 1." in read.stdout and ": all made the same calls up to #1, and all have ended" in read.stdout, read


def test_where_and_the_signal_write_too(jobs, folder) -> None:
    answer, read = jobs["asked"].result()
    assert f"flight recorder: 3 of 3 ranks wrote {folder}/asked/rank_*" in answer.stdout, answer
    assert "after rank 0: a question\n" in read.stdout and "part at #6\n    rank 1 (node " in read.stdout, read


def test_nothing_is_written_unasked(tmp_path) -> None:
    """A job that ends well, and one with an error of one rank's own."""
    for body in ("", "raise KeyError"):
        text = f"import mpiddp as dist\ndist.init_process_group()\ndist.barrier()\n{body}"
        job = mpirun(2, text, env={"MPIDDP_FLIGHT_RECORDER": None, "TMPDIR": str(tmp_path)})
        assert "flight recorder" not in job.stderr, job
    assert not list(tmp_path.glob("mpiddp-*"))


@pytest.mark.long
def test_the_line_of_a_torch_program(tmp_path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "script.py"
    lines = (
        "import torch, torch.distributed as dist",
        "import mpiddp.torch",
        "dist.init_process_group('mpiddp')",
        "def step():",
        "    dist.all_reduce(torch.ones(3))",
        "step()",
        "dist.barrier()",
        "raise SystemExit('mine') if dist.get_rank() == 9 else KeyError",
    )
    script.write_text("\n".join(lines))
    prefix = tmp_path / "dumps" / "rank_"
    job = mpirun(2, script, env={"MPIDDP_FLIGHT_RECORDER": str(prefix)})
    read = python(None, "-m", "mpiddp", "flight", "--json", *map(str, sorted(prefix.parent.iterdir())))
    calls = json.loads(read.stdout)["0"]["calls"]
    places = [(each["function"], each["file"], each["line"]) for each in calls if "all_reduce" in each["call"]]
    assert ("step", str(script), 5) in places, (job, calls)
