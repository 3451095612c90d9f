"""The package's use of MPI: ranks and nodes, communicators, pending operations, messages.

Only `lazy` imports mpi4py.
"""
