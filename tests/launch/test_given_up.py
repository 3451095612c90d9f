"""A program that has caught a timeout and gives its operation up ends as any other, and other groups go on."""

from __future__ import annotations

import pytest
from harness.launcher import mpirun

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


@pytest.mark.parametrize(
    ("operation", "count"),
    [("all_reduce(x, group=group, async_op=True)", 300_000), ("irecv(x, 1, group)", 3)],
    ids=["all_reduce", "irecv"],
)
def test_program_ends(operation, count):
    job = mpirun(3, PROGRAM.format(operation=operation, count=count), timeout_s=60)
    assert job.rc == 0, job
    assert job.stdout.count("caught") == job.stdout.count("refused") == 2, job
    assert "asynchronous operations that no other rank takes part in" in job.stderr, job
    assert job.seconds < 40, job
