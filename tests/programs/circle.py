"""Ranks that wait for each other: ``circle.py GROUPS CALLS``: lists of ranks, and by rank a call, a rank, a group."""

import json
import sys

import numpy as np

import mpiddp as dist

dist.init_process_group()
groups = [dist.new_group(ranks) for ranks in json.loads(sys.argv[1])]
name, awaited, group = json.loads(sys.argv[2])[str(dist.get_rank())]
x = np.ones(4)
dist.barrier()
# None of them ends before the awaited rank comes.
match name:
    case "recv":
        dist.recv(x, awaited)
    case "send":
        dist.send(np.ones(1 << 21), awaited)
    case "irecv":
        dist.irecv(x, awaited).wait()
    case "batch_isend_irecv":
        dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, awaited)])[0].wait()
    case "barrier":
        dist.barrier(groups[group])
    case "all_reduce":
        dist.all_reduce(np.ones(300_000), group=groups[group], async_op=True).wait()
    case "broadcast":
        dist.broadcast(x, awaited, group=groups[group])
