"""Ctrl-C ends the job at once with one message, also while every rank waits inside MPI."""

from __future__ import annotations

import os
import re
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from harness.launcher import mpiexec, side_by_side, start
from harness.tiers import chosen, thinned

PROGRAM = """
import os, sys, time
import numpy as np
import mpiddp as dist

dist.init_process_group()
rank, x = dist.get_rank(), np.ones(4)
sys.stdout.write(f"pid of {rank}: {os.getpid()}.\\n")
sys.stdout.flush()
"""

STATES = {
    "blocked in MPI": "dist.recv(x, src=0) if rank == 2 else dist.all_reduce(x)",
    "polling": "dist.irecv(x, src=0).wait() if rank == 2 else dist.all_reduce(x, async_op=True).wait()",
    "computing": "while True: x = x + 1",
    "at their ends": "time.sleep(60) if rank == 1 else sys.exit()",
    "stuck in a collective": "time.sleep(60) if rank == 1 else dist.all_reduce(x)",
}


def interrupt(body, target):
    """Send SIGINT to the launcher, or to rank 2, once all ranks are in ``body``."""
    with start(3, PROGRAM + body) as job:
        for rank in range(3):
            job.wait_for(f"pid of {rank}: ")
        # Their waits are invisible from outside.
        time.sleep(1)
        began = time.monotonic()
        if target == "launcher":
            job.signal(signal.SIGINT)
        else:
            os.kill(int(job.output[0].split("pid of 2: ")[1].split(".")[0]), signal.SIGINT)
        return job.wait(30), time.monotonic() - began


@pytest.fixture(scope="module")
def jobs(request):
    calls = {
        f"{who}, {state}": partial(interrupt, STATES[state], who)
        for who in ("rank", "launcher")
        for state in chosen(request, "state")
    }
    with side_by_side(calls) as futures:
        yield futures


def report(job):
    said = [line for line in job.stderr.splitlines() if line.startswith("[rank ")]
    ranks = {line.split("]")[0].split()[1] for line in said}
    assert len(ranks) == 1 and sum("interrupted (Ctrl-C)" in line for line in said) == 1, job
    return [line.partition("] ")[2] for line in said], int(ranks.pop().split("/")[0])


# The operation of ranks 0 and 2 in the report of one of them, and the others' state.
REPORTS = {
    "blocked in MPI": {
        0: ["all_reduce #1 of float64 (4,)", "1 rank is NOT in it", "rank 2 (node", "in recv"],
        2: ["recv", "rank 0"],
    },
    "polling": {
        0: ["all_reduce #1 of float64 (4,)", "1 rank is NOT in it", "rank 2 (node", "in irecv"],
        2: ["irecv", "in all_reduce"],
    },
    "computing": {rank: ["ranks ", "program.py:10 in <module>", "in its own code"] for rank in (0, 2)},
    "at their ends": {rank: ["rank 1 (node", "program.py:10 in <module>", "in its own code"] for rank in (0, 2)},
    "stuck in a collective": {0: ["all_reduce #1", "rank 1 (node", "program.py:10"], 2: ["all_reduce #1"]},
}


def assert_reported(job, rank, state):
    lines, reporter = report(job)
    assert reporter == rank, job
    # Open MPI's mpirun leaves rank 0 half a second: its own state is a line, and the others' another one.
    start = next(index for index, line in enumerate(lines) if "interrupted (Ctrl-C)" in line)
    assert len(lines) - start <= 4, job
    for text in REPORTS[state][rank]:
        assert text in " ".join(lines[start:]), (text, job)
    if state != "at their ends":  # its own line of the program, and none of the package after it
        assert any("program.py" in line and "line 10" in line for line in lines), job
        assert not any("mpiddp/" in line and "File" in line for line in lines), job


@pytest.mark.parametrize("state", thinned(STATES, "blocked in MPI", "at their ends", "stuck in a collective"))
def test_rank(jobs, state):
    job, _ = jobs[f"rank, {state}"].result()
    assert job.rc == 130, job
    assert_reported(job, 2, state)


HYDRA = (mpiexec() or Path()).with_name("mpiexec.hydra").exists()


@pytest.mark.parametrize("state", thinned(STATES, "blocked in MPI", "at their ends", "stuck in a collective"))
def test_launcher(jobs, state):
    job, took_s = jobs[f"launcher, {state}"].result()
    assert job.rc not in (0, 124), job
    assert took_s < 10, job  # alone it takes less than a second
    assert "Traceback" not in job.stderr, job
    # Open MPI's mpirun ends its ranks within half a second, too short for a report beside other jobs.
    if HYDRA or "[rank " in job.stderr:
        assert_reported(job, 0, state)


# Rank 1 cannot answer, or late.
CULPRITS = {
    "asleep": "time.sleep(60)",
    "stopped": "import signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "holding the interpreter": "sys.setswitchinterval(60)\n    while True: pass",
    "looping": "while True: pass",
}


@pytest.mark.parametrize("culprit", thinned(CULPRITS, "asleep", "stopped", "holding the interpreter"))
def test_launcher_of_open_mpi_prints_a_report(culprit):
    if HYDRA:
        pytest.skip("MPICH's launcher hands the signal on")
    body = f"if rank == 1:\n    {CULPRITS[culprit]}\nwhile True: dist.all_reduce(x)"
    for _ in range(3):
        job, _ = interrupt(body, "launcher")
        if "[rank 0/3 " in job.stderr:
            break
    assert re.search(r"program\.py\", line 1\d, in <module>\n.*\n.* interrupted \(Ctrl-C\)", job.stderr), job
    if culprit == "asleep":
        assert re.search(r"1 rank is NOT in it:\n.* rank 1 \(.*  program.py:11 in <module> ", job.stderr), job


def test_ranks_that_fail_are_not_reported_as_interrupted():
    """mpirun ends the other ranks in the same way then."""
    for fault, text in (("raise ValueError('boom')", "boom"), ("os.kill(os.getpid(), signal.SIGKILL)", "")):
        body = f"import signal\nif rank == 1: time.sleep(0.5); {fault}\ndist.all_reduce(x)\n"
        with start(3, PROGRAM + body) as job:
            done = job.wait(30)
        assert done.rc not in (0, 124) and text in done.stderr and "interrupted" not in done.stderr, done


def test_handler_of_the_program_is_left_alone():
    body = """
import signal
caught = []
signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
sys.stdout.write("handler set.\\n")
sys.stdout.flush()
deadline = time.monotonic() + 20
while rank == 2 and not caught and time.monotonic() < deadline: time.sleep(0.05)
dist.barrier()
if rank == 2: print("caught", caught, flush=True)
"""
    with start(3, PROGRAM + body) as job:
        while "".join(job.output).count("handler set.") < 3:
            job.wait_for("handler set.")
        os.kill(int(job.output[0].split("pid of 2: ")[1].split(".")[0]), signal.SIGINT)
        done = job.wait(60)
    assert done.rc == 0 and "caught [2]" in done.stdout, done


def test_termination_of_launcher():
    with start(3, PROGRAM + STATES["blocked in MPI"]) as job:
        for rank in range(3):
            job.wait_for(f"pid of {rank}: ")
        job.signal(signal.SIGTERM)
        done = job.wait(30)
    assert done.rc not in (0, 124), (mpiexec(), done)
