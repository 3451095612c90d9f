"""A training that goes on after deaths: ``recovery.py FOLDER survivors|spares|restart SPARES``, of `measure_recovery`.

Each working rank writes its process id; rank 0 writes each completed step: time, number, and when its state was made.
"""

import os
import pathlib
import sys
import time

import numpy as np

import mpiddp as dist
from mpiddp import elastic, nn, optim
from mpiddp.data import digits

folder, way, spares = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
BATCH, STEPS = 96, 100_000


class State:
    def __init__(self):
        dist.manual_seed(1)
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        self.ddp = dist.DistributedDataParallel(self.model)
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.images, self.labels = digits(size=8).arrays
        (folder / f"rank-{dist.get_rank()}").write_text(str(os.getpid()))
        dist.barrier()
        self.made_s = time.monotonic()

    def state_dict(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def step(state, number):
    batch = np.arange(number * BATCH, (number + 1) * BATCH) % len(state.images)
    mine = batch[dist.get_rank() :: dist.get_world_size()]
    state.optimizer.zero_grad()
    nn.functional.cross_entropy(state.ddp(state.images[mine]), state.labels[mine]).backward()
    state.optimizer.step()
    time.sleep(0.005)
    if dist.get_rank() == 0:
        with (folder / "steps").open("a") as log:
            log.write(f"{time.monotonic()} {number} {state.made_s}\n")


dist.init_process_group()
if way == "restart":
    state, first, file = State(), 0, folder / "state"
    if file.exists():
        saved = dist.load(file)
        state.load_state_dict(saved["state"])
        first = saved["step"]
    for number in range(first, STEPS):
        step(state, number)
        if (number + 1) % 10 == 0 and dist.get_rank() == 0:
            dist.save({"step": number + 1, "state": state.state_dict()}, file)
else:
    elastic.run(step, State, STEPS, spares=spares)
