"""Ray Train on the CPU: ``torchrun world_ray.py FILE``, and in Ray ``python world_ray.py FILE RANKS BACKEND``."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(config: dict) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank() + 1)
    losses = []
    for _ in range(5):
        x = torch.randn(8, 4)
        loss = nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss := loss.detach())
        losses.append(f"{loss.item():.6f}")
    assert "mpi4py.MPI" not in sys.modules
    if dist.get_rank() == 0:
        Path(config["file"]).write_text(" ".join(losses))


def main() -> None:
    config = {"file": sys.argv[1]}
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        train(config)
        dist.destroy_process_group()
        return
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ranks = int(sys.argv[2])
    ray.init(num_cpus=ranks + 1, include_dashboard=False, object_store_memory=100 << 20)
    TorchTrainer(
        train,
        train_loop_config=config,
        torch_config=TorchConfig(backend=sys.argv[3]),
        scaling_config=ScalingConfig(num_workers=ranks),
        run_config=RunConfig(storage_path=str(Path(config["file"]).parent)),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
