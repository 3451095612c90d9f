"""Ctrl-C ends the job at once with one message, also while every rank waits inside MPI, where Python sees no signal."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import pytest
from harness.launcher import mpiexec, side_by_side, start

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
}


def interrupt(body, target):
    """Send SIGINT to the launcher, or to rank 2, once all ranks are in ``body``."""
    with start(3, PROGRAM + body) as job:
        for rank in range(3):
            job.wait_for(f"pid of {rank}: ")
        # Nothing tells from outside when they have begun to wait, nor is much lost if one has not.
        time.sleep(1)
        if target == "launcher":
            job.signal(signal.SIGINT)
        else:
            os.kill(int(job.output[0].split("pid of 2: ")[1].split(".")[0]), signal.SIGINT)
        return job.wait(30)


@pytest.fixture(scope="module")
def jobs():
    """Interrupt all side by side, and return the futures by target and state."""
    calls = {
        f"{who}, {state}": partial(interrupt, STATES[state], who) for who in ("rank", "launcher") for state in STATES
    }
    with side_by_side(calls) as futures:
        yield futures


@pytest.mark.parametrize("state", STATES)
def test_rank(jobs, state):
    job = jobs[f"rank, {state}"].result()
    assert job.rc == 130, job
    said = [line for line in job.stderr.splitlines() if line.startswith("[rank ")]
    assert len(said) == 1 and said[0].startswith("[rank 2/3 ") and "interrupted (Ctrl-C)" in said[0], job


@pytest.mark.parametrize("state", STATES)
def test_launcher(jobs, state):
    job = jobs[f"launcher, {state}"].result()
    assert job.rc not in (0, 124), job
    # Open MPI's mpirun ends the ranks itself, by SIGTERM; Hydra hands the signal on.
    said = [line for line in job.stderr.splitlines() if "interrupted (Ctrl-C)" in line]
    assert len(said) <= 1, job
    assert "Traceback" not in job.stderr, job


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
