"""The border to MPI: the running world, the messages, the communicators of a group, and operations on their way.

The only package that imports mpi4py. It may import ``errors``, ``settings``, ``typing`` and ``device``.
"""
