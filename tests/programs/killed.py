"""The last rank is killed while all share memory: ``killed.py memfd|files``."""

import os
import signal
import sys

if "files" in sys.argv:
    del os.memfd_create
import numpy as np

import mpiddp as dist

dist.init_process_group()
x = dist.symmetric_empty(1 << 20)
x[...] = 1
dist.all_reduce(x)
assert (x == dist.get_world_size()).all()
dist.all_reduce(np.ones(1 << 19, np.float32))
dist.barrier()
if dist.get_rank() == dist.get_world_size() - 1:
    os.write(1, b"going\n")
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
