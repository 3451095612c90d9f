"""Collectives through a death: ``moved.py VICTIM``; rank 0 prints its view of the world afterwards."""

import json
import os
import signal
import sys

import numpy as np

import mpiddp as dist
from mpiddp.faults import this_job

dist.init_process_group()
me, victim = dist.get_rank(), int(sys.argv[1])
step = 0
while step < 60:
    try:
        if step == 30 and me == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        for n in (7, 100_003):
            x = np.full(n, 1.0 + dist.get_rank())
            dist.all_reduce(x)
            assert (x == dist.get_world_size() * (dist.get_world_size() + 1) / 2).all(), (step, x)
    except dist.RankFailedError as error:
        assert error.ranks == [victim], error.ranks
        dist.shrink_group(error.ranks)
        last = np.array([step])  # some may still have waited for the victim's last sum
        dist.all_reduce(last, dist.ReduceOp.MAX)
        step = int(last[0])
    step += 1
world = this_job.current().world
if dist.get_rank() == 0:
    print(json.dumps({"hosts": world.hosts, "nodes": world.nodes}), flush=True)
