"""HSDP, FSDP2 with tensor parallelism, sequence parallelism and a parallel loss: ``torchrun meshes.py FOLDER``."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

dist.init_process_group(os.environ.get("BACKEND", "gloo"))
size = dist.get_world_size()
for shape, names in (
    ((size, 1), ("replicate", "shard")),
    ((1, size), ("shard", "tensor")),
    ((size, 1), ("shard", "tensor")),
):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    if "tensor" in names:
        plan = {
            "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
            "1": SequenceParallel(sequence_dim=0),
            "2": ColwiseParallel(input_layouts=Shard(0)),
            "4": RowwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tensor"], plan)
        fully_shard(model, mesh=mesh["shard"])
    else:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    torch.manual_seed(1 + mesh.get_local_rank(names[0]))
    for _ in range(3):
        x, y = torch.randn(12, 12), torch.randint(0, 8, (12,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        dist.all_reduce(total := loss.detach(), dist.ReduceOp.SUM)
        if dist.get_rank() == 0:
            print(f"loss {total.item():.6f}", flush=True)
mesh = init_device_mesh("cpu", (size,))
torch.manual_seed(3)
logits = DTensor.from_local(torch.randn(4, 3, requires_grad=True), mesh, [Shard(1)])
with loss_parallel():
    loss = nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 3]) % (3 * size), reduction="sum")
    loss.backward()
if dist.get_rank() == 0:
    print(f"loss {loss.full_tensor().item():.6f}", flush=True)
dist.destroy_process_group()
