"""The ranks of `test_torch_on_some_ranks`: DDP and FSDP2 beside a rank that is silent until the file END is there."""

import sys
import time
from pathlib import Path

from mpi4py import MPI

world, end = MPI.COMM_WORLD, Path(sys.argv[1])
part = world.Split(0 if world.rank else MPI.UNDEFINED, -world.rank)
if world.rank == 0:
    while not end.exists():
        time.sleep(0.1)
    sys.exit()

import torch  # noqa: E402 - as in a program that has other things to do first
import torch.distributed as dist  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import mpiddp.torch  # noqa: E402


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
end.touch()
