"""``mpirun -np 2 python -m mpiddp.examples.torch_user``: a torch user's script, and its changes.

Only the imports change, and the start: torch's ``torchrun --nproc-per-node 2`` is ``mpirun -np 2`` here.

Output::

    with torch                              here
    import torch.distributed as dist        import mpiddp as dist
    from torch import nn, optim             from mpiddp import data, nn, optim, parallel
    from torch.nn import parallel
    from torch.utils import data

    with both
    def train() -> None:
        dist.init_process_group("gloo")
        random = np.random.default_rng(0)
        samples = [(x, int(x.sum() > 0)) for x in random.standard_normal((256, 8), np.float32)]
        sampler = data.DistributedSampler(samples)
        loader = data.DataLoader(samples, batch_size=8, sampler=sampler)

        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        ddp = parallel.DistributedDataParallel(model)
        optimizer = optim.SGD(ddp.parameters(), lr=0.2, momentum=0.9)
        for epoch in range(4):
            sampler.set_epoch(epoch)
            for x, label in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(ddp(x), label)
                loss.backward()
                optimizer.step()
        if dist.get_rank() == 0:
            print(f"it has learnt: {loss.item() < 0.3}")
        dist.destroy_process_group()

    it has learnt: True
"""

from __future__ import annotations

import inspect
import itertools

import numpy as np

import mpiddp as dist
from mpiddp import data, nn, optim, parallel
from mpiddp.examples.printing import print_once

TORCH_IMPORTS = """\
import torch.distributed as dist
from torch import nn, optim
from torch.nn import parallel
from torch.utils import data
"""
OUR_IMPORTS = """\
import mpiddp as dist
from mpiddp import data, nn, optim, parallel
"""


def train() -> None:
    dist.init_process_group("gloo")
    random = np.random.default_rng(0)
    samples = [(x, int(x.sum() > 0)) for x in random.standard_normal((256, 8), np.float32)]
    sampler = data.DistributedSampler(samples)
    loader = data.DataLoader(samples, batch_size=8, sampler=sampler)

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    ddp = parallel.DistributedDataParallel(model)
    optimizer = optim.SGD(ddp.parameters(), lr=0.2, momentum=0.9)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, label in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(x), label)
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print(f"it has learnt: {loss.item() < 0.3}")
    dist.destroy_process_group()


def main() -> None:
    dist.init_process_group()
    print_once(f"{'with torch':<40}here")
    for theirs, ours in itertools.zip_longest(TORCH_IMPORTS.splitlines(), OUR_IMPORTS.splitlines(), fillvalue=""):
        print_once(f"{theirs:<40}{ours}".rstrip())
    print_once(f"\nwith both\n{inspect.getsource(train)}")
    dist.destroy_process_group()
    dist.manual_seed(0)
    train()


if __name__ == "__main__":
    main()
