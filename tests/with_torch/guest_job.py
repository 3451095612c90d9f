"""The ranks of `test_torch_on_some_ranks`: DDP beside a rank that is silent until the file END is there."""

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
from harness import without_dynamo  # noqa: E402, F401
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import mpiddp.torch  # noqa: E402


def trained(ddp: bool, size: int, rank: int) -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    data = torch.randn(size * 3, 8)
    wrapped = DistributedDataParallel(model) if ddp else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(data[rank::size] if ddp else data).square().mean().backward()
        optimizer.step()
    return model.weight


for backend in ("mpiddp", "mpiddp", "gloo"):
    mpiddp.torch.use(part)
    dist.init_process_group(backend)
    assert (dist.get_rank(), dist.get_world_size()) == (part.rank, part.size)
    ours, expected = (trained(ddp, part.size, part.rank) for ddp in (True, False))
    assert torch.allclose(ours, expected, rtol=1.3e-6, atol=1e-5)
    dist.destroy_process_group()
print("all right", flush=True)
end.touch()
