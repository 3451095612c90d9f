"""Ranks that give up operations after a timeout, and go on in other groups."""

import numpy as np

import mpiddp as dist

dist.init_process_group()
groups, x, y = [dist.new_group(), dist.new_group()], np.ones(300_000), np.ones(3)
if dist.get_rank() != 1:
    for work in dist.irecv(y, 1, groups[0]), dist.all_reduce(x, group=groups[1], async_op=True):
        try:
            work.wait(0.3)
        except dist.DistTimeoutError:
            print("caught", flush=True)
for _ in range(20):
    z = np.ones(300_000)
    dist.all_reduce(z)
    assert (z == 3).all()
for group in groups if dist.get_rank() != 1 else ():
    try:
        dist.destroy_process_group(group)
    except dist.DistError as error:
        assert "not finished" in str(error)
        print("refused", flush=True)
