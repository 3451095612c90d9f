"""Collective algorithms, one idea a file, as generators (see `mpiddp.mpi.work`), and the table that chooses.

They take validated, contiguous arrays, return nothing, and know neither groups nor defaults.
"""
