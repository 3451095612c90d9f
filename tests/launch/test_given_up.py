"""A program that gives up an operation after a timeout ends as any other, and other groups go on."""

from __future__ import annotations

from functools import partial

import pytest
from harness.launcher import mpirun, side_by_side

PROGRAM = """
import numpy as np
import mpiddp as dist

dist.init_process_group()
group, x = dist.new_group(), np.ones({count})
if dist.get_rank() != 1:
    try:
        dist.{operation}.wait(0.3)
    except dist.DistTimeoutError:
        print("caught", flush=True)
for _ in range(20):
    y = np.ones(100_000)
    dist.all_reduce(y)
    assert (y == 3).all()
if dist.get_rank() != 1:
    try:
        dist.destroy_process_group(group)
    except dist.DistError as error:
        assert "not finished" in str(error)
        print("refused", flush=True)
"""


GIVEN_UP = {"all_reduce": ("all_reduce(x, group=group, async_op=True)", 300_000), "irecv": ("irecv(x, 1, group)", 3)}


@pytest.fixture(scope="module")
def jobs():
    programs = {name: PROGRAM.format(operation=call, count=count) for name, (call, count) in GIVEN_UP.items()}
    with side_by_side({name: partial(mpirun, 3, program) for name, program in programs.items()}) as futures:
        yield futures


@pytest.mark.parametrize("name", GIVEN_UP)
def test_program_ends(jobs, name):
    job = jobs[name].result()
    assert job.rc == 0, job
    assert job.stdout.count("caught") == job.stdout.count("refused") == 2, job
    assert "asynchronous operations that no other rank takes part in" in job.stderr, job
    assert job.seconds < 40, job
