"""On hosts: rank 0 prints a line of JSON, after the facts of any placement have been asserted."""

import itertools
import json
import socket
from types import SimpleNamespace

import numpy as np
from harness.collectives import check

import mpiddp as dist
from mpiddp.algorithms import plan
from mpiddp.faults import this_job
from mpiddp.shm import segment


def in_symmetric_memory(x):
    made = dist.symmetric_empty(x.shape, x.dtype)
    made[...] = x
    return made


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
here = SimpleNamespace(rank=rank, size=size, rng=np.random.default_rng(0))
names = [None, *(name for name in plan.offering("all_reduce") if name not in plan._IN_MEMORY)]
for name, count, make in itertools.product(names, (1, 1000, 100_003), (np.copy, in_symmetric_memory)):
    check(here, "all_reduce", np.dtype("f4"), (count,), {"algorithm": name}, make=make)
for name in ("all_gather", "broadcast"):
    check(here, name, np.dtype("f8"), (100_003,))
told, own = [None] * size, np.random.default_rng(rank)
for name in names:
    dist.all_reduce(x := own.uniform(-1, 1, 100_003), algorithm=name)
    dist.all_gather_object(told, x.tobytes())
    assert len(set(told)) == 1, f"ranks have different bits by {name}"
if rank == 0:
    print(json.dumps({"hosts": world.hosts, "nodes": world.nodes, "checked": len(names)}), flush=True)
dist.destroy_process_group()
