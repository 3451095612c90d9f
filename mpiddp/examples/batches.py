"""``mpirun -np 2 python -m mpiddp.examples.batches``: which samples a rank sees, and in how many batches.

A sampler draws the same order in every epoch, unless ``set_epoch`` tells it the epoch.

Ranks may have different numbers of batches. Without ``Join`` the backward of the other ranks would wait for a finished
rank until the timeout. Under ``Join`` a finished rank contributes zeros, and at the end it gets the model of the rank
with most batches. In this program every gradient and the learning rate are 1, so the averages on two ranks are 2 / 2
and then 1 / 2.

BatchNorm normalises by mean and deviation of the batch on its own rank. These statistics come from few images, and
differ between ranks. SyncBatchNorm uses the mean and deviation of all ranks' images; one call converts a model.

Output::

    without set_epoch
    rank 0: epoch 0 [4, 7, 2, 1], epoch 1 [4, 7, 2, 1], epoch 2 [4, 7, 2, 1]
    rank 1: epoch 0 [0, 3, 5, 6], epoch 1 [0, 3, 5, 6], epoch 2 [0, 3, 5, 6]
    the sampler warns: epoch 0 was iterated a second time, in the same order
    with set_epoch
    rank 0: epoch 0 [4, 7, 2, 1], epoch 1 [5, 2, 7, 1], epoch 2 [0, 7, 6, 1]
    rank 1: epoch 0 [0, 3, 5, 6], epoch 1 [4, 6, 3, 0], epoch 2 [4, 2, 5, 3]
    join
    rank 0: weight after each of its batches -1.00
    rank 1: weight after each of its batches -1.00 -1.50
    rank 0: weight after join -1.50
    rank 1: weight after join -1.50
    BatchNorm: each rank makes its own batch's mean 0
    rank 0: [0. 2.] becomes [-1.  1.], the mean was 1.0
    rank 1: [4. 6.] becomes [-1.  1.], the mean was 5.0
    SyncBatchNorm: the mean of all is 0
    rank 0: [0. 2.] becomes [-1.34 -0.45], the mean was 3.0
    rank 1: [4. 6.] becomes [0.45 1.34], the mean was 3.0
"""

import warnings

import numpy as np

import mpiddp as dist
from mpiddp import nn, optim
from mpiddp.data import DistributedSampler
from mpiddp.examples.printing import print_in_order, print_once


def orders(set_epoch: bool) -> str:
    sampler, said = DistributedSampler(range(8)), []
    for epoch in range(3):
        if set_epoch:
            sampler.set_epoch(epoch)
        said.append(f"epoch {epoch} {list(sampler)}")
    return f"rank {dist.get_rank()}: {', '.join(said)}"


def show_orders() -> None:
    print_once("without set_epoch")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        print_in_order(orders(set_epoch=False))
    print_once(f"the sampler warns: {str(caught[0].message).split(';')[0]}")
    print_once("with set_epoch")
    print_in_order(orders(set_epoch=True))


def train_uneven() -> None:
    rank = dist.get_rank()
    model = nn.Linear(1, 1, bias=False)
    model.weight.data[...] = 0
    ddp = dist.DistributedDataParallel(model)
    optimizer = optim.SGD(ddp.parameters(), lr=1.0)
    weights = []
    with dist.Join([ddp]):
        for x in [np.ones((1, 1), np.float32)] * (rank + 1):
            optimizer.zero_grad()
            ddp(x).sum().backward()
            optimizer.step()
            weights.append(f"{model.weight.item():.2f}")
    print_in_order(f"rank {rank}: weight after each of its batches {' '.join(weights)}")
    print_in_order(f"rank {rank}: weight after join {model.weight.item():.2f}")


def normalize(model: nn.Module) -> None:
    rank = dist.get_rank()
    x = np.array([[0], [2]], np.float32) + 4 * rank  # (2 images, 1 channel)
    output = model(x).data.round(2)
    (running_mean,) = (buffer for name, buffer in model.named_buffers() if name.endswith("running_mean"))
    mean = float(running_mean[0]) / 0.1  # running_mean began at 0, and moved a tenth of the way to the mean
    print_in_order(f"rank {rank}: {x[:, 0]} becomes {output[:, 0]}, the mean was {mean:.1f}")


def main() -> None:
    dist.init_process_group()
    show_orders()
    print_once("join")
    train_uneven()
    print_once("BatchNorm: each rank makes its own batch's mean 0")
    normalize(nn.Sequential(nn.BatchNorm1d(1)))
    print_once("SyncBatchNorm: the mean of all is 0")
    normalize(dist.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(1))))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
