"""A sharded model that is saved and loaded by torch.distributed.checkpoint: ``torchrun dcp.py FOLDER``."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    model = fully_shard(nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 3)), mesh=mesh)
    return model, torch.optim.Adam(model.parameters(), lr=0.02)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    torch.manual_seed(seed + dist.get_rank())
    for _ in range(steps):
        x = torch.randn(8, 12)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x[:, :3])
        loss.backward()
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"loss {total.item():.6f}", flush=True)


dist.init_process_group(os.environ.get("BACKEND", "gloo"))
folder = Path(sys.argv[1]) / "checkpoint"
model, optimizer = make(seed=0)
train(model, optimizer, 3, seed=10)
weights, moments = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)

model, optimizer = make(seed=1)
weights, moments = get_state_dict(model, optimizer)
dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
train(model, optimizer, 3, seed=20)
dist.destroy_process_group()
