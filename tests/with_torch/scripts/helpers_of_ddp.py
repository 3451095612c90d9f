"""Helpers that torch has around DDP: ZeRO, Join, PostLocalSGD, PowerSGD: ``torchrun helpers_of_ddp.py FOLDER``."""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def train(kind: str) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 3)))
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.1), 4
    joinables = [model]
    if kind == "zero":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.02)
        joinables.append(optimizer)
        steps += dist.get_rank()
    elif kind == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        state = post_localSGD_hook.PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=2)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        optimizer = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=2, warmup_steps=2))
    torch.manual_seed(10 + dist.get_rank())
    with Join(joinables) if kind == "zero" else contextlib.nullcontext():
        for _ in range(steps):
            x = torch.randn(8, 12)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x[:, :3]).backward()
            optimizer.step()
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    dist.all_reduce(weights)
    if dist.get_rank() == 0:
        print(f"loss {weights.sum():.5f} after {kind}", flush=True)


dist.init_process_group(os.environ.get("BACKEND", "gloo"))
for kind in ("zero", "powersgd", "post_local"):
    train(kind)
dist.destroy_process_group()
