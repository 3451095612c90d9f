"""Products and sums of float16, of four ranks on two nodes, that another order of rounding would spoil."""

import numpy as np

import mpiddp as dist

dist.init_process_group()
rank = dist.get_rank()
for make in (np.empty, dist.symmetric_empty):
    x = make(50_000, np.float16)
    x[...] = 2.0 ** (10 if rank < 2 else -10)
    dist.all_reduce(x, dist.ReduceOp.PRODUCT)
    assert (x == 1).all(), x
    x[...] = 2048 if rank == 0 else 1
    dist.all_reduce(x)
    assert (x == np.float16(2051)).all(), x
