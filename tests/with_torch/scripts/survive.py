"""Training that goes on after a rank has been killed: ``PYTHONPATH=tests mpirun --with-ft ulfm python survive.py``."""

import os
import signal
import time

import torch
import torch.distributed as dist
from harness import without_dynamo  # noqa: F401
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpiddp.torch

STEPS, DEATH = 12, 5


dist.init_process_group("mpiddp")
victim = dist.get_rank() == 1
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 400), nn.ReLU(), nn.Linear(400, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = 0
while step < STEPS:
    if victim and step == DEATH:
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.randn(16, 8)
    began = time.monotonic()
    try:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
        optimizer.step()
    except dist.DistBackendError as error:
        took = time.monotonic() - began
        print(f"step {step}: {type(error).__name__} of ranks {error.ranks} after {took:.2f} s", flush=True)
        mpiddp.torch.shrink_group(error.ranks)
        model = DistributedDataParallel(model.module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        continue
    step += 1
total = sum(parameter.detach().double().sum() for parameter in model.parameters()).reshape(1)
everybody = [torch.zeros_like(total) for _ in range(dist.get_world_size())]
dist.all_gather(everybody, total)
print(f"{step} steps, {dist.get_world_size()} ranks, equal: {len(set(map(float, everybody))) == 1}", flush=True)
dist.destroy_process_group()
