"""Ranks that give up an operation after a timeout, and go on in other groups: ``given_up.py all_reduce|irecv``."""

import sys

import numpy as np

import mpiddp as dist

dist.init_process_group()
group, x, y = dist.new_group(), np.ones(300_000), np.ones(3)
if dist.get_rank() != 1:
    work = dist.irecv(y, 1, group) if sys.argv[1] == "irecv" else dist.all_reduce(x, group=group, async_op=True)
    try:
        work.wait(0.3)
    except dist.DistTimeoutError:
        print("caught", flush=True)
for _ in range(20):
    z = np.ones(300_000)
    dist.all_reduce(z)
    assert (z == 3).all()
if dist.get_rank() != 1:
    try:
        dist.destroy_process_group(group)
    except dist.DistError as error:
        assert "not finished" in str(error)
        print("refused", flush=True)
