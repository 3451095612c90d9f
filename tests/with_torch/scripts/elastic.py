"""torch's DDP where a rank dies, and undisturbed: ``PYTHONPATH=tests mpirun --with-ft ulfm python elastic.py``."""

import hashlib
import os
import signal

import torch
import torch.distributed as dist
from harness import without_dynamo  # noqa: F401
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpiddp.torch  # noqa: F401 - registers the backend
from mpiddp import elastic, launchers

STEPS, DEATH = 12, 5


class State:
    def __init__(self) -> None:
        if dist.is_initialized():  # torch's group of the world before
            dist.destroy_process_group()
        dist.init_process_group("mpiddp")
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 400), nn.ReLU(), nn.Dropout(0.1), nn.Linear(400, 2))
        self.ddp = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.Adam(self.ddp.parameters(), lr=0.01)

    def state_dict(self) -> dict:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def step(state: State, number: int) -> None:
    launched = launchers.launch()
    if number == DEATH and launched is not None and launched.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.manual_seed(1000 * number + dist.get_rank())  # a dead rank's generator would be lost
    x = torch.randn(16, 8)
    state.optimizer.zero_grad()
    nn.functional.cross_entropy(state.ddp(x), (x[:, 0] > 0).long()).backward()
    state.optimizer.step()


def bits(state: State) -> str:
    whole = b"".join(parameter.detach().numpy().tobytes() for parameter in state.model.parameters())
    return hashlib.sha256(whole).hexdigest()


dist.init_process_group("mpiddp")
disturbed = bits(elastic.run(step, State, STEPS, spares=1))
undisturbed = State()
for number in range(STEPS):
    step(undisturbed, number)  # without the rank that has died
print(f"{dist.get_world_size()} ranks, same bits: {bits(undisturbed) == disturbed}", flush=True)
dist.destroy_process_group()
