"""The ranks of `test_torch_on_some_ranks`: DDP and FSDP2 on two communicators at once, beside a silent rank."""

import sys
import time

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

world = MPI.COMM_WORLD
color = min(world.rank, 2) if world.rank < 3 else 2
part = world.Split(color if world.rank else MPI.UNDEFINED, -world.rank)
if world.rank == 0:
    time.sleep(5)
    sys.exit()

import mpiddp.torch  # noqa: E402 - as in a program that has other things to do first


def trained(wrap: str, size: int, rank: int) -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    data = torch.randn(size * 3, 8)
    wrapped = model
    match wrap:
        case "DDP":
            wrapped = DistributedDataParallel(model)
        case "FSDP2":
            fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(data if wrap == "alone" else data[rank::size]).square().mean().backward()
        optimizer.step()
    weight = model.weight
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


for backend in ("mpiddp", "mpiddp", "gloo"):
    mpiddp.torch.use(part)
    dist.init_process_group(backend)
    assert (dist.get_rank(), dist.get_world_size()) == (part.rank, part.size)
    expected = trained("alone", part.size, part.rank)
    for wrap in ("DDP", "FSDP2"):
        torch.testing.assert_close(trained(wrap, part.size, part.rank), expected)
    dist.destroy_process_group()
print("all right", flush=True)
