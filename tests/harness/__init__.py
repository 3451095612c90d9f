"""What lets ``python -m pytest`` run MPI tests: launcher (processes), parent (outside mpiexec), ranks (inside it)."""
