"""mpi4jax beside mpiddp, in one program: ``mpirun -np N python beside_mpi4jax.py``."""

import jax.numpy as jnp
import mpi4jax
import numpy as np
from mpi4py import MPI

import mpiddp.distributed as dist


def main() -> None:
    dist.init_process_group()
    theirs = mpi4jax.allreduce(jnp.arange(3.0) + dist.get_rank(), op=MPI.SUM)
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    ours = np.arange(3.0) + dist.get_rank()
    dist.all_reduce(ours)
    assert (np.asarray(theirs) == ours).all()
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main()
