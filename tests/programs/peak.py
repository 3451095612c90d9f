"""Print the memory that a long hierarchical all-reduce takes."""

import tracemalloc

import numpy as np

import mpiddp as dist

dist.init_process_group()
x = np.ones(64 << 17)
dist.all_reduce(np.ones(1 << 17), algorithm="hierarchical")
tracemalloc.start()
dist.all_reduce(x, algorithm="hierarchical")
peak = tracemalloc.get_traced_memory()[1]
assert (x == dist.get_world_size()).all()
print(f"peak {peak / 2**20:.0f} MiB", flush=True)
