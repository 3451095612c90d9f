"""``mpirun -np 4 python -m mpiddp.examples.tensor_parallel``: weights on several ranks, batches on others.

Along "tp" (tensor parallel) each rank holds some of the hidden features, rows of the first weight and columns of the
second; ``nn.functional.all_reduce`` adds up the outputs. Along "dp" (data parallel) ranks hold the same weights and
average their gradients. A gradient is that of the sum of all ranks' losses, so each of the equal losses along "tp"
takes its share. The losses equal those of the whole model in one process.

Output::

    rank 0 of DeviceMesh((dp=2, tp=2), 'cpu', [[0, 1], [2, 3]]) has hidden features 0 to 5
    rank 1 of DeviceMesh((dp=2, tp=2), 'cpu', [[0, 1], [2, 3]]) has hidden features 6 to 11
    rank 2 of DeviceMesh((dp=2, tp=2), 'cpu', [[0, 1], [2, 3]]) has hidden features 0 to 5
    rank 3 of DeviceMesh((dp=2, tp=2), 'cpu', [[0, 1], [2, 3]]) has hidden features 6 to 11
    step  loss, mesh  loss, whole
       1       1.210        1.210
       2       1.148        1.148
       3       1.104        1.104
       4       1.068        1.068
"""

from __future__ import annotations

import numpy as np

import mpiddp as dist
from mpiddp import nn, optim
from mpiddp.autograd import Tensor
from mpiddp.examples.printing import print_in_order, print_once
from mpiddp.typing import Array

F = nn.functional
STEPS, SAMPLES, FEATURES, HIDDEN, CLASSES = 4, 24, 8, 12, 3


class Model(nn.Module):
    """Two linear layers, or this rank's ``hidden`` features of them."""

    def __init__(self, hidden: slice, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        nn.manual_seed(0)
        first, second = nn.Linear(FEATURES, HIDDEN, bias=False), nn.Linear(HIDDEN, CLASSES, bias=False)
        self.first = nn.Parameter(first.weight.data[hidden].copy())  # (hidden, FEATURES)
        self.second = nn.Parameter(second.weight.data[:, hidden].copy())  # (CLASSES, hidden)
        self.group = group

    def forward(self, x: Array) -> Tensor:
        part = F.linear(F.relu(F.linear(x, self.first)), self.second)
        return part if self.group is None else F.all_reduce(part, group=self.group)


def train(model: Model, images: Array, labels: Array, mesh: dist.DeviceMesh | None = None) -> list[float]:
    """Train, and return the losses of all samples."""
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        mean = np.array([loss.item()])
        if mesh is None:
            loss.backward()
        else:
            (loss / mesh["tp"].size()).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, group=mesh.get_group("dp"))
            dist.all_reduce(mean, dist.ReduceOp.AVG, group=mesh.get_group("dp"))
        optimizer.step()
        losses.append(float(mean[0]))
    return losses


def main() -> None:
    dist.init_process_group()
    size = dist.get_world_size()
    tp = 2 if size % 2 == 0 else size
    mesh = dist.init_device_mesh("cpu", (size // tp, tp), mesh_dim_names=("dp", "tp"))

    rng = np.random.default_rng(0)
    images = rng.standard_normal((SAMPLES, FEATURES)).astype(np.float32)
    labels = rng.integers(0, CLASSES, SAMPLES)
    whole = train(Model(slice(None)), images, labels)

    first, last = (HIDDEN * (mesh["tp"].get_local_rank() + end) // tp for end in (0, 1))
    print_in_order(f"rank {dist.get_rank()} of {mesh} has hidden features {first} to {last - 1}")
    mine = slice(mesh["dp"].get_local_rank(), None, mesh["dp"].size())
    losses = train(Model(slice(first, last), mesh.get_group("tp")), images[mine], labels[mine], mesh)

    print_once("step  loss, mesh  loss, whole")
    for step, (ours, theirs) in enumerate(zip(losses, whole, strict=True), start=1):
        print_once(f"{step:4}  {ours:10.3f}  {theirs:11.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
