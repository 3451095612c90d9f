"""Programs as new users wrote them, and their errors' texts."""

from __future__ import annotations

import re
from functools import partial

import pytest
from harness.launcher import mpirun, side_by_side, start
from harness.tiers import chosen, thinned

INIT = """
import os, sys, time
import numpy as np
import mpiddp as dist
{before}
dist.init_process_group({arguments})
rank, x = dist.get_rank(), np.ones(4)
"""


def program(body, arguments="", before=""):
    return INIT.format(arguments=arguments, before=before) + body


LINES, RANKS = 300, 3
PRINTS = f"""
for line in range({LINES}):
    print("rank", rank, "has", line, "x" * (line % 90), "end")
"""


@pytest.mark.parametrize("unbuffered", [None, "1"])
def test_printed_lines_stay_whole(unbuffered):
    job = mpirun(RANKS, program(PRINTS), env={"PYTHONUNBUFFERED": unbuffered})
    assert job.rc == 0, job
    wanted = {f"rank {rank} has {line} {'x' * (line % 90)} end" for rank in range(RANKS) for line in range(LINES)}
    assert sorted(job.stdout.splitlines()) == sorted(wanted)


@pytest.mark.parametrize("before", ["print('first from', os.environ['RANK']); time.sleep(30)", ""])
def test_a_print_appears_at_once(before):
    """Also before the process group is made."""
    with start(2, program("print('first from', rank)\ntime.sleep(30)\n", before=before)) as job:
        for rank in range(2):
            job.wait_for(f"first from {rank}", 25)
        assert job.poll() is None


SPAWN = """
import multiprocessing, sys
import numpy as np
import mpiddp as dist


def run(rank, size):
    dist.init_process_group(rank=rank, world_size=size)
    dist.all_reduce(np.ones(1))
    print("went on", flush=True)


if __name__ == "__main__":
    method = multiprocessing.get_context("{method}")
    ranks = [method.Process(target=run, args=(rank, 2)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
"""
TORCH_SPAWN = """
import numpy as np
import mpiddp as dist
import torch.multiprocessing as mp


def run(rank, size):
    dist.init_process_group(rank=rank, world_size=size)


if __name__ == "__main__":
    mp.spawn(run, args=(2,), nprocs=2)
"""
METHODS = ("fork", "spawn", "forkserver")


@pytest.fixture(scope="module")
def spawns(request):
    texts = {method: SPAWN.format(method=method) for method in chosen(request, "method")}
    with side_by_side({method: partial(mpirun, 2, text, timeout_s=50) for method, text in texts.items()}, 2) as jobs:
        yield jobs


def assert_refused(job):
    assert job.rc not in (0, 124), job
    assert job.stderr.count("delete the spawn") == 1 and "has started all 2 of them" in job.stderr, job
    assert "went on" not in job.stdout and "PMIU" not in job.stderr and "Fatal error" not in job.stderr, job


@pytest.mark.parametrize("method", thinned(METHODS, "fork", "spawn"))
def test_a_spawn_that_was_left_in(spawns, method):
    assert_refused(spawns[method].result())


@pytest.mark.long
def test_mp_spawn_that_was_left_in():
    pytest.importorskip("torch")
    assert_refused(mpirun(2, TORCH_SPAWN, timeout_s=200))


def test_rank_and_world_size_of_the_backend_mpi_are_ignored_as_in_torch():
    job = mpirun(2, program("print('went on', dist.get_world_size())", "rank=0, world_size=0, backend='mpi'"))
    assert job.rc == 0 and job.stdout.count("went on 2") == 2, job
    text = "For MPI backend, world_size (0) and rank (0) are ignored since they are assigned by the MPI runtime."
    assert text in job.stderr, job


@pytest.mark.once
def test_one_process_is_not_taken_for_four_with_the_backend_mpi():
    from harness.launcher import python

    job = python(program("print('went on')", "rank=0, world_size=4, backend='mpi'"))
    assert job.rc == 1 and "mpirun -np 4 python program.py" in job.stderr and "went on" not in job.stdout, job


def test_an_error_before_the_start_ends_with_its_own_exit_code():
    job = mpirun(3, program("", before="if os.environ['RANK'] == '1': raise ValueError('boom')"), timeout_s=40)
    assert "[rank 1/3" in job.stderr and "ValueError: boom" in job.stderr, job
    assert job.rc == 1 and "BAD TERMINATION" not in job.stderr and "Killed" not in job.stderr, job


MESSAGES = {
    "wrong tag": (
        "dist.recv(x, src=0) if rank == 1 else dist.send(x, dst=1, tag=1)",
        ["recv of float64 (4,) from rank 0 with tag 0", "ended and not sent it", "with tag 1 (32 bytes of float64)"],
    ),
    "wrong source": (
        "dist.recv(x, src=2) if rank == 1 else dist.send(x, dst=1) if rank == 0 else None",
        [
            "from rank 2 with tag 0",
            "program of rank 2 has ended",
            "a message lies that no receive has taken: from rank 0",
        ],
    ),
    "nobody sends": ("dist.irecv(x, src=0).wait() if rank == 1 else None", ["irecv of", "from rank 0", "not sent it"]),
    "nobody receives": (
        "dist.send(np.ones(1_000_000), dst=1) if rank == 0 else None",
        ["send of float64 (1000000,) to rank 1 with tag 0", "not received it"],
    ),
}


@pytest.fixture(scope="module")
def messages():
    jobs = {name: partial(mpirun, 3, program(body), timeout_s=50) for name, (body, _) in MESSAGES.items()}
    with side_by_side(jobs) as futures:
        yield futures


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_that_cannot_arrive(messages, name):
    job = messages[name].result()
    assert job.rc not in (0, 124) and "the same operations in the same order" not in job.stderr, job
    for text in MESSAGES[name][1]:
        assert text in job.stderr, (text, job)


BOTH = ["dist.recv(x, src=1 - rank)", "dist.send(np.ones(10**6), dst=1 - rank, tag=rank)"]


@pytest.mark.parametrize("wait", thinned(BOTH, BOTH[0]))
def test_two_that_both_receive_or_both_send(wait):
    job = mpirun(2, program(wait), timeout_s=50, env={"MPIDDP_TIMEOUT": "4"})
    assert job.rc == 110, job
    circle = "rank 0 waits for rank 1, which waits for rank 0: a deadlock"
    found = rf"with tag 0 .* did not finish in 4 s: {circle}\n(.*\n)*.*    rank 1 \(.*  in (recv|send) of .* rank 0"
    assert re.search(found, job.stderr), job


UNEVEN = """
from mpiddp import nn
model = dist.DistributedDataParallel(nn.Linear(4, 2))
for batch in range(4 if rank else 3):
    model(np.ones((2, 4), np.float32)).sum().backward()
dist.barrier()
"""


def test_a_bucket_is_named_as_such():
    job = mpirun(2, program(UNEVEN), timeout_s=50)
    assert job.rc not in (0, 124), job
    assert re.search(
        r"rank 0 calls barrier #\d+, rank 1 calls DDP bucket 0 #\d+ of 10 float32 elements;", job.stderr
    ), job
    assert "PREMUL_SUM" not in job.stderr and "rank 1 calls all_reduce" not in job.stderr, job


def test_a_mismatch_tells_the_lines_of_both():
    job = mpirun(2, program("dist.barrier() if rank else dist.all_reduce(x)"), timeout_s=50)
    assert job.rc == 111 and "line 8" in job.stderr, job
    assert re.search(r"    rank [01] \(node .*  program.py:8", job.stderr), job


@pytest.mark.once
def test_a_timeline_of_a_program_without_ddp_is_mentioned(tmp_path):
    trace = tmp_path / "trace.json"
    job = mpirun(2, program("dist.all_reduce(x)"), env={"MPIDDP_TIMELINE": str(trace)})
    assert job.rc == 0 and not trace.exists(), job
    assert job.stderr.count("MPIDDP_TIMELINE traces the steps of DistributedDataParallel") == 1, job


CURES = """
import contextlib
def said(call):
    try:
        call()
    except (TypeError, dist.DistError) as error:
        return str(error)
halo, values = np.zeros((4, 4)), [1.0, 2.0]
for text in (said(lambda: dist.all_reduce(halo[:, 0])), said(lambda: dist.all_reduce(values))):
    print(text)
y = np.ascontiguousarray(halo[:, 0] + 1)
dist.all_reduce(y)
halo[:, 0] = y
assert (halo[:, 0] == dist.get_world_size()).all()
print(said(lambda: dist.send(halo[:, 0], dst=1 - rank)))
"""


@pytest.mark.once
def test_no_cure_loses_the_result():
    job = mpirun(2, program(CURES))
    assert job.rc == 0, job
    assert job.stdout.count("make y = numpy.ascontiguousarray(x), pass y, and copy the result back: x[...] = y") == 2
    assert job.stdout.count("make y = numpy.array(x), pass y and read the result from y") == 2, job
    assert job.stdout.count("; pass numpy.ascontiguousarray(x)") == 2, job
