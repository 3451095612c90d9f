"""The ranks of `test_torch_s_own_shrink_group`: torch 2.15's shrink_group reaches mpiddp's."""

import sys

import torch
import torch.distributed as dist

import mpiddp
import mpiddp.torch

dist.init_process_group("mpiddp")
rank, size = dist.get_rank(), dist.get_world_size()
few = dist.new_group([0, 2])
if rank == 0:
    dist.distributed_c10d._get_default_store().set("key", "value")
dist.barrier()
if rank == 1:
    sys.exit()
dist.shrink_group([1])
assert (dist.get_rank(), dist.get_world_size()) == (max(rank - 1, 0), size - 1) == (mpiddp.get_rank(), size - 1)
assert few not in dist.distributed_c10d._world.pg_map
dist.all_reduce(x := torch.ones(3))
assert (x == size - 1).all()
dist.all_reduce(x, async_op=True).wait()
assert (x == (size - 1) ** 2).all()
found = [None] * (size - 1)
dist.all_gather_object(found, rank)
assert found == [each for each in range(size) if each != 1]
pair = dist.new_group([0, 1])
if dist.get_rank() < 2:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=pair)
    model(torch.ones(1, 2)).sum().backward()
dist.destroy_process_group()
assert not mpiddp.is_initialized()
print("all right")
