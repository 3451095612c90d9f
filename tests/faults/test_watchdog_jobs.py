"""Ctrl-C ends the job at once with one message, also while every rank waits inside MPI."""

import os
import re
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from harness.launcher import is_open_mpi, job, line_of, mpiexec, side_by_side, start
from harness.tiers import chosen, thinned

import mpiddp

pytestmark = pytest.mark.core
PACKAGE = Path(mpiddp.__file__).parent

# Of programs/waits, with the line in which ranks 0 and 1 are.
STATES = {
    "blocked in MPI": ("alike", "recv on 2", "dist.recv(x, src=0) if rank == 2"),
    "computing": ("alike", "compute", "x = x + 1"),
    "at their ends": ("sleep", "exit", "time.sleep(60)  # in"),
    "stuck in a collective": ("sleep", "all_reduce", "time.sleep(60)  # in"),
}
LINES = {state: line_of("waits", text) for state, (_, _, text) in STATES.items()}
# The operation of ranks 0 and 2 in the report of one of them, and the others' state.
REPORTS = {
    "blocked in MPI": {
        0: ["all_reduce #1 of float64 (4,)", "rank 2 (node", "in recv"],
        2: ["recv", "rank 0"],
    },
    "computing": {rank: ["ranks ", "waits.py:LINE in <module>", "in its own code"] for rank in (0, 2)},
    "at their ends": {rank: ["rank 1 (node", "waits.py:LINE in <module>", "in its own code"] for rank in (0, 2)},
    "stuck in a collective": {0: ["all_reduce #1", "rank 1 (node", "waits.py:LINE"], 2: ["all_reduce #1"]},
}


def interrupt(one, others, target):
    """Send SIGINT to the launcher, or to rank 2, once all ranks wait."""
    with start("waits", one, others, ranks=3) as job:
        pids = [job.pid_of(rank) for rank in range(3)]
        # Their waits are invisible from outside. A wait of less than a second is no part of a deadlock.
        time.sleep(2.2)
        began = time.monotonic()
        if target == "launcher":
            job.signal(signal.SIGINT)
        else:
            os.kill(pids[2], signal.SIGINT)
        return job.wait(30), time.monotonic() - began


@pytest.fixture(scope="module")
def jobs(request):
    calls = {
        f"{who}, {state}": partial(interrupt, *STATES[state][:2], who)
        for who in ("rank", "launcher")
        for state in chosen(request, "state")
    }
    with side_by_side(calls) as futures:
        yield futures


def report(done):
    said = [line for line in done.stderr.splitlines() if line.startswith("[rank ")]
    ranks = {line.split("]")[0].split()[1] for line in said}
    assert len(ranks) == 1 and sum("interrupted (Ctrl-C)" in line for line in said) == 1, done
    return [line.partition("] ")[2] for line in said], int(ranks.pop().split("/")[0])


def is_whole(done):
    """Return True if the state of the others follows the reporter's own."""
    return "\n[rank " in done.stderr.partition("interrupted (Ctrl-C)")[2]


def with_whole_report(one, others):
    """Interrupt the launcher up to 24 times; return the job that said most.

    Open MPI's mpirun ends its ranks within half a second, which beside other jobs is too short for a report. Of jobs
    with a stopped rank it mostly hands on nothing that the others print meanwhile.
    """
    tries = []
    for _ in range(24):
        tries.append(interrupt(one, others, "launcher")[0])
        if is_whole(tries[-1]):
            break
    return max(tries, key=lambda done: len(done.stderr))


def assert_reported(done, rank, state):
    lines, reporter = report(done)
    assert reporter == rank, done
    start = next(index for index, line in enumerate(lines) if "interrupted (Ctrl-C)" in line)
    assert len(lines) - start <= 1 + 1 + 3, done  # what has happened, how many are not in it, and a line a rank
    for text in REPORTS[state][rank]:
        assert text.replace("LINE", str(LINES[state])) in " ".join(lines[start:]), (text, done)
    if state != "at their ends":  # its own line of the program, and none of the package after it
        own = line_of("waits", 'case "all_reduce":') + 1 if "stuck" in state else LINES[state]
        assert any("waits.py" in line and f"line {own}" in line for line in lines), done
        assert not any(f"{PACKAGE}/" in line for line in lines), done


@pytest.mark.parametrize("state", thinned(STATES, "blocked in MPI", "stuck in a collective"))
def test_rank(jobs, state):
    done, _ = jobs[f"rank, {state}"].result()
    assert done.rc == 130, done
    assert_reported(done, 2, state)


@pytest.mark.parametrize("state", thinned(STATES, "blocked in MPI", "stuck in a collective"))
def test_launcher(jobs, state):
    done, took_s = jobs[f"launcher, {state}"].result()
    assert done.rc not in (0, 124) and took_s < 10 and "Traceback" not in done.stderr, done  # alone less than a second
    if is_open_mpi() and not is_whole(done):
        done = with_whole_report(*STATES[state][:2])
    assert_reported(done, 0, state)
    if state == "blocked in MPI":
        circle = "rank 0 waits for rank 2, which waits for rank 0: a deadlock"
        assert ("1 rank is NOT in it" if is_open_mpi() else circle) in done.stderr, done  # asked as mpirun ends the job


# Rank 1 cannot answer, or late.
@pytest.mark.skipif(not is_open_mpi(), reason="MPICH's launcher hands the signal on")
@pytest.mark.parametrize("culprit", thinned(["sleep", "SIGSTOP", "hold the interpreter"], "sleep", "SIGSTOP"))
def test_launcher_of_open_mpi_prints_a_report(culprit):
    done = with_whole_report(culprit, "loop")
    assert re.search(r"waits\.py\", line \d+, in <module>\n.*\n.* interrupted \(Ctrl-C\)", done.stderr), done
    if culprit == "sleep":
        line = line_of("waits", "time.sleep(60)  # in")
        said = rf"1 rank is NOT in it:\n.* rank 1 \(.*  waits.py:{line} in <module> "
        assert re.search(said, done.stderr), done


def test_ranks_beside_one_that_dies_are_not_reported_as_interrupted():
    """mpirun ends the other ranks in the same way then."""
    done = job("waits", "SIGKILL", "all_reduce", ranks=3, limit_s=30)
    assert done.rc not in (0, 124) and "interrupted" not in done.stderr, done


def test_handler_of_the_program_is_left_alone():
    with start("waits", "alike", "handler", ranks=3) as job:
        job.wait_for("handler set.", times=3)
        os.kill(job.pid_of(2), signal.SIGINT)
        done = job.wait(60)
    assert done.rc == 0 and "caught [2]" in done.stdout, done


def test_termination_of_launcher():
    with start("waits", "alike", "recv on 2", ranks=3) as job:
        job.wait_for("pid of ", times=3)
        job.signal(signal.SIGTERM)
        done = job.wait(30)
    assert done.rc not in (0, 124), (mpiexec(), done)
