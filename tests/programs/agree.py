"""Three ranks that make the same calls, of all kinds and in all orders of waiting."""

import numpy as np

import mpiddp as dist

dist.init_process_group()
rank = dist.get_rank()
for number in range(200):
    x = np.ones(1 + number % 5)
    works = [dist.all_reduce(x, async_op=True) for _ in range(number % 4)]
    large = np.ones(30_000)
    dist.all_reduce(large, dist.ReduceOp.PREMUL_SUM(float(rank)))
    assert (large == 3).all()
    for each in works[:: 1 if rank else -1]:
        each.wait()
    dist.all_gather([np.ones(each) for each in range(3)], np.ones(rank))
    dist.barrier()
    dist.all_reduce_coalesced([np.ones(9_000 + number), np.ones(9_000, np.float32)])
print("right", flush=True)
