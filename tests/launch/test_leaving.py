"""A rank that is done early harms nobody, however it ends its program."""

from __future__ import annotations

from functools import partial

import pytest
from harness.launcher import mpirun, side_by_side
from harness.tiers import chosen, thinned

HEAD = """
import atexit, sys, time
import numpy as np
import mpiddp as dist

dist.init_process_group()
rank = dist.get_rank()
x = np.ones(4)
"""


def run(body, n=3, env=None):
    return mpirun(n, HEAD + body, timeout_s=90, env=env)


@pytest.fixture(scope="module")
def jobs(request):
    names = chosen(request, "name")
    alike = {name: body for name, body in (SLOW | ENDINGS).items() if name in names}
    alike |= {"alone": ALONE, "exit code": "dist.barrier()\nsys.exit(75)"}
    all_jobs = {name: partial(run, body) for name, body in alike.items()}
    all_jobs["serialized"] = partial(run, SERIALIZED, env={"MPI4PY_RC_THREAD_LEVEL": "serialized"})
    all_jobs["patient"] = partial(run, "dist.all_reduce(x)", env={"MPIDDP_TIMEOUT": "1e12"})
    all_jobs |= {way: partial(run, FORKED.format(way=way)) for way in chosen(request, "way")}
    with side_by_side(all_jobs) as futures:
        yield futures


def assert_clean(job):
    assert job.rc == 0, job
    assert "rank" not in job.stderr, job


SLOW = {
    "after the last collective": "dist.all_reduce(x)\nif rank == 0: time.sleep(6)",
    "root of a gather": """
if rank == 0: time.sleep(5)
parts = [np.zeros(4) for _ in range(3)] if rank == 0 else None
dist.gather(x, parts, dst=0)
assert rank or all((part == 1).all() for part in parts)
""",
    "receiver of a broadcast": """
if rank == 2: time.sleep(5)
dist.broadcast(x, src=0)
""",
    "receiver of an isend that was never waited for": """
if rank == 0: work = dist.isend(np.full(1_000_000, 2.0), dst=1)
if rank == 1:
    time.sleep(5)
    big = np.zeros(1_000_000)
    dist.recv(big, src=0)
    assert (big == 2).all()
""",
    "among those that never waited for collectives": """
if rank == 1: time.sleep(5)
works = [dist.all_reduce(np.ones(30_000), async_op=True) for _ in range(3)]
""",
    "with its last words": """
def last_words():
    if rank == 1: time.sleep(5)
    dist.all_reduce(x)
    assert x[0] == 3
atexit.register(last_words)
""",
}


@pytest.mark.parametrize(
    "name",
    thinned(
        SLOW,
        "after the last collective",
        "receiver of an isend that was never waited for",
        "among those that never waited for collectives",
        "with its last words",
    ),
)
def test_slow_rank(jobs, name):
    assert_clean(jobs[name].result())


ENDINGS = {
    "groups alive": "dist.new_group([0, 2])\ndist.barrier()",
    "destroyed": "dist.barrier()\ndist.destroy_process_group()",
    "made again": """
for _ in range(3):
    dist.destroy_process_group()
    dist.init_process_group()
    dist.all_reduce(x)
""",
    "Finalize called by the program, at different times": """
from mpi4py import MPI
time.sleep(rank)
MPI.Finalize()
for late in (lambda: dist.all_reduce(x), dist.barrier, lambda: dist.new_group([0])):
    try: late()
    except dist.DistError as error: assert "MPI has been finalised" in str(error)
    else: raise AssertionError("a call went on")
dist.destroy_process_group()
""",
    "an exception at exit": """
def last_words(): raise ValueError("boom")
if rank == 1: atexit.register(last_words)
""",
    "an isend that nobody receives": "if rank == 0: work = dist.isend(np.ones(3), dst=1)",
    "SystemExit without code": "sys.exit()",
    "daemon threads": "import threading; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
}


@pytest.mark.parametrize(
    "name",
    thinned(
        ENDINGS,
        "groups alive",
        "Finalize called by the program, at different times",
        "an exception at exit",
        "an isend that nobody receives",
    ),
)
def test_ending(jobs, name):
    assert_clean(jobs[name].result())


ALONE = "if rank == 0: work = dist.all_reduce(x, async_op=True)"


def test_operations_that_nobody_shares_are_named(jobs):
    job = jobs["alone"].result()
    assert job.rc == 0, job
    assert "[rank 0/3" in job.stderr and "that no other rank takes part in" in job.stderr, job


SERIALIZED = """
import threading

def reduce():
    try:
        dist.all_reduce(x)
    except dist.DistError as error:
        print("refused:", error, flush=True)

thread = threading.Thread(target=reduce)
thread.start()
thread.join()
if rank == 0: time.sleep(4)
dist.all_reduce(x)
assert x[0] == 3
"""


def test_without_thread_multiple(jobs):
    job = jobs["serialized"].result()
    assert job.rc == 0, job
    warning = "UserWarning: no watchdog runs: MPI runs with MPI_THREAD_SERIALIZED"
    assert job.stderr.count("Warning") == job.stderr.count(warning) == 1 and "[rank " not in job.stderr, job
    assert "a hang inside of MPI is not noticed" in job.stderr, job
    assert job.stdout.count("refused: MPI runs without MPI_THREAD_MULTIPLE here, so only the thread that") == 3, job


def test_time_without_end(jobs):
    job = jobs["patient"].result()
    assert_clean(job)
    assert "Error" not in job.stderr, job


def test_exit_code_is_kept(jobs):
    assert jobs["exit code"].result().rc == 75


WAYS = ["dist.all_reduce(x)", "dist.all_reduce(x, group=whole)", "dist.new_group([0, 1])", "dist.init_process_group()"]
FORKED = """
import os, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, from Python 3.12 on
whole = dist.group.WORLD
child = os.fork() if rank == 1 else -1
if child == 0:
    try:
        {way}
    except Exception as error:
        assert "fork" in str(error), error
        print("refused", flush=True)
    sys.exit(5)
if child > 0:
    deadline = time.monotonic() + 20
    found, status = os.waitpid(child, os.WNOHANG)
    while not found and time.monotonic() < deadline:
        time.sleep(0.05)
        found, status = os.waitpid(child, os.WNOHANG)
    assert found and os.waitstatus_to_exitcode(status) == 5, (found, status)
for _ in range(3):
    dist.all_reduce(x)
assert x[0] == 27
"""


@pytest.mark.parametrize("way", thinned(WAYS, "dist.all_reduce(x)", "dist.init_process_group()"))
def test_forked_child(jobs, way):
    job = jobs[way].result()
    assert_clean(job)
    assert job.stdout.count("refused") == 1, job
