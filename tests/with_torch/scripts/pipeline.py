"""Schedules of torch.distributed.pipelining: ``torchrun pipeline.py FOLDER``."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

dist.init_process_group(os.environ.get("BACKEND", "gloo"))
rank, size = dist.get_rank(), dist.get_world_size()
for schedule, chunks in ((ScheduleGPipe, 1), (Schedule1F1B, 1), (ScheduleInterleaved1F1B, 2)):
    stages, parameters = [], []
    for index in range(rank, chunks * size, size):
        torch.manual_seed(index)
        layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        parameters += layer.parameters()
        stages.append(PipelineStage(layer, index, chunks * size, torch.device("cpu")))
    run = schedule(stages if chunks > 1 else stages[0], n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    torch.manual_seed(7)
    for _ in range(3):
        x, losses = torch.randn(16, 8), []
        optimizer.zero_grad()
        run.step(*(x,) * (rank == 0), **({"target": x.flip(1), "losses": losses} if rank == size - 1 else {}))
        optimizer.step()
        total = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(total, size - 1)
        if rank == 0:
            print(f"loss {total.item():.6f}", flush=True)
dist.destroy_process_group()
