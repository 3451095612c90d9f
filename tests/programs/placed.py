"""On hosts: rank 0 prints a line of JSON, after the facts of any placement have been asserted."""

import json
import os
import socket

import numpy as np

import mpiddp as dist
from mpiddp.algorithms import plan
from mpiddp.faults import this_job
from mpiddp.shm import segment

dist.init_process_group()
world = this_job.current().world
rank, size = dist.get_rank(), dist.get_world_size()
node = world.local_ranks
assert world.hosts[rank] == socket.gethostname()
assert dist.get_node_local_rank() == node.index(rank)
assert all(world.hosts[each] == socket.gethostname() for each in node)

# Memory is shared within a host, and ends there.
x = dist.symmetric_empty(8)
x[...] = rank
dist.barrier()
if len(node) > 1:
    place = segment.find(x)
    shared = segment.segment(place.segment)
    for each in range(size):
        try:
            seen = shared.view(each, place.offset, x.size, x.dtype)
        except KeyError:
            assert each not in node, (each, node)
        else:
            assert each in node and (seen == each).all(), (each, node, seen)
dist.barrier()

# Every algorithm is right over the wire, at sizes of one message, many, and an odd one.
rng = np.random.default_rng(0)
checked = 0
for name in ("auto", *plan.offering("all_reduce")):
    if name in plan._IN_MEMORY:
        continue
    if name != "auto":
        os.environ["MPIDDP_ALGORITHM"] = "all_reduce:" + name
    plan.forget()
    for count in (1, 1000, 100_003):
        rows = rng.uniform(-1, 1, (size, count))
        for make in (np.empty, dist.symmetric_empty):
            x = make(count, np.float32)
            x[...] = rows[rank]
            dist.all_reduce(x)
            np.testing.assert_allclose(x, rows.sum(0), rtol=1e-5, atol=1e-5, err_msg=name)
            everybody = [np.empty_like(x) for _ in range(size)]
            dist.all_gather(everybody, x)
            assert all((each == x).all() for each in everybody), (name, count, "ranks have different bits")
            checked += 1
os.environ.pop("MPIDDP_ALGORITHM", None)
plan.forget()
x = np.full(300_000, rank, np.float64)
dist.broadcast(x, src=size - 1)
assert (x == size - 1).all()
told = [None] * size
dist.all_gather_object(told, {"rank": rank})
assert told == [{"rank": each} for each in range(size)]
if rank == 0:
    print(json.dumps({"hosts": world.hosts, "nodes": world.nodes, "checked": checked}), flush=True)
dist.destroy_process_group()
