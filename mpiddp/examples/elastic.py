"""``mpirun -np 4 python -m mpiddp.examples.elastic``: training that outlives its ranks.

``elastic.run`` calls ``step`` for each step. Open MPI's ``mpirun --with-ft ulfm -np 4`` lets ranks live on when one
dies. Under it this program kills rank 1 in step 30. A fourth rank, which has slept until then, takes the place of rank
1, and step 30 is made again. The model at the end has the bits of a run on three ranks in which none dies. After the
death every rank makes a new ``State``, because DDP belongs to the ranks that it was made with, and loads a copy of the
state from before the step.

All else in a step must follow from the number of the step and the rank. A random generator that goes on from step to
step would be lost with its rank.

Output::

    loss in step 20: 1.469
    loss in step 40: 0.440
    loss in step 60: 0.299
"""

import os
import signal
from typing import Any

import numpy as np

import mpiddp as dist
from mpiddp import elastic, launchers, nn, optim
from mpiddp.data import digits
from mpiddp.examples.printing import print_once

BATCH, STEPS = 96, 60


class State:
    """The state of the training, equal on all ranks between steps."""

    def __init__(self) -> None:
        dist.manual_seed(1)
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.ddp = dist.DistributedDataParallel(self.model)
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.images, self.labels = digits(size=8).arrays

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def step(state: State, number: int) -> None:
    if launchers.launcher_survives() and number == 30 and started_as(1):
        os.kill(os.getpid(), signal.SIGKILL)
    batch = np.arange(number * BATCH, (number + 1) * BATCH) % len(state.images)
    mine = batch[dist.get_rank() :: dist.get_world_size()]
    state.optimizer.zero_grad()
    loss = nn.functional.cross_entropy(state.ddp(state.images[mine]), state.labels[mine])
    loss.backward()
    state.optimizer.step()
    if (number + 1) % 20 == 0:
        mean = np.array([loss.item()])
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        print_once(f"loss in step {number + 1}: {mean[0]:.3f}")


def started_as(rank: int) -> bool:
    """Return True in the process that the launcher started as ``rank``."""
    launched = launchers.launch()
    return launched is not None and launched.rank == rank


def main() -> None:
    dist.init_process_group()
    state = elastic.run(step, State, STEPS, spares=int(launchers.launcher_survives()))
    if state is not None:  # it is None on a spare that was not needed
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
