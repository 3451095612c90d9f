"""A group is made while an operation is on its way that one rank has waited for."""

import numpy as np

import mpiddp as dist

dist.init_process_group(timeout=4)
x = np.ones(1 << 18)
work = dist.all_reduce(x, async_op=True)
if dist.get_rank() == 1:
    work.wait()
dist.new_group()
work.wait()
assert (x == dist.get_world_size()).all()
print("right", flush=True)
