"""Three ranks that wait for each other: rank 0 in a collective for rank 1, that in a receive for rank 2, that for 0."""

import numpy as np

import mpiddp as dist

dist.init_process_group()
groups = [dist.new_group(ranks) for ranks in ([0, 1], [0, 2])]
dist.barrier()
match dist.get_rank():
    case 0:
        dist.all_reduce(np.ones(300_000), group=groups[0], async_op=True).wait()
    case 1:
        dist.recv(np.ones(4), 2)
    case 2:
        dist.barrier(groups[1])
