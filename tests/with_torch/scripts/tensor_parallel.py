"""A feed-forward block whose two layers are split over the ranks by DTensor: ``torchrun tensor_parallel.py``."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

if "BACKEND" in os.environ:
    dist.init_process_group(os.environ["BACKEND"])
mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))
torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(24, 60), nn.ReLU(), nn.Linear(60, 24))
model = parallelize_module(layers, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for _ in range(6):
    x = torch.randn(16, 24)  # tensor parallel ranks see the same batch
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), x.flip(1))
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}", flush=True)
dist.destroy_process_group()
