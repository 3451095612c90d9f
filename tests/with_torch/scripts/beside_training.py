"""Checkpoints written beside training, functional collectives, rpc: ``torchrun beside_training.py FOLDER``."""

import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch.distributed import rpc
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group(os.environ.get("BACKEND", "gloo"))
    rank, size = dist.get_rank(), dist.get_world_size()
    own = dist.new_group()  # the thread that writes needs a group of its own
    for kind, group in ((AsyncCheckpointerType.THREAD, own), (AsyncCheckpointerType.PROCESS, None)):
        folder = Path(sys.argv[1]) / kind.value
        mine = {f"rank {rank}": torch.full((3,), float(rank)), "all": torch.arange(4.0)}
        saving = dcp.async_save(mine, checkpoint_id=folder, process_group=group, async_checkpointer_type=kind)
        for step in range(5):
            dist.all_reduce(x := torch.full((2,), float(rank + step)))
            if rank == 0:
                print(f"loss {x.sum().item()}", flush=True)
        saving.result()
        loaded = {name: torch.zeros_like(each) for name, each in mine.items()}
        dcp.load(loaded, checkpoint_id=folder)
        assert all(torch.equal(loaded[name], each) for name, each in mine.items())

    def scattered(x: torch.Tensor) -> torch.Tensor:
        whole = functional.all_gather_tensor(functional.all_reduce(x, "sum", dist.group.WORLD), 0, dist.group.WORLD)
        return functional.reduce_scatter_tensor(whole * 2, "avg" if rank < 0 else "sum", 0, dist.group.WORLD).sin()

    for backend in ("eager", "aot_eager", "inductor") if shutil.which("g++") else ("eager", "aot_eager"):
        y = torch.compile(scattered, backend=backend, fullgraph=True)(torch.arange(4.0) + rank)
        torch.manual_seed(0)
        model = torch.compile(DistributedDataParallel(torch.nn.Linear(7, 3)), backend=backend)
        loss = model(torch.ones(2, 7) * rank).square().mean()
        loss.backward()
        if rank == 0:
            print(
                f"loss {y.sum().item():.6f} {loss.item():.6f} {model.module.weight.grad.sum().item():.6f}", flush=True
            )
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=size)
    total = rpc.rpc_sync(f"rank{(rank + 1) % size}", torch.add, (torch.ones(2), rank))
    assert (total == rank + 1).all()
    rpc.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
