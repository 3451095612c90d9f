"""``mpirun -np 4 python -m mpiddp.examples.sgd``: distributed SGD by hand, then with DistributedDataParallel.

Each rank has the whole model and its part of the data. The models are equal at the start, because of the seed. They
stay equal, because all ranks average their gradients after each backward and make the same step. The batch of 128
samples is divided among the ranks.

DistributedDataParallel averages during backward, in a few large messages, and broadcasts rank 0's values at the start.

Output::

    by hand
    epoch 1
    rank 0: 360 digits, mean loss 1.674
    rank 1: 360 digits, mean loss 1.704
    rank 2: 360 digits, mean loss 1.710
    rank 3: 360 digits, mean loss 1.710
    epoch 2
    rank 0: 360 digits, mean loss 0.306
    rank 1: 360 digits, mean loss 0.340
    rank 2: 360 digits, mean loss 0.393
    rank 3: 360 digits, mean loss 0.339
    the models of all ranks are equal: True
    with DistributedDataParallel
    epoch 1
    rank 0: 360 digits, mean loss 1.674
    rank 1: 360 digits, mean loss 1.704
    rank 2: 360 digits, mean loss 1.710
    rank 3: 360 digits, mean loss 1.710
    epoch 2
    rank 0: 360 digits, mean loss 0.306
    rank 1: 360 digits, mean loss 0.340
    rank 2: 360 digits, mean loss 0.393
    rank 3: 360 digits, mean loss 0.339
    the models of all ranks are equal: True
"""

import numpy as np

import mpiddp as dist
from mpiddp import nn, optim
from mpiddp.data import DataLoader, DistributedSampler, digits
from mpiddp.examples.printing import print_in_order, print_once


def new_model() -> nn.Module:
    dist.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def train(model: nn.Module, by_hand: bool) -> None:
    """Train two epochs on this rank's part of the digits."""
    rank, size = dist.get_rank(), dist.get_world_size()
    data = digits(size=8)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=128 // size, sampler=sampler)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in (1, 2):
        print_once(f"epoch {epoch}")
        sampler.set_epoch(epoch)
        losses = []
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            if by_hand:
                dist.average_gradients(model)  # for each parameter: all_reduce(p.grad), divided by the number of ranks
            optimizer.step()
            losses.append(loss.item())
        print_in_order(f"rank {rank}: {len(sampler)} digits, mean loss {np.mean(losses):.3f}")

    models = [b""] * size
    dist.all_gather_object(models, b"".join(p.data.tobytes() for p in model.parameters()))
    print_once(f"the models of all ranks are equal: {len(set(models)) == 1}")


def main() -> None:
    dist.init_process_group()
    print_once("by hand")
    train(new_model(), by_hand=True)
    print_once("with DistributedDataParallel")
    train(dist.DistributedDataParallel(new_model()), by_hand=False)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
