"""All that talks to MPI: ranks and nodes, communicators, pending operations, messages. `lazy` alone imports mpi4py."""
