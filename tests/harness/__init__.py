"""MPI tests under ``python -m pytest``: launcher (processes), parent (outside mpiexec), ranks (inside it)."""
