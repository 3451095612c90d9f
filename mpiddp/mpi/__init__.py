"""The border to MPI, and mpi4py's only importer."""
