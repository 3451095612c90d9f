"""One rank fails, leaves or sleeps while the others need it: the job ends, soon, with the reason.

Upper bounds are generous: without the library these jobs hang for ever.
"""

from __future__ import annotations

import re
from functools import partial

import pytest
from harness.launcher import mpirun, side_by_side
from harness.tiers import chosen, thinned

# Waits of ranks 0 and 2, while rank 1 does something else.
WAITS = {
    "all_reduce": "dist.all_reduce(np.ones(3))",
    "async": "dist.all_reduce(np.ones(3), async_op=True).wait()",
    "barrier": "dist.barrier()",
    "recv": "dist.recv(np.ones(3), src=1)",
    "irecv": "dist.irecv(np.ones(3), src=1).wait()",
    "send": "dist.send(np.ones(1_000_000), dst=1)",
    "new_group": "dist.new_group([0, 2])",
}

PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
import mpiddp as dist

dist.init_process_group()
if dist.get_rank() == 1:
    time.sleep(0.2)
    {one}
else:
    {others}
print("went on", flush=True)
"""


def run(one, others):
    return mpirun(3, PROGRAM.format(one=one, others=others), timeout_s=40)


@pytest.fixture(scope="module")
def jobs(request):
    left = {way: partial(run, way, WAITS[LEFT[way]]) for way in chosen(request, "way") & set(LEFT)}
    whole = {text: partial(mpirun, 3, text, timeout_s=40) for text in (AT_EXIT, CAUGHT)}
    if request.config.option.long:
        whole[SENDERS_LEFT] = partial(mpirun, 3, SENDERS_LEFT, timeout_s=40)
    late = {name: partial(run, *programs) for name, programs in LATE.items()}
    for text in (STOPPED_AT_THE_END, STOPPED_BEFORE_FINALIZE):
        late[text] = partial(mpirun, 3, text, timeout_s=40, env={"MPIDDP_TIMEOUT": "8"})
    without = {
        NO_INIT.format(before=before): partial(mpirun, 3, NO_INIT.format(before=before), timeout_s=40, env=env)
        for before, env in (("", None), (STARTS_MPI, {"MPIDDP_TIMEOUT": "2"}))
    }
    with side_by_side(left | whole | late | without) as futures:
        yield futures


def assert_ended(job, within_s=30):
    assert job.rc != 0, job
    assert job.seconds < within_s, job
    assert "went on" not in job.stdout, job


def said(job):
    lines: dict[int, list[str]] = {}
    for line in job.stderr.splitlines():
        if line.startswith("[rank "):
            name, _, text = line.partition("] ")
            rank, size = name.split()[1].split("/")
            assert size == "3", job
            lines.setdefault(int(rank), []).append(text)
    return lines


@pytest.mark.parametrize("wait", thinned(["all_reduce", "async", "recv"], "all_reduce"))
def test_exception_ends_job(wait):
    job = run('raise ValueError("boom")', WAITS[wait])
    assert_ended(job)
    assert job.rc == 1, job
    lines = said(job)[1]
    assert lines[0] == "Traceback (most recent call last):", job
    assert lines[-1] == "ValueError: boom", job
    # In one piece, without others' lines between them.
    block = "".join(f"{line}\n" for line in job.stderr.splitlines() if line.startswith("[rank 1/3"))
    assert block in job.stderr.replace("\r", ""), job


@pytest.mark.long
def test_exception_ends_job_past_living_threads():
    job = run('threading.Thread(target=time.sleep, args=(60,)).start(); raise ValueError("boom")', WAITS["barrier"])
    assert_ended(job)
    assert said(job)[1][-1] == "ValueError: boom", job


def test_exception_before_init_ends_job():
    program = """
import os
import mpiddp as dist
if os.environ["RANK"] == "1":
    raise ValueError("boom")
dist.init_process_group()
"""
    job = mpirun(3, program, timeout_s=40)
    assert_ended(job)
    assert said(job)[1][-1] == "ValueError: boom", job


def test_reason_that_cannot_be_told_is_one_too():
    program = """
import mpiddp as dist
from mpiddp.faults.abort import abort
dist.init_process_group()
if dist.get_rank() == 1:
    abort(lambda: 1 / 0, 7)
dist.barrier()
"""
    job = mpirun(3, program, timeout_s=40)
    assert_ended(job)
    assert job.rc == 7, job
    assert said(job)[1][-1] == "ZeroDivisionError: division by zero", job


def test_same_exception_on_all_ranks_is_printed_once():
    job = mpirun(3, "import mpiddp as dist\ndist.init_process_group()\nraise ValueError('boom')", timeout_s=40)
    assert_ended(job)
    assert job.rc == 1, job
    # Rank 0 speaks first; the others are ended before their turn unless the machine is very busy.
    assert said(job)[0][-1] == "ValueError: boom", job


LEFT = {
    "sys.exit(3)": "all_reduce",
    "sys.exit()": "async",
    "sys.exit(0)": "recv",
    "sys.exit(None)": "irecv",
    "raise SystemExit": "send",
    "threading.Thread(target=time.sleep, args=(60,)).start(); sys.exit()": "barrier",
    "from mpi4py import MPI; MPI.Finalize(); sys.exit()": "all_reduce",
    "threading.Timer(1, print).start(); sys.exit()": "new_group",
}


LEFT_EVERYDAY = ("sys.exit(3)", "sys.exit(None)", "raise SystemExit", "threading.Timer(1, print).start(); sys.exit()")


@pytest.mark.parametrize("way", thinned(LEFT, *LEFT_EVERYDAY))
def test_rank_that_left_is_named(jobs, way):
    job = jobs[way].result()
    assert_ended(job)
    assert job.rc == 1, job
    name = {"async": "all_reduce"}.get(LEFT[way], LEFT[way])
    reasons = ["\n".join(lines) for lines in said(job).values()]
    assert reasons and all(f"{name}" in text and "the program of rank 1 has ended" in text for text in reasons), job
    assert all(re.search(r"    rank 1 \(node \S+, pid \d+\) +the program has ended", text) for text in reasons), job
    assert job.seconds > 3, job  # patience


SENDERS_LEFT = PROGRAM.format(one="sys.exit()", others="dist.recv(np.ones(3)) if dist.get_rank() == 0 else sys.exit()")


@pytest.mark.long
def test_all_possible_senders_left(jobs):
    job = jobs[SENDERS_LEFT].result()
    assert_ended(job)
    assert "the programs of ranks 1, 2 have ended" in job.stderr, job


AT_EXIT = """
import atexit
import numpy as np
import mpiddp as dist

def last_words():
    if dist.get_rank() == 1:
        raise ValueError("boom")
    dist.all_reduce(np.ones(3))

dist.init_process_group()
atexit.register(last_words)
"""


def test_exception_at_exit_of_a_rank_that_others_need(jobs):
    job = jobs[AT_EXIT].result()
    assert_ended(job)
    assert "ValueError: boom" in job.stderr, job
    assert "all_reduce #1" in job.stderr and "rank 1 has ended" in job.stderr, job


KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize("way", thinned([KILL, "os._exit(7)", "os.kill(os.getpid(), signal.SIGTERM)"], KILL))
def test_death_ends_job(way):
    assert_ended(run(way, WAITS["all_reduce"]))


def test_a_crash_tells_its_rank_and_line():
    job = run("import ctypes; ctypes.string_at(8)", WAITS["all_reduce"])
    assert_ended(job)
    _, crash, stacks = job.stderr.partition("Fatal Python error: Segmentation fault")
    assert crash and re.search(r"in \[rank 1/3 \S+\]\n", stacks) and 'program.py", line 9 in <module>' in stacks, job


# A group's timeout: on a busy machine init_process_group takes longer itself.
LATE = {
    "asleep": (
        "dist.new_group(timeout=1.5); time.sleep(60)",
        "dist.all_reduce(np.ones(3), group=dist.new_group(timeout=1.5))",
    ),
    "waiting": (
        "dist.new_group(timeout=1.5); dist.recv(np.ones(2), src=0)",
        "dist.barrier(dist.new_group(timeout=1.5))",
    ),
    "asleep, and one waits": ("time.sleep(60)", "dist.irecv(np.ones(3), src=1).wait(timeout=0.5)"),
}


def test_blocking_operation_times_out(jobs):
    job = jobs["asleep"].result()
    assert_ended(job)
    assert job.rc == 110, job
    # Rank 0 speaks first, unless a busy machine has begun to run rank 2 before.
    (speaker, lines), *_ = said(job).items()
    reason = "\n".join(lines)
    assert (
        "mpiddp.errors.DistTimeoutError: all_reduce #1 of float64 (3,) in the group of all 3 ranks did not finish in"
        " 1.5 s (Timed out):\n  1 rank is NOT in it:\n    rank 1 (node "
    ) in reason, job
    assert re.search(r" rank 1 \(node \S+, pid \d+\)  +program.py:\d+ in .* since ", reason), job
    assert f"rank {2 - speaker} (node" not in reason, job


def test_timeout_tells_where_the_missing_rank_waits(jobs):
    job = jobs["waiting"].result()
    assert_ended(job)
    assert job.rc == 110, job
    assert any(" in recv of float64 (2,)" in line for lines in said(job).values() for line in lines), job


STOPPED_AT_THE_END = """
import os, signal
import mpiddp as dist

dist.init_process_group()
dist.barrier()
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_stopped_rank_keeps_the_others_at_their_end_for_the_timeout(jobs):
    job = jobs[STOPPED_AT_THE_END].result()
    assert_ended(job)
    assert job.rc == 110, job
    assert "its program has ended, and rank 1 has not answered for 8 s" in job.stderr, job


# The handler runs when all ranks have met at their ends, and before MPI_Finalize.
STOPPED_BEFORE_FINALIZE = """
import atexit, os, signal
import mpiddp as dist
from mpiddp.mpi.lazy import MPI

if MPI.COMM_WORLD.rank == 1:
    atexit.register(os.kill, os.getpid(), signal.SIGSTOP)
dist.init_process_group()
"""


def test_stopped_rank_keeps_the_others_in_finalize_for_the_timeout(jobs):
    job = jobs[STOPPED_BEFORE_FINALIZE].result()
    assert_ended(job)
    assert "Timeout (0:00:08)" in job.stderr and "in finalize" in job.stderr, job


CAUGHT = """
import numpy as np
import mpiddp as dist

dist.init_process_group()
x, word = np.ones(3), np.ones(1)
if dist.get_rank() == 1:
    for rank in (0, 2):
        dist.recv(word, rank)
work = dist.all_reduce(x, async_op=True)
if dist.get_rank() != 1:
    try:
        work.wait(timeout=0.5)
    except dist.DistTimeoutError as error:
        assert isinstance(error, TimeoutError)
        print("caught", error, flush=True)
    dist.send(word, 1)
work.wait()
assert x.tolist() == [3, 3, 3]
"""


def test_timeout_of_wait_can_be_caught(jobs):
    job = jobs[CAUGHT].result()
    assert job.rc == 0, job
    assert job.stdout.count("caught all_reduce #1") == 2, job
    assert "1 rank is NOT in it:\n    rank 1 (node " in job.stdout, job


def test_uncaught_timeout_has_its_exit_code(jobs):
    job = jobs["asleep, and one waits"].result()
    assert_ended(job)
    assert job.rc == 110, job
    assert "DistTimeoutError: irecv of float64 (3,)" in job.stderr, job


STARTS_MPI = "from mpi4py import MPI"
NO_INIT = """
import os, sys
import mpiddp as dist
if os.environ["RANK"] == "1":
    {before}
    sys.exit()
dist.init_process_group()
"""


def test_rank_that_ends_before_mpi_starts_is_named(jobs):
    job = jobs[NO_INIT.format(before="")].result()
    assert_ended(job)
    assert job.stderr.count("rank 1 of 3 ended before MPI had started") == 1, job


def test_rank_that_starts_mpi_and_never_calls_init(jobs):
    job = jobs[NO_INIT.format(before=STARTS_MPI)].result()
    assert_ended(job)
    assert "init_process_group did not finish in 2 s" in job.stderr, job
