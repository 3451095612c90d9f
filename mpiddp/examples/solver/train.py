"""The Python half of solver.c, which runs it on the ranks that train. They learn to predict the solver's next step.

The solver sets ``communicator``, ``address`` and ``cells`` before it runs this file, and calls ``step`` after each of
its own steps. The training reads the solver's array in place, without a copy.
"""

import ctypes

import numpy as np
from mpi4py import MPI

import mpiddp as dist
from mpiddp import nn, optim

told = globals()
dist.init_process_group(comm=MPI.Intracomm(MPI.Comm.f2py(told["communicator"])))
heat = np.ctypeslib.as_array((ctypes.c_float * told["cells"]).from_address(told["address"]))[None]
before = heat.copy()
dist.manual_seed(1)
model = dist.DistributedDataParallel(nn.Linear(heat.size, heat.size))
optimizer = optim.Adam(model.parameters(), lr=0.01)


def step(number: int) -> None:
    """Train on the array that the solver has computed since the last call."""
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(before), heat)
    loss.backward()
    optimizer.step()
    before[:] = heat
    if dist.get_rank() == 0 and number % 50 == 0:
        print(f"step {number}: loss {loss.item():.5f}", flush=True)
