"""Ranks end with an operation on its way, without destroy_process_group, on a device."""

import cupy
import numpy as np

import mpiddp as dist

dist.init_process_group()
x = cupy.ones(100_000, np.float32)
dist.all_reduce(x)
dist.all_reduce(x, async_op=True)
print("end", flush=True)
