"""DeepSpeed on the CPU, ZeRO stages 0 to 2: ``torchrun world_deepspeed.py FOLDER``."""

import os

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

# An operator for inference, which DeepSpeed would compile now, for minutes.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
if "BACKEND" in os.environ:
    dist.init_process_group(os.environ["BACKEND"])  # DeepSpeed takes a group that exists
else:
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
torch.manual_seed(dist.get_rank())
data = torch.randn(5, 8, 4), torch.randint(0, 2, (5, 8))
for stage in (0, 1, 2):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for x, y in zip(*data, strict=True):
        loss = nn.functional.cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
        dist.all_reduce(loss := loss.detach(), dist.ReduceOp.SUM)
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.5f}", flush=True)
