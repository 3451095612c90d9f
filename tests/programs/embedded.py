"""The module that the interpreters in solver.c run: ``step`` after each of the solver's steps 0, 1 and 2."""

import numpy as np
from mpi4py import MPI

import mpiddp as dist

comm = MPI.Comm.f2py(globals()["communicator"])


def step(number: int) -> None:
    """Sum in a new group; rank 0 raises in step 1, and the others are told."""
    if dist.is_initialized():  # an exception has left it
        dist.destroy_process_group()
    dist.init_process_group(comm=comm, timeout=20)
    x = np.full(1000, float(comm.rank + number))
    dist.all_reduce(x)
    assert (x == comm.size * (comm.size - 1) / 2 + comm.size * number).all()
    if number == 1 and comm.rank == 0:
        raise ValueError("of this rank alone")
    if number == 1:
        try:
            dist.barrier()
            dist.barrier()
            raise AssertionError("no error")
        except dist.RankFailedError as error:
            assert error.ranks == [0] and "ValueError: of this rank alone" in str(error), error
            print("told", flush=True)
    if number < 2:
        dist.destroy_process_group()
