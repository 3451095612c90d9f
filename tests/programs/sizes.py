"""Calls whose sizes differ between ranks are an error of each call, and the group goes on."""

import re

import numpy as np

import mpiddp as dist

dist.init_process_group(timeout=30)
rank, size = dist.get_rank(), dist.get_world_size()
n, kind = (20_000, np.int32) if rank == 1 else (10_003, np.int64)
x, table = np.ones(n, kind), np.ones(n * size, kind)
calls = {
    "all_reduce": lambda g: dist.all_reduce(x, group=g),
    "broadcast": lambda g: dist.broadcast(x, 0, g),
    "reduce": lambda g: dist.reduce(x, 0, group=g),
    "all_gather_single": lambda g: dist.all_gather_single(table, x, g),
    "reduce_scatter_single": lambda g: dist.reduce_scatter_single(x, table, group=g),
    "all_reduce_coalesced": lambda g: dist.all_reduce_coalesced([x, x.copy()], group=g),
    "broadcast_object_list": lambda g: dist.broadcast_object_list(["x" * n], 0, g) if rank else dist.barrier(g),
}
for name, call in calls.items():
    group = dist.new_group()
    try:
        call(group)
    except dist.MismatchError as error:
        other = "barrier #1" if "object" in name else "#1 of [0-9]+ int64"
        assert re.search(f"rank 0 calls .*{other}.*rank 1 calls {name} #1", str(error)), error
    else:
        raise AssertionError(name)
    dist.barrier(group)
    dist.destroy_process_group(group)
print("all heard", flush=True)
