"""Data parallel training with a DistributedSampler and snapshots: ``torchrun ddp_snapshot.py FOLDER``."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(256, 20, generator=generator)
    return TensorDataset(x, x[:, :4].argmax(1))


class Trainer:
    def __init__(self, snapshot: Path) -> None:
        self.rank = int(os.environ["RANK"])
        self.snapshot = snapshot
        self.epoch = 0
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        if snapshot.exists():
            state = torch.load(snapshot)
            self.model.module.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.epoch = state["epoch"]
        self.loader = DataLoader(data(), batch_size=16, sampler=DistributedSampler(data()), num_workers=0)

    def run_epoch(self) -> torch.Tensor:
        self.loader.sampler.set_epoch(self.epoch)
        total = torch.zeros(())
        for x, y in self.loader:
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        return total / len(self.loader) / dist.get_world_size()

    def train(self, epochs: int) -> None:
        while self.epoch < epochs:
            loss = self.run_epoch()
            self.epoch += 1
            if self.rank == 0:
                print(f"loss {loss.item():.6f}", flush=True)
                state = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
                torch.save(state | {"epoch": self.epoch}, self.snapshot)
        dist.barrier()


if __name__ == "__main__":
    dist.init_process_group(backend=os.environ.get("BACKEND", "gloo"))
    Trainer(Path(sys.argv[1]) / "snapshot.pt").train(2)
    Trainer(Path(sys.argv[1]) / "snapshot.pt").train(4)
    dist.destroy_process_group()
