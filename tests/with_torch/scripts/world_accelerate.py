"""Accelerate: ``torchrun world_accelerate.py FOLDER``."""

import os

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if "BACKEND" in os.environ:
    dist.init_process_group(os.environ["BACKEND"])  # Accelerate takes no names but torch's own
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = nn.Linear(4, 2)
data = TensorDataset(torch.randn(60, 4), torch.randint(0, 2, (60,)))
parts = model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=8)
model, optimizer, loader = accelerator.prepare(*parts)
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    count = accelerator.gather_for_metrics(y).numel()
    accelerator.print(f"loss {accelerator.reduce(loss.detach(), 'mean').item():.6f} {count}")
accelerator.end_training()
