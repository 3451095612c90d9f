"""FSDP1 with each of its strategies, a compiled DDP and call, fake tensors: ``torchrun wrappers.py FOLDER``."""

import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel


def total_and_one(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x + 1


warnings.simplefilter("ignore")  # FSDP1 is deprecated
dist.init_process_group(os.environ.get("BACKEND", "gloo"))
cpu = torch.device("cpu")
wrappers = {
    each.name: lambda model, each=each: FullyShardedDataParallel(model, sharding_strategy=each, device_id=cpu)
    for each in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
}
for backend in ("eager", "aot_eager"):
    wrappers[f"DDP compiled by {backend}"] = lambda model, backend=backend: torch.compile(
        DistributedDataParallel(model), backend=backend
    )
for name, wrap in wrappers.items():
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(3):
        x = torch.randn(5, 7)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x[:, :3])
        loss.backward()
        optimizer.step()
        dist.all_reduce(total := loss.detach())
        if dist.get_rank() == 0:
            print(f"loss {total.item():.5f} {name}", flush=True)
total = torch.compile(total_and_one, backend="eager")(torch.ones(2))
with FakeTensorMode():
    dist.all_reduce(fake := torch.ones(2))
    dist.all_gather_single(torch.ones(2 * dist.get_world_size()), fake)
if dist.get_rank() == 0:
    print(f"loss {total.sum().item()} {type(fake).__name__}", flush=True)
dist.destroy_process_group()
