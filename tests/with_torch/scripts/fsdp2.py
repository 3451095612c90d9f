"""Fully sharded training, with clipped gradients: ``torchrun fsdp2.py``."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

dist.init_process_group(os.environ.get("BACKEND", "gloo"))
rank = int(os.environ["RANK"])
mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(30, 30), nn.Tanh()) for _ in range(3)), nn.Linear(30, 5))
for block in model[:3]:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
model.set_allocate_memory_from_process_group_for_comm(True)  # symmetric memory, where the backend has it
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(100 + rank)
for _ in range(6):
    x = torch.randn(8, 30)
    with CommDebugMode() as calls:
        loss = nn.functional.mse_loss(model(x), x[:, :5])
        loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach()
    dist.all_reduce(mean)
    whole = norm.full_tensor()
    if rank == 0:
        loss = mean.item() / dist.get_world_size()
        print(f"loss {loss:.6f} norm {whole.item():.5f} calls {calls.get_total_counts()}", flush=True)
dist.destroy_process_group()
