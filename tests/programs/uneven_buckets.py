"""Rank 1 has one batch more than rank 0."""

import numpy as np

import mpiddp as dist
from mpiddp import nn

dist.init_process_group()
model = dist.DistributedDataParallel(nn.Linear(4, 2))
for _ in range(3 + dist.get_rank()):
    model(np.ones((2, 4), np.float32)).sum().backward()
dist.barrier()
