"""A feed-forward block whose two layers are split over the ranks by DTensor: ``torchrun tensor_parallel.py``."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 60)
        self.down = nn.Linear(60, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


if "BACKEND" in os.environ:
    dist.init_process_group(os.environ["BACKEND"])
mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))
torch.manual_seed(0)
model = parallelize_module(FeedForward(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
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
