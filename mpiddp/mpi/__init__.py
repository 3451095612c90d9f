"""The border to MPI: the running world, messages, communicators, and pending operations; mpi4py's only importer."""
