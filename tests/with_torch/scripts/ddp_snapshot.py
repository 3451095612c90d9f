"""Data parallel training with a DistributedSampler and snapshots: ``torchrun ddp_snapshot.py FOLDER``."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(snapshot: Path, epochs: int) -> None:
    """Train until so many epochs are done, from the snapshot if there is one."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    begin = 0
    if snapshot.exists():
        state = torch.load(snapshot)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["epoch"]
    x = torch.randn(256, 20, generator=torch.Generator().manual_seed(7))
    data = TensorDataset(x, x[:, :4].argmax(1))
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data), num_workers=0)
    for epoch in range(begin, epochs):
        loader.sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"loss {total.item() / len(loader) / dist.get_world_size():.6f}", flush=True)
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"epoch": epoch + 1}, snapshot)
    dist.barrier()


dist.init_process_group(backend=os.environ.get("BACKEND", "gloo"))
for epochs in (2, 4):
    train(Path(sys.argv[1]) / "snapshot.pt", epochs)
dist.destroy_process_group()
