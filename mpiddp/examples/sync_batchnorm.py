"""``mpirun -np 2 python -m mpiddp.examples.sync_batchnorm``: batch normalisation over the batches of all ranks.

BatchNorm normalises by mean and deviation of this rank's batch: poor statistics of few images, and another function on
each rank. SyncBatchNorm takes those of all ranks' images; one call converts a model.

Output::

    BatchNorm: each rank makes its own batch's mean 0
    rank 0: [0. 2.] becomes [-1.  1.], the mean was 1.0
    rank 1: [4. 6.] becomes [-1.  1.], the mean was 5.0
    SyncBatchNorm: the mean of all is 0
    rank 0: [0. 2.] becomes [-1.34 -0.45], the mean was 3.0
    rank 1: [4. 6.] becomes [0.45 1.34], the mean was 3.0
"""

from __future__ import annotations

import numpy as np

import mpiddp as dist
from mpiddp import nn
from mpiddp.examples.printing import print_in_order, print_once


def show(model: nn.Module) -> None:
    rank = dist.get_rank()
    x = np.array([[0], [2]], np.float32) + 4 * rank  # (2 images, 1 channel)
    output = model(x).data.round(2)
    (running_mean,) = (buffer for name, buffer in model.named_buffers() if name.endswith("running_mean"))
    mean = float(running_mean[0]) / 0.1  # from 0, a tenth of the mean was added
    print_in_order(f"rank {rank}: {x[:, 0]} becomes {output[:, 0]}, the mean was {mean:.1f}")


def main() -> None:
    dist.init_process_group()
    print_once("BatchNorm: each rank makes its own batch's mean 0")
    show(nn.Sequential(nn.BatchNorm1d(1)))
    print_once("SyncBatchNorm: the mean of all is 0")
    show(dist.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(1))))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
