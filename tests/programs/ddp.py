"""Three steps of DDP, and then an end: ``ddp.py fail|destroy|leave``; "fail" is an error inside rank 1's backward."""

import sys

import numpy as np

import mpiddp as dist
from mpiddp import nn

dist.init_process_group()
ddp = dist.DistributedDataParallel(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), bucket_cap_mb=0.00001)


def fail(parameter):
    if dist.get_rank() == 1 and sys.argv[1] == "fail":
        raise ZeroDivisionError("inside backward")


ddp.module[0].weight.register_post_accumulate_grad_hook(fail)
for _ in range(3):
    ddp(np.ones((2, 4), np.float32)).sum().backward()
if sys.argv[1] == "destroy":
    dist.destroy_process_group()
print("came to the end", flush=True)
