"""``elastic.run`` of a small state, under ``mpirun --with-ft ulfm``: ``elastic.py CASE``, with victims, or a folder."""

import os
import pathlib
import signal
import sys
import threading
import time

import numpy as np

import mpiddp as dist
from mpiddp import elastic, launchers

case = sys.argv[1]


class State:
    def __init__(self):
        self.x = np.zeros(1000)

    def state_dict(self):
        return {"x": self.x} if case == "sum" else None

    def load_state_dict(self, state):
        self.x[...] = state["x"]


def add(state, number):
    if number == 17 and str(launchers.launch().rank) in sys.argv[2:]:
        state.x += 1000  # what the step had begun
        os.kill(os.getpid(), signal.SIGKILL)
    state.x *= 0.9
    x = np.full(1000, number + dist.get_rank(), np.float64)
    dist.all_reduce(x)
    state.x += x
    time.sleep(0.05)


def stop_if_alone(state, number):
    if dist.get_world_size() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(2)


def ask(state, number):
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGUSR2)
    end = time.monotonic() + 20
    while len(list(pathlib.Path(sys.argv[2]).glob("rank_?"))) < 3 and time.monotonic() < end:
        time.sleep(0.05)


dist.init_process_group()
match case:
    case "sum":
        began, used = time.monotonic(), time.process_time()
        state = elastic.run(add, State, 40, spares=dist.get_world_size() - 3, every=3)
        if state is None:
            sys.stdout.write(f"slept {(time.process_time() - used) / (time.monotonic() - began):.3f}\n")
        else:
            expected = 0
            for number in range(40):
                expected = expected * 0.9 + sum(number + rank for rank in range(3))
            assert dist.get_world_size() == 3 and (state.x == expected).all(), (state.x[0], expected)
            sys.stdout.write("right\n")
    case "stopped":
        # Ranks 0 and 1 make the step, and the spare, rank 2, is stopped; or rank 0 makes it alone, and is stopped.
        if dist.get_rank() == 2:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        elastic.run(stop_if_alone, State, 1, spares=1)
    case "asked":
        elastic.run(ask, State, 1, spares=1)
