"""Threads, disagreements that nobody waits for, limits in init, interrupts in steps: jobs of their own."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
from harness.launcher import mpirun, side_by_side
from harness.tiers import chosen, thinned

SETUP = """
import os, signal, sys, threading, time
import numpy as np
import mpiddp as dist
from mpi4py import MPI

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
"""

# The end of the program would wait for operations of failed threads.
IN_THREADS = (
    SETUP
    + """
dist.init_process_group(timeout=10)
groups, wrong = [dist.new_group(), dist.new_group()], []

def reduce(group):
    try:
        for number in range({calls}):
            x = np.full({count}, float(rank + number))
            {call}
            assert (x == sum(range(size)) + size * number).all(), number
    except BaseException as error:
        wrong.append(repr(error))

threads = [threading.Thread(target=reduce, args=(group,), daemon=True) for group in groups]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(15)
if wrong or any(thread.is_alive() for thread in threads):
    print("wrong", wrong, file=sys.stderr, flush=True)
    os._exit(1)
dist.barrier()
print("right", flush=True)
"""
)
BLOCKING = "dist.all_reduce(x, group=group)"
ASYNC = "dist.all_reduce(x, group=group, async_op=True).wait()"

BESIDE_DDP = (
    SETUP
    + """
from mpiddp import nn, optim
from mpiddp.autograd import Tensor

dist.init_process_group(timeout=10)
dist.manual_seed(1)
side, wrong = dist.new_group(), []
layers = nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)
model = dist.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.5)
optimizer = optim.SGD(model.parameters(), lr=1e-6)

def gather_metrics():
    try:
        for _ in range(20):
            y = np.full(1 << 18, float(rank))
            dist.all_reduce(y, group=side, async_op=True).wait()
            assert (y == sum(range(size))).all()
    except BaseException as error:
        wrong.append(repr(error))

thread = threading.Thread(target=gather_metrics, daemon=True)
thread.start()
x = Tensor(np.random.default_rng(rank).standard_normal((64, 512), dtype=np.float32))
try:
    for _ in range(20):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
except BaseException as error:
    wrong.append(repr(error))
thread.join(15)
if wrong or thread.is_alive():
    print("wrong", wrong, file=sys.stderr, flush=True)
    os._exit(1)
dist.barrier()
print("right", flush=True)
"""
)

# The two calls end in another order than they began; then the process computes beyond the timeout.
OVERLAPPING = (
    SETUP
    + """
dist.init_process_group(timeout=2)
groups = [dist.new_group(), dist.new_group()]
if rank == 0:
    calls = [lambda group=group: dist.all_reduce(np.ones(2), group=group) for group in groups]
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    for thread in threads:
        thread.join()
else:
    for group in groups:
        time.sleep(0.8)
        dist.all_reduce(np.ones(2), group=group)
time.sleep(4)
print("right", flush=True)
"""
)

# Rank 0 waits in a short call for rank 1, and rank 1 for operations of another thread of rank 0.
BESIDE_A_SHORT_CALL = (
    SETUP
    + """
dist.init_process_group(timeout=10)
group, x, y = dist.new_group(), np.ones(2), np.ones(100)
main_is_back = threading.Event()

def submit():
    works = [dist.all_reduce(y, group=group, async_op=True) for _ in range(2)]
    return works[1].wait

def submit_and_compute():
    time.sleep(0.5)
    wait = submit()
    main_is_back.wait()
    wait()

if rank == 0:
    thread = threading.Thread(target=submit_and_compute)
    thread.start()
    dist.all_reduce(x)
    main_is_back.set()
    thread.join()
else:
    time.sleep(1)
    submit()()
    dist.all_reduce(x)
assert (x == size).all() and (y == size**2).all()
print("right", flush=True)
"""
)

# Rank 0's first call waits for rank 1, whose main thread waits for the second one.
ONE_GROUP = (
    SETUP
    + """
dist.init_process_group(timeout=10)
x = np.ones({count})
if rank == 0:
    thread = threading.Thread(target=dist.all_reduce, args=(x,))
    thread.start()
    time.sleep(1)
    try:
        dist.barrier()
    except dist.DistError as error:
        print("refused:", error, flush=True)
    dist.send(np.ones(1), 1)
    thread.join()
else:
    dist.recv(np.ones(1), 0)
    dist.all_reduce(x)
assert (x == size).all()
dist.barrier()
print("right", flush=True)
"""
)

# Rank 0 is a few calls ahead, and waits for nobody; so does rank 1, which finds all it needs. When they wait again, the
# calls that differ are long past.
DISAGREE = (
    SETUP
    + """
def one_after_the_other(*calls):
    if rank == 1:
        MPI.COMM_WORLD.Barrier()
    for call in calls:
        call()
    if rank == 0:
        MPI.COMM_WORLD.Barrier()
    MPI.COMM_WORLD.Barrier()

dist.init_process_group()
x, y = np.full(4, float(rank)), np.zeros(4)
agreed = [lambda: dist.broadcast(y, 0)] * 2
one_after_the_other(lambda: {call}, *agreed)
one_after_the_other(*agreed)
for _ in range(20):
    dist.barrier()
    dist.all_reduce(np.ones(3))
print("went on", flush=True)
"""
)
DISAGREEMENTS = {
    "disagree, broadcast": ("dist.broadcast(x, rank)", "broadcast #1", "broadcast #1"),
    "disagree, reduce": ("dist.reduce(x, 1 - rank)", "reduce #1", "reduce #1"),
    "disagree, mixed": ("dist.reduce(x, 0) if rank else dist.broadcast(x, 0)", "broadcast #1", "reduce #1"),
}

# Rank 0 shows its part of the coalesced call before rank 1 comes, which does not have to wait.
PART = (
    SETUP
    + """
dist.init_process_group(timeout=10)
x = np.ones(4)
if rank == 0:
    work = dist.all_reduce_coalesced([x], async_op=True)
    MPI.COMM_WORLD.Barrier()
else:
    MPI.COMM_WORLD.Barrier()
    dist.all_reduce(x)
dist.barrier()
print("went on", flush=True)
"""
)

# The ranks have their world before the group duplicates the given communicator.
STALLED_INIT = (
    SETUP
    + """
class Comm(MPI.Intracomm):
    def _stall(self):
        if rank == 1:
            time.sleep(30)
    def Dup(self, *args):
        self._stall()
        return super().Dup(*args)
    def Idup(self, *args):
        self._stall()
        return super().Idup(*args)

dist.init_process_group(timeout=2, comm=Comm(MPI.COMM_WORLD))
print("went on", flush=True)
"""
)
OTHER_COMM = (
    SETUP
    + """
dist.init_process_group(timeout=2, comm=None if rank else MPI.COMM_WORLD)
print("went on", flush=True)
"""
)

SERIALIZED = {"MPI4PY_RC_THREAD_LEVEL": "serialized"}
LATE = (
    SETUP
    + """
dist.init_process_group(timeout=2)
if rank == 1:
    time.sleep(8)
dist.all_reduce(np.ones(2))
print("went on", flush=True)
"""
)
GROUP_BESIDE_WORK = (
    SETUP
    + """
dist.init_process_group(timeout=4)
x = np.ones(1 << 18)
work = dist.all_reduce(x, async_op=True)
if rank == 1:
    work.wait()
dist.new_group()
work.wait()
assert (x == size).all()
print("right", flush=True)
"""
)

# The signal comes in a step, a generator, of the first operation.
INTERRUPTED = (
    SETUP
    + """
import inspect

dist.init_process_group(timeout=20)
first, second = dist.new_group(), dist.new_group()

def interrupt(number, frame):
    while frame is not None:
        if frame.f_code.co_flags & inspect.CO_GENERATOR:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt
        frame = frame.f_back

signal.signal(signal.SIGALRM, interrupt)
x, y = np.ones(1 << 24), np.ones(4)
work = dist.all_reduce(x, group=first, async_op=True)
if rank == 1:
    end = time.monotonic() + 4
    while time.monotonic() < end:
        work.is_completed()
        time.sleep(1e-3)
try:
    if rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 2e-3, 2e-3)
    dist.all_reduce(y, group=second)
    print(f"{rank} went on", flush=True)
except KeyboardInterrupt:
    print(f"{rank} interrupted", flush=True)
    time.sleep(5)
os._exit(0)
"""
)

PEAK_MIB = 16
PIECES = (
    SETUP
    + """
import tracemalloc

dist.init_process_group()
x = np.ones(64 << 17)
dist.all_reduce(np.ones(1 << 17), algorithm="hierarchical")
tracemalloc.start()
dist.all_reduce(x, algorithm="hierarchical")
peak = tracemalloc.get_traced_memory()[1]
assert (x == size).all()
print(f"peak {peak / 2**20:.0f} MiB", flush=True)
"""
)


class Job(NamedTuple):
    program: str
    timeout_s: float = 40
    env: dict[str, str] | None = None


JOBS = {
    "threads, blocking, 8": Job(IN_THREADS.format(call=BLOCKING, count=8, calls=60)),
    "threads, blocking, 300000": Job(IN_THREADS.format(call=BLOCKING, count=300_000, calls=60)),
    "threads, async, 8": Job(IN_THREADS.format(call=ASYNC, count=8, calls=600)),
    "threads, async, 300000": Job(IN_THREADS.format(call=ASYNC, count=300_000, calls=60)),
    "beside DDP": Job(BESIDE_DDP),
    "overlapping": Job(OVERLAPPING),
    "beside a short call": Job(BESIDE_A_SHORT_CALL),
    **{f"one group, {count}": Job(ONE_GROUP.format(count=count)) for count in (8, 300_000)},
    **{name: Job(DISAGREE.format(call=call)) for name, (call, _, _) in DISAGREEMENTS.items()},
    "disagree, part": Job(PART),
    # They end within seconds, or hang.
    "stalled init": Job(STALLED_INIT, 25),
    "other comm": Job(OTHER_COMM, 25),
    "late": Job(LATE, env=SERIALIZED),
    "group beside work": Job(GROUP_BESIDE_WORK, 25, SERIALIZED),
    "interrupted": Job(INTERRUPTED),
    "pieces": Job(PIECES, env={"MPIDDP_NODES": "0,1"}),
}


BLOCK, DO_NOT_BLOCK, REFUSED = (
    [name for name in JOBS if name.startswith(beginning)]
    for beginning in ("threads, blocking", "threads, async", "one group")
)
CASES = {*BLOCK, *DO_NOT_BLOCK, *REFUSED, *DISAGREEMENTS}


@pytest.fixture(scope="module")
def jobs(request):
    wanted = chosen(request, "name") | {name for name in JOBS if name not in CASES}
    calls = {
        name: partial(mpirun, 2, program, timeout_s=limit, env=env)
        for name, (program, limit, env) in JOBS.items()
        if name in wanted
    }
    with side_by_side(calls, places=2) as futures:
        yield futures


def assert_right(job):
    assert job.rc == 0 and job.stdout.count("right") == 2, job


@pytest.mark.parametrize("name", thinned(BLOCK, BLOCK[0]))
def test_two_threads_with_a_group_each_block(jobs, name):
    assert_right(jobs[name].result())


@pytest.mark.parametrize("name", thinned(DO_NOT_BLOCK, DO_NOT_BLOCK[1]))
def test_two_threads_with_a_group_each_do_not_block(jobs, name):
    assert_right(jobs[name].result())


def test_thread_with_a_group_of_its_own_beside_ddp(jobs):
    assert_right(jobs["beside DDP"].result())


def test_calls_of_two_threads_that_overlap_end_no_healthy_job(jobs):
    assert_right(jobs["overlapping"].result())


def test_short_call_that_waits_drives_what_another_thread_has_submitted(jobs):
    assert_right(jobs["beside a short call"].result())


@pytest.mark.parametrize("name", thinned(REFUSED, REFUSED[0]))
def test_two_threads_in_one_group_are_refused(jobs, name):
    job = jobs[name].result()
    assert_right(job)
    assert job.stdout.count("is used by two threads at once, whose calls have no order that all ranks share") == 1, job


@pytest.mark.parametrize("name", thinned(DISAGREEMENTS, "disagree, broadcast", "disagree, mixed"))
def test_disagreement_is_found_where_nobody_waits(jobs, name):
    job = jobs[name].result()
    assert job.rc == 111 and job.seconds < 30, job
    assert "went on" not in job.stdout, job
    assert "disagree: rank" in job.stderr and all(call in job.stderr for call in DISAGREEMENTS[name][1:]), job
    assert "rank 0 calls" in job.stderr and "rank 1 calls" in job.stderr, job


def test_part_of_an_operation_is_not_taken_for_a_call(jobs):
    job = jobs["disagree, part"].result()
    assert job.rc == 111 and "went on" not in job.stdout, job
    assert "rank 0 calls all_reduce_coalesced #1" in job.stderr and "rank 1 calls all_reduce #1" in job.stderr, job


def test_rank_that_stalls_in_init_ends_the_job(jobs):
    job = jobs["stalled init"].result()
    assert job.rc == 110, job
    assert "init_process_group" in job.stderr and "went on" not in job.stdout, job


def test_ranks_that_give_init_different_communicators_end(jobs):
    job = jobs["other comm"].result()
    assert job.rc == 1 and job.seconds < 30, job
    assert "SetupError: rank 0 gave comm= to init_process_group and rank 1 did not" in job.stderr, job
    assert "went on" not in job.stdout, job


def test_short_call_has_a_time_limit_without_thread_multiple(jobs):
    job = jobs["late"].result()
    assert job.rc == 110, job
    assert "all_reduce #1" in job.stderr and "went on" not in job.stdout, job


def test_group_is_made_beside_an_operation_without_thread_multiple(jobs):
    assert_right(jobs["group beside work"].result())


def test_interrupt_in_a_step_of_another_operation_is_raised_at_once(jobs):
    job = jobs["interrupted"].result()
    assert "0 interrupted" in job.stdout, job


def test_hierarchical_keeps_few_pieces(jobs):
    job = jobs["pieces"].result()
    assert job.rc == 0 and job.stdout.count("peak") == 2, job
    peaks = [float(line.split()[1]) for line in job.stdout.splitlines()]
    assert max(peaks) < PEAK_MIB, job
