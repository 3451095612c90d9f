"""``mpirun -np 2 python -m mpiddp.examples.model_parallel``: one model, its layers on two ranks.

``send`` takes the first layer's output to rank 1 and its gradient back; each rank has an optimizer. The loss equals
that of the whole model in one process.

*Scale up* (a larger machine) first: nothing is sent. *Scale out* with DistributedDataParallel a model that fits into
one machine. Split a model that does not; one rank always waits for the other, unless a pipeline feeds them several
small batches.

Output::

    rank 0 has 144 parameters
    rank 1 has 68 parameters
    step  loss, split  loss, whole
       1        1.462        1.462
       2        1.440        1.440
       3        1.420        1.420
       4        1.402        1.402
"""

from __future__ import annotations

import numpy as np

import mpiddp as dist
from mpiddp import nn, optim
from mpiddp.autograd import Tensor
from mpiddp.examples.printing import need_ranks, print_in_order
from mpiddp.typing import Array

STEPS = 4


def layers() -> tuple[nn.Module, nn.Module]:
    """Return the two halves of the model, equal on every rank."""
    nn.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 4)


def train_first(images: Array) -> None:
    """Run rank 0: forward to rank 1, and backward from there."""
    first, _ = layers()
    optimizer = optim.SGD(first.parameters(), lr=0.2)
    gradient = np.empty((len(images), 16), np.float32)
    for _ in range(STEPS):
        optimizer.zero_grad()
        hidden = first(images)  # (N, 16)
        dist.send(np.ascontiguousarray(hidden.data), dst=1)  # messages are contiguous
        dist.recv(gradient, src=1)
        hidden.backward(gradient)
        optimizer.step()


def train_second(labels: Array) -> list[float]:
    """Run rank 1: take the hidden layer from rank 0, and return its gradient."""
    _, second = layers()
    optimizer = optim.SGD(second.parameters(), lr=0.2)
    hidden = Tensor(np.empty((len(labels), 16), np.float32), requires_grad=True)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        hidden.grad = None
        dist.recv(hidden, src=0)
        loss = nn.functional.cross_entropy(second(hidden), labels)
        loss.backward()
        dist.send(np.ascontiguousarray(hidden.grad), dst=0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_whole(images: Array, labels: Array) -> list[float]:
    model = nn.Sequential(*layers())
    optimizer = optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    dist.init_process_group()
    need_ranks(2, "mpirun -np 2 python -m mpiddp.examples.model_parallel")
    rank = dist.get_rank()
    random = np.random.default_rng(0)
    images = random.standard_normal((32, 8), np.float32)
    labels = random.integers(0, 4, 32)

    said = f"rank {rank} has nothing to do"
    if rank < 2:
        said = f"rank {rank} has {sum(p.size for p in layers()[rank].parameters())} parameters"
    print_in_order(said)

    table = "step  loss, split  loss, whole"
    if rank == 0:
        train_first(images)
    elif rank == 1:
        for step, pair in enumerate(zip(train_second(labels), train_whole(images, labels), strict=True), 1):
            table += f"\n{step:4}{pair[0]:13.3f}{pair[1]:13.3f}"
    tables = [table]
    dist.broadcast_object_list(tables, src=1)
    if rank == 0:
        print(tables[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
