"""mpi4py-fft beside mpiddp, in one program: ``mpirun -np N python beside_mpi4py_fft.py``."""

import numpy as np
from mpi4py import MPI
from mpi4py_fft import PFFT, newDistArray

import mpiddp.distributed as dist


def main() -> None:
    dist.init_process_group()
    fft = PFFT(MPI.COMM_WORLD, (16, 12, 8), dtype=float)
    before, after = newDistArray(fft, False), newDistArray(fft, False)
    before[:] = np.random.default_rng(dist.get_rank()).random(before.shape)
    ours = np.array([np.square(before).sum()])
    dist.all_reduce(ours)
    fft.backward(fft.forward(before), after)
    theirs = np.array([np.square(after).sum()])
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, theirs)
    assert np.allclose(before, after) and np.allclose(ours, theirs)
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main()
