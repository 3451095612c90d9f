"""``mpirun -np 4 python -m mpiddp.examples.model_parallel``: one model on several ranks, by its layers and its weights.

*By layers*: rank 0 has the first layer and rank 1 the second. ``send`` takes the output of the first layer to rank 1,
and its gradient back. One rank always waits for the other, unless a pipeline feeds them several small batches.

*By weights*, on a mesh: along "tp" (tensor parallel) each rank holds some of the hidden features, which are rows of the
first weight and columns of the second. ``nn.functional.all_reduce`` adds up the outputs. Along "dp" (data parallel)
ranks hold the same weights and average their gradients. The ranks along "tp" all compute the same loss, and backward
gives the gradient of the sum of their losses. Therefore each loss is divided by the number of these ranks.

Both ways give the losses of the whole model on one rank.

First *scale up*, to a larger machine, because then nothing is sent. *Scale out* with DistributedDataParallel if the
model fits into one machine. Split a model that does not fit.

Output::

    rank 0 of DeviceMesh((dp=2, tp=2), 'cpu', [[0, 1], [2, 3]]) has hidden features 0 to 5
    rank 1 of DeviceMesh((dp=2, tp=2), 'cpu', [[0, 1], [2, 3]]) has hidden features 6 to 11
    rank 2 of DeviceMesh((dp=2, tp=2), 'cpu', [[0, 1], [2, 3]]) has hidden features 0 to 5
    rank 3 of DeviceMesh((dp=2, tp=2), 'cpu', [[0, 1], [2, 3]]) has hidden features 6 to 11
    losses, whole:      1.210 1.148 1.104 1.068
    losses, by layers:  1.210 1.148 1.104 1.068
    losses, by weights: 1.210 1.148 1.104 1.068
"""

import sys

import numpy as np

import mpiddp as dist
from mpiddp import nn, optim
from mpiddp.autograd import Tensor
from mpiddp.examples.printing import print_in_order, print_once
from mpiddp.typing import Array

F = nn.functional
STEPS, SAMPLES, FEATURES, HIDDEN, CLASSES = 4, 24, 8, 12, 3


def weights() -> tuple[Array, Array]:
    """Return the weights of both layers, (HIDDEN, FEATURES) and (CLASSES, HIDDEN), equal on every rank."""
    nn.manual_seed(0)
    first, second = nn.Linear(FEATURES, HIDDEN, bias=False), nn.Linear(HIDDEN, CLASSES, bias=False)
    return first.weight.data, second.weight.data


def train_by_layers(images: Array, labels: Array) -> list[float]:
    """Train one layer on each of two ranks; return the losses on rank 1."""
    rank, losses = dist.get_rank(), list[float]()
    if rank > 1:
        return losses
    weight = nn.Parameter(weights()[rank].copy())
    optimizer = optim.SGD([weight], lr=0.5)
    gradient = np.empty((len(images), HIDDEN), np.float32)
    received = Tensor(np.empty_like(gradient), requires_grad=True)
    for _ in range(STEPS):
        optimizer.zero_grad()
        if rank == 0:
            hidden = F.relu(F.linear(images, weight))
            dist.send(np.ascontiguousarray(hidden.data), dst=1)  # send takes contiguous arrays only
            dist.recv(gradient, src=1)
            hidden.backward(gradient)
        else:
            received.grad = None
            dist.recv(received, src=0)
            loss = F.cross_entropy(F.linear(received, weight), labels)
            loss.backward()
            dist.send(np.ascontiguousarray(received.grad), dst=0)
            losses.append(loss.item())
        optimizer.step()
    return losses


def train(hidden: slice, images: Array, labels: Array, mesh: dist.DeviceMesh | None = None) -> list[float]:
    """Train a network with this rank's slice of the hidden features; return the loss of each step."""
    first, second = (nn.Parameter(x.copy()) for x in (weights()[0][hidden], weights()[1][:, hidden]))
    optimizer = optim.SGD([first, second], lr=0.5)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        output = F.linear(F.relu(F.linear(images, first)), second)
        if mesh is not None:
            output = F.all_reduce(output, group=mesh.get_group("tp"))
        loss = F.cross_entropy(output, labels)
        (loss if mesh is None else loss / mesh["tp"].size()).backward()
        means = [np.array([loss.item()]), first.grad, second.grad]
        for mean in means if mesh is not None else ():
            assert mesh is not None and mean is not None
            dist.all_reduce(mean, dist.ReduceOp.AVG, group=mesh.get_group("dp"))
        optimizer.step()
        losses.append(float(means[0][0]))  # type: ignore[index]
    return losses


def main() -> None:
    dist.init_process_group()
    if dist.get_world_size() == 1:
        print("this example needs 2 ranks: mpirun -np 4 python -m mpiddp.examples.model_parallel", file=sys.stderr)
        sys.exit(2)
    rng = np.random.default_rng(0)
    images = rng.standard_normal((SAMPLES, FEATURES)).astype(np.float32)
    labels = rng.integers(0, CLASSES, SAMPLES)
    by_layers = [train_by_layers(images, labels)]
    dist.broadcast_object_list(by_layers, src=1)

    size = dist.get_world_size()
    tp = 2 if size % 2 == 0 else size
    mesh = dist.init_device_mesh("cpu", (size // tp, tp), mesh_dim_names=("dp", "tp"))
    first, last = (HIDDEN * (mesh["tp"].get_local_rank() + end) // tp for end in (0, 1))
    print_in_order(f"rank {dist.get_rank()} of {mesh} has hidden features {first} to {last - 1}")
    mine = slice(mesh["dp"].get_local_rank(), None, mesh["dp"].size())
    by_weights = train(slice(first, last), images[mine], labels[mine], mesh)

    whole = train(slice(None), images, labels)
    for name, losses in (("whole:     ", whole), ("by layers: ", by_layers[0]), ("by weights:", by_weights)):
        print_once(f"losses, {name} {' '.join(f'{loss:.3f}' for loss in losses)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
